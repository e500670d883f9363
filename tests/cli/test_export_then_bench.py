"""`fimaq export` and `fimaq bench`: from a finished run to a verified file and its speed."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from command_line import World, fimaq, truncate

from fimaq.cli.bench import _times
from fimaq.export import deliver


@pytest.fixture(scope="module")
def exported(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("exported") / "run"
    shutil.copytree(finished, run)
    done = fimaq("export", run)
    assert done.code == 0, done.err
    assert "quantized products run in integer in onnxruntime" in done.out
    done = fimaq("export", run, "--format", "openvino")
    assert done.code == 0, done.err
    assert "quantized products run in integer in openvino" in done.out
    return run


def test_export_as_json_is_what_is_stored(exported: Path, world: World) -> None:
    done = fimaq("export", exported, "--verify", world.data / "val", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out) == json.loads((exported / "export.json").read_text())
    assert set(json.loads(done.out)["verification"]["agreement"]) == {"calibration", "verify"}


def test_bench_compares_with_full_precision(exported: Path) -> None:
    done = fimaq("bench", exported, "--repeats", "4", "--threads", "1", "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert json.loads((exported / "bench.json").read_text()) == result
    assert result["runtimes"].keys() == {"onnxruntime", "openvino"}
    for found in result["runtimes"].values():
        assert [row["batch"] for row in found["times"]] == [1, 16]
        assert all(row[n]["median_ms"] > 0 for row in found["times"] for n in ("full_precision", "quantized"))
    sizes = {name: found["bytes"]["quantized"] for name, found in result["runtimes"].items()}
    assert sizes["onnxruntime"] == (exported / "model.onnx").stat().st_size
    assert sizes["openvino"] == sum((exported / name).stat().st_size for name in ("model.xml", "model.bin"))


def test_an_image_that_cannot_be_read_does_not_stop_an_export(
    finished: Path, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calib = shutil.copytree(world.data / "train", tmp_path / "calib")
    truncate(calib / "03.jpg")
    monkeypatch.setattr(
        deliver, "export_run", lambda _, images, *__, **___: {k: len(v) for k, v in images.items()}
    )
    done = fimaq("export", finished, "--calib", calib, "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out) == {"calibration": 9}


def test_bench_prints_a_table_also_where_it_cannot_store_it(exported: Path, tmp_path: Path) -> None:
    run = shutil.copytree(exported, tmp_path / "run", ignore=shutil.ignore_patterns("bench.json", "model.xml"))
    (run / "bench.json").mkdir()
    done = fimaq("bench", run, "--repeats", "4", "--threads", "1")
    assert done.code == 0, done.err
    assert all(text in done.out for text in ("batch 1", "batch 16", "full precision", "file"))
    assert "the result is not stored" in done.err


@pytest.mark.parametrize(("name", "kind"), [("model.onnx", "onnx"), ("model.bin", "openvino")])
def test_a_file_that_is_not_the_exported_one_is_not_timed(
    name: str, kind: str, exported: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(exported, run)
    content = bytearray((run / name).read_bytes())
    content[len(content) // 2] ^= 1
    (run / name).write_bytes(content)
    done = fimaq("bench", run, "--repeats", "4", "--threads", "1")
    assert done.code == 2
    assert f"{run / name} is not the file that was exported" in done.err
    assert f"--format {kind}" in done.err


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ([], "export.json is damaged"),
        (
            {"file": "b.onnx", "sha256": {"b.onnx": ""}, "input": {}},
            "export.json is not about model.onnx but about b.onnx",
        ),
    ],
)
def test_a_record_that_does_not_speak_of_the_file_is_refused(
    record: Any, said: str, exported: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(exported, run)
    (run / "export.json").write_text(json.dumps(record))
    done = fimaq("bench", run)
    assert done.code == 2
    assert said in done.err


def test_a_run_that_was_not_exported_says_how(finished: Path) -> None:
    done = fimaq("bench", finished)
    assert done.code == 2
    assert f"fimaq export {finished}" in done.err


def test_an_unfinished_run_is_refused(unfinished: Path) -> None:
    done = fimaq("export", unfinished)
    assert done.code == 2
    assert "incomplete" in done.err


def test_an_unknown_format_is_refused(finished: Path) -> None:
    done = fimaq("export", finished, "--format", "tflite")
    assert done.code == 2
    assert "'tflite' is not known; accepted are onnx, openvino" in done.err


def test_an_unknown_processor_is_refused(finished: Path) -> None:
    done = fimaq("export", finished, "--processor", "npu")
    assert done.code == 2
    assert "'npu' is not known; accepted are any, vnni" in done.err


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("missing/model.onnx", "a folder that exists"),
        ("model.xml", "it ends in .onnx"),
        ("caf\udce9.onnx", "not UTF-8"),
    ],
)
def test_a_place_for_the_file_is_refused_before_images_are_read(
    out: str, said: str, finished: Path, tmp_path: Path
) -> None:
    done = fimaq("export", finished, "--out", tmp_path / out)
    assert done.code == 2
    assert said in done.err
    assert "reading" not in done.err


def test_images_that_moved_are_asked_for(exported: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(exported, run)
    config = json.loads((run / "config.json").read_text())
    config["given"]["calib"] = str(tmp_path / "moved")
    del config["digest"]
    (run / "config.json").write_text(json.dumps(config))
    done = fimaq("export", run)
    assert done.code == 2
    assert "give --calib or --verify DIR" in done.err


def test_what_is_not_faster_is_called_slower() -> None:
    assert [_times(ratio, "faster", "slower") for ratio in (2.0, 0.5)] == ["2.00x faster", "2.00x slower"]
