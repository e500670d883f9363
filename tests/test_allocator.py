"""Memory of tensors is used again where that is asked for, and given back afterwards."""

import ctypes
import resource

import pytest
import torch

from fimaq.allocator import reused
from fimaq.device import resident_bytes

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
SIZE, COUNT = 10 * 2**20, 20


def new_pages() -> int:
    """How many the system had to hand out for as many tensors as a model's forward pass makes."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(SIZE // 4) for _ in range(COUNT)]
    del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_no_new_pages_are_needed_once_there_are_enough() -> None:
    pages = SIZE * COUNT // resource.getpagesize()
    with reused():
        new_pages()
        assert new_pages() < pages / 2


def test_afterwards_memory_goes_back_to_the_system() -> None:
    before = resident_bytes()
    with reused():
        new_pages()
        assert resident_bytes() > before + SIZE * COUNT / 2
    assert resident_bytes() < before + SIZE * COUNT / 4
