"""Region proposal network: where something may be, as boxes with scores."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fimaq.detection.anchors import RATIOS, STRIDES, grid_anchors
from fimaq.detection.boxes import decode
from fimaq.detection.nms import grouped_nms

CANDIDATES_PER_LEVEL = 1000
OVERLAP = 0.7
PROPOSALS = 1000


class RPNHead(nn.Module):
    """Per position and anchor one objectness logit and one delta, by the same three convolutions at all levels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.rpn_conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.rpn_cls = nn.Conv2d(channels, len(RATIOS), 1)
        self.rpn_reg = nn.Conv2d(channels, 4 * len(RATIOS), 1)

    def forward(self, features: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Maps (n, channels, h_i, w_i) -> logits (n, anchors, h_i, w_i) and deltas (n, 4 * anchors, h_i, w_i)."""
        hidden = [self.rpn_conv(x).relu() for x in features]
        return [self.rpn_cls(x) for x in hidden], [self.rpn_reg(x) for x in hidden]

    def propose(self, features: Sequence[Tensor], sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Proposals of each image, best first: (k, 4) with k <= 1000. `sizes`: (height, width) without padding."""
        logits, deltas = self(features)
        anchors = [
            grid_anchors(level.shape[2], level.shape[3], stride, level.device)
            for level, stride in zip(logits, STRIDES, strict=True)
        ]
        flat_logits = [in_anchor_order(level, 1).squeeze(2) for level in logits]
        flat_deltas = [in_anchor_order(level, 4) for level in deltas]
        return [
            select_proposals([s[i] for s in flat_logits], [d[i] for d in flat_deltas], anchors, size)[0]
            for i, size in enumerate(sizes)
        ]


def in_anchor_order(level: Tensor, values: int) -> Tensor:
    """One level's map (n, anchors * values, h, w) -> (n, h * w * anchors, values)."""
    return level.permute(0, 2, 3, 1).reshape(len(level), -1, values)


def select_proposals(
    logits: Sequence[Tensor], deltas: Sequence[Tensor], anchors: Sequence[Tensor], size: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Proposals (k, 4) of one image and their scores (k,), best first.

    Per level: logits (a,), deltas (a, 4), anchors (a, 4). Levels are thinned out, and suppressed, separately.
    """
    boxes, scores, levels = [], [], []
    for level, (level_logits, level_deltas, level_anchors) in enumerate(zip(logits, deltas, anchors, strict=True)):
        ranked, order = level_logits.sigmoid().sort(descending=True, stable=True)
        best = order[:CANDIDATES_PER_LEVEL]
        boxes.append(decode(level_anchors[best], level_deltas[best], size))
        scores.append(ranked[:CANDIDATES_PER_LEVEL])
        levels.append(torch.full_like(best, level))
    every_box, every_score, every_level = torch.cat(boxes), torch.cat(scores), torch.cat(levels)
    inside = (every_box[:, 2:] > every_box[:, :2]).all(dim=1)
    every_box, every_score = every_box[inside], every_score[inside]
    kept = grouped_nms(every_box, every_score, every_level[inside], OVERLAP)[:PROPOSALS]
    return every_box[kept], every_score[kept]
