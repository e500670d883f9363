"""`fimaq.quantize` and `fimaq.load` from end to end, on the embedded demo model with tiny settings."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fimaq
from fimaq.artifact.files import read_tensors, write_tensors
from fimaq.config import METHODS
from fimaq.data.demo import demo_calibration, demo_model, demo_test
from fimaq.errors import InputError
from fimaq.progress import Silent
from fimaq.quant.layers import quantized_products
from fimaq.reconstruct.algorithm import Reconstruction

SETTINGS: dict[str, Any] = {
    "bits": "w3a3",
    "iters": 6,
    "batch_size": 16,
    "search_size": 16,
    "calib_size": 64,
    "device": "cpu",
}
UNITS = 8
PATIENCE = 60.0

WORKER = """
import json, sys, time
import torch
import fimaq
from fimaq.data.demo import demo_calibration, demo_model
from fimaq.progress import Silent

class Slow(Silent):
    def start(self, what, total):
        time.sleep(0.25)  # so that a kill between two units cannot come too late

torch.set_num_threads(1)
out, settings = sys.argv[1], json.loads(sys.argv[2])
fimaq.quantize(demo_model(), demo_calibration(64), out=out, progress=Slow(), **settings)
"""

TINY = {"img_size": 32, "patch_size": 16, "depth": 2, "embed_dim": 24, "num_heads": 2, "num_classes": 7}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def quantize(model: nn.Module | None = None, images: Any = None, **settings: Any) -> fimaq.Run:
    given = demo_calibration(64) if images is None else images
    return fimaq.quantize(model or demo_model(), given, **{**SETTINGS, **settings})


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(demo_test()[0][:100])


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> fimaq.Run:
    """A run that nothing interrupted, for the tests that only read it."""
    torch.set_num_threads(1)
    return quantize(out=tmp_path_factory.mktemp("runs") / "finished")


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run stopped after three units, for the tests that copy it or must leave it alone."""
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("runs") / "unfinished"
    with pytest.MonkeyPatch.context() as patch:
        stop_after(3, patch)
        with pytest.raises(KeyboardInterrupt):
            quantize(out=path)
    return path


def stop_after(units: int, patch: pytest.MonkeyPatch) -> None:
    reconstruct = Reconstruction.reconstruct

    def interrupted(self: Reconstruction, index: int, report: Any) -> Any:
        if index == units:
            raise KeyboardInterrupt
        return reconstruct(self, index, report)

    patch.setattr(Reconstruction, "reconstruct", interrupted)


# The user's model


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


# Repeating a run


def test_the_same_seed_gives_the_same_bits(finished: fimaq.Run) -> None:
    torch.manual_seed(99)  # the caller's own seed must not matter
    assert equal(tensors(quantize().model), tensors(finished.model))


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


# Methods and presets


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


# Storing and loading


def test_a_stored_run_loads_with_bit_identical_logits(finished: fimaq.Run) -> None:
    assert finished.path is not None
    assert torch.equal(logits(fimaq.load(finished.path, model=demo_model())), logits(finished.model))


def test_loading_does_not_read_the_weights_of_the_model_given(finished: fimaq.Run) -> None:
    assert finished.path is not None
    other = demo_model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_()
    assert torch.equal(logits(fimaq.load(finished.path, model=other)), logits(finished.model))


def test_loading_a_run_of_an_unnamed_model_without_one_says_so(finished: fimaq.Run) -> None:
    assert finished.path is not None
    with pytest.raises(InputError, match="model="):
        fimaq.load(finished.path)


def test_loading_an_unfinished_run_says_so(unfinished: Path) -> None:
    with pytest.raises(InputError, match="incomplete"):
        fimaq.load(unfinished, model=demo_model())


def test_loading_into_another_architecture_is_refused(finished: fimaq.Run) -> None:
    assert finished.path is not None
    with pytest.raises(InputError):
        fimaq.load(finished.path, model=timm.create_model("vit_tiny_patch16_224", **TINY))


