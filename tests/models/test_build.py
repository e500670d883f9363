"""Models are built by name and loaded from files that are checked first and never executed."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fimaq.errors import InputError
from fimaq.models.build import build_architecture, build_model, check_finite, load_weights, read_state_dict

NAME = "vit_tiny_patch16_224"
ARGS = {"img_size": 32, "depth": 1, "embed_dim": 16, "num_heads": 2}


@pytest.fixture
def model() -> nn.Module:
    return build_architecture(NAME, 5, ARGS)


def test_weights_come_back_from_safetensors(tmp_path, model):
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    loaded = build_model(NAME, tmp_path / "w.safetensors", 5, ARGS)
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert not loaded.training


@pytest.mark.parametrize("wrapper", [None, "state_dict", "model", "model_ema"])
def test_weights_come_back_from_a_torch_file(tmp_path, model, wrapper):
    state = model.state_dict()
    torch.save(state if wrapper is None else {wrapper: state, "epoch": 3}, tmp_path / "w.pth")
    loaded = build_model(NAME, tmp_path / "w.pth", 5, ARGS)
    torch.testing.assert_close(loaded.state_dict(), state, rtol=0, atol=0)


def test_half_precision_weights_are_widened(tmp_path, model):
    save_file({k: v.half() for k, v in model.state_dict().items()}, tmp_path / "w.safetensors")
    loaded = build_model(NAME, tmp_path / "w.safetensors", 5, ARGS)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}


def test_weights_of_another_architecture_name_missing_and_unknown_keys(tmp_path, model):
    save_file(build_architecture("pit_ti_224", 5).state_dict(), tmp_path / "w.safetensors")
    with pytest.raises(InputError) as error:
        load_weights(model, tmp_path / "w.safetensors")
    assert "w.safetensors" in str(error.value)
    assert "missing in the file: blocks.0.attn.proj.bias" in str(error.value)
    assert "transformers.0.blocks.0.attn.proj.bias" in str(error.value).split("not in the model: ")[1]


def test_weights_of_another_size_name_both_shapes(tmp_path, model):
    save_file(build_architecture(NAME, 7, ARGS).state_dict(), tmp_path / "w.safetensors")
    with pytest.raises(InputError, match=r"head\.weight is \(7, 16\) in the file and \(5, 16\) in the model"):
        load_weights(model, tmp_path / "w.safetensors")


def test_refused_weights_leave_the_model_as_it_was(tmp_path, model):
    before = {k: v.clone() for k, v in model.state_dict().items()}
    other = {k: v + 1 for k, v in before.items() if k != "head.bias"}
    save_file(other, tmp_path / "w.safetensors")
    with pytest.raises(InputError, match=r"missing in the file: head\.bias"):
        load_weights(model, tmp_path / "w.safetensors")
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_a_missing_weights_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"nothing\.pth does not exist"):
        build_model(NAME, tmp_path / "nothing.pth", 5, ARGS)


class _Trap:
    """Loaded by plain pickle, this writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("where", ["alone", "beside weights"])
def test_code_in_a_checkpoint_is_not_executed(tmp_path, model, where):
    trap = _Trap(tmp_path / "sprung")
    torch.save(trap if where == "alone" else {"state_dict": model.state_dict(), "extra": trap}, tmp_path / "w.pth")
    with pytest.raises(InputError, match=r"w\.pth is not a safetensors file or a plain torch state dict"):
        read_state_dict(tmp_path / "w.pth")
    assert not (tmp_path / "sprung").exists()
    torch.load(tmp_path / "w.pth", weights_only=False)
    assert (tmp_path / "sprung").exists(), "the trap itself must work"


def test_a_whole_pickled_model_is_refused(tmp_path):
    torch.save(nn.Linear(2, 2), tmp_path / "w.pth")
    with pytest.raises(InputError, match=r"w\.pth is not a safetensors file or a plain torch state dict"):
        read_state_dict(tmp_path / "w.pth")


@pytest.mark.parametrize("content", [[torch.ones(2)], {"lr": 0.1}, torch.ones(3)])
def test_a_file_of_other_things_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "w.pth")
    with pytest.raises(InputError, match=f"holds {type(content).__name__}, not a plain state dict"):
        read_state_dict(tmp_path / "w.pth")


@pytest.mark.parametrize("tensor", [torch.ones(2, 2).to_sparse(), torch.empty(2, 2, device="meta")])
def test_tensors_that_are_not_plain_are_refused_by_name(tmp_path, tensor):
    torch.save({"head.weight": tensor}, tmp_path / "w.pth")
    with pytest.raises(InputError, match=r"w\.pth: head\.weight is a sparse"):
        read_state_dict(tmp_path / "w.pth")


@pytest.mark.parametrize("content", [b"", b"<html>404</html>", b"hello"])
@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_a_file_of_no_known_format_is_refused(tmp_path, content, suffix):
    path = tmp_path / f"w.{suffix}"
    path.write_bytes(content)
    with pytest.raises(InputError, match="is not a safetensors file or a plain torch state dict"):
        read_state_dict(path)


@pytest.mark.parametrize("content", [b"\x80\x02.", b"\x80\x02X}"])
def test_a_damaged_pickle_is_refused(tmp_path, content):
    path = tmp_path / "w.pth"
    path.write_bytes(content)
    with pytest.raises(InputError, match="is not a safetensors file or a plain torch state dict"):
        read_state_dict(path)


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_a_truncated_file_is_refused(tmp_path, model, suffix):
    path = tmp_path / f"w.{suffix}"
    save = save_file if suffix == "safetensors" else torch.save
    save(model.state_dict(), path)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(InputError, match=f"w.{suffix} is not a safetensors file or a plain torch state dict"):
        read_state_dict(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(tmp_path, model, value):
    model.blocks[0].mlp.fc1.weight.data[0, 0] = value
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    with pytest.raises(InputError, match=r"NaN or Inf: .*blocks\.0\.mlp\.fc1\.weight"):
        build_model(NAME, tmp_path / "w.safetensors", 5, ARGS)


def test_finite_weights_pass(model):
    check_finite(model)


def test_an_unknown_model_name_brings_suggestions():
    with pytest.raises(InputError, match=r"'swinv2_tinny' is not a timm model; similar names: .*swinv2_"):
        build_architecture("swinv2_tinny")


def test_the_nearest_model_name_is_suggested():
    with pytest.raises(InputError, match=r"deit_tiny_patch16_224"):
        build_architecture("deit_tiny_patch16_225")


def test_arguments_the_model_does_not_take_are_named():
    with pytest.raises(InputError, match=r"cannot build 'vit_tiny_patch16_224'.*no_such_option"):
        build_architecture(NAME, args={"no_such_option": 3})
