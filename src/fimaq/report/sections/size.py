"""How small and how fast."""

from typing import Any

from fimaq.report.charts import Bar, bar_chart
from fimaq.report.markup import Html, table, tag
from fimaq.report.material import Material
from fimaq.report.reading import listed, mapping, megabytes, number, shown, whole


def size_section(material: Material) -> list[Any]:
    return [*_sizes(material), *_speed(material)]


def _sizes(material: Material) -> list[Any]:
    size = mapping(material.metrics.get("size"))
    before, after = number(size.get("full_precision_bytes")), number(size.get("quantized_bytes"))
    if not before or not after:
        return [tag("p", "metrics.json does not say how large the model is.")]
    bars = [
        Bar("full precision", before / 1e6, megabytes(before)),
        Bar("this run", after / 1e6, megabytes(after), emphasised=True),
    ]
    for record in material.exports:
        size_of_file = number(record.get("bytes"))
        if size_of_file is not None:
            bars.append(Bar(f"{record.get('format')} file", size_of_file / 1e6, megabytes(size_of_file)))
    caption = f"Weights in the run are {before / after:.2f} times smaller than at four bytes per value."
    return [bar_chart("sizes", "Size of the weights", bars, ("", "size"), caption), *_exports(material)]


def _exports(material: Material) -> list[Html]:
    said = []
    for record in material.exports:
        found, products = mapping(record.get("verification")), whole(record.get("quantized_products"))
        integer = whole(found.get("integer_products"))
        runtime = mapping(record.get("versions")).get("runtime", "its runtime")
        if products is not None and integer is not None:
            said.append(
                tag("li", f"{record.get('file')}: {integer} of {products} products run in integer in {runtime}")
            )
    return [tag("ul", said)] if said else []


def _speed(material: Material) -> list[Any]:
    bench = mapping(material.bench)
    if not bench:
        steps = (
            "Detectors cannot be exported yet."
            if material.task == "detection"
            else [
                "It is measured by ",
                tag("code", f"fimaq export {material.path}"),
                " and then ",
                tag("code", f"fimaq bench {material.path}"),
                ".",
            ]
        )
        return [tag("p", tag("strong", "Speed was not measured. "), steps)]
    parts: list[Any] = []
    for number_of, (runtime, found) in enumerate(mapping(bench.get("runtimes")).items()):
        parts += _in_runtime(f"speed-{number_of}", runtime, mapping(found))
    threads = whole(bench.get("threads"))
    note = f"Medians of turns taken one after the other, {threads} thread{'' if threads == 1 else 's'}. "
    return [*parts, tag("p", note, "Full precision ran in the same runtime with the same architecture.")]


def _in_runtime(name: str, runtime: str, found: dict[str, Any]) -> list[Any]:
    rows, bars, ratios = [], [], []
    for row in listed(found.get("times")):
        row = mapping(row)
        batch = whole(row.get("batch")) or 1
        for key, label in (("full_precision", "full precision"), ("quantized", "quantized")):
            times = mapping(row.get(key))
            median, quartiles = number(times.get("median_ms")), listed(times.get("quartiles_ms"))
            if median is None:
                continue
            each = median / batch
            bars.append(Bar(f"{label}, {batch}", each, f"{each:.1f} ms", emphasised=key == "quantized"))
            ends = " to ".join(shown(value, 1) for value in quartiles)
            rows.append(
                (f"{label}, batch {batch}", f"{median:.1f} ms", ends, shown(times.get("images_per_second"), 1))
            )
        ratio = number(row.get("speedup"))
        if ratio is not None:
            ratios.append(f"{ratio:.2f} times as fast at batch {batch}")
    if not bars:
        return []
    caption = f"{found.get('version', runtime)}: milliseconds per image, by batch size. " + ", ".join(ratios) + "."
    for label, key in (("File", "bytes"), ("Peak memory", "peak_memory_bytes")):
        sizes = mapping(found.get(key))
        if sizes:
            shown_sizes = [megabytes(sizes.get(which)) for which in ("full_precision", "quantized")]
            caption += f" {label}: {shown_sizes[0]} in full precision, {shown_sizes[1]} quantized."
    data = table(("", "per batch", "quartiles, ms", "images/s"), rows, f"Measured in {runtime}")
    return [bar_chart(name, f"Time per image in {runtime}", bars, (), caption, data)]
