"""HTML and SVG as nested calls: text is escaped unless it was made here, so that no file's content becomes markup.

What comes out is HTML that is also well-formed XML: every element is closed and every attribute quoted.
"""

import html
import re
from collections.abc import Iterable, Sequence
from typing import Any

VOID = {"meta", "img", "br", "wbr", "path", "line", "rect", "circle", "polygon", "polyline", "use"}
"""Elements without content; those of SVG are closed in themselves too."""

_NOT_TEXT = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def escaped(text: Any) -> Html:
    """Text as it is to be read; characters that no page may hold (controls, lone surrogates) become U+FFFD."""
    if isinstance(text, Html):
        return text
    return Html(html.escape(_NOT_TEXT.sub("\ufffd", str(text)), quote=True))


def tag(element: str, /, *children: Any, **attributes: Any) -> Html:
    """An element. `class_` stands for class, `_` in other names for `-`; attributes that are None are left out."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escaped(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if element in VOID:
        return Html(f"<{element}{given}/>")
    return Html(f"<{element}{given}>{joined(children)}</{element}>")


def joined(parts: Iterable[Any]) -> Html:
    """Parts one after the other; nested lists are flattened, None is nothing."""
    texts = []
    for part in parts:
        if isinstance(part, (list, tuple)):
            texts.append(joined(part))
        elif part is not None:
            texts.append(escaped(part))
    return Html("".join(texts))


def breakable(name: str) -> list[Any]:
    """A dotted name that may be broken over lines after its dots."""
    parts = name.split(".")
    return [[part, ".", tag("wbr")] for part in parts[:-1]] + [parts[-1]]


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]], caption: Any = None) -> Html:
    """A table whose first column names the row; it scrolls sideways by itself where it is too wide."""
    body = [
        tag("tr", [tag("th", cell, scope="row") if i == 0 else tag("td", cell) for i, cell in enumerate(row)])
        for row in rows
    ]
    inside = [
        tag("caption", caption) if caption else None,
        tag("thead", tag("tr", [tag("th", cell, scope="col") for cell in head])),
        tag("tbody", body),
    ]
    return tag(
        "div", tag("table", inside), class_="wide", tabindex="0", role="region", aria_label=caption or "table"
    )


def details(summary: Any, *children: Any, open_: bool = False) -> Html:
    """Something shown on demand; no script is needed."""
    return tag("details", tag("summary", summary), *children, open="open" if open_ else None)
