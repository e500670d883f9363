"""A loaded run is a plain module: `torch.export` and `torch.compile` take it, and it gives the same bits."""

from pathlib import Path

import pytest
import torch

import fimaq
from fimaq.data.demo import demo_model, demo_test


@pytest.fixture(scope="module")
def loaded(finished: fimaq.Run) -> torch.nn.Module:
    assert isinstance(finished.path, Path)
    return fimaq.load(finished.path, demo_model())


@pytest.mark.parametrize("strict", [False, True])
@torch.no_grad()
def test_torch_export_takes_it_with_any_number_of_images(loaded: torch.nn.Module, strict: bool) -> None:
    images, batch = demo_test()[0][:6], torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(loaded, (images[:2],), dynamic_shapes=({0: batch},), strict=strict)
    assert torch.equal(program.module()(images), loaded(images))


@torch.no_grad()
def test_torch_compile_takes_it_as_one_graph(loaded: torch.nn.Module) -> None:
    images = demo_test()[0][:6]
    compiled = torch.compile(loaded, backend="eager", fullgraph=True)
    assert torch.equal(compiled(images), loaded(images))
