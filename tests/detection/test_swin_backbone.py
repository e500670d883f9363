"""The backbone is timm's where windows divide the maps, and MMDetection's definition where they do not."""

import math

import pytest
import torch
from narrow_detector import images, narrow_detector
from timm.models.swin_transformer import SwinTransformer
from torch import Tensor, nn

from fimaq.detection.swin import SwinBackbone, SwinBlock


def layer_norm(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    centred = x - x.mean(dim=-1, keepdim=True)
    return centred / (centred.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * norm.weight + norm.bias


def linear(x: Tensor, layer: nn.Linear) -> Tensor:
    return x @ layer.weight.T + (0 if layer.bias is None else layer.bias)


def naive_attention(x: Tensor, block: SwinBlock, side: int, shift: int) -> Tensor:
    """One map (h, w, c), one query at a time: it sees the tokens of its window that lie together in the map."""
    height, width, channels = x.shape
    rows, columns = math.ceil(height / side) * side, math.ceil(width / side) * side
    padded = x.new_zeros(rows, columns, channels)
    padded[:height, :width] = x
    heads = block.attn.num_heads
    query, key, value = linear(padded, block.attn.qkv).reshape(rows, columns, 3, heads, -1).unbind(2)
    members: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for y in range(rows):
        for x_ in range(columns):
            window = ((y - shift) % rows // side, (x_ - shift) % columns // side)
            members.setdefault((*window, y < shift, x_ < shift), []).append((y, x_))
    result = torch.zeros_like(padded)
    table = block.attn.relative_position_bias_table.reshape(2 * side - 1, 2 * side - 1, heads)
    for tokens in members.values():
        for qy, qx in tokens:
            scores = torch.stack(
                [
                    (query[qy, qx] * key[ky, kx]).sum(-1) / math.sqrt(channels / heads)
                    + table[qy - ky + side - 1, qx - kx + side - 1]
                    for ky, kx in tokens
                ]
            )
            values = torch.stack([value[ky, kx] for ky, kx in tokens])
            result[qy, qx] = (scores.softmax(dim=0)[..., None] * values).sum(0).flatten()
    return linear(result, block.attn.proj)[:height, :width]


def naive_backbone(image: Tensor, backbone: SwinBackbone, side: int) -> list[Tensor]:
    height, width = (math.ceil(length / 4) * 4 for length in image.shape[1:])
    padded = image.new_zeros(3, height, width)
    padded[:, : image.shape[1], : image.shape[2]] = image
    kernel, bias = backbone.patch_embed.proj.weight, backbone.patch_embed.proj.bias
    patches = [
        [(kernel * padded[:, y : y + 4, x : x + 4]).sum((1, 2, 3)) + bias for x in range(0, width, 4)]
        for y in range(0, height, 4)
    ]
    x = layer_norm(torch.stack([torch.stack(row) for row in patches]), backbone.patch_embed.norm)
    outputs = []
    for index, stage in enumerate(backbone.layers):
        for number, block in enumerate(stage.blocks):
            x = x + naive_attention(layer_norm(x, block.norm1), block, side, side // 2 if number % 2 else 0)
            hidden = linear(layer_norm(x, block.norm2), block.mlp.fc1)
            x = x + linear(hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2))), block.mlp.fc2)
        outputs.append(layer_norm(x, getattr(backbone, f"norm{index}")).permute(2, 0, 1))
        if index < 3:
            even = x.new_zeros(x.shape[0] + x.shape[0] % 2, x.shape[1] + x.shape[1] % 2, x.shape[2])
            even[: x.shape[0], : x.shape[1]] = x
            merged = [even[r::2, c::2] for r, c in ((0, 0), (1, 0), (0, 1), (1, 1))]
            x = linear(layer_norm(torch.cat(merged, dim=-1), stage.downsample.norm), stage.downsample.reduction)
    return outputs


@pytest.mark.parametrize("shape", [(75, 53), (33, 64)])
@torch.no_grad()
def test_maps_that_windows_do_not_divide_follow_the_definition(shape):
    backbone = narrow_detector(depths=(2, 2, 1, 2)).backbone
    image = images(*shape)
    for output, expected in zip(backbone(image), naive_backbone(image[0], backbone, side=4), strict=True):
        torch.testing.assert_close(output[0], expected, rtol=1e-8, atol=1e-8)


@torch.no_grad()
def test_maps_of_whole_windows_are_those_of_timm():
    backbone = narrow_detector(depths=(2, 2, 2, 2)).backbone
    timm_model = SwinTransformer(
        img_size=(128, 256),
        embed_dim=12,
        depths=(2, 2, 2, 2),
        num_heads=(1, 2, 2, 4),
        window_size=4,
        always_partition=True,
        num_classes=0,
    )
    state = {}
    for key, value in backbone.state_dict().items():
        for stage in range(3):
            key = key.replace(f"layers.{stage}.downsample", f"LAYERS.{stage + 1}.downsample")
        if not key.startswith("norm"):
            state[key.lower()] = value
    left = timm_model.double().eval().load_state_dict(state, strict=False)
    assert left.unexpected_keys == []
    assert set(left.missing_keys) == {"norm.weight", "norm.bias"}
    image = images(128, 256)
    theirs = timm_model.forward_intermediates(image, intermediates_only=True)
    for index, (output, expected) in enumerate(zip(backbone(image), theirs, strict=True)):
        expected = getattr(backbone, f"norm{index}")(expected.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        torch.testing.assert_close(output, expected)


def test_blocks_mergings_and_embedding_are_called_once_with_one_tensor():
    backbone = narrow_detector().backbone
    parts = [backbone.patch_embed]
    for stage in backbone.layers:
        parts += [*stage.blocks, *([stage.downsample] if stage.downsample else [])]
    calls = []
    for part in parts:
        part.register_forward_hook(lambda m, args, kwargs, _: calls.append((m, args, kwargs)), with_kwargs=True)
    backbone(images(40, 36, count=2))
    assert [module for module, _, _ in calls] == parts
    assert all(len(args) == 1 and args[0].shape[0] == 2 and not kwargs for _, args, kwargs in calls)
