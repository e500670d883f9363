"""What stayed float, what is worth knowing, and everything needed to repeat the run."""

import json
import shlex
from typing import Any

import yaml

from fimaq.config import Config
from fimaq.report.markup import details, table, tag
from fimaq.report.material import Material
from fimaq.report.reading import listed, mapping, megabytes, number, shown


def notes_section(material: Material) -> list[Any]:
    metrics = material.metrics
    floats = [str(item) for item in material.stayed_float or listed(metrics.get("stayed_float"))]
    parts: list[Any] = [tag("h3", "What stayed in float")]
    if floats:
        parts.append(tag("ul", [tag("li", item) for item in floats]))
    else:
        parts.append(tag("p", "No matrix product and no convolution: all of them are quantized."))
    notes = [
        f"{mapping(unit).get('unit')}: its loss was not finite, so the result of the range search was kept"
        for unit in listed(metrics.get("units"))
        if mapping(unit).get("finite") is False
    ]
    for name, columns in material.divided.items():
        shares = ", ".join(f"channel {channel} over {count} columns" for channel, count in columns.items())
        notes.append(f"{name}: massive channels are divided: {shares}")
    folded = mapping(metrics.get("folded_layer_norms"))
    if folded:
        scaled = sum(kind == "scaled" for kind in folded.values())
        without = f", {scaled} of them without a shift" if scaled else ""
        notes.append(
            f"{len(folded)} LayerNorms were folded{without}: stored weights are not the original ones rounded"
        )
    seconds, memory = number(metrics.get("seconds")), number(metrics.get("peak_memory_bytes"))
    if seconds is not None:
        used = f", {megabytes(memory)} at most" if memory is not None else ""
        notes.append(f"quantizing took {shown(seconds, 0)} s on {metrics.get('device', '?')}{used}")
    parts += [tag("h3", "Notes"), tag("ul", [tag("li", note) for note in notes])] if notes else []
    return parts


def repeat_section(material: Material) -> list[Any]:
    config = material.config
    model, data = mapping(config.get("model")), mapping(config.get("data"))
    given, versions = mapping(config.get("given")), mapping(config.get("versions"))
    repeated = repeat_configuration(config)
    digests = [
        ("full-precision weights", model.get("weights")),
        ("calibration images", data.get("fingerprint")),
        ("model.safetensors", material.digest),
    ]
    return [
        *_how(material, model, given),
        tag(
            "pre",
            tag("code", yaml.safe_dump(repeated, sort_keys=True, allow_unicode=True)),
            id="run-yaml",
            tabindex="0",
        ),
        tag("h3", "Digests"),
        tag("dl", [[tag("dt", name), tag("dd", tag("code", value))] for name, value in digests]),
        table(("", "version"), list(versions.items()), "Versions the run was made with"),
        details(
            "config.json, complete",
            tag("pre", tag("code", json.dumps(config, indent=2)), tabindex="0"),
        ),
    ]


def _how(material: Material, model: dict[str, Any], given: dict[str, Any]) -> list[Any]:
    name = model.get("name")
    if name is None or given.get("calib") is None:
        missing = "a model object" if name is None else "images that Python handed over"
        return [
            tag(
                "p",
                f"This run was made in Python from {missing}. To repeat it, call ",
                tag("code", "fimaq.quantize(model, images, **settings)"),
                " with the same model and images, as the digests below say, and these settings:",
            )
        ]
    command = shlex.join(["fimaq", "quantize", str(name), "--config", "run.yaml", "--out", "again"])
    return [
        tag(
            "p", "The same bits come out on the same device and versions. Save the text below as run.yaml, and run"
        ),
        tag("pre", tag("code", command), tabindex="0"),
    ]


def repeat_configuration(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of a configuration file that asks for this run again; what is unset is left out."""
    model = mapping(config.get("model"))
    values = {
        **mapping(config.get("settings")),
        **mapping(config.get("given")),
        "model": model.get("name"),
        "model_args": model.get("args"),
        "num_classes": model.get("num_classes"),
    }
    return {key: values[key] for key in Config.model_fields if values.get(key) not in (None, {})}