def test_a_run_of_an_earlier_format_is_not_loaded(finished: fimaq.Run, tmp_path: Path) -> None:
    assert finished.path is not None
    out = shutil.copytree(finished.path, tmp_path / "run")
    described = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**described, "format": described["format"] - 1}))
    with pytest.raises(InputError, match="format 1"):
        fimaq.load(out, model=demo_model())


def test_a_finished_run_is_not_overwritten(finished: fimaq.Run) -> None:
    assert finished.path is not None
    before = snapshot(finished.path)
    with pytest.raises(InputError, match="finished run"):
        quantize(out=finished.path)
    assert snapshot(finished.path) == before


def test_resuming_a_finished_run_gives_it_back(finished: fimaq.Run) -> None:
    assert finished.path is not None
    before = (finished.path / "model.safetensors").read_bytes()
    again = quantize(out=finished.path, resume=True)
    assert torch.equal(logits(again.model), logits(finished.model))
    assert (finished.path / "model.safetensors").read_bytes() == before


def test_a_finished_run_keeps_no_checkpoint(finished: fimaq.Run) -> None:
    assert finished.path is not None
    names = {path.name for path in finished.path.iterdir()} - {".lock"}
    assert names == {"config.json", "events.jsonl", "metrics.json", "model.safetensors"}


# Models that timm builds by name


