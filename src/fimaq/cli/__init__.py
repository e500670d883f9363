"""The `fimaq` command: one file per sub-command, errors turned into exit codes here."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Annotated

import typer

from fimaq.errors import FimaqError, InputError
from fimaq.version import __version__

app = typer.Typer(
    name="fimaq",
    help="Vision Transformers in 3 to 8 bits, after training, from a folder of unlabelled images (FIMA-Q).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
_KEPT = {
    "quantize": "; finished units are kept: run the command again with --resume",
    "compare": "; finished units are kept: run the command again",
}
"""What a command that goes on where it stopped says when it is interrupted."""


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fimaq {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    return None


def main() -> None:
    """Run the command line. Exit 0 done, 2 bad input, 1 failed, 130 interrupted (resumable)."""
    from fimaq.cli import bench, compare, demo, evaluate, export, fisher, listing, quantize, report

    app.command("demo")(demo.demo)
    app.command("quantize")(quantize.quantize)
    app.command("evaluate")(evaluate.evaluate)
    app.command("export")(export.export)
    app.command("bench")(bench.bench)
    app.command("report")(report.report)
    app.command("compare")(compare.compare)
    app.command("fisher")(fisher.fisher)
    app.command("list")(listing.listing)
    try:
        with _stopped_as_by_ctrl_c():
            app()
    except InputError as error:
        _fail(error, BAD_INPUT)
    except FimaqError as error:
        _fail(error, FAILED)
    except SystemExit as stop:
        if stop.code == INTERRUPTED:
            typer.echo(f"fimaq: interrupted{_KEPT.get(''.join(sys.argv[1:2]), '')}", err=True)
        raise
    except OSError as error:
        _fail(error, FAILED)


@contextlib.contextmanager
def _stopped_as_by_ctrl_c() -> Iterator[None]:
    """SIGTERM, by which schedulers and containers stop a run, ends it as Ctrl-C does: tidily, exit 130."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if ours:
        signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _fail(error: BaseException, code: int) -> None:
    typer.echo(f"fimaq: {error}", err=True)
    if os.environ.get("FIMAQ_TRACEBACK"):
        raise error
    sys.exit(code)
