"""Tables of a comparison as Markdown, CSV and HTML: pure functions of what was measured."""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from fimaq.compare.summary import ACCURACIES, MEASURES, CellResult, Entry, Measure, best_of, summarise

MISSING = "-"
STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.45 system-ui, sans-serif; margin: 1rem auto; max-width: 75rem; padding: 0 .75rem; }
h1 { font-size: 1.35rem; } h2 { font-size: 1.1rem; margin: 1.5rem 0 .4rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #8884; }
th.key, td.key { text-align: left; }
th:first-child, td:first-child { position: sticky; left: 0; background: Canvas; }
tr.first td { border-top: 2px solid #888; }
li { overflow-wrap: anywhere; }
"""


@dataclass(frozen=True)
class Text:
    """What stands in one field of a table."""

    shown: str
    bold: bool = False


@dataclass(frozen=True)
class Table:
    """A heading, then lines of fields; the first `keys` fields of a line say which it is."""

    heading: str
    header: list[str]
    lines: list[list[Text]]
    keys: int


def build_tables(
    results: Sequence[CellResult], rows: Sequence[str], columns: Sequence[str], overview: Sequence[str] = ()
) -> list[Table]:
    """All rows and columns first, where there are several columns; then all measures, one table per column.

    `overview`: the measures in the first table, by key; none: accuracies.
    """
    entries = summarise(results, rows, columns)
    best = best_of(entries)
    groups = list(dict.fromkeys(entry.column for entry in entries))
    keys = [key.replace("_", " ") for key in rows]
    tables = [_overview(entries, groups, keys, best, overview)] if len(groups) > 1 else []
    return tables + [_details(entries, group, keys, best) for group in groups]


def markdown(
    title: str,
    results: Sequence[CellResult],
    rows: Sequence[str],
    columns: Sequence[str],
    overview: Sequence[str] = (),
) -> str:
    """A Markdown page."""
    lines = [f"# {title}", "", progress_line(results), ""]
    for table in build_tables(results, rows, columns, overview):
        lines += [f"## {table.heading}", "", *markdown_lines(table), ""]
    failed = _failures(results)
    if failed:
        lines += ["## Failed", "", *(f"* {_one_line(text)}" for text in failed), ""]
    return "\n".join([*lines, *_notes(results, rows, columns)]) + "\n"


def markdown_lines(table: Table) -> list[str]:
    """The table alone, its columns aligned so that it can be read as it is."""
    marked = [[f"**{text.shown}**" if text.bold else text.shown for text in line] for line in table.lines]
    fields = [[field.replace("|", "\\|") for field in line] for line in (table.header, *marked)]
    widths = [max(3, *(len(line[place]) for line in fields)) for place in range(len(table.header))]
    padded = [
        "| " + " | ".join(f.ljust(w) if i < table.keys else f.rjust(w) for i, (f, w) in enumerate(pairs)) + " |"
        for pairs in (list(zip(line, widths, strict=True)) for line in fields)
    ]
    rule = ["-" * w if i < table.keys else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return [padded[0], "| " + " | ".join(rule) + " |", *padded[1:]]


def csv_text(results: Sequence[CellResult], rows: Sequence[str], columns: Sequence[str]) -> str:
    """One line for each row and column of the table, with unrounded numbers."""
    entries = summarise(results, rows, columns)
    measures = _present(entries)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    numbers = [name for measure in measures for name in (measure.key, f"{measure.key}_spread")]
    writer.writerow([*rows, *columns, "runs_done", "runs", *numbers, "errors"])
    for entry in entries:
        values: list[float | str | None] = []
        for measure in measures:
            average = entry.averages.get(measure.key)
            values += [average.mean, average.spread] if average else [None, None]
        errors = "; ".join(map(_one_line, entry.errors))
        writer.writerow([*entry.row, *entry.column, entry.done, entry.total, *values, errors])
    return text.getvalue()


def html_page(
    title: str,
    results: Sequence[CellResult],
    rows: Sequence[str],
    columns: Sequence[str],
    overview: Sequence[str] = (),
) -> str:
    """A page that needs nothing else: no script, no style sheet, no font."""
    parts = [f"<h1>{escape(title)}</h1>", f"<p>{escape(progress_line(results))}</p>"]
    for table in build_tables(results, rows, columns, overview):
        parts += [f"<h2>{escape(table.heading)}</h2>", _html_table(table)]
    failed = _failures(results)
    if failed:
        items = "".join(f"<li>{escape(_one_line(text))}</li>" for text in failed)
        parts += ["<h2>Failed</h2>", f"<ul>{items}</ul>"]
    parts += [f"<p>{escape(note)}</p>" for note in _notes(results, rows, columns) if note]
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
    )
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def progress_line(results: Sequence[CellResult]) -> str:
    """How many runs there are, and how far they are."""
    states = [result.state for result in results]
    parts = [f"{states.count('done')} of {len(states)} runs done"]
    parts += [f"{states.count(state)} {state}" for state in ("failed", "waiting") if state in states]
    return ", ".join(parts) + "."


def _overview(
    entries: Sequence[Entry],
    groups: Sequence[tuple[str, ...]],
    keys: list[str],
    best: set[tuple],
    wanted: Sequence[str],
) -> Table:
    found = _present(entries) or [MEASURES[0]]
    leads = [measure for measure in found if measure.key in (wanted or ACCURACIES)]
    leads = leads or [measure for measure in found if measure.better][:1]  # without validation images: KL
    by_place = {(entry.row, entry.column): entry for entry in entries}
    lines = []
    full = [_full_precision(entries, group, leads) for group in groups]
    if any(text.shown != MISSING for text in full):
        lines.append([Text("full precision"), *(Text("") for _ in keys[1:]), *full])
    for row in dict.fromkeys(entry.row for entry in entries):
        fields = []
        for group in groups:
            entry = by_place.get((row, group))
            shown = [_shown(entry, measure) for measure in leads]
            shown = list(dict.fromkeys(shown)) if entry is None or not entry.averages else shown
            bold = all((row, group, measure.key) in best for measure in leads)
            fields.append(Text(" / ".join(shown) + _incomplete(entry), bold))
        lines.append([*map(Text, row), *fields])
    heading = " / ".join(measure.heading for measure in leads)
    return Table(heading, [*keys, *map(", ".join, groups)], lines, len(keys))


def _details(entries: Sequence[Entry], group: tuple[str, ...], keys: list[str], best: set[tuple]) -> Table:
    chosen = [entry for entry in entries if entry.column == group]
    measures = _present(chosen) or [MEASURES[0]]
    lines = []
    for entry in chosen:
        fields = [Text(_shown(entry, m), (entry.row, group, m.key) in best) for m in measures]
        first = Text(fields[0].shown + _incomplete(entry), fields[0].bold)
        lines.append([*map(Text, entry.row), first, *fields[1:]])
    return Table(", ".join(group), [*keys, *(measure.heading for measure in measures)], lines, len(keys))


def _present(entries: Sequence[Entry]) -> list[Measure]:
    return [measure for measure in MEASURES if any(measure.key in entry.averages for entry in entries)]


def _shown(entry: Entry | None, measure: Measure) -> str:
    if entry is not None and measure.key in entry.averages:
        average = entry.averages[measure.key]
        text = f"{average.mean:.{measure.digits}f}"
        if average.spread is not None and not measure.key.endswith("_full"):
            text += f" ± {average.spread:.{measure.digits}f}"
        return text
    if entry is not None and entry.errors and not entry.averages:
        return "failed"
    return MISSING


def _incomplete(entry: Entry | None) -> str:
    """Says that an average lacks some of its seeds."""
    if entry is None or entry.done in (0, entry.total):
        return ""
    return f" ({entry.done} of {entry.total})"


def _full_precision(entries: Sequence[Entry], group: tuple[str, ...], leads: Sequence[Measure]) -> Text:
    """What a whole column has in common, if it does: one original model."""
    shown = []
    for measure in leads:
        averages = [entry.averages.get(f"{measure.key}_full") for entry in entries if entry.column == group]
        values = {round(average.mean, measure.digits) for average in averages if average}
        if len(values) != 1:
            return Text(MISSING)
        shown.append(f"{values.pop():.{measure.digits}f}")
    return Text(" / ".join(shown))


def _html_table(table: Table) -> str:
    def line(tag: str, fields: Sequence[str], attributes: str = "") -> str:
        kinds = [' class="key"' if place < table.keys else "" for place in range(len(fields))]
        inner = "".join(f"<{tag}{kind}>{text}</{tag}>" for kind, text in zip(kinds, fields, strict=True))
        return f"<tr{attributes}>{inner}</tr>"

    lines = [line("th", [escape(text) for text in table.header])]
    before: list[str] | None = None
    for texts in table.lines:
        block = [text.shown for text in texts[: table.keys - 1]]
        fields = [f"<b>{escape(t.shown)}</b>" if t.bold else escape(t.shown) for t in texts]
        lines.append(line("td", fields, "" if block == before else ' class="first"'))
        before = block
    return '<div class="wide"><table>\n' + "\n".join(lines) + "\n</table></div>"


def _failures(results: Sequence[CellResult]) -> list[str]:
    return [f"{result.name}: {result.error}" for result in results if result.error is not None]


def _notes(results: Sequence[CellResult], rows: Sequence[str], columns: Sequence[str]) -> list[str]:
    """What a reader needs to know to read the numbers."""
    several = any(entry.total > 1 for entry in summarise(results, rows, columns))
    averaged = "± is the standard deviation over seeds. " if several else ""
    last = rows[-1].replace("_", " ")
    return [
        f"{averaged}Bold: the best of the rows that differ in {last} only. Drop: full precision less quantized."
        + _certainty(results),
        "",
        "KL: mean divergence from the full-precision model, on validation images where there are any to classify, "
        "else on the calibration images. Seconds and peak memory: of the quantization, without the evaluation.",
    ]


def _certainty(results: Sequence[CellResult]) -> str:
    """Of how many images accuracies are, and how far chance alone moves a top-1."""
    measured = [result.measures for result in results if 0 < result.measures.get("images", 0) < math.inf]
    counts = sorted({int(measures["images"]) for measures in measured})
    if not counts:
        return ""
    ends = " to ".join(f"{count:,}" for count in dict.fromkeys((counts[0], counts[-1])))
    text = f" Accuracies: of {ends} validation images"
    shares = [(m["top1"] / 100, m["images"]) for m in measured if "top1" in m]
    errors = [100 * math.sqrt(max(0.0, share * (1 - share)) / images) for share, images in shares]
    return text + (f"; the standard error of a top-1 is up to {max(errors):.1f} points." if errors else ".")


def _one_line(text: str) -> str:
    return " ".join(text.split())
