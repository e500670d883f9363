"""A suite file becomes configurations; whatever is wrong with it is said before anything runs."""

from pathlib import Path
from typing import Any

import pytest

from fimaq.compare.suite import Cell, expand, read_suite, shipped_suites
from fimaq.errors import InputError

SHIPPED = ("paper-loss", "paper-main", "paper-rank", "paper-samples", "paper-time")


def cells_of(tmp_path: Path, text: str, quick: bool = False, **more: Any) -> list[Cell]:
    (tmp_path / "suite.yaml").write_text(text)
    return expand(read_suite(str(tmp_path / "suite.yaml"), quick), **more)


def test_the_papers_experiments_ship() -> None:
    assert set(SHIPPED) <= set(shipped_suites())


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_suite_is_valid_and_its_quick_form_is_small(name: str) -> None:
    full, quick = expand(read_suite(name)), expand(read_suite(name, quick=True))
    assert 1 < len(quick) < len(full)
    for cells in (full, quick):
        assert len({cell.name for cell in cells}) == len(cells)
    assert {cell.config.iters for cell in full} == {20000}
    assert max(cell.config.calib_size for cell in full) == 1024
    assert {cell.config.iters for cell in quick} == {50}
    assert max(cell.config.calib_size for cell in quick) == 64
    assert len({cell.config.seed for cell in quick}) == 1


def test_the_main_table_has_every_model_width_and_method_of_the_paper() -> None:
    cells = expand(read_suite("paper-main"))
    assert len(cells) == 7 * 3 * 2
    assert {cell.labels["model"] for cell in cells} == {
        *("ViT-S", "ViT-B", "DeiT-T", "DeiT-S", "DeiT-B", "Swin-S", "Swin-B")
    }
    assert {cell.config.bits for cell in cells} == {"w3a3", "w4a4", "w6a6"}


def test_the_full_table_of_the_documentation_can_be_run() -> None:
    cells = expand(read_suite(str(Path(__file__).parents[2] / "benchmarks" / "full-table.yaml")))
    assert len(cells) == 120
    assert {str(cell.config.calib) for cell in cells if "Swin" in cell.name} == {"imagenette/train"}


def test_models_of_the_shipped_suites_exist() -> None:
    import timm

    for name in SHIPPED:
        for quick in (False, True):
            for cell in expand(read_suite(name, quick)):
                assert timm.is_model_pretrained(str(cell.config.model)), cell.config.model


def test_a_grid_is_every_combination_and_names_are_readable(tmp_path: Path) -> None:
    cells = cells_of(tmp_path, "grid: {model: [a, b], bits: [w3a3, W4A4], rank: 5, seed: [0, 1]}")
    assert len(cells) == 8
    assert cells[0].name == "a-w3a3-fima-q-rank-5-seed-0"
    assert cells[-1].name == "b-w4a4-fima-q-rank-5-seed-1"
    assert cells[-1].labels == {"model": "b", "bits": "w4a4", "rank": "5", "seed": "1"}


def test_several_grids_follow_each_other_and_share_their_common_cells(tmp_path: Path) -> None:
    text = """
settings: {model: a}
grid:
  - {calib_size: 64, fisher_size: [32, 48]}
  - {calib_size: [32, 64]}
  - {calib_size: [64]}
"""
    sizes = [(cell.config.calib_size, cell.config.fisher_size) for cell in cells_of(tmp_path, text)]
    assert sizes == [(64, 32), (64, 48), (32, None), (64, None)]


def test_a_model_has_its_own_settings_and_may_go_by_another_name(tmp_path: Path) -> None:
    text = """
settings: {crop_pct: 0.9}
models:
  small: {model: swin_tiny_patch4_window7_224, model_args: {embed_dim: 48}, num_classes: 10, crop_pct: 1.0}
grid: {model: [small, deit_tiny_patch16_224]}
"""
    small, deit = cells_of(tmp_path, text)
    assert (small.config.model, small.labels["model"]) == ("swin_tiny_patch4_window7_224", "small")
    assert (small.config.model_args, small.config.num_classes, small.config.crop_pct) == (
        {"embed_dim": 48},
        10,
        1.0,
    )
    assert (deit.config.model, deit.config.crop_pct) == ("deit_tiny_patch16_224", 0.9)


def test_quick_replaces_settings_one_by_one_and_the_grid_as_a_whole(tmp_path: Path) -> None:
    text = """
settings: {iters: 100, alpha: 0.3}
grid: {model: [a, b], bits: [w3a3, w4a4]}
quick: {settings: {iters: 5}, grid: {model: [c]}}
"""
    (cell,) = cells_of(tmp_path, text, quick=True)
    assert (cell.config.model, cell.config.iters, cell.config.alpha) == ("c", 5, 0.3)
    assert len(cells_of(tmp_path, text)) == 4


