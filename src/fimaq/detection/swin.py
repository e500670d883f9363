"""Swin backbone for images of any size, with MMDetection's treatment of maps that windows do not divide.

timm's parts are reused, but not its blocks: timm shifts a map before it pads it, and neither shifts nor pads to
whole windows where a map is smaller than one. Weights trained under the other convention expect padding at the
bottom and right first, and the shift (in every second block) always.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from timm.layers import Mlp, PatchEmbed
from timm.models.swin_transformer import PatchMerging, WindowAttention, window_partition, window_reverse
from torch import Tensor, nn

PATCH = 4
MASKED = -100.0


class SwinBlock(nn.Module):
    """Attention within windows, then an MLP: (n, h, w, dim) -> (n, h, w, dim)."""

    def __init__(self, dim: int, num_heads: int, window_size: int, shift: int, mlp_ratio: float) -> None:
        super().__init__()
        self.window_size = window_size
        self.shift = shift
        self.norm1 = nn.LayerNorm(dim)
        self.attn = WindowAttention(dim, num_heads, window_size=window_size)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))

    def _attend(self, x: Tensor) -> Tensor:
        height, width = x.shape[1:3]
        side = self.window_size
        x = F.pad(x, (0, 0, 0, -width % side, 0, -height % side))
        padded_height, padded_width = x.shape[1:3]
        mask = None
        if self.shift:
            x = x.roll((-self.shift, -self.shift), dims=(1, 2))
            mask = shifted_window_mask(padded_height, padded_width, side, self.shift, x.device).to(x.dtype)
        windows = window_partition(x, (side, side))
        attended = self.attn(windows.flatten(1, 2), mask=mask)
        x = window_reverse(attended.unflatten(1, (side, side)), (side, side), padded_height, padded_width)
        if self.shift:
            x = x.roll((self.shift, self.shift), dims=(1, 2))
        return x[:, :height, :width]


class SwinStage(nn.Module):
    """Blocks at one resolution, and the step to the next: (n, h, w, dim) -> that, and (n, h/2, w/2, 2 dim)."""

    def __init__(
        self, dim: int, depth: int, num_heads: int, window_size: int, mlp_ratio: float, downsample: bool
    ) -> None:
        super().__init__()
        shifts = [0 if index % 2 == 0 else window_size // 2 for index in range(depth)]
        self.blocks = nn.Sequential(*(SwinBlock(dim, num_heads, window_size, s, mlp_ratio) for s in shifts))
        self.downsample = PatchMerging(dim) if downsample else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.blocks(x)
        return x, x if self.downsample is None else self.downsample(x)


class SwinBackbone(nn.Module):
    """Image (n, 3, H, W) -> one normalised map per stage, (n, embed_dim * 2^i, h_i, w_i), finest first."""

    def __init__(
        self,
        embed_dim: int = 96,
        depths: Sequence[int] = (2, 2, 6, 2),
        num_heads: Sequence[int] = (3, 6, 12, 24),
        window_size: int = 7,
        mlp_ratio: float = 4.0,
    ) -> None:
        super().__init__()
        self.channels = [embed_dim * 2**index for index in range(len(depths))]
        self.patch_embed = PatchEmbed(
            None, PATCH, embed_dim=embed_dim, norm_layer=nn.LayerNorm, output_fmt="NHWC", dynamic_img_pad=True
        )
        last = len(depths) - 1
        self.layers = nn.ModuleList(
            SwinStage(dim, depth, heads, window_size, mlp_ratio, downsample=index < last)
            for index, (dim, depth, heads) in enumerate(zip(self.channels, depths, num_heads, strict=True))
        )
        for index, dim in enumerate(self.channels):
            self.add_module(f"norm{index}", nn.LayerNorm(dim))

    def forward(self, images: Tensor) -> list[Tensor]:
        x = self.patch_embed(images)
        outputs = []
        for index, stage in enumerate(self.layers):
            features, x = stage(x)
            outputs.append(self.get_submodule(f"norm{index}")(features).permute(0, 3, 1, 2).contiguous())
        return outputs


def shifted_window_mask(
    height: int, width: int, side: int, shift: int, device: torch.device | None = None
) -> Tensor:
    """What keeps apart in one window what the cyclic shift brought together: (windows, side^2, side^2), 0 or -100.

    `height` and `width` are those of the padded map. Along each axis the shifted map has three zones: all whole
    windows, the part of the last window that belongs there, and the part that came around.
    """

    def zones(length: int) -> Tensor:
        position = torch.arange(length, device=device)
        return (position >= length - side).int() + (position >= length - shift).int()

    regions = zones(height)[:, None] * 3 + zones(width)
    windows = window_partition(regions[None, :, :, None], (side, side)).flatten(1)
    return (windows[:, None] != windows[:, :, None]) * MASKED
