"""Reading what was typed: `key=value` pairs, tuples, and a configuration file under the flags."""

from pathlib import Path
from typing import Any

from fimaq.cli.detection import USUAL, detection_folders
from fimaq.config import Config, read_config_file
from fimaq.data.classes import data_folders
from fimaq.detection.build import DETECTORS
from fimaq.errors import InputError


def parse_value(text: str) -> Any:
    """A number, true/false/none, a tuple written 3,6,12,24, or the text itself."""
    if "," in text:
        return tuple(parse_value(part) for part in text.split(",") if part)
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False, "none": None}.get(text.lower(), text)


def parse_pairs(pairs: list[str], flag: str) -> dict[str, Any]:
    """`key=value` strings as a dictionary."""
    result = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise InputError(f"{flag} {pair!r} is not of the form key=value, such as img_size=384")
        result[key] = parse_value(value)
    return result


def build_config(flags: dict[str, Any], config_file: Path | None, data: Path | None) -> Config:
    """A Config from the file's keys, overridden by the flags that were given (are not None)."""
    values = read_config_file(config_file) if config_file is not None else {}
    stored = values.pop("data", None)
    given = {key: value for key, value in flags.items() if value is not None}
    task = given.get("task", values.get("task"))
    if task != "detection" and given.get("model") in DETECTORS:
        raise InputError(f"{given['model']} is a detector: add --task detection")
    usual = USUAL if task == "detection" else {}
    values = {
        **usual,
        **folder_settings(stored if data is None else None, task, "calib" not in values | given),
        **values,
        **folder_settings(data, task, "calib" not in given),
    }
    return Config.create(**(values | given))


def folder_settings(data: str | Path | None, task: str | None, needs_train: bool = True) -> dict[str, Path]:
    """The settings that a data folder stands for. `needs_train`: whether its calibration images must be there."""
    if data is None:
        return {}
    if not isinstance(data, str | Path):
        raise InputError(f"data: {data!r} is not a folder name")
    if task == "detection":
        return detection_folders(Path(data), needs_train)
    calib, val = data_folders(Path(data), needs_train)
    return {"calib": calib} if val is None else {"calib": calib, "val": val}
