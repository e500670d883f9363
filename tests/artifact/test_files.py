"""Files appear whole or not at all, and damage is noticed before anything is loaded."""

import errno
import hashlib
import json
import os
import stat
from pathlib import Path

import pytest
import torch

from fimaq.artifact import files
from fimaq.artifact.files import file_digest, read_json, read_tensors, write_json, write_tensors
from fimaq.errors import FimaqError, InputError

EVERY_KIND = {
    "float": torch.randn(3, 4),
    "half": torch.randn(5).to(torch.bfloat16),
    "packed": torch.arange(7, dtype=torch.uint8),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "flags": torch.tensor([True, False]),
    "empty": torch.zeros(0, 3),
}


def test_json_keeps_values_and_key_order(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"b": 1, "a": [1.5, "ü", None, True], "c": {"z": 0, "y": -1}})
    assert read_json(path) == {"b": 1, "a": [1.5, "ü", None, True], "c": {"z": 0, "y": -1}}
    assert list(read_json(path)) == ["b", "a", "c"]
    assert path.read_text().startswith('{\n  "b": 1,\n')


def test_json_takes_what_a_run_produces(tmp_path):
    path = tmp_path / "a.json"
    produced = {
        "path": Path("x/y"),
        "pair": (1, 2),
        3: torch.tensor(4),
        "row": torch.tensor([1.0, float("nan")]),
    }
    write_json(path, produced)
    assert read_json(path) == {"path": "x/y", "pair": [1, 2], "3": 4, "row": [1.0, None]}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_numbers_become_null(tmp_path, value):
    write_json(tmp_path / "a.json", {"loss": value})
    assert (tmp_path / "a.json").read_text() == '{\n  "loss": null\n}\n'


def test_a_path_that_is_not_unicode_survives(tmp_path):
    write_json(tmp_path / "a.json", {"data": Path(os.fsdecode(b"im\xff"))})
    assert os.fsencode(read_json(tmp_path / "a.json")["data"]) == b"im\xff"


def test_what_json_cannot_hold_is_refused_and_nothing_written(tmp_path):
    with pytest.raises(TypeError, match="object"):
        write_json(tmp_path / "a.json", {"thing": object()})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b'{"a": 1', b"\xff\xfe\x00", b"{'a': 1}"])
def test_damaged_json_is_named(tmp_path, content):
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"broken\.json is damaged"):
        read_json(path)


def test_missing_files_are_named(tmp_path):
    for read in (read_json, read_tensors, file_digest):
        with pytest.raises(InputError, match=r"nowhere"):
            read(tmp_path / "nowhere")


def test_tensors_and_metadata_survive(tmp_path):
    path = tmp_path / "t.safetensors"
    write_tensors(path, EVERY_KIND, {"note": "ü", "empty": ""})
    tensors, metadata = read_tensors(path)
    assert metadata == {"note": "ü", "empty": ""}
    assert tensors.keys() == EVERY_KIND.keys()
    for name, tensor in EVERY_KIND.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)


def test_the_same_content_gives_the_same_bytes(tmp_path):
    tensors = {"b": torch.arange(3), "a": torch.ones(2, dtype=torch.uint8), "é": torch.zeros(1)}
    metadata = {f"key {number}": "é" for number in range(8)}
    written = set()
    for number in range(8):
        write_tensors(tmp_path / str(number), tensors, metadata)
        written.add((tmp_path / str(number)).read_bytes())
    assert len(written) == 1
    read, told = read_tensors(tmp_path / "0")
    assert told == metadata
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)


def test_no_tensors_and_no_metadata_survive(tmp_path):
    write_tensors(tmp_path / "t.safetensors", {}, {})
    assert read_tensors(tmp_path / "t.safetensors") == ({}, {})


def test_tied_transposed_and_trained_tensors_are_accepted(tmp_path):
    weight = torch.nn.Parameter(torch.randn(3, 4))
    write_tensors(tmp_path / "t.safetensors", {"a": weight, "b": weight, "c": weight.t(), "d": weight[1:]}, {})
    tensors, _ = read_tensors(tmp_path / "t.safetensors")
    assert torch.equal(tensors["a"], tensors["b"])
    assert torch.equal(tensors["c"], weight.t())
    assert torch.equal(tensors["d"], weight[1:])