def test_what_is_given_wins_over_the_suite(tmp_path: Path) -> None:
    text = "settings: {iters: 100, data: stored}\nmodels: {a: {crop_pct: 0.9}}\ngrid: {model: [a]}"

    def folders(data: Any, task: Any, needs_train: bool) -> dict[str, Path]:
        return {} if data is None else {"calib": Path(data) / "train"}

    (cell,) = cells_of(tmp_path, text, given={"iters": 7, "crop_pct": 1.0}, folders=folders)
    assert (cell.config.iters, cell.config.crop_pct, cell.config.calib) == (7, 1.0, Path("stored/train"))
    (cell,) = cells_of(tmp_path, text, data=Path("other"), folders=folders)
    assert cell.config.calib == Path("other/train")


def test_a_data_folder_needs_no_calibration_images_where_others_are_given(tmp_path: Path) -> None:
    def folders(data: Any, task: Any, needs_train: bool) -> dict[str, Path]:
        assert data is None or not needs_train
        return {}

    given = {"calib": Path("mine")}
    for text in ("settings: {data: d}\ngrid: {model: [a]}", "settings: {data: d, calib: c}\ngrid: {model: [a]}"):
        assert cells_of(tmp_path, text, given=given, folders=folders)
    assert cells_of(tmp_path, "settings: {data: d, calib: c}\ngrid: {model: [a]}", folders=folders)
    assert cells_of(tmp_path, "grid: {model: [a]}", data=Path("d"), given=given, folders=folders)


def test_weights_are_found_in_a_folder_by_the_names_of_models(tmp_path: Path) -> None:
    (tmp_path / "deit_tiny_patch16_224.safetensors").touch()
    (tmp_path / "mine.pth").touch()
    text = """
models: {other: {model: swin_tiny_patch4_window7_224, weights: mine.pth}}
grid: {model: [deit_tiny_patch16_224.fb_in1k, other]}
"""
    tagged, named = cells_of(tmp_path, text, weights_dir=tmp_path)
    assert tagged.config.weights == tmp_path / "deit_tiny_patch16_224.safetensors"
    assert named.config.weights == tmp_path / "mine.pth"
    with pytest.raises(InputError, match=r"no weights of a: looked for a\.safetensors"):
        cells_of(tmp_path, "grid: {model: [a]}", weights_dir=tmp_path)
    (tmp_path / "mine.pth").unlink()
    with pytest.raises(InputError, match=r"holds no mine\.pth, the weights of other"):
        cells_of(tmp_path, text, weights_dir=tmp_path)
    with pytest.raises(InputError, match=r"gone is no folder: --weights-dir"):
        cells_of(tmp_path, text, weights_dir=tmp_path / "gone")


def test_names_that_fall_together_are_told_apart(tmp_path: Path) -> None:
    cells = cells_of(tmp_path, "grid: {model: ['a/b', 'a b']}")
    assert len({cell.name for cell in cells}) == 2
    assert all("/" not in cell.name and " " not in cell.name for cell in cells)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("grids: {model: [a]}", "'grids'.*accepted are title, settings, grid"),
        ("grid: {modle: [a]}", "'modle' in grid: accepted are .*model"),
        ("settings: {itters: 5}\ngrid: {model: [a]}", "'itters' in settings: accepted are .*iters"),
        ("models: {a: {weight: x}}\ngrid: {model: [a]}", r"'weight' in models\.a: accepted are .*weights"),
        ("grid: {model: [a]}\nrows: [methods]", "'methods' in rows"),
        ("grid: {model: [a]}\noverview: [speed]", "'speed' in overview.*seconds"),
        ("grid: {model: [a]}\nrows: [model]", "'model' in rows and in columns"),
        ("settings: {iters: 5}", "no 'grid'"),
        ("grid: {bits: [w4a4]}", "names no model"),
        ("grid: {model: []}", r"grid\.model .*empty"),
        ("grid: 5", "grid .*not 5"),
        ("grid: {model: [a], bits: [w4a4, w9a9]}", "bits w9a9.*from 2 to 8"),
        ("settings: {iters: 5}\ngrid: {model: [a], rank: [5, 6]}", "rank 6.*larger than iters 5"),
        ("grid: {model: [a], bits: [w3a3, w4a4], method: [rtn, qdrop]}\nrows: [method]", "varies 'bits'"),
        ("grid: {model: [a", "cannot be read"),
    ],
)
def test_mistakes_are_named_with_what_is_accepted(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(InputError, match=named):
        cells_of(tmp_path, text)


def test_a_setting_that_the_suite_varies_cannot_be_given(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--calib-size cannot be given"):
        cells_of(tmp_path, "grid: {model: [a], calib_size: [32, 64]}", given={"calib_size": 48})


def test_an_unknown_suite_names_those_that_ship() -> None:
    with pytest.raises(InputError, match="paper-main"):
        read_suite("paper-mian")


def test_quick_needs_its_section(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'quick'"):
        cells_of(tmp_path, "grid: {model: [a]}", quick=True)
