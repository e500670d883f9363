"""The page: one file, complete in itself, that may load nothing and run nothing."""

import base64
import hashlib
from typing import Any

from fimaq.report.markup import Html, joined, tag
from fimaq.report.material import Material
from fimaq.report.reading import mapping
from fimaq.report.sections.accuracy import accuracy_section, headline
from fimaq.report.sections.disagreements import disagreements_section
from fimaq.report.sections.distributions import distributions_section
from fimaq.report.sections.layers import layers_section
from fimaq.report.sections.optimisation import optimisation_section
from fimaq.report.sections.repeat import notes_section, repeat_section
from fimaq.report.sections.size import size_section
from fimaq.version import __version__

SECTIONS = (
    ("accuracy", "How accurate is it?", accuracy_section),
    ("size", "How small and how fast?", size_section),
    ("layers", "Which units and layers hurt?", layers_section),
    ("optimisation", "What did the optimisation do?", optimisation_section),
    ("distributions", "How are weights and activations distributed?", distributions_section),
    ("disagreements", "Where do the two models disagree?", disagreements_section),
    ("notes", "What stayed in float, and notes", notes_section),
    ("repeat", "How to repeat this run", repeat_section),
)

STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 64rem; padding: 1rem; background: #fff; color: #1a1a1a;
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif;
  overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .2rem 0; }
h2 { font-size: 1.25rem; line-height: 1.3; margin: 2.2rem 0 .5rem; padding-top: .6rem;
  border-top: 2px solid #0072B2; }
h3 { font-size: 1.05rem; margin: 1.4rem 0 .3rem; }
p, ul { max-width: 44rem; }
ul { padding-left: 1.2rem; }
a { color: #00527f; }
.headline { font-size: 1.15rem; }
.facts { color: #444; margin: .2rem 0; }
nav ol { columns: 16rem; padding-left: 1.4rem; }
figure { margin: 1rem 0; }
figcaption { font-size: .875rem; color: #333; max-width: 34rem; }
svg.chart { display: block; width: 100%; max-width: 30rem; height: auto; }
svg.small { display: block; width: 100%; height: auto; }
svg.key { width: .9em; height: .9em; vertical-align: -.1em; }
.picture { overflow-x: auto; }
.picture img { max-width: 100%; min-width: 36rem; height: auto; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); gap: 0 1.5rem; }
.multiples { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: .8rem 1rem; }
.multiples figure { margin: 0; }
.multiples figcaption { font-size: .8rem; line-height: 1.35; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: 1rem; }
.cards figure { margin: 0; }
.cards img { display: block; width: 100%; max-width: 9.5rem; height: auto; }
dl { margin: .2rem 0 0; }
dt { font-size: .75rem; color: #555; }
dd { margin: 0 0 .2rem; }
.wide { overflow-x: auto; max-width: 100%; margin: .8rem 0; }
table { border-collapse: collapse; font-size: .9rem; }
caption { text-align: left; font-weight: 600; padding: .2rem 0; }
th, td { text-align: right; padding: .2rem .7rem; border-bottom: 1px solid #ddd;
  font-variant-numeric: tabular-nums; overflow-wrap: normal; }
td { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; font-weight: 400; }
thead th { border-bottom: 1px solid #555; }
pre { background: #f5f5f5; padding: .7rem; overflow-x: auto; font-size: .85rem; max-width: 100%;
  overflow-wrap: normal; }
code { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace; font-size: .9em; }
summary { cursor: pointer; padding: .3rem 0; color: #00527f; }
footer { margin-top: 3rem; font-size: .85rem; color: #555; }
@media print { nav { display: none; } }
"""


def page(material: Material) -> str:
    """The whole document as text."""
    settings, model = mapping(material.config.get("settings")), mapping(material.config.get("model"))
    name = model.get("name") or "a model object"
    bits, method, preset = (settings.get(key, "?") for key in ("bits", "method", "preset"))
    title = f"{name}, {bits}, {method}"
    facts = f"{bits} · method {method} · preset {preset} · {settings.get('iters', '?')} iterations per unit"
    contents = tag(
        "nav",
        tag("ol", [tag("li", tag("a", text, href=f"#{key}")) for key, text, _ in SECTIONS]),
        aria_label="Contents",
    )
    sections = [
        tag("section", tag("h2", text, id=f"{key}-title"), write(material), id=key, aria_labelledby=f"{key}-title")
        for key, text, write in SECTIONS
    ]
    body = [
        tag("header", tag("h1", name), tag("p", facts, class_="facts"), headline(material)),
        contents,
        tag("main", sections),
        tag("footer", f"Written by fimaq {__version__} from {material.path}."),
    ]
    return _document(title, body)


def _document(title: str, body: list[Any]) -> str:
    # Neither scripts nor anything from outside: a name in a file that escaped escaping would still do nothing.
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", title),
        tag("style", Html(STYLE)),
    ]
    document = tag("html", tag("head", head), tag("body", joined(body)), lang="en")
    return f"<!DOCTYPE html>\n{document}\n"
