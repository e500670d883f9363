"""`fimaq.quantize`: the model given, repeatable results, methods and presets, bad input."""

import os
from pathlib import Path

import pytest
import torch
from demo_runs import SETTINGS, TINY, UNITS, equal, logits, quantize, tensors, timm_model
from torch.utils.data import DataLoader, TensorDataset

import fimaq
from fimaq.accuracy import fidelity
from fimaq.config import METHODS
from fimaq.data.demo import demo_calibration, demo_model
from fimaq.errors import InputError
from fimaq.quant.layers import quantized_products


def test_the_given_model_is_left_untouched() -> None:
    model = demo_model()
    before, classes = tensors(model), [type(m) for m in model.modules()]
    gradients = [p.requires_grad for p in model.parameters()]
    run = quantize(model, method="rtn")
    assert run.model is not model
    assert equal(tensors(model), before)
    assert [type(m) for m in model.modules()] == classes
    assert [p.requires_grad for p in model.parameters()] == gradients


def test_inplace_quantizes_the_given_object() -> None:
    model = demo_model()
    assert quantize(model, method="rtn", inplace=True).model is model


def test_the_random_numbers_of_the_caller_are_left_alone() -> None:
    model = demo_model()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    quantize(model, iters=2)
    assert torch.equal(torch.rand(3), expected)


def test_the_same_seed_gives_the_same_bits(finished: fimaq.Run) -> None:
    torch.manual_seed(99)  # the caller's own seed must not matter
    assert equal(tensors(quantize().model), tensors(finished.model))


def test_a_memory_budget_moves_the_cache_and_changes_no_bit(finished: fimaq.Run) -> None:
    run = quantize(memory_budget="100kB")
    assert set(run.metrics["cache"].values()) == {"disk", "host memory"}
    assert set(finished.metrics["cache"].values()) == {"host memory"}
    assert equal(tensors(run.model), tensors(finished.model))


def test_recognising_a_timm_model_draws_no_random_numbers(tmp_path: Path) -> None:
    model, images = timm_model(), torch.randn(8, 3, 32, 32)
    settings = {**SETTINGS, "calib_size": 8, "batch_size": 8, "method": "rtn"}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    fimaq.quantize(model, images, out=tmp_path / "run", model_args=TINY, **settings)
    assert torch.equal(torch.rand(3), expected)


def test_another_seed_gives_another_model(finished: fimaq.Run) -> None:
    assert not equal(tensors(quantize(seed=1).model), tensors(finished.model))


@pytest.mark.parametrize("source", ["dataset", "loader with labels", "more images than needed"])
def test_every_way_to_hand_images_over_gives_the_same_result(finished: fimaq.Run, source: str) -> None:
    images = demo_calibration(64)
    labels = torch.zeros(64, dtype=torch.long)
    given = {
        "dataset": TensorDataset(images, labels),
        "loader with labels": DataLoader(TensorDataset(images, labels), batch_size=24),
        "more images than needed": demo_calibration(80),
    }[source]
    assert equal(tensors(quantize(images=given).model), tensors(finished.model))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_finite_logits(method: str) -> None:
    run = quantize(method=method, iters=3)
    assert logits(run.model).isfinite().all()
    assert all(unit["finite"] for unit in run.metrics["units"])


@pytest.mark.parametrize("preset", ["deploy", "released"])
def test_every_preset_survives_storing(preset: str, tmp_path: Path) -> None:
    run = quantize(preset=preset, method="rtn", out=tmp_path / "run")
    assert torch.equal(logits(fimaq.load(tmp_path / "run", model=demo_model())), logits(run.model))


@pytest.mark.parametrize(("preset", "rescaled"), [("deploy", {"1"}), ("released", set())])
def test_the_deploy_preset_rescales_the_rows_of_every_softmax(
    preset: str, rescaled: set[str], tmp_path: Path
) -> None:
    """Stored as well: `products.1` of each attention, the one that reads the softmax."""
    quantize(preset=preset, method="rtn", out=tmp_path / "run")
    products = dict(quantized_products(fimaq.load(tmp_path / "run", model=demo_model())))
    assert len(products) == 2 * (UNITS - 2)
    for name, product in products.items():
        assert product.rescales_rows == (name.split(".")[-1] in rescaled), name


