"""The page as a document: its order, its numbers, what it says where something is missing, and that it is safe."""

import base64
import hashlib
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from documents import SECTIONS, material, parsed, section, words, written
from runs import snapshot
from torch import Tensor, nn

from fimaq.errors import InputError
from fimaq.report.page import page
from fimaq.report.write import write_report

ACCURACY = {
    "full_precision": {"top1": 75.0, "top5": 93.5},
    "quantized": {"top1": 68.0, "top5": 89.5},
    "images": 200,
    "unreadable": 3,
    "agreement": 79.0,
    "kl_divergence": 0.316,
    "kl_standard_error": 0.029,
    "top1_right": {"both": 130, "only_full_precision": 20, "only_quantized": 6, "neither": 44},
    "classes_by": "ImageNet synsets",
}
HOSTILE = "</title><script>alert(1)</script>\"><img src=x onerror='alert(2)'>\x00\ud800&amp;"


@pytest.fixture(scope="module")
def report(demo_run: Path, images: Tensor, tmp_path_factory: pytest.TempPathFactory) -> ElementTree.Element:
    from fimaq.data.demo import demo_model

    before = snapshot(demo_run)
    out = write_report(
        demo_run, tmp_path_factory.mktemp("page") / "r.html", model=demo_model(), images=images, device="cpu"
    )
    assert snapshot(demo_run) == before
    return parsed(out.read_text(encoding="utf-8"))


def test_sections_come_in_the_order_of_the_questions(report: ElementTree.Element) -> None:
    assert [found.get("id") for found in report.iter("section")] == SECTIONS
    links = [a.get("href") for a in report.find(".//nav").iter("a")]
    assert links == [f"#{name}" for name in SECTIONS]


def test_nothing_is_loaded_and_nothing_runs(report: ElementTree.Element) -> None:
    for element in report.iter():
        assert element.tag not in ("script", "link", "iframe", "object", "embed", "base", "form")
        for name, value in element.attrib.items():
            assert not name.startswith("on"), name
            assert name != "style"  # the policy below would not let it act
            if name in ("src", "href"):
                assert value.startswith(("data:image/", "#")), value
    assert "url(" not in words(report.find(".//style"))


def test_the_policy_allows_this_style_and_pictures_in_the_file_alone(report: ElementTree.Element) -> None:
    policy = report.find(".//meta[@http-equiv='Content-Security-Policy']").get("content")
    style = "".join(report.find(".//style").itertext())
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy.split("; ")[:3] == ["default-src 'none'", "img-src data:", f"style-src 'sha256-{digest}'"]


def test_every_chart_has_a_text_alternative(report: ElementTree.Element) -> None:
    ids = {element.get("id") for element in report.iter() if element.get("id")}
    charts = [svg for svg in report.iter("svg") if svg.get("aria-hidden") != "true"]
    assert len(charts) > 30
    for svg in charts:
        assert svg.get("role") == "img"
        named = svg.get("aria-labelledby")
        assert svg.get("aria-label") or (named and set(named.split()) <= ids)
    assert all(img.get("alt") for img in report.iter("img"))


def test_ids_are_unique(report: ElementTree.Element) -> None:
    ids = [element.get("id") for element in report.iter() if element.get("id")]
    assert len(ids) == len(set(ids))


def test_every_unit_and_layer_is_there(report: ElementTree.Element) -> None:
    layers, distributions = section(report, "layers"), section(report, "distributions")
    for unit in ("patch_embed", "blocks.0", "blocks.5", "head"):
        assert unit in layers
        assert unit in distributions
    assert "blocks.3.attn.products.1" in layers
    assert "left operand, rows divided by their largest, 3 bits" in distributions
    assert "20 images (images given in Python)" in layers


def test_scales_and_losses_of_a_real_run_are_shown(report: ElementTree.Element) -> None:
    said = section(report, "optimisation")
    assert "Activation scales learned" in said
    assert "blocks.2.attn.qkv.input_quantizer" in said
    assert len(report.findall(".//section[@id='optimisation']//polyline")) == 8


