"""Feature pyramid: maps of one width at five scales out of the backbone's four."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from fimaq.detection.conv import ConvLayer


class FPN(nn.Module):
    """MMDetection's FPN, without norms or activations; the fifth level is every second pixel of the fourth."""

    def __init__(self, in_channels: Sequence[int], out_channels: int) -> None:
        super().__init__()
        self.lateral_convs = nn.ModuleList(ConvLayer(c, out_channels, 1) for c in in_channels)
        self.fpn_convs = nn.ModuleList(ConvLayer(out_channels, out_channels, 3) for _ in in_channels)

    def forward(self, features: Sequence[Tensor]) -> list[Tensor]:
        """Maps (n, c_i, h_i, w_i), finest first -> maps (n, out, h_i, w_i) and one of half the last one's size."""
        laterals = [conv(x) for conv, x in zip(self.lateral_convs, features, strict=True)]
        for level in range(len(laterals) - 1, 0, -1):
            finer = laterals[level - 1]
            laterals[level - 1] = finer + F.interpolate(laterals[level], size=finer.shape[2:], mode="nearest")
        outputs = [conv(x) for conv, x in zip(self.fpn_convs, laterals, strict=True)]
        return [*outputs, F.max_pool2d(outputs[-1], kernel_size=1, stride=2)]
