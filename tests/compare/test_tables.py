"""Tables say what was measured: means and spreads by hand, the best in bold, nothing that was not measured."""

import csv
import io
import math
import re
from html.parser import HTMLParser

import pytest

from fimaq.compare.summary import CellResult, best_of, measures_of, summarise
from fimaq.compare.tables import build_tables, csv_text, html_page, markdown

ROWS, COLUMNS = ["bits", "method"], ["model"]


def result(
    model: str, bits: str, method: str, seed: int, top1: float | None, error: str | None = None
) -> CellResult:
    labels = {"model": model, "bits": bits, "method": method, "seed": str(seed)}
    measures = (
        {} if top1 is None else {"top1": top1, "top1_full": 72.0, "top1_drop": 72.0 - top1, "kl": 2 - top1 / 50}
    )
    return CellResult("-".join(labels.values()), labels, measures, error)


@pytest.fixture
def results() -> list[CellResult]:
    """Two models, two widths, two methods, two seeds: some done, one failed, some waiting."""
    return [
        result("DeiT-T", "w3a3", "qdrop", 0, 50.0),
        result("DeiT-T", "w3a3", "qdrop", 1, 52.0),
        result("DeiT-T", "w3a3", "fima-q", 0, 55.0),
        result("DeiT-T", "w3a3", "fima-q", 1, 56.0),
        result("DeiT-T", "w4a4", "qdrop", 0, 65.0),
        result("DeiT-T", "w4a4", "qdrop", 1, None),
        result("DeiT-T", "w4a4", "fima-q", 0, 66.0),
        result("DeiT-T", "w4a4", "fima-q", 1, None, "out of GPU memory: a | b\n<second line>"),
        result("ViT-S", "w3a3", "qdrop", 0, None),
        result("ViT-S", "w3a3", "fima-q", 0, None, "weights do not fit"),
    ]


