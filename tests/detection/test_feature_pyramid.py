"""The pyramid, against the same sums written out."""

import torch
import torch.nn.functional as F
from narrow_detector import narrow_detector

from fimaq.detection.conv import ConvLayer, fold_batch_norms


@torch.no_grad()
def test_the_pyramid_adds_each_coarser_map_to_the_next_finer_one():
    neck = narrow_detector().neck
    shapes = [(19, 14), (10, 7), (5, 4), (3, 2)]
    features = [torch.randn(2, 12 * 2**i, *shape, dtype=torch.float64) for i, shape in enumerate(shapes)]

    def lateral(i: int) -> torch.Tensor:
        conv = neck.lateral_convs[i].conv
        return torch.einsum("oi,nihw->nohw", conv.weight[:, :, 0, 0], features[i]) + conv.bias[:, None, None]

    merged = lateral(3)
    expected = [merged]
    for i in (2, 1, 0):
        (height, width), (coarse_height, coarse_width) = shapes[i], shapes[i + 1]
        rows = [y * coarse_height // height for y in range(height)]
        columns = [x * coarse_width // width for x in range(width)]
        merged = lateral(i) + merged[:, :, rows][:, :, :, columns]
        expected.insert(0, merged)
    outputs = neck(features)
    convs = [layer.conv for layer in neck.fpn_convs]
    for output, x, conv in zip(outputs[:4], expected, convs, strict=True):
        torch.testing.assert_close(output, F.conv2d(x, conv.weight, conv.bias, padding=1))
    torch.testing.assert_close(outputs[4], outputs[3][:, :, ::2, ::2], rtol=0, atol=0)


@torch.no_grad()
def test_a_folded_batch_norm_changes_nothing():
    head = narrow_detector("cascade_mask_rcnn_swin_t").roi_head.bbox_head[0]
    pooled = torch.randn(3, 16, 7, 7, dtype=torch.float64)
    before = head(pooled)
    fold_batch_norms(head)
    assert all(layer.bn is None for layer in head.modules() if isinstance(layer, ConvLayer))
    for now, then in zip(head(pooled), before, strict=True):
        torch.testing.assert_close(now, then)
