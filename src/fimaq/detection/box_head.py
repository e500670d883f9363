"""Box head: what a region shows, and where exactly it is."""

import torch
from torch import Tensor, nn

from fimaq.detection.boxes import Numbers4, decode
from fimaq.detection.conv import ConvLayer

REGION_SIZE = 7
BOX_HEADS = {"shared2fc": (0, 2), "4conv1fc": (4, 1)}  # convolutions and fully connected layers


class BoxHead(nn.Module):
    """MMDetection's ConvFCBBoxHead with all layers shared between classification and regression."""

    def __init__(
        self,
        kind: str,
        num_classes: int,
        channels: int,
        fc_channels: int,
        stds: Numbers4,
        class_agnostic: bool,
    ) -> None:
        super().__init__()
        num_convs, num_fcs = BOX_HEADS[kind]
        self.stds = stds
        self.class_agnostic = class_agnostic
        self.shared_convs = nn.ModuleList(
            ConvLayer(channels, channels, 3, normalised=True, activated=True) for _ in range(num_convs)
        )
        widths = [channels * REGION_SIZE**2] + [fc_channels] * num_fcs
        self.shared_fcs = nn.ModuleList(nn.Linear(widths[i], widths[i + 1]) for i in range(num_fcs))
        self.fc_cls = nn.Linear(fc_channels, num_classes + 1)
        self.fc_reg = nn.Linear(fc_channels, 4 if class_agnostic else 4 * num_classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Pooled regions (k, channels, 7, 7) -> class logits (k, classes + 1), background last, and deltas.

        The deltas are (k, 4) where they are class-agnostic, otherwise (k, 4 * classes).
        """
        for conv in self.shared_convs:
            x = conv(x)
        x = x.flatten(1)
        for fc in self.shared_fcs:
            x = fc(x).relu()
        return self.fc_cls(x), self.fc_reg(x)

    def boxes(self, proposals: Tensor, deltas: Tensor, size: tuple[int, int]) -> Tensor:
        """Proposals (k, 4) moved by the head's deltas and clipped to the image: (k, 4) or (k, 4 * classes)."""
        return decode(proposals, deltas, size, self.stds)

    def refined(self, proposals: Tensor, logits: Tensor, deltas: Tensor, size: tuple[int, int]) -> Tensor:
        """Proposals (k, 4) for the next stage: moved as their most likely class, background left out, asks for."""
        if not self.class_agnostic:
            label = logits[:, :-1].argmax(dim=1)
            deltas = deltas.unflatten(1, (-1, 4))[torch.arange(len(label), device=label.device), label]
        return self.boxes(proposals, deltas, size)
