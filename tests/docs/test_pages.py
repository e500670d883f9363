"""The documentation is true: its code runs, and what it names and links to is there."""

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import fimaq

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "fimaq"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
ABOUT_CODE = ("how-it-works.md", "add-your-own.md", "which-setting.md", "speed.md")
"""Pages whose dotted names are names in the package; elsewhere `data.images` is a field of a file."""
LONGEST_EXAMPLE = 40
FILES = (".json", ".jsonl", ".safetensors", ".onnx", ".xml", ".bin", ".md")


def code_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def quoted(page: Path) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", prose(page)))


@cache
def names() -> frozenset[str]:
    """Everything the package defines, as module.name and module.Class.name, and Class.name as people write it."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        module = ".".join(part for part in parts if part != "__init__")
        found |= {module, f"fimaq.{module}"}
        for own in _defined(ast.parse(path.read_text(encoding="utf-8"))):
            found |= {own, f"{module}.{own}", f"fimaq.{module}.{own}"}
    return frozenset(found)


def _defined(tree: ast.Module) -> set[str]:
    found = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def is_known(text: str) -> bool:
    """False for `module.function`, `Class.method` and `folder/file.py` that are absent; the rest is left alone."""
    if re.fullmatch(r"[\w/]+\.py", text):
        return (SOURCE / text).exists() or (ROOT / text).exists()
    if not re.fullmatch(r"\w+(\.[A-Za-z_]\w*)+", text) or text.endswith(FILES):
        return True
    first, *_, last = text.split(".")
    if first == "fimaq" and last in fimaq.__all__:
        return True
    ours = {path.stem for path in SOURCE.iterdir()} | {"fimaq"} | {name for name in names() if name[:1].isupper()}
    return first not in ours or text in names()


@pytest.mark.parametrize("page", ABOUT_CODE)
def test_every_function_that_a_page_names_is_there(page: str) -> None:
    assert [text for text in sorted(quoted(ROOT / "docs" / page)) if not is_known(text)] == []


@pytest.mark.parametrize("text", ["fisher.exact.no_such", "Reconstruction.no_such", "models/no_such.py"])
def test_a_name_that_is_not_there_would_be_noticed(text: str) -> None:
    assert not is_known(text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        other = (page.parent / name).resolve() if name else page
        if not other.exists() or (anchor and anchor not in _anchors(other)):
            broken.append(target)
    assert broken == []


def _anchors(page: Path) -> set[str]:
    """Of its headings: lower case, spaces as hyphens, the rest of the punctuation gone."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_pages_of_the_documentation_are_linked_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in PAGES[2:] if f"docs/{page.name}" not in readme] == []


def test_the_code_of_add_your_own_runs(capsys: pytest.CaptureFixture[str]) -> None:
    from fimaq.quant.layers import activation_quantizers, quantized_layers

    blocks = code_blocks(ROOT / "docs" / "add-your-own.md")
    assert len(blocks) == 3
    assert max(len(block.splitlines()) for block in blocks) < LONGEST_EXAMPLE
    there: dict[str, Any] = {"__name__": "add_your_own"}
    for block in blocks:
        exec(compile(block, "add-your-own.md", "exec"), there)  # our own page
    printed = capsys.readouterr().out
    assert "['embed', 'blocks.0', 'blocks.1', 'head']" in printed
    assert there["run"].metrics["fidelity"]["agreement"] > 80
    layers = dict(quantized_layers(there["quantized"]))
    assert len(layers) == 1 + 2 * 4 + 1
    rows = [row for layer in layers.values() for row in layer.weight.flatten(1)]
    assert max(len(row.unique()) for row in rows) <= 2**4
    scales = [quantizer.scale.log2() for _, quantizer in activation_quantizers(there["shifted"])]
    assert len(scales) == len(layers) + 2 * 4
    assert all(bool((scale == scale.round()).all()) for scale in scales)


def test_the_example_quantizes_stores_and_exports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("example", ROOT / "examples" / "quantize_your_model.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    found = example.main(tmp_path / "run")
    assert found["full precision"] - found["quantized"] < 5
    assert found["loaded"] == found["quantized"]
    assert 99 <= found["same class in onnxruntime"] <= 100
    assert (tmp_path / "run" / "model.onnx").stat().st_size > 0
    assert "products in integer" in capsys.readouterr().out
