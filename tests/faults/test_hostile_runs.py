"""Run directories and weights from strangers: refused in one line or read; nothing executed, nothing allocated."""

import contextlib
import json
import pickle
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import ARGUMENTS, CLASSES, MODEL, World, fimaq
from hostile import VALUES, bounds, changed, inputs, names_below, spoiled
from hypothesis import given
from hypothesis import strategies as st
from tally import Tally

import fimaq as package
from fimaq.artifact.files import read_tensors, write_tensors
from fimaq.artifact.run_directory import RunDirectory
from fimaq.compare.runner import stored_metrics
from fimaq.config import Config
from fimaq.errors import FimaqError, InputError
from fimaq.models.build import build_architecture, load_weights

HUGE = (
    {"depth": 10**9},
    {"depth": 10**9, "embed_dim": 8, "num_heads": 1},
    {"embed_dim": 10**7},
    {"img_size": 10**6},
    {"patch_size": 10**5},
    {"num_heads": 10**9},
    {"mlp_ratio": 1e9},
    {"reg_tokens": 10**9},
    {"num_classes": 10**12},
)


@pytest.fixture(scope="session")
def run(undisturbed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy to be spoiled; every test leaves it whole."""
    return shutil.copytree(undisturbed, tmp_path_factory.mktemp("hostile") / "run")


def without_digest(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    content.pop("digest", None)
    return content


@contextlib.contextmanager
def spoilt(path: Path, content: bytes) -> Any:
    good = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(good)


def read_everything(run: Path, world: World) -> None:
    """What commands do with a run of somebody else's."""
    metrics = run / "metrics.json"
    before, good = names_below(run.parent), metrics.read_bytes()
    with bounds():
        as_stored = Config(model=MODEL, model_args=ARGUMENTS, num_classes=CLASSES)
        for read in (lambda: package.load(run), lambda: stored_metrics(run, as_stored)):
            with contextlib.suppress(FimaqError):
                read()
        # Without weights, full precision would be asked of the network.
        outcome = fimaq("evaluate", run, "--data", world.data, "--weights", world.weights, "--device", "cpu")
    if outcome.code == 0:
        metrics.write_bytes(good)
    assert outcome.code in (0, 1, 2)
    assert names_below(run.parent) <= before | {"run/metrics.json"}


@inputs(25)
@given(data=st.data())
def test_any_config_is_read_or_refused(data: st.DataObject, run: Path, world: World, tally: Tally) -> None:
    content = data.draw(changed(without_digest(run / "config.json")) | VALUES)
    tally.input()
    with spoilt(run / "config.json", json.dumps(content).encode()):
        read_everything(run, world)


@inputs(25)
@given(data=st.data())
def test_any_bytes_for_a_config_are_read_or_refused(
    data: st.DataObject, run: Path, world: World, tally: Tally
) -> None:
    good = json.dumps(without_digest(run / "config.json")).encode()
    tally.input()
    with spoilt(run / "config.json", data.draw(spoiled(good) | st.binary(max_size=40))):
        read_everything(run, world)


@pytest.mark.parametrize("arguments", HUGE, ids=str)
def test_a_config_of_a_huge_model_is_refused_before_it_is_built(
    arguments: dict[str, Any], run: Path, tally: Tally
) -> None:
    content = without_digest(run / "config.json")
    content["model"]["num_classes"] = arguments.get("num_classes", CLASSES)
    content["model"]["args"] |= {key: value for key, value in arguments.items() if key != "num_classes"}
    tally.input()
    with spoilt(run / "config.json", json.dumps(content).encode()), bounds(), pytest.raises(InputError):
        package.load(run)


def test_a_config_cannot_have_other_files_loaded(run: Path, tmp_path: Path, tally: Tally) -> None:
    """timm would read a checkpoint of its own, and older ones of it execute what is pickled there."""

    class Spy:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "executed",)

    (tmp_path / "evil.pth").write_bytes(pickle.dumps({"head.bias": Spy()}))
    content = without_digest(run / "config.json")
    content["model"]["args"]["checkpoint_path"] = str(tmp_path / "evil.pth")
    tally.input()
    with (
        spoilt(run / "config.json", json.dumps(content).encode()),
        pytest.raises(InputError, match="checkpoint_path"),
    ):
        package.load(run)
    assert not (tmp_path / "executed").exists()


@inputs(10)
@given(data=st.data())
def test_any_metrics_are_read_or_refused(data: st.DataObject, run: Path, world: World, tally: Tally) -> None:
    good = without_digest(run / "metrics.json")
    content = json.dumps(data.draw(changed(good) | VALUES)).encode()
    tally.input()
    with spoilt(run / "metrics.json", data.draw(st.just(content) | spoiled(content))):
        with bounds():
            outcome = fimaq(*world.quantize(run, "--resume", data=None, calib=world.data / "train"))
        assert outcome.code in (0, 1, 2)
        read_everything(run, world)