def fields(page: str, heading: str) -> list[list[str]]:
    """The lines of the Markdown table below a heading, spaces removed."""
    part = page.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    return [[field.strip() for field in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_the_overview_shows_means_spreads_and_the_best_method_at_each_width(results: list[CellResult]) -> None:
    lines = fields(markdown("A title", results, ROWS, COLUMNS), "top-1 %")
    assert lines[0] == ["bits", "method", "DeiT-T", "ViT-S"]
    assert lines[2:] == [
        ["full precision", "", "72.00", "-"],
        ["w3a3", "qdrop", "51.00 ± 1.41", "-"],
        ["w3a3", "fima-q", "**55.50 ± 0.71**", "failed"],
        ["w4a4", "qdrop", "65.00 (1 of 2)", "-"],
        ["w4a4", "fima-q", "**66.00 (1 of 2)**", "-"],
    ]


def test_every_measure_stands_beside_accuracy(results: list[CellResult]) -> None:
    lines = fields(markdown("A title", results, ROWS, COLUMNS), "DeiT-T")
    assert lines[0] == ["bits", "method", "top-1 %", "full precision", "drop", "KL"]
    assert lines[2] == ["w3a3", "qdrop", "51.00 ± 1.41", "72.00", "21.00 ± 1.41", "0.9800 ± 0.0283"]
    assert lines[3][4:] == ["**16.50 ± 0.71**", "**0.8900 ± 0.0141**"]


def test_errors_are_listed_on_one_line_each(results: list[CellResult]) -> None:
    page = markdown("A title", results, ROWS, COLUMNS)
    assert "7 of 10 runs done" not in page
    assert "6 of 10 runs done, 2 failed, 2 waiting." in page
    assert "* DeiT-T-w4a4-fima-q-1: out of GPU memory: a | b <second line>" in page


def test_csv_has_unrounded_numbers_and_a_line_for_each_place(results: list[CellResult]) -> None:
    lines = list(csv.DictReader(io.StringIO(csv_text(results, ROWS, COLUMNS))))
    assert len(lines) == 6
    assert lines[0]["method"] == "qdrop"
    assert (lines[0]["runs_done"], lines[0]["runs"]) == ("2", "2")
    assert float(lines[0]["top1_spread"]) == pytest.approx(2**0.5)
    assert lines[2]["top1_spread"] == ""
    assert lines[4]["top1"] == ""
    assert "weights do not fit" in lines[5]["errors"]


def test_html_is_whole_escaped_and_needs_nothing_else(results: list[CellResult]) -> None:
    page = html_page("Losses <1>", results, ROWS, COLUMNS)
    opened: list[str] = []

    class Checker(HTMLParser):
        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            assert tag not in ("script", "link", "img")
            if tag != "meta":
                opened.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert opened.pop() == tag

    Checker().feed(page)
    assert opened == []
    assert "Losses &lt;1&gt;" in page
    assert "&lt;second line&gt;" in page
    assert "<b>55.50 ± 0.71</b>" in page
    assert "width=device-width" in page
    assert "http" not in page


def test_one_column_needs_no_overview(results: list[CellResult]) -> None:
    chosen = [one for one in results if one.labels["model"] == "DeiT-T"]
    assert [table.heading for table in build_tables(chosen, ROWS, COLUMNS)] == ["DeiT-T"]


def test_a_suite_may_ask_for_another_overview(results: list[CellResult]) -> None:
    first = build_tables(results, ROWS, COLUMNS, ["kl"])[0]
    assert first.heading == "KL"
    assert first.lines[0][2].shown == "0.9800 ± 0.0283"


def test_tables_can_be_written_before_anything_is_done() -> None:
    waiting = [result(model, "w4a4", "rtn", 0, None) for model in ("a", "b")]
    page = markdown("A title", waiting, ROWS, COLUMNS)
    assert fields(page, "top-1 %")[2] == ["w4a4", "rtn", "-", "-"]
    assert fields(page, "a")[2] == ["w4a4", "rtn", "-"]
    assert "0 of 2 runs done" in html_page("A title", waiting, ROWS, COLUMNS)
    assert csv_text(waiting, ROWS, COLUMNS).count("\n") == 3


def test_equal_values_are_both_best_and_a_single_one_is_not() -> None:
    pair = [result("a", "w4a4", "qdrop", 0, 60.001), result("a", "w4a4", "fima-q", 0, 60.002)]
    alone = [result("a", "w3a3", "fima-q", 0, 50.0)]
    best = best_of(summarise(pair + alone, ROWS, COLUMNS))
    assert {(row, key) for row, _, key in best if key == "top1"} == {
        (("w4a4", "qdrop"), "top1"),
        (("w4a4", "fima-q"), "top1"),
    }


def test_measures_of_a_classifier() -> None:
    metrics = {
        "accuracy": {
            "quantized": {"top1": 60.0, "top5": 80.0},
            "full_precision": {"top1": 72.0, "top5": 90.0},
            "kl_divergence": 0.5,
        },
        "fidelity": {"kl_divergence": 0.4, "agreement": 80.0},
        "seconds": 12.5,
        "peak_memory_bytes": 2_500_000_000,
        "units": [{"seconds": 3.0}, {"seconds": 4.0}],
    }
    assert measures_of(metrics) == {
        "top1": 60.0,
        "top1_full": 72.0,
        "top1_drop": 12.0,
        "kl": 0.5,
        "seconds": 12.5,
        "memory": 2.5,
    }


def test_a_resumed_run_took_at_least_as_long_as_its_units() -> None:
    assert measures_of({"seconds": 2.0, "units": [{"seconds": 30.0}, {"seconds": 1.0}]})["seconds"] == 31.0


def test_a_detector_shows_box_and_mask_precision() -> None:
    precision = {"bbox": {"AP": 38.7}, "segm": {"AP": 37.8}}
    metrics = {
        "accuracy": {"quantized": precision, "full_precision": {"bbox": {"AP": 46.0}, "segm": {"AP": None}}},
        "fidelity": {"kl_divergence": 0.1},
        "seconds": 5.0,
    }
    measures = measures_of(metrics)
    assert measures["ap_box_drop"] == pytest.approx(7.3)
    assert "ap_mask_drop" not in measures
    assert measures["kl"] == 0.1
    cells = [CellResult(name, {"model": name, "method": "rtn"}, measures) for name in ("a", "b")]
    lines = fields(markdown("A title", cells, ["method"], ["model"]), "AP box / AP mask")
    assert lines[2] == ["rtn", "38.7 / 37.8", "38.7 / 37.8"]


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        ([{"top1": 50.0, "images": 400}, {"top1": 90.0, "images": 100}], "of 100 to 400 .*; .* up to 3.0 points"),
        (
            [{"top1": 50.0, "images": 400}, {"kl": 0.1}],
            r"Accuracies: of 400 validation images; .* up to 2\.5 points",
        ),
        ([{"ap_box": 40.0, "images": 5000.0}], r"Accuracies: of 5,000 validation images\.$"),
        ([{"kl": 0.1}], r"less quantized\.$"),
        ([{"top1": 1.0, "images": n} for n in (math.nan, math.inf, -5.0, 0.0)], r"less quantized\.$"),
    ],
)
def test_it_says_of_how_many_images_accuracies_are(measured: list[dict[str, float]], said: str) -> None:
    results = [CellResult(str(n), {"method": str(n), "model": "m"}, each) for n, each in enumerate(measured)]
    (line,) = [x for x in markdown("t", results, ["method"], ["model"]).splitlines() if x.startswith("Bold:")]
    assert re.search(said, line)


def test_the_number_of_images_is_read_from_a_runs_metrics() -> None:
    accuracy = {"quantized": {"top1": 50.0}, "images": 400}
    assert measures_of({"accuracy": accuracy})["images"] == 400
