"""Reading a report as the document it is, and materials to write one from without any model."""

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from fimaq.report.material import Material
from fimaq.report.page import page

SECTIONS = ["accuracy", "size", "layers", "optimisation", "distributions", "disagreements", "notes", "repeat"]


def parsed(text: str) -> ElementTree.Element:
    """The document's root; what is not well-formed raises."""
    kind, _, rest = text.partition("\n")
    assert kind == "<!DOCTYPE html>"
    return ElementTree.fromstring(rest)


def words(element: ElementTree.Element | None) -> str:
    """The text below an element as one line; parts of SVG that are only heard are text too."""
    assert element is not None
    return re.sub(r"\s+", " ", "".join(element.itertext()))


def section(root: ElementTree.Element, name: str) -> str:
    return words(root.find(f".//section[@id='{name}']"))


def material(config: Any = None, metrics: Any = None, task: str = "classification", **more: Any) -> Material:
    """Of a run that exists in memory only."""
    stored = {
        "format": 2,
        "settings": {"bits": "w4a4", "method": "fima-q", "preset": "deploy", "iters": 700, "seed": 0},
        "model": {"name": "vit", "args": {}, "num_classes": 10, "weights": "sha256:11"},
        "data": {"images": 128, "fingerprint": "sha256:22"},
        "given": {"calib": "/images/train", "weights": "/weights/vit.safetensors"},
        "preprocessing": None,
        "versions": {"fimaq": "0.1.0"},
    }
    measured = {
        "fidelity": {"kl_divergence": 0.05, "agreement": 93.75},
        "units": [
            {"unit": "blocks.0", "losses": [[0, 1.0], [10, 0.5]], "finite": True, "weights": 100, "flipped": 7}
        ],
        "size": {"quantized_bytes": 2_000_000, "full_precision_bytes": 8_000_000},
    }
    return Material(
        Path("runs/it"), {**stored, **(config or {})}, {**measured, **(metrics or {})}, task, "sha256:33", **more
    )


def written(*arguments: Any, **more: Any) -> ElementTree.Element:
    return parsed(page(material(*arguments, **more)))