def test_eight_bits_agree_with_full_precision() -> None:
    run = quantize(bits="w8a8", method="rtn")
    agreement = logits(run.model).argmax(1) == logits(demo_model()).argmax(1)
    assert agreement.float().mean() >= 0.98


def test_fewer_images_than_asked_for_are_refused() -> None:
    with pytest.raises(InputError, match="64"):
        quantize(images=demo_calibration(63))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_images_that_are_not_finite_are_refused(bad: float) -> None:
    images = demo_calibration(64).clone()
    images[40, 0, 3, 3] = bad
    with pytest.raises(InputError, match="NaN or Inf"):
        quantize(images=images)


def test_weights_that_are_not_finite_are_refused_by_name() -> None:
    model = demo_model()
    with torch.no_grad():
        model.blocks[1].mlp.fc1.weight[0, 0] = float("nan")
    with pytest.raises(InputError, match=r"blocks\.1\.mlp\.fc1\.weight"):
        quantize(model)


def test_images_without_a_batch_dimension_are_refused() -> None:
    with pytest.raises(InputError, match=r"\(n, C, H, W\)"):
        quantize(images=demo_calibration(64)[:, 0])


def test_an_unknown_setting_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="itters"):
        quantize(itters=5)


@pytest.mark.parametrize("name", ["weights", "calib", "val", "val_size", "class_map", "crop_pct"])
def test_a_setting_that_only_the_command_reads_is_refused_by_name(name: str) -> None:
    with pytest.raises(InputError, match=f"^{name} is not read"):
        quantize(**{name: 1})


def test_a_folder_whose_name_is_not_utf_8_is_refused_before_it_is_made(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not UTF-8"):
        quantize(out=tmp_path / os.fsdecode(b"caf\xe9") / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_refused_run_leaves_no_directory(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        quantize(bits="w9a9", out=tmp_path / "deep" / "run")
    assert not (tmp_path / "deep").exists()


def test_the_record_of_a_unit_says_how_far_its_scales_moved() -> None:
    settings = {
        "preset": "released",
        "iters": 8,
        "images": demo_calibration(32),
        "calib_size": 32,
    }  # no ties avoided
    searched, learned = quantize(method="rtn", **settings), quantize(**settings)
    changes = learned.metrics["units"][0]["scale_changes"]
    assert changes.keys() == {"proj.input_quantizer"}
    before, after = (run.model.patch_embed.proj.input_quantizer.scale for run in (searched, learned))
    assert changes["proj.input_quantizer"] == pytest.approx(float((after / before - 1).mean()), abs=1e-6)
    assert changes["proj.input_quantizer"] != 0
    assert len(learned.metrics["units"][1]["scale_changes"]) == 8
    assert searched.metrics["units"][0]["scale_changes"] == {}


def test_a_name_instead_of_a_model_is_refused_with_what_to_do():
    with pytest.raises(InputError, match=r"'vit_tiny_patch16_224' is not a model: .*timm\.create_model"):
        fimaq.quantize("vit_tiny_patch16_224", torch.randn(2, 3, 32, 32))


def test_fidelity_is_the_divergence_from_full_precision_and_the_share_of_equal_choices():
    teacher = torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0], [1.0, 0.0, 0.5], [0.0, 0.0, 1.0]])
    student = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.5], [0.0, 1.0, 0.0], [0.5, 0.0, 1.0]])
    p, q = teacher.double().softmax(-1), student.double().softmax(-1)
    expected = (p * (p / q).log()).sum(-1).mean()
    backwards = (q * (q / p).log()).sum(-1).mean()
    batches = ((torch.arange(4)[rows], teacher[rows]) for rows in (slice(3), slice(3, None)))
    found = fidelity(lambda rows: student[rows], batches)
    assert found["agreement"] == 75
    assert found["kl_divergence"] == pytest.approx(expected.item(), rel=1e-5)
    assert abs(backwards - expected) > 0.1 * expected