@inputs(25)
@given(lines=st.lists(st.binary(max_size=40) | VALUES.map(lambda value: json.dumps(value).encode()), max_size=5))
def test_any_events_are_read_and_can_be_added_to(
    lines: list[bytes], tmp_path_factory: pytest.TempPathFactory, tally: Tally
) -> None:
    path = tmp_path_factory.mktemp("events")
    tally.input()
    with RunDirectory.create(path, {"settings": {}}, resume=False) as run:
        (path / "events.jsonl").write_bytes(b"\n".join(lines))
        before = run.read_events()
        run.event("unit", index=3)
        after = run.read_events()
    assert after[:-1] == before
    assert after[-1]["index"] == 3


@inputs(25)
@given(data=st.data())
def test_any_structure_is_applied_or_refused(data: st.DataObject, run: Path, tally: Tally) -> None:
    """With a digest that fits: it protects from damage, not from malice."""
    path = run / "model.safetensors"
    tensors, metadata = read_tensors(path)
    structure = data.draw(changed(json.loads(json.loads(metadata["structure"]))) | VALUES)
    wrapped = data.draw(
        st.sampled_from((json.dumps(json.dumps(structure)), json.dumps(structure), "{", "[" * 5000))
    )
    good = path.read_bytes()
    tally.input()
    try:
        write_tensors(path, tensors, {**metadata, "structure": wrapped})
        with bounds(), contextlib.suppress(FimaqError):
            package.load(run)
    finally:
        path.write_bytes(good)


@inputs(25)
@given(data=st.data())
def test_any_tensors_are_loaded_or_refused(data: st.DataObject, run: Path, tally: Tally) -> None:
    """Of other shapes and types, missing or added, with a digest that fits."""
    path = run / "model.safetensors"
    tensors, metadata = read_tensors(path)
    name = data.draw(st.sampled_from(sorted(tensors)))
    shape = data.draw(st.lists(st.sampled_from((0, 1, 2, 24, 1000)), max_size=2))
    kind = data.draw(st.sampled_from((torch.float32, torch.uint8, torch.int64, torch.bool, torch.bfloat16)))
    action = data.draw(st.sampled_from(("replace", "remove", "add", "nan")))
    good = path.read_bytes()
    if action == "remove":
        del tensors[name]
    elif action == "nan":
        tensors[name] = torch.full_like(tensors[name].float(), float("nan"))
    else:
        tensors[name if action == "replace" else f"{name}.more"] = torch.zeros(shape, dtype=kind)
    tally.input()
    try:
        write_tensors(path, tensors, metadata)
        with bounds(), contextlib.suppress(FimaqError):
            model = package.load(run)
            assert action not in ("remove", "add")
            with contextlib.suppress(RuntimeError):  # shapes that do not fit each other: an error, no result
                model(torch.zeros(1, 3, 32, 32))
    finally:
        path.write_bytes(good)


def safetensors_file(header: Any, data: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


@inputs(25)
@given(data=st.data())
def test_any_header_of_tensors_is_read_or_refused(
    data: st.DataObject, world: World, run: Path, tmp_path_factory: pytest.TempPathFactory, tally: Tally
) -> None:
    path = tmp_path_factory.mktemp("weights") / "weights.safetensors"
    good = (data.draw(st.sampled_from((run / "model.safetensors", world.weights)))).read_bytes()
    size = struct.unpack("<Q", good[:8])[0]
    header = json.loads(good[8 : 8 + size])
    header = {name: header[name] for name in list(header)[:4]}
    length = data.draw(st.none() | st.sampled_from((0, 1, 2**31, 2**63, 2**64 - 1)))
    made = safetensors_file(data.draw(changed(header)), good[8 + size :], length)
    path.write_bytes(data.draw(st.just(made) | spoiled(good)))
    model = build_architecture(MODEL, CLASSES, ARGUMENTS)
    tally.input()
    with bounds():
        for read in (lambda: read_tensors(path), lambda: load_weights(model, path)):
            with contextlib.suppress(InputError):
                read()


@inputs(25)
@given(data=st.data())
def test_any_torch_file_is_read_or_refused(
    data: st.DataObject, world: World, tmp_path_factory: pytest.TempPathFactory, tally: Tally
) -> None:
    folder = tmp_path_factory.mktemp("weights")
    torch.save({"head.bias": torch.zeros(4), "head.weight": torch.zeros(4, 24)}, folder / "good.pth")
    path = folder / "weights.pth"
    path.write_bytes(data.draw(spoiled((folder / "good.pth").read_bytes()) | st.binary(max_size=60)))
    model = build_architecture(MODEL, CLASSES, ARGUMENTS)
    tally.input()
    with bounds(), contextlib.suppress(InputError):
        load_weights(model, path)
