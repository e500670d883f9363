"""Files that appear whole or not at all, that are never loaded damaged, and that can be locked.

JSON and safetensors only: reading a file runs no code from it."""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fimaq.errors import FimaqError, InputError

DIGEST_KEY = "content_digest"
"""The metadata entry of a tensor file that holds the digest of everything else in it."""

TEMPORARY_SUFFIX = ".partial"
"""How the names of files still being written end. After a kill one may stay behind; it is never read."""


def write_json(path: Path, obj: Any) -> None:
    """Write `obj` as indented JSON, atomically. Keys keep their order; `json_ready` says what is accepted."""
    # Non-ASCII characters are escaped, so that a path that is not valid Unicode survives as well.
    text = json.dumps(json_ready(obj), indent=2, allow_nan=False)
    write_bytes(path, (text + "\n").encode("ascii"))


def read_json(path: Path) -> Any:
    """The content of a JSON file; a missing, unreadable or damaged one is an InputError that names it."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is damaged: it is not JSON ({error})") from None


def json_ready(obj: Any) -> Any:
    """`obj` in JSON's own types: paths become strings, tuples and arrays lists, non-finite numbers None."""
    if obj is None or isinstance(obj, bool | int | str):
        return obj
    if isinstance(obj, float):
        return float(obj) if math.isfinite(obj) else None
    if isinstance(obj, os.PathLike):
        return os.fspath(obj)
    if isinstance(obj, Mapping):
        return {str(key): json_ready(value) for key, value in obj.items()}
    if isinstance(obj, list | tuple):
        return [json_ready(item) for item in obj]
    if hasattr(obj, "tolist"):  # tensors, NumPy arrays and their scalars
        return json_ready(obj.tolist())
    raise TypeError(f"{obj!r} of type {type(obj).__name__} cannot be written as JSON")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, atomically, with a digest of its whole content in its metadata.

    Args:
        path: the file; an earlier one is replaced.
        tensors: any shapes and dtypes, on any device; those that share memory are each written in full.
        metadata: plain strings; the key `content_digest` is taken.
    """
    if DIGEST_KEY in metadata:
        raise ValueError(f"metadata key {DIGEST_KEY!r} is reserved")
    separate = _separate_copies(tensors)
    digest = _content_digest(separate, metadata)
    write_bytes(path, _in_one_order(save(separate, metadata={**metadata, DIGEST_KEY: digest})))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a file of `write_tensors` and verify its digest.

    Returns:
        The tensors on the CPU with their shapes and dtypes, and the metadata without the digest.
    """
    if not os.path.isfile(path):
        raise InputError(f"{path} does not exist or is not a file")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except PermissionError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except (SafetensorError, OSError, ValueError, RuntimeError, TypeError, AttributeError) as error:
        # A damaged header can name a dtype that safetensors knows and torch does not.
        raise InputError(f"{path} is damaged: it is not a safetensors file ({error})") from None
    stored = metadata.pop(DIGEST_KEY, None)
    if stored is None:
        raise InputError(f"{path} is damaged or was not written by fimaq: it carries no content digest")
    if stored != _content_digest(tensors, metadata):
        raise InputError(f"{path} is damaged: its content does not match its digest")
    return tensors, metadata


def file_digest(path: Path) -> str:
    """`"sha256:"` and the hexadecimal digest of the file's bytes."""
    try:
        with open(path, "rb") as file:
            return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def _separate_copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Dense CPU tensors with a storage each, as safetensors demands: tied weights are written twice."""
    separate: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        dense = tensor.detach().to("cpu").contiguous()
        if dense.untyped_storage().data_ptr() in seen:
            dense = dense.clone()
        seen.add(dense.untyped_storage().data_ptr())
        separate[name] = dense
    return separate


def _in_one_order(content: bytes) -> bytes:
    """The same safetensors file with its metadata sorted, so that equal runs have equal files."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    ordered = json.dumps(header, separators=(",", ":")).encode()
    ordered += b" " * (-len(ordered) % 8)  # tensors are aligned to 8 bytes
    return b"".join([len(ordered).to_bytes(8, "little"), ordered, memoryview(content)[8 + length :]])


def _content_digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """SHA-256 over metadata and over names, dtypes, shapes and bytes of the tensors, sorted by name."""
    digest = hashlib.sha256(json.dumps(sorted(metadata.items())).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return f"sha256:{digest.hexdigest()}"


def write_bytes(path: Path, content: bytes) -> None:
    """Write aside, force to disk, rename: a reader sees the earlier file or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise FimaqError(
            f"{path} could not be written: {reason}; earlier content of this file is untouched"
        ) from error
    finally:
        with contextlib.suppress(OSError):  # after the rename there is nothing to remove
            temporary.unlink()
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Force a rename to disk. Where the file system cannot, the file is in place all the same: no error."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


class FileLock:
    """An exclusive lock on a file. The kernel frees it when the process ends, however it ends."""

    _held: ClassVar[set["FileLock"]] = set()

    def __init__(self, path: Path, what: str) -> None:
        """Take the lock at once or raise an InputError saying that `what` is in use, and by which process."""
        self._path = path
        self._signed = False
        self._handle = _lock_exclusively(path, what)
        FileLock._held.add(self)

    def sign(self) -> None:
        """Write down who holds the lock: a courtesy to those who find it taken, so failing to is no error."""
        self._signed = True
        with contextlib.suppress(OSError):
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, f"{os.getpid()}\n".encode(), 0)

    def release(self, remove: bool = False) -> None:
        """Free the lock and, if asked, remove its file. An unsigned lock leaves the file's content alone."""
        if self not in FileLock._held:
            return
        FileLock._held.discard(self)
        with contextlib.suppress(OSError):
            if self._signed:
                os.ftruncate(self._handle, 0)
            if remove:
                self._path.unlink()
        os.close(self._handle)

    @staticmethod
    def _forget_in_child() -> None:
        """A forked data-loading worker shares the lock, and would keep it when its parent is killed."""
        for lock in FileLock._held:
            os.close(lock._handle)
        FileLock._held.clear()


os.register_at_fork(after_in_child=FileLock._forget_in_child)


@contextlib.contextmanager
def brief_lock(path: Path) -> Iterator[None]:
    """Wait for a lock and hold it for a moment. The file has to exist and must never be replaced."""
    try:
        file = open(path, "rb+")  # noqa: SIM115 (closed below, where errors of the caller's own pass through)
    except OSError as error:
        raise FimaqError(f"{path} cannot be locked: {error.strerror}") from None
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _lock_exclusively(path: Path, what: str) -> int:
    """The handle of `path`, locked without waiting; the file is made where it is missing."""
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise InputError(f"{what} cannot be written: {error.strerror}") from None
        locked = False
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its earlier holder may have removed the file; a lock on a removed file would guard nothing.
            locked = path.exists() and os.path.samestat(os.fstat(handle), path.stat())
        except BlockingIOError:
            holder = os.pread(handle, 32, 0).decode("ascii", "replace").strip()
            owner = f"process {holder}" if holder.isdigit() else "another process"
            raise InputError(f"{what} is in use by {owner}") from None
        except OSError as error:
            raise InputError(f"{what} cannot be locked: {error.strerror}") from None
        finally:
            if not locked:
                os.close(handle)
        if locked:
            return handle