def test_accuracy_comes_with_intervals() -> None:
    said = section(written(metrics={"accuracy": ACCURACY}), "accuracy")
    assert "Measured on 200 labelled images (3 unreadable ones left out); classes by ImageNet synsets" in said
    assert "61.25 to 74.07" in said  # Wilson, 136 of 200
    assert "Top-1 changes by −7.00 points" in said
    assert "20 images are right in full precision alone, 6 in the quantized model alone. Zero is outside." in said
    assert "0.259 to 0.373" in said


def test_a_difference_that_may_be_chance_is_called_so() -> None:
    right = {"both": 140, "only_full_precision": 10, "only_quantized": 8, "neither": 42}
    accuracy = {**ACCURACY, "quantized": {"top1": 74.0, "top5": 93.0}, "top1_right": right}
    assert "Zero is inside: the difference may be chance." in section(
        written(metrics={"accuracy": accuracy}), "accuracy"
    )


def test_an_accuracy_without_pairs_says_how_to_get_them() -> None:
    accuracy = {name: value for name, value in ACCURACY.items() if name != "top1_right"}
    assert "measure again for a paired interval" in section(written(metrics={"accuracy": accuracy}), "accuracy")


def test_without_labelled_images_the_page_says_so() -> None:
    said = section(written(), "accuracy")
    assert "The accuracy of this run is not known" in said
    assert "fimaq evaluate runs/it --data DIR" in said
    assert "93.75 %" in said
    assert "128 calibration images" in said


def test_what_was_not_measured_is_explained() -> None:
    root = written(missing="the full-precision weights cannot be had; give --weights FILE")
    for name in ("layers", "distributions", "disagreements"):
        assert "give --weights FILE" in section(root, name)
    assert "fimaq bench runs/it" in section(root, "size")


def test_measured_speed_is_shown() -> None:
    times = {"median_ms": 40.0, "quartiles_ms": [39.0, 41.0], "images_per_second": 25.0}
    fast = {**times, "median_ms": 20.0}
    row = {"batch": 1, "full_precision": times, "quantized": fast, "speedup": 2.0}
    bench = {"threads": 1, "runtimes": {"onnxruntime": {"version": "onnxruntime 1.2.3", "times": [row]}}}
    said = section(written(bench=bench), "size")
    assert "onnxruntime 1.2.3" in said
    assert "2.00 times as fast at batch 1" in said
    assert "4.00 times smaller" in said


def test_a_unit_that_ran_away_and_what_stayed_float_are_noted() -> None:
    units = [{"unit": "blocks.3", "losses": [[0, 1.0]], "finite": False, "weights": 10, "flipped": 0}]
    said = section(written(metrics={"units": units}, stayed_float=["odd (Odd): bmm"]), "notes")
    assert "blocks.3: its loss was not finite" in said
    assert "odd (Odd): bmm" in said


def test_a_detector_is_given_what_can_be_given() -> None:
    scores = {"bbox": {"AP": 40.5, "AP50": 61.0, "APs": None}, "segm": {"AP": 36.1}}
    accuracy = {"full_precision": scores, "quantized": scores, "images": 4, "unreadable": 2}
    root = written(metrics={"accuracy": accuracy}, task="detection", missing="detectors are not measured yet")
    said = section(root, "accuracy")
    assert "40.5" in said
    assert "4 images (2 unreadable ones left out)" in said
    assert "object or not" in said
    assert "detectors are not measured yet" in section(root, "layers")
    assert "Detectors cannot be exported yet" in section(root, "size")
    assert root.find(".//section[@id='optimisation']//polyline") is not None


