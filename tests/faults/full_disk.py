"""A disk that is full from the n-th operation on, in this process; and one that is really small."""

import builtins
import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from fimaq.artifact import files, run_directory


class FullDisk:
    """Counts what a run writes: files made, bytes written and forced to disk, names given, folders made.

    From the `room`-th operation on every one fails. A write that fails has written half of its bytes, as it may.
    """

    def __init__(self, room: int | None) -> None:
        self.room, self.operations = room, 0

    def take(self) -> None:
        self.operations += 1
        if self.room is not None and self.operations > self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    @contextlib.contextmanager
    def mounted(self) -> Iterator["FullDisk"]:
        real_sync, real_replace, real_mkdir = os.fsync, os.replace, Path.mkdir

        def sync(handle: int) -> None:
            self.take()
            real_sync(handle)

        def replace(source: Any, target: Any) -> None:
            self.take()
            real_replace(source, target)

        def mkdir(path: Path, *given: Any, **named: Any) -> None:
            if not path.exists():
                self.take()
            real_mkdir(path, *given, **named)

        with pytest.MonkeyPatch.context() as patch:
            for module in (files, run_directory):
                patch.setattr(module, "open", self._open, raising=False)
            patch.setattr(os, "fsync", sync)
            patch.setattr(os, "replace", replace)
            patch.setattr(Path, "mkdir", mkdir)
            yield self

    def _open(self, path: Any, mode: str = "r", *given: Any, **named: Any) -> Any:
        if mode.startswith("r"):
            return builtins.open(path, mode, *given, **named)
        self.take()
        return _File(builtins.open(path, mode, *given, **named), self)


class _File:
    def __init__(self, file: IO[bytes], disk: FullDisk) -> None:
        self.file, self.disk = file, disk

    def __enter__(self) -> "_File":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, content: bytes) -> int:
        try:
            self.disk.take()
        except OSError:
            self.file.write(content[: len(content) // 2])
            raise
        return self.file.write(content)


@contextlib.contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[None]:
    """A file system of that size at `folder`; the test is skipped where mounting is not allowed."""
    options = ["-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
    try:
        subprocess.run(["mount", *options], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("a small file system cannot be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True, capture_output=True)
