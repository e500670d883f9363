"""Published checkpoints fit a detector, key by key, and compute what they were trained to."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from narrow_detector import images, narrow_detector
from torch import Tensor

from fimaq.detection.convert import convert_checkpoint, load_checkpoint
from fimaq.detection.detector import Detector
from fimaq.errors import InputError


def mmdetection_names(detector: Detector) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {"data_preprocessor.mean": torch.zeros(3, 1, 1)}
    for key, value in detector.state_dict().items():
        parts = key.split(".")
        if parts[:2] == ["backbone", "layers"]:
            parts[1] = "stages"
            if "attn" in parts:
                parts.insert(parts.index("attn") + 1, "w_msa")
            if "mlp" in parts:
                at = parts.index("mlp")
                parts[at : at + 2] = (
                    ["ffn", "layers", "0", "0"] if parts[at + 1] == "fc1" else ["ffn", "layers", "1"]
                )
            if "downsample" in parts:
                value = unfold_order(value)
        if parts[:3] == ["backbone", "patch_embed", "proj"]:
            parts[2] = "projection"
        state[".".join(parts)] = value
    state["backbone.stages.0.blocks.0.attn.w_msa.relative_position_index"] = torch.zeros(16, 16).long()
    return state


def unfold_order(value: Tensor) -> Tensor:
    dim = value.shape[-1] // 4
    result = torch.empty_like(value)
    for place, (row, column) in enumerate(((0, 0), (1, 0), (0, 1), (1, 1))):
        for channel in range(dim):
            result[..., 4 * channel + 2 * row + column] = value[..., place * dim + channel]
    return result


def swin_repository_names(detector: Detector) -> dict[str, Tensor]:
    """Its names are the detector's own; what it has besides is listed here."""
    state = dict(detector.state_dict())
    state["backbone.layers.0.blocks.0.attn.relative_position_index"] = torch.zeros(16, 16).long()
    state["ema_backbone_patch_embed_proj_weight"] = torch.zeros(1)
    return state


STYLES: dict[str, Any] = {"mmdetection": mmdetection_names, "swin repository": swin_repository_names}


@pytest.mark.parametrize("name", ["mask_rcnn_swin_t", "cascade_mask_rcnn_swin_s"])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_checkpoint_loads_with_no_key_left_over(tmp_path, name, style, wrapped):
    detector, image = narrow_detector(name), images(40, 52)
    state = STYLES[style](detector)
    torch.save({"meta": {"epoch": 36}, "state_dict": state} if wrapped else state, tmp_path / "weights.pth")
    other = narrow_detector(name)
    for parameter in other.parameters():
        parameter.data.zero_()
    load_checkpoint(other, tmp_path / "weights.pth")
    for key, value in detector.state_dict().items():
        assert torch.equal(other.state_dict()[key], value)
    (found,), (expected,) = other(image, [(40, 52)]), detector(image, [(40, 52)])
    assert torch.equal(found.masks, expected.masks)
    assert torch.equal(found.boxes, expected.boxes)


def test_a_wrapped_state_dict_converts_as_the_bare_one():
    state = mmdetection_names(narrow_detector())
    assert convert_checkpoint({"state_dict": state, "meta": {}}).keys() == convert_checkpoint(state).keys()


@torch.no_grad()
def test_merging_with_weights_of_mmdetection_is_its_unfold_norm_and_linear():
    detector = narrow_detector()
    state = mmdetection_names(detector)
    x = torch.randn(2, 12, 6, 8, dtype=torch.float64)
    prefix = "backbone.stages.0.downsample."
    columns = F.unfold(x, 2, stride=2).transpose(1, 2)
    normed = F.layer_norm(columns, (48,), state[prefix + "norm.weight"], state[prefix + "norm.bias"])
    expected = (normed @ state[prefix + "reduction.weight"].T).view(2, 3, 4, 24)
    detector.load_state_dict(convert_checkpoint(state))
    torch.testing.assert_close(detector.backbone.layers[0].downsample(x.permute(0, 2, 3, 1)), expected)


def test_the_names_of_the_heads_are_those_of_mmdetection():
    single = narrow_detector("mask_rcnn_swin_t").state_dict()
    cascade = narrow_detector("cascade_mask_rcnn_swin_t").state_dict()
    for key in (
        "neck.lateral_convs.3.conv.bias",
        "neck.fpn_convs.0.conv.weight",
        "rpn_head.rpn_conv.weight",
        "rpn_head.rpn_cls.bias",
        "rpn_head.rpn_reg.bias",
        "roi_head.bbox_head.shared_fcs.1.weight",
        "roi_head.bbox_head.fc_cls.weight",
        "roi_head.bbox_head.fc_reg.weight",
        "roi_head.mask_head.convs.3.conv.weight",
        "roi_head.mask_head.upsample.bias",
        "roi_head.mask_head.conv_logits.weight",
    ):
        assert key in single
    for key in (
        "roi_head.bbox_head.2.shared_convs.3.conv.weight",
        "roi_head.bbox_head.0.shared_convs.0.bn.running_var",
        "roi_head.bbox_head.1.shared_convs.0.bn.num_batches_tracked",
        "roi_head.bbox_head.1.shared_fcs.0.weight",
        "roi_head.mask_head.2.conv_logits.bias",
    ):
        assert key in cascade
    assert "roi_head.bbox_head.0.shared_convs.0.conv.bias" not in cascade


def test_what_does_not_fit_is_named(tmp_path):
    state = mmdetection_names(narrow_detector())
    del state["rpn_head.rpn_cls.bias"]
    state["neck.extra.weight"] = torch.zeros(1)
    state["roi_head.bbox_head.fc_cls.bias"] = torch.zeros(81)
    torch.save(state, tmp_path / "weights.pth")
    with pytest.raises(InputError) as raised:
        load_checkpoint(narrow_detector(), tmp_path / "weights.pth")
    for told in ("rpn_head.rpn_cls.bias", "neck.extra.weight", r"roi_head.bbox_head.fc_cls.bias ((81,)"):
        assert told in str(raised.value)


@pytest.mark.parametrize("shape", [(), (5,)])
def test_merged_channels_of_another_shape_are_named(tmp_path, shape):
    name = "backbone.stages.0.downsample.norm.weight"
    torch.save({name: torch.zeros(shape)}, tmp_path / "weights.pth")
    with pytest.raises(InputError, match=name) as raised:
        load_checkpoint(narrow_detector(), tmp_path / "weights.pth")
    assert "save the weights alone" not in str(raised.value)


class Record:
    """Something a training run may have left in its checkpoint."""


def test_a_checkpoint_with_objects_in_it_is_refused_with_a_way_out(tmp_path):
    torch.save({"meta": Record(), "state_dict": {}}, tmp_path / "weights.pth")
    with pytest.raises(InputError, match="save the weights alone"):
        load_checkpoint(narrow_detector(), tmp_path / "weights.pth")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        load_checkpoint(narrow_detector(), tmp_path / "weights.pth")
