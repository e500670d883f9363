"""The run directory: everything a run leaves behind, owned by one process at a time and resumable."""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from fimaq.artifact.files import (
    TEMPORARY_SUFFIX,
    FileLock,
    brief_lock,
    json_ready,
    read_json,
    read_tensors,
    write_json,
    write_tensors,
)
from fimaq.errors import FimaqError, InputError

CONFIG = "config.json"
MODEL = "model.safetensors"
METRICS = "metrics.json"
EVENTS = "events.jsonl"
CHECKPOINT = "checkpoint"
LOCK = ".lock"
DIGEST = "digest"
DIGEST_KIND = "sha256:"
SECTIONS = ("settings", "model", "data", "given")
"""Those sections of `config.json` that are objects in every run."""

_ABSENT = object()


class RunDirectory:
    """One run on disk. `create` opens it for the process that computes, `open_existing` for readers.

    The model file is written last, so a run is complete exactly when it is there.
    """

    def __init__(self, path: Path, config: dict[str, Any], complete: bool, lock: FileLock | None) -> None:
        self.path = path
        self.config = config
        """What `config.json` holds; on resume the stored one, not the one given."""
        self.complete = complete
        self._lock = lock

    @classmethod
    def create(
        cls, path: Path, config: Mapping[str, Any], resume: bool, same: Sequence[str] = ("settings",)
    ) -> Self:
        """Start a run in a new or empty folder, or continue an unfinished one. A refusal changes nothing.

        Args:
            path: the folder; missing parents are made.
            config: sections by name, as `write_json` accepts them.
            resume: continue what is there, if anything is; a finished run is opened with `complete` set.
            same: the sections that have to equal the stored ones on resume.
        """
        given = json_ready(config)
        made = _make_folders(path)
        lock: FileLock | None = None
        lock_existed = os.path.exists(path / LOCK)
        try:
            if not lock_existed:
                _continued_config(path, given, resume, same)  # refuse before a lock file is made
            lock = FileLock(path / LOCK, f"run directory {path}")
            stored = _continued_config(path, given, resume, same)
            lock.sign()
            if stored is None:
                _write_object(path / CONFIG, given)
            complete = (path / MODEL).exists()
            _remove_leftovers(path, complete)
            return cls(path, given if stored is None else stored, complete, lock)
        except BaseException:
            if lock is not None:
                lock.release(remove=not lock_existed and not os.path.exists(path / CONFIG))
            _remove_empty(made)
            raise

    @classmethod
    def check(cls, path: Path, resume: bool) -> None:
        """Refuse a folder that `create` refuses whatever the run's settings are. Nothing is made or changed."""
        if os.path.exists(path):
            _continued_config(path, {}, resume, same=())

    @classmethod
    def open_existing(cls, path: Path) -> Self:
        """Open a complete run for reading, without a lock: evaluation and export may run side by side."""
        if not os.path.isfile(path / CONFIG):
            raise InputError(f"{path} is not a run directory: it holds no {CONFIG}")
        config = _read_config(path / CONFIG)
        if not os.path.isfile(path / MODEL):
            raise InputError(
                f"run directory {path} is incomplete: it holds no {MODEL}; to finish it, repeat the command "
                "that started it with --resume"
            )
        return cls(path, config, complete=True, lock=None)

    @property
    def task(self) -> str:
        """What the run's model is for: classification or detection."""
        return str(self.config.get("settings", {}).get("task", "classification"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let other processes have the directory."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def event(self, kind: str, /, **fields: Any) -> None:
        """Append one line to `events.jsonl`: the time (UTC), the kind and the fields."""
        stamp = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "kind": kind}
        line = json.dumps(json_ready({**stamp, **fields}), allow_nan=False).encode() + b"\n"
        path = self.path / EVENTS
        try:
            with open(path, "ab+") as file:
                if file.tell() > 0:
                    file.seek(-1, os.SEEK_END)
                    if file.read(1) != b"\n":  # a kill tore the last line: keep it from tearing this one too
                        line = b"\n" + line
                file.write(line)
        except OSError as error:
            raise FimaqError(f"{path} could not be written: {error.strerror}") from error

    def read_events(self) -> list[dict[str, Any]]:
        """The events so far, oldest first. Lines torn by a kill are left out."""
        try:
            lines = (self.path / EVENTS).read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        events = []
        for line in lines:
            with contextlib.suppress(ValueError, RecursionError):
                event = json.loads(line)
                if isinstance(event, dict):
                    events.append(event)
        return events

    def save_stage(self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
        """Keep a finished stage (`calibration`, `unit-000`, ...) for `load_stage` after an interruption."""
        self._require_ownership()
        path = self._stage_file(name)
        path.parent.mkdir(exist_ok=True)
        write_tensors(path, tensors, _encode(metadata))

    def load_stage(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """What `save_stage` kept under this name, or None. The tensors are on the CPU."""
        path = self._stage_file(name)
        if not path.exists():
            return None
        try:
            tensors, metadata = read_tensors(path)
        except InputError as error:
            raise InputError(
                f"checkpoint cannot be used: {error}; delete that one file and resume to redo it from there"
            ) from None
        return tensors, _decode(metadata, path)

    def finish(
        self, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any], metrics: Mapping[str, Any]
    ) -> None:
        """Write the results, the model last, and remove the checkpoint."""
        self._require_ownership()
        _write_object(self.path / METRICS, metrics)
        write_tensors(self.path / MODEL, tensors, _encode(metadata))
        self.complete = True
        _remove_leftovers(self.path, complete=True)

    def read_model(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors and the metadata given to `finish`. The tensors are on the CPU."""
        tensors, metadata = read_tensors(self.path / MODEL)
        return tensors, _decode(metadata, self.path / MODEL)

    def read_metrics(self) -> dict[str, Any]:
        """What `metrics.json` holds; empty while the run has not come to it."""
        path = self.path / METRICS
        if not path.exists() and self.complete:
            raise InputError(f"{path} is missing, though the run is complete: `fimaq evaluate` makes a new one")
        return _read_object(path) if path.exists() else {}

    def read_accuracy(self) -> dict[str, Any]:
        """What `metrics.json` holds under `accuracy`; empty where nothing was measured, or the file is gone."""
        stored = self.read_metrics() if (self.path / METRICS).exists() else {}
        accuracy = stored.get("accuracy")
        return accuracy if isinstance(accuracy, dict) else {}

    def update_metrics(self, values: Mapping[str, Any]) -> None:
        """Replace the given top-level entries of `metrics.json` and keep the others."""
        with brief_lock(self.path / CONFIG):
            stored = self.read_metrics() if (self.path / METRICS).exists() else {}
            _write_object(self.path / METRICS, {**stored, **values})

    def _stage_file(self, name: str) -> Path:
        if re.fullmatch(r"[A-Za-z0-9_-]+", name) is None:
            raise ValueError(f"stage name {name!r} must consist of letters, digits, '-' and '_'")
        return self.path / CHECKPOINT / f"{name}.safetensors"

    def _require_ownership(self) -> None:
        if self._lock is None:
            raise RuntimeError(f"run directory {self.path} is not held by this process: open it with create()")


def _make_folders(path: Path) -> list[Path]:
    """Make `path` and its missing parents; returns those that were made, outermost first."""
    made: list[Path] = []
    try:
        for folder in [folder for folder in reversed([path, *path.parents]) if not folder.exists()]:
            folder.mkdir(exist_ok=True)  # another process may be starting beside it
            made.append(folder)
        if not path.is_dir():
            raise NotADirectoryError(0, "it is an existing file")
    except OSError as error:
        _remove_empty(made)
        raise InputError(f"{path} cannot be used as run directory: {error.strerror}") from None
    return made


def _remove_empty(folders: Sequence[Path]) -> None:
    """Undo `_make_folders`, except for folders that another process has begun to use."""
    for folder in reversed(folders):
        with contextlib.suppress(OSError):
            folder.rmdir()


def _continued_config(
    path: Path, given: dict[str, Any], resume: bool, same: Sequence[str]
) -> dict[str, Any] | None:
    """The stored config that this request continues, None for a fresh start; InputError if it must not."""
    try:
        names = sorted(name for name in os.listdir(path) if name != LOCK and not _is_leftover(name))
    except OSError as error:
        raise InputError(f"{path} cannot be used as run directory: {error.strerror}") from None
    if not names:
        return None
    if CONFIG not in names:
        raise InputError(
            f"{path} is not empty and not a run directory (it holds {names[0]}); "
            "choose a new or empty folder for --out"
        )
    stored = _read_config(path / CONFIG)
    if not resume and MODEL in names:
        raise InputError(f"{path} already holds a finished run; choose another --out or remove it")
    if not resume:
        raise InputError(f"{path} holds an unfinished run; --resume continues it, or choose another --out")
    differing = [line for name in same for line in _differences(stored, given, name)]
    if differing:
        raise InputError(
            f"{path} holds a run with other settings: {'; '.join(differing)}. Resume with the stored ones "
            "or choose another --out"
        )
    return stored


def _differences(stored: Any, given: Any, *names: str) -> list[str]:
    """For each value under the dotted name that differs: its name, the stored value and the given one."""
    name = names[-1]
    old, new = stored.get(name, _ABSENT), given.get(name, _ABSENT)
    if isinstance(old, dict) and isinstance(new, dict):
        return [line for key in {**old, **new} for line in _differences(old, new, *names, key)]
    if old == new:
        return []
    shown = ["nothing" if value is _ABSENT else json.dumps(value) for value in (old, new)]
    return [f"{'.'.join(names)} is stored as {shown[0]}, given as {shown[1]}"]


def _remove_leftovers(path: Path, complete: bool) -> None:
    """Remove what a kill left. In a complete run others may be writing files, so only the checkpoint goes."""
    if complete:
        shutil.rmtree(path / CHECKPOINT, ignore_errors=True)
        return
    for folder in (path, path / CHECKPOINT):
        for entry in folder.glob(f".*{TEMPORARY_SUFFIX}"):
            entry.unlink(missing_ok=True)


def _is_leftover(name: str) -> bool:
    return name.startswith(".") and name.endswith(TEMPORARY_SUFFIX)


def _write_object(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object with a digest of the rest of it as its last entry."""
    ready = json_ready(content)
    write_json(path, {**ready, DIGEST: _object_digest(ready)})


def _read_object(path: Path) -> dict[str, Any]:
    """Without its digest, which is verified. Files written before there were digests are taken as they are."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise InputError(f"{path} is damaged: it holds a {type(content).__name__}, not an object")
    stored = content.pop(DIGEST, None)
    # Where the name of the digest is what was damaged, there is a digest under another name.
    nameless = any(isinstance(value, str) and value.startswith(DIGEST_KIND) for value in content.values())
    if nameless or (stored is not None and stored != _object_digest(content)):
        raise InputError(
            f"{path} is damaged: its content does not match its digest. Whoever changed it on purpose "
            f"deletes the entry {DIGEST!r}"
        )
    return content


def _object_digest(content: Mapping[str, Any]) -> str:
    return DIGEST_KIND + hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _read_config(path: Path) -> dict[str, Any]:
    """A config whose sections are objects, so that readers need not ask."""
    config = _read_object(path)
    for name in SECTIONS:
        if not isinstance(config.get(name, {}), dict):
            raise InputError(f"{path} is damaged: {name!r} is not an object")
    return config


def _encode(metadata: Mapping[str, Any]) -> dict[str, str]:
    return {key: json.dumps(json_ready(value), allow_nan=False) for key, value in metadata.items()}


def _decode(metadata: Mapping[str, str], path: Path) -> dict[str, Any]:
    try:
        return {key: json.loads(value) for key, value in metadata.items()}
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is damaged: its metadata is not JSON ({error})") from None