def test_no_flipped_bit_is_loaded_as_good(tmp_path):
    path = tmp_path / "t.safetensors"
    tensors = {"a": torch.tensor([1.0, -2.0]), "b": torch.tensor([3, 4], dtype=torch.uint8)}
    write_tensors(path, tensors, {"bits": "4"})
    good = path.read_bytes()
    refused = 0
    for position in range(len(good) * 8):
        damaged = bytearray(good)
        damaged[position // 8] ^= 1 << (position % 8)
        path.write_bytes(damaged)
        try:
            loaded, metadata = read_tensors(path)
        except InputError as error:
            assert "t.safetensors is damaged" in str(error)  # noqa: PT017 (one of two allowed outcomes)
            refused += 1
        else:  # only blanks between header fields may change without a trace
            assert metadata == {"bits": "4"}
            assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    assert refused > 0.95 * len(good) * 8


@pytest.mark.parametrize("kept", [0, 1, 7, 8, 40, -1])
def test_a_truncated_tensor_file_is_refused(tmp_path, kept):
    path = tmp_path / "t.safetensors"
    write_tensors(path, EVERY_KIND, {})
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(InputError, match=r"t\.safetensors is damaged"):
        read_tensors(path)


def test_a_tensor_file_from_elsewhere_is_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.ones(2)}, tmp_path / "t.safetensors")
    with pytest.raises(InputError, match="not written by fimaq"):
        read_tensors(tmp_path / "t.safetensors")


def test_the_digest_key_cannot_be_given(tmp_path):
    with pytest.raises(ValueError, match="reserved"):
        write_tensors(tmp_path / "t.safetensors", {}, {files.DIGEST_KEY: "x"})


@pytest.mark.parametrize("failing", ["fsync", "replace"])
@pytest.mark.parametrize("name", ["a.json", "a.safetensors"])
def test_a_full_disk_leaves_the_earlier_file_and_nothing_else(tmp_path, monkeypatch, failing, name):
    path = tmp_path / name

    def write(value: int) -> None:
        if name.endswith("json"):
            write_json(path, {"value": value})
        else:
            write_tensors(path, {"value": torch.tensor(value)}, {})

    write(1)
    before = path.read_bytes()

    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, failing, no_space)
    with pytest.raises(FimaqError, match=rf"{name} could not be written: No space left.*untouched") as caught:
        write(2)
    assert not isinstance(caught.value, InputError)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_an_interrupt_while_writing_leaves_nothing_behind(tmp_path, monkeypatch):
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_json(tmp_path / "a.json", {})
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_an_error_that_names_the_file(tmp_path):
    with pytest.raises(FimaqError, match=r"a\.json could not be written: No such file"):
        write_json(tmp_path / "no" / "a.json", {})


def test_files_are_as_readable_as_the_user_wants(tmp_path):
    earlier = os.umask(0o027)
    try:
        write_json(tmp_path / "a.json", {})
        write_tensors(tmp_path / "a.safetensors", {"a": torch.ones(1)}, {})
    finally:
        os.umask(earlier)
    for entry in tmp_path.iterdir():
        assert stat.S_IMODE(entry.stat().st_mode) == 0o640


def test_file_digest_is_sha256_of_the_bytes(tmp_path):
    (tmp_path / "f").write_bytes(b"abc")
    assert file_digest(tmp_path / "f") == "sha256:" + hashlib.sha256(b"abc").hexdigest()


def test_written_json_is_plain_json(tmp_path):
    write_json(tmp_path / "a.json", {"x": 1e-30})
    assert json.loads((tmp_path / "a.json").read_text(encoding="ascii")) == {"x": 1e-30}


@pytest.mark.parametrize("changed", ['"shape":[3,2]', '"dtype":"I32"', '"other"'])
def test_a_tensor_under_another_name_shape_or_type_is_not_loaded_as_good(tmp_path: Path, changed: str) -> None:
    """The same bytes, to which the header gives another meaning."""
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"given": torch.arange(6.0).view(2, 3)}, {})
    was = {'"shape":[3,2]': '"shape":[2,3]', '"dtype":"I32"': '"dtype":"F32"', '"other"': '"given"'}[changed]
    content = path.read_bytes()
    assert content.count(was.encode()) == 1
    path.write_bytes(content.replace(was.encode(), changed.encode()))
    with pytest.raises(InputError, match="does not match its digest"):
        read_tensors(path)