def timm_model(**changed: Any) -> nn.Module:
    """Random weights of visible size, so that attention is far from uniform."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", **{**TINY, **changed}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return model


def store_by_name(model: nn.Module, out: Path) -> tuple[fimaq.Run, Tensor]:
    """Quantized with the arguments TINY, and the images it was calibrated with."""
    images = torch.randn(8, 3, 32, 32)
    settings = {**SETTINGS, "bits": "w6a6", "calib_size": 8, "batch_size": 8, "method": "rtn"}
    return fimaq.quantize(model, images, out=out, model_args=TINY, **settings), images


def test_a_timm_model_is_built_by_its_name_when_loaded(tmp_path: Path) -> None:
    run, images = store_by_name(timm_model(), tmp_path / "run")
    loaded = fimaq.load(tmp_path / "run")
    with torch.no_grad():
        assert torch.equal(loaded(images), run.model(images))


def test_a_model_whose_name_builds_something_else_is_not_loaded_by_name(tmp_path: Path) -> None:
    """The number of heads shows in no weight: a twin built by name has the same shapes and other outputs."""
    run, _ = store_by_name(timm_model(num_heads=4), tmp_path / "run")
    assert run.config.model is None
    with pytest.raises(InputError, match="model="):
        fimaq.load(tmp_path / "run")


# Interruption


@contextmanager
def worker(out: Path, **settings: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that quantizes into `out`; killed, not asked, at the end."""
    command = [sys.executable, "-c", WORKER, str(out), json.dumps({**SETTINGS, **settings})]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_until(reached: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not reached():
        assert process.poll() is None, "the run ended before the moment to kill it came"
        assert time.monotonic() < deadline, "the run never came to the moment to kill it"
        time.sleep(0.002)


def unit_events(out: Path) -> int:
    path = out / "events.jsonl"
    return path.read_text().count('"unit"') if path.exists() else 0


MOMENTS: dict[str, Callable[[Path], bool]] = {
    "before the first unit": lambda out: (out / "config.json").exists(),
    "after one unit": lambda out: (out / "checkpoint" / "unit-000.safetensors").exists(),
    "after three units": lambda out: unit_events(out) >= 3,
    "while a unit is written": lambda out: any((out / "checkpoint").glob(".unit-004*")),
    "before the last unit": lambda out: (out / "checkpoint" / f"unit-{UNITS - 2:03d}.safetensors").exists(),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_run_resumes_to_the_same_bits(finished: fimaq.Run, tmp_path: Path, moment: str) -> None:
    out = tmp_path / "run"
    with worker(out) as process:
        # A file being written is there for an instant only: being too late for it, by a unit, is as good a kill.
        late = out / "checkpoint" / "unit-005.safetensors"
        reached = MOMENTS[moment]
        wait_until(lambda: reached(out) or (moment == "while a unit is written" and late.exists()), process)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert not (out / "model.safetensors").exists()
    resumed = quantize(out=out, resume=True)
    assert finished.path is not None
    assert equal(load_file(out / "model.safetensors"), load_file(finished.path / "model.safetensors"))
    assert torch.equal(logits(resumed.model), logits(finished.model))


def test_resuming_takes_finished_units_from_the_checkpoint(unfinished: Path, tmp_path: Path) -> None:
    out = shutil.copytree(unfinished, tmp_path / "run")
    notes: list[str] = []

    class Notes(Silent):
        def note(self, text: str) -> None:
            notes.append(text)

    quantize(out=out, resume=True, progress=Notes())
    assert sum("taken from the checkpoint" in note for note in notes) == 3


def test_a_directory_in_use_by_another_process_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with worker(out, iters=100_000) as process:
        wait_until(lambda: (out / "config.json").exists(), process)
        with pytest.raises(InputError, match=f"in use by process {process.pid}"):
            quantize(out=out, iters=100_000, resume=True)
        assert process.poll() is None


@pytest.mark.parametrize(
    ("changed", "named"),
    [({"bits": "w4a4"}, "bits"), ({"seed": 1}, "seed"), ({"iters": 7}, "iters"), ({"images": True}, "data")],
)
def test_another_configuration_is_refused_and_leaves_every_byte(
    unfinished: Path, changed: dict[str, Any], named: str
) -> None:
    before = snapshot(unfinished)
    settings = {"images": demo_calibration(65)[1:]} if "images" in changed else changed
    with pytest.raises(InputError, match=named):
        quantize(out=unfinished, resume=True, **settings)
    assert snapshot(unfinished) == before


def test_other_weights_are_refused_and_leave_every_byte(unfinished: Path) -> None:
    before = snapshot(unfinished)
    model = demo_model()
    with torch.no_grad():
        model.head.bias[0] += 1e-3
    with pytest.raises(InputError, match="weights"):
        quantize(model, out=unfinished, resume=True)
    assert snapshot(unfinished) == before


def test_an_unfinished_run_is_not_restarted_unasked(unfinished: Path) -> None:
    before = snapshot(unfinished)
    with pytest.raises(InputError, match="resume"):
        quantize(out=unfinished)
    assert snapshot(unfinished) == before


def damage_one_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def exchange_with_another_unit(path: Path) -> None:
    path.write_bytes((path.parent / "unit-000.safetensors").read_bytes())


def leave_a_tensor_out(path: Path) -> None:
    state, metadata = read_tensors(path)
    del state["norm1.weight"]
    write_tensors(path, state, metadata)


@pytest.mark.parametrize(
    "damage", [damage_one_bit, cut_short, exchange_with_another_unit, leave_a_tensor_out], ids=lambda f: f.__name__
)
def test_a_damaged_checkpoint_is_refused(unfinished: Path, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    out = shutil.copytree(unfinished, tmp_path / "run")
    damage(out / "checkpoint" / "unit-002.safetensors")
    with pytest.raises(InputError):
        quantize(out=out, resume=True)
    assert not (out / "model.safetensors").exists()


def test_the_checkpoint_of_an_exchanged_block_is_refused(unfinished: Path, tmp_path: Path) -> None:
    """Blocks have the same shapes: only what the file says of itself can tell one from the other."""
    out = shutil.copytree(unfinished, tmp_path / "run")
    (out / "checkpoint" / "unit-002.safetensors").write_bytes(
        (unfinished / "checkpoint" / "unit-001.safetensors").read_bytes()
    )
    with pytest.raises(InputError):
        quantize(out=out, resume=True)


# Bad input


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


def test_a_refused_run_leaves_no_directory(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        quantize(bits="w9a9", out=tmp_path / "deep" / "run")
    assert not (tmp_path / "deep").exists()
