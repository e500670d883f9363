"""A convolution with what may follow it, named as mmcv names the parts (`conv`, `bn`) so that weights fit."""

import torch
from torch import Tensor, nn


class ConvLayer(nn.Module):
    """Stride-1 convolution that keeps height and width: (n, in, h, w) -> (n, out, h, w).

    With `normalised`, BatchNorm follows and the convolution has no bias; with `activated`, a ReLU comes last.
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel: int, normalised: bool = False, activated: bool = False
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel, padding=kernel // 2, bias=not normalised)
        self.bn = nn.BatchNorm2d(out_channels) if normalised else None
        self.activated = activated

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        if self.bn is not None:
            x = self.bn(x)
        return x.relu() if self.activated else x


@torch.no_grad()
def fold_batch_norms(module: nn.Module) -> None:
    """Make every BatchNorm of the ConvLayers within `module` part of its convolution, for inference."""
    for layer in module.modules():
        if isinstance(layer, ConvLayer) and layer.bn is not None:
            assert layer.bn.running_mean is not None
            assert layer.bn.running_var is not None
            gain = layer.bn.weight / (layer.bn.running_var + layer.bn.eps).sqrt()
            offset = layer.bn.bias - layer.bn.running_mean * gain
            layer.conv.weight.mul_(gain.view(-1, 1, 1, 1))
            layer.conv.bias = nn.Parameter(offset)
            layer.bn = None
