"""fimaq: Vision Transformers in 3 to 8 bits, after training, from a folder of unlabelled images."""

from typing import TYPE_CHECKING, Any

from fimaq.version import __version__

if TYPE_CHECKING:
    from fimaq.config import Config
    from fimaq.loading import load
    from fimaq.pipeline import Run, quantize

__all__ = ["Config", "Run", "__version__", "load", "quantize"]

_HOME = {"quantize": "pipeline", "load": "loading", "Run": "pipeline", "Config": "config"}


def __getattr__(name: str) -> Any:
    """Import on first use, so that `import fimaq` and `fimaq --help` do not wait for torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'fimaq' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"fimaq.{_HOME[name]}"), name)