def test_hostile_text_stays_text() -> None:
    config = {
        "settings": {"bits": HOSTILE, "method": HOSTILE, HOSTILE: HOSTILE},
        "model": {"name": HOSTILE, "args": {HOSTILE: [HOSTILE]}, "weights": HOSTILE},
        "given": {"calib": HOSTILE, "weights": HOSTILE},
        "versions": {HOSTILE: HOSTILE},
    }
    unit = {"unit": HOSTILE, "losses": [[0, 1.0], [5, 0.4]], "finite": False, "weights": 3, "flipped": 1}
    unit["scale_changes"] = {HOSTILE: 0.5}
    metrics = {
        "units": [unit],
        "stayed_float": [HOSTILE],
        "folded_layer_norms": {HOSTILE: HOSTILE},
        "device": HOSTILE,
        "seconds": 3,
        "accuracy": {**ACCURACY, "classes_by": HOSTILE},
    }
    bench = {"runtimes": {HOSTILE: {"version": HOSTILE, "times": [{"batch": 1, "quantized": {"median_ms": 3}}]}}}
    exports = [{"file": HOSTILE, "format": HOSTILE, "bytes": 5, "versions": {"runtime": HOSTILE}}]
    more = {"bench": bench, "exports": exports, "missing": HOSTILE, "divided": {HOSTILE: {1: 17}}}
    text = page(material(config, metrics, **more))
    text.encode("utf-8")
    assert "<script" not in text
    assert "<img" not in text
    root = parsed(text)
    assert [found.get("id") for found in root.iter("section")] == SECTIONS
    assert not [name for element in root.iter() for name in element.attrib if name.startswith("on")]
    assert words(root).count("alert(1)") > 15


GARBAGE: list[Any] = [None, "text", -1, [], {}, [[1]], True, 1e308, [None], {"top1": "x"}, 10**400]


@pytest.mark.parametrize("value", GARBAGE, ids=repr)
def test_damaged_values_do_not_stop_the_page(value: Any) -> None:
    keys = ("fidelity", "units", "size", "accuracy", "seconds", "peak_memory_bytes", "folded_layer_norms")
    inner = (
        "images",
        "agreement",
        "kl_divergence",
        "kl_standard_error",
        "top1_right",
        "full_precision",
        "quantized",
    )
    for key in keys:
        assert_complete(metrics={key: value})
    for key in inner:
        assert_complete(metrics={"accuracy": {**ACCURACY, key: value}})
    for key in ("losses", "weights", "flipped", "scale_changes", "unit", "finite", "seconds"):
        unit = {"unit": "u", "losses": [[0, 1.0], [1, 0.5]], "weights": 2, "flipped": 1, key: value}
        assert_complete(metrics={"units": [unit]})
    for key in ("settings", "model", "data", "given", "versions"):
        assert_complete(config={key: value})
    assert_complete(bench={"runtimes": {"r": {"times": [{"batch": value, "quantized": {"median_ms": value}}]}}})
    assert_complete(bench={"threads": value, "runtimes": value})
    assert_complete(exports=[{"bytes": value, "verification": value, "versions": value}])


def assert_complete(**given: Any) -> None:
    assert [found.get("id") for found in written(**given).iter("section")] == SECTIONS


def test_the_configuration_to_repeat_a_run_is_complete_yaml() -> None:
    root = written(config={"model": {"name": "vit", "args": {"depth": 2}, "num_classes": 10, "weights": "x"}})
    text = "".join(root.find(".//pre[@id='run-yaml']").itertext())
    found = yaml.safe_load(text)
    assert found["model_args"] == {"depth": 2}
    assert found["calib"] == "/images/train"
    assert found["iters"] == 700
    assert "fimaq quantize vit --config run.yaml --out again" in section(root, "repeat")
    assert all(digest in section(root, "repeat") for digest in ("sha256:22", "sha256:33"))


def test_a_report_without_model_is_written_and_says_why(demo_run: Path, tmp_path: Path) -> None:
    out = write_report(demo_run, tmp_path / "r.html")
    assert "the full-precision model was not given" in section(parsed(out.read_text()), "layers")


def test_another_models_weights_are_refused(
    demo_run: Path, original: nn.Module, images: Tensor, tmp_path: Path
) -> None:
    original.head.bias += 1
    with pytest.raises(InputError, match="not those the run was made from"):
        write_report(demo_run, tmp_path / "r.html", model=original, images=images)
    assert not list(tmp_path.iterdir())


def test_a_report_replaces_the_one_before(demo_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.html"
    out.write_text("earlier")
    assert write_report(demo_run, out) == out
    assert out.read_text().startswith("<!DOCTYPE html>")
    assert re.findall(r"partial", " ".join(path.name for path in tmp_path.iterdir())) == []
