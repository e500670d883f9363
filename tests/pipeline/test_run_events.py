"""What a run writes while it works: events.jsonl, and curves for TensorBoard where they are asked for."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from demo_runs import SETTINGS, UNITS, quantize

import fimaq
from fimaq.artifact.run_directory import RunDirectory
from fimaq.errors import InputError
from fimaq.progress import Facts, Silent

PROGRESS = {"time", "kind", "index", "of", "unit", "iteration", "iterations", "loss", "rate", "seconds"} | {
    "seconds_left",
    "memory_bytes",
}


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in RunDirectory.open_existing(run).read_events() if event["kind"] == kind]


def curves(run: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and values by name, as TensorBoard itself reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    accumulator.Reload()
    names = accumulator.Tags()["scalars"]
    return {name: [(event.step, event.value) for event in accumulator.Scalars(name)] for name in names}


@pytest.fixture(scope="session")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> fimaq.Run:
    return quantize(out=tmp_path_factory.mktemp("runs") / "drawn", tensorboard=True)


def test_every_report_is_an_event_with_all_facts(finished: fimaq.Run) -> None:
    assert finished.path is not None
    reported = events(finished.path, "progress")
    assert all(event.keys() == PROGRESS for event in reported)
    for number, unit in enumerate(finished.metrics["units"]):
        own = [event for event in reported if event["index"] == number]
        assert [(event["iteration"] - 1, event["loss"]) for event in own] == unit["losses"]
        assert {(event["unit"], event["of"], event["iterations"]) for event in own} == {
            (unit["unit"], UNITS, SETTINGS["iters"])
        }
        assert own[0]["rate"] is None
        assert all(event["rate"] > 0 for event in own[1:])


def test_the_time_left_is_unknown_at_first_and_nothing_at_the_end(finished: fimaq.Run) -> None:
    assert finished.path is not None
    reported = events(finished.path, "progress")
    assert reported[0]["seconds_left"] is None
    of_blocks = [event["seconds_left"] for event in reported if event["index"] == 3]
    assert all(left > 0 for left in of_blocks)
    assert reported[-1]["seconds_left"] == 0
    assert all(event["memory_bytes"] > 50 * 2**20 for event in reported)


def test_what_the_host_gave_so_far_is_told_with_every_unit(finished: fimaq.Run) -> None:
    assert finished.path is not None
    told = [event["peak_host_bytes"] for event in events(finished.path, "unit")]
    assert len(told) == UNITS
    growing = [50 * 2**20, *told, finished.metrics["peak_host_bytes"]]
    assert growing == sorted(growing)


def test_the_display_is_told_the_same(tmp_path: Path) -> None:
    told: list[Facts] = []

    class Kept(Silent):
        def report(self, facts: Facts) -> None:
            told.append(facts)

    quantize(out=tmp_path / "run", iters=3, progress=Kept())
    assert [facts.unit for facts in told if facts.unit_done] == [
        e["unit"] for e in events(tmp_path / "run", "unit")
    ]
    stages = {facts.stage for facts in told}
    assert stages == {"preparing", "range search", "refresh", "reconstruction", "evaluation"}
    losses = {(facts.unit, facts.iteration): facts.loss for facts in told if facts.loss is not None}
    assert losses == {(e["unit"], e["iteration"]): e["loss"] for e in events(tmp_path / "run", "progress")}


def test_curves_hold_what_was_measured(drawn: fimaq.Run) -> None:
    assert drawn.path is not None
    shown, units = curves(drawn.path), drawn.metrics["units"]
    for unit in units:
        assert shown[f"loss/{unit['unit']}"] == [(i, pytest.approx(loss)) for i, loss in unit["losses"]]
    flipped = [(i, pytest.approx(100 * unit["flipped"] / unit["weights"])) for i, unit in enumerate(units)]
    assert shown["units/flipped_percent"] == flipped
    assert shown["units/seconds"] == [(i, pytest.approx(unit["seconds"])) for i, unit in enumerate(units)]
    assert [step for step, _ in shown["units/memory_gib"]] == list(range(UNITS))
    fidelity = drawn.metrics["fidelity"]
    assert shown["final/kl_divergence"] == [(0, pytest.approx(fidelity["kl_divergence"]))]
    assert shown["final/agreement"] == [(0, pytest.approx(fidelity["agreement"]))]


def test_curves_are_off_by_default(finished: fimaq.Run) -> None:
    assert finished.path is not None
    assert not (finished.path / "tensorboard").exists()


def test_curves_can_be_switched_on_when_a_run_is_resumed(unfinished: Path, tmp_path: Path) -> None:
    """They are no setting of the result: a run begun without them is the same run. The rest is appended."""
    out = shutil.copytree(unfinished, tmp_path / "run")
    run = quantize(out=out, resume=True, tensorboard=True)
    steps = [step for step, _ in curves(out)["units/seconds"]]
    assert steps == list(range(3, UNITS))
    assert len(events(out, "unit")) == UNITS
    assert run.metrics["units"][0]["unit"] not in {name.split("/")[1] for name in curves(out)}


def test_a_resumed_run_adds_to_its_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from runs import stop_at_unit

    with pytest.MonkeyPatch.context() as patch:
        stop_at_unit(2, patch)
        with pytest.raises(KeyboardInterrupt):
            quantize(out=tmp_path / "run", iters=2, tensorboard=True)
    quantize(out=tmp_path / "run", iters=2, tensorboard=True, resume=True)
    assert [step for step, _ in curves(tmp_path / "run")["units/seconds"]] == list(range(UNITS))
    assert len(list((tmp_path / "run" / "tensorboard").iterdir())) == 2


def test_a_finished_run_gets_no_further_curves(drawn: fimaq.Run) -> None:
    assert drawn.path is not None
    before = sorted((drawn.path / "tensorboard").iterdir())
    quantize(out=drawn.path, resume=True, tensorboard=True)
    assert sorted((drawn.path / "tensorboard").iterdir()) == before


def test_without_the_package_nothing_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(InputError, match=r"pip install 'fimaq\[tensorboard\]'"):
        quantize(out=tmp_path / "run", tensorboard=True)
    assert list(tmp_path.iterdir()) == []


def test_curves_need_a_run_directory() -> None:
    with pytest.raises(InputError, match="out="):
        quantize(tensorboard=True)


def test_curves_are_no_setting_of_the_result(drawn: fimaq.Run) -> None:
    assert drawn.path is not None
    stored = json.loads((drawn.path / "config.json").read_text())
    assert "tensorboard" not in stored["settings"]
    assert stored["given"]["tensorboard"] is True
