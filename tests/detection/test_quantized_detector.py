"""A detector quantized as a whole: what is reconstructed, what only searched, what stays float; loading it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from narrow_detector import CLASSES, NARROW, images, narrow_detector

from fimaq.config import Config
from fimaq.data.detection_image import DetectionPreprocessing
from fimaq.detection.anchors import STRIDES
from fimaq.detection.detector import Detector
from fimaq.detection.quantize import ProposalScores, quantize_detector
from fimaq.errors import InputError
from fimaq.loading import load
from fimaq.pipeline import Run
from fimaq.progress import Facts, Silent
from fimaq.quant.layers import QuantizedLayer, quantized_layers, quantized_products

HEIGHT, WIDTH = 64, 96
DETECTORS = ("mask_rcnn_swin_t", "cascade_mask_rcnn_swin_t")


class Impatient(Silent):
    """Gives up when a unit begins."""

    def __init__(self, unit: str) -> None:
        self.unit = unit

    def report(self, facts: Facts) -> None:
        if facts.unit.startswith(self.unit):
            raise KeyboardInterrupt


def quantized(
    detector: Detector, out: Any = None, resume: bool = False, progress: Silent | None = None, **settings: Any
) -> Run:
    given = {"calib_size": 8, "batch_size": 4, "search_size": 4, "iters": 6, "rank": 2, "device": "cpu"} | settings
    config = Config.create(task="detection", num_classes=CLASSES, model_args=NARROW, **given)
    calibration = images(HEIGHT, WIDTH, 8).float()
    sizes = [(HEIGHT, WIDTH)] * 8
    preprocessing = DetectionPreprocessing(HEIGHT, WIDTH)
    progress = progress or Silent()
    return quantize_detector(detector, calibration, sizes, config, preprocessing, "", out, resume, progress)


@pytest.fixture(scope="module", params=DETECTORS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("detector") / "run"
    return quantized(narrow_detector(request.param).float(), out, model=request.param, bits="w4a4")


def test_every_convolution_linear_and_product_is_quantized(run: Run) -> None:
    layers = [m for m in run.model.modules() if isinstance(m, (torch.nn.Linear, torch.nn.Conv2d))]
    assert len(layers) > 30
    assert all(isinstance(layer, QuantizedLayer) and layer.hard for layer in layers)
    assert len(list(quantized_products(run.model))) == 2 * sum(NARROW["depths"])
    assert all(product.quantized for _, product in quantized_products(run.model))


def test_what_stays_float_is_listed(run: Run) -> None:
    heads = ["mask_head"] if len(run.metrics["stayed_float"]) == 1 else [f"mask_head.{i}" for i in range(3)]
    assert run.metrics["stayed_float"] == [f"roi_head.{head}.upsample (ConvTranspose2d)" for head in heads]


def test_backbone_pyramid_and_heads_are_reconstructed_and_proposals_only_searched(run: Run) -> None:
    learned = {unit["unit"]: bool(unit["losses"]) for unit in run.metrics["units"]}
    assert not learned.pop("rpn_head")
    assert all(learned.values())
    blocks = 1 + sum(NARROW["depths"]) + 3
    assert list(learned)[blocks] == "neck"
    count = {"mask_rcnn_swin_t": 1, "cascade_mask_rcnn_swin_t": 3}[str(run.config.model)]
    numbers = [""] if count == 1 else [f".{number}" for number in range(count)]
    assert list(learned)[blocks + 1 :] == [f"roi_head.{k}_head{n}" for k in ("bbox", "mask") for n in numbers]


@pytest.mark.parametrize("settings", [{"heads": "searched"}, {"method": "rtn"}])
def test_of_heads_that_are_not_learned_the_ranges_are_searched(settings: dict[str, Any]) -> None:
    run = quantized(narrow_detector().float(), bits="w4a4", **settings)
    assert not any("roi_head" in unit["unit"] for unit in run.metrics["units"])
    assert all(layer.hard for _, layer in quantized_layers(run.model.roi_head))


def test_a_stored_detector_detects_the_same_in_images_of_any_size(run: Run) -> None:
    loaded = load(run.path)
    for height, width in ((HEIGHT, WIDTH), (75, 53)):
        given = images(height, width).float(), [(height, width)]
        with run.model.every_region_counts(), loaded.every_region_counts():
            one, two = run.model(*given)[0], loaded(*given)[0]
        assert len(one) > 0
        for name in ("boxes", "scores", "labels", "masks"):
            assert torch.equal(getattr(one, name), getattr(two, name))


@pytest.mark.parametrize("unit", ["backbone.layers.1.blocks.0", "roi_head.mask_head"])
def test_an_interrupted_run_ends_as_if_it_had_not_been(unit: str, run: Run, tmp_path: Path) -> None:
    name, out = run.config.model, tmp_path / "run"
    settings = {"model": name, "bits": "w4a4"}
    with pytest.raises(KeyboardInterrupt):
        quantized(narrow_detector(name).float(), out, progress=Impatient(unit), **settings)
    resumed = quantized(narrow_detector(name).float(), out, resume=True, **settings)
    uninterrupted, again = run.model.state_dict(), resumed.model.state_dict()
    assert uninterrupted.keys() == again.keys()
    assert all(torch.equal(tensor, again[key]) for key, tensor in uninterrupted.items())


def test_eight_bits_stay_close_to_full_precision_and_three_do_not() -> None:
    detector = narrow_detector().float()
    given = images(HEIGHT, WIDTH, 2).float()
    full = ProposalScores(detector)(given)[..., 0]
    errors = {}
    for bits in ("w8a8", "w3a3"):
        run = quantized(narrow_detector().float(), bits=bits, method="rtn")
        found = ProposalScores(run.model)(given)[..., 0]
        errors[bits] = ((found - full).square().mean() / full.var()).item()
    assert errors["w8a8"] < 0.02 < errors["w3a3"]


def test_proposal_scores_are_pairs_of_object_or_not_for_all_anchors_and_have_a_gradient() -> None:
    detector, given = narrow_detector(), images(HEIGHT, WIDTH, 2)
    pairs = ProposalScores(detector)(given)
    assert pairs.shape == (2, sum(3 * -(-HEIGHT // s) * -(-WIDTH // s) for s in STRIDES), 2)
    logits, _ = detector.rpn_head(detector.neck(detector.backbone(given)))
    expected = torch.cat([level.sigmoid().flatten(1) for level in logits], dim=1)
    torch.testing.assert_close(pairs.softmax(-1)[..., 0].sort(1).values, expected.sort(1).values)
    pairs.sum().backward()
    assert detector.backbone.patch_embed.proj.weight.grad.abs().sum() > 0


def test_scales_per_token_are_refused() -> None:
    with pytest.raises(InputError, match="use preset 'deploy'"):
        quantized(narrow_detector().float(), preset="released")


def test_no_layer_of_the_heads_is_forgotten(run: Run) -> None:
    names = {name for name, _ in quantized_layers(run.model)}
    assert {name.split(".")[0] for name in names} == {"backbone", "neck", "rpn_head", "roi_head"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this PyTorch sees no CUDA GPU")
@pytest.mark.parametrize("compile", [False, True], ids=["uncompiled", "compiled"])
def test_a_gpu_learns_what_a_cpu_learns(compile: bool) -> None:
    losses = {}
    for device in ("cpu", "cuda"):
        run = quantized(narrow_detector().float(), device=device, compile=compile, iters=6, precision="fp32")
        losses[device] = [unit["losses"][0][1] for unit in run.metrics["units"] if unit["losses"]]
    assert losses["cuda"][0] == pytest.approx(losses["cpu"][0], rel=1e-2)
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=0.3)  # each starts from what those before it learned
