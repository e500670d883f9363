"""fimaq quantize --dry-run: a prediction is printed, and nothing is written or needed but the model's name."""

import json
from pathlib import Path

import pytest
from command_line import World, assert_refused, fimaq
from runs import snapshot


def test_it_prints_and_writes_nothing(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = snapshot(world.data.parent)
    outcome = fimaq(*world.quantize(tmp_path / "run", "--dry-run"))
    assert outcome.code == 0, outcome.err
    lines = outcome.out.splitlines()
    assert "8 images, 3 iterations" in lines[0]
    assert "predicted, not measured" in lines[0]
    assert [line.split()[0] for line in lines[1:]] == ["time", "host", "disk", "of"]
    assert "in host memory" in lines[-1]
    assert list(tmp_path.iterdir()) == []
    assert snapshot(world.data.parent) == before


def test_json_holds_this_machine_and_an_h200_and_needs_no_data(world: World, tmp_path: Path) -> None:
    arguments = world.quantize(tmp_path / "run", "--dry-run", "--json", data=None, weights=None, device=None)
    outcome = fimaq(*arguments)
    assert outcome.code == 0, outcome.err
    told = json.loads(outcome.out)
    assert "this machine" in told
    for prediction in told.values():
        assert prediction["total_seconds"] == pytest.approx(sum(prediction["seconds"].values()))
        assert prediction["host_bytes"] > 0
        # Each of 8 images takes 3 * 32 * 32 floats, as raw and as quantized inputs of the first unit.
        assert sum(prediction["lists"].values()) > 2 * 8 * 3 * 32 * 32 * 4
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_predicted_is_refused(world: World, tmp_path: Path) -> None:
    assert_refused(
        fimaq("quantize", "mask_rcnn_swin_t", "--task", "detection", "--dry-run", "--out", tmp_path / "run"),
        "not predicted",
    )
    assert_refused(fimaq("quantize", "vit_tinny", "--dry-run", "--out", tmp_path / "run"), "vit_tinny")
    assert_refused(fimaq(*world.quantize(tmp_path / "run", "--dry-run", bits="w1a1")), "w1a1")
    assert_refused(fimaq(*world.quantize(tmp_path / "run", "--dry-run", device="tpu")), "tpu")
