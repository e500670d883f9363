"""fimaq list models|methods"""

import sys
from typing import Annotated, Literal

import typer


def listing(what: Annotated[Literal["models", "methods"], typer.Argument(help="models or methods")]) -> None:
    """Show what is supported, and how well."""
    from rich.console import Console
    from rich.table import Table

    from fimaq.catalogue import METHODS, MODELS

    table = Table(box=None)
    rows = MODELS if what == "models" else METHODS
    for column in ("family", "example timm names", "evidence") if what == "models" else ("name", "what it is"):
        table.add_column(column)
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, width=None if sys.stdout.isatty() else 200).print(table)
