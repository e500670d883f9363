"""Help, lists and version."""

import re
import subprocess
import sys

import pytest
from command_line import ENVIRONMENT, PATIENCE, Outcome, fimaq, fimaq_process

from fimaq.catalogue import METHODS
from fimaq.version import __version__

OPTIONS = {
    "quantize": "--out --task --data --calib --val --weights --bits --method --preset --iters --rank --alpha "
    "--damping --calib-size --val-size --batch-size --crop-pct --image-size --model-arg --num-classes --class-map "
    "--allow-float --device --precision --memory-budget --host-budget --seed --config --resume --json "
    "w4a4 fima-q deploy 20000 1024",
    "evaluate": "--data --val --crop-pct --val-size --class-map --weights --batch-size --device --json",
    "compare": "--out --data --quick --weights-dir --iters --json",
    "fisher": "--unit --out --data --weights --rank --token --exact-size --averages --json",
    "report": "--out --data --calib --val --val-size --class-map --weights --images --fisher --stored --device "
    "--json",
    "demo": "--seed",
    "list": "models methods",
}


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.parametrize("command", OPTIONS)
def test_help_names_every_option(command: str) -> None:
    outcome = fimaq(command, "--help")
    assert outcome.code == 0
    words = set(re.findall(r"[\w-]+", plain(outcome.out)))
    assert set(OPTIONS[command].split()) - words == set()


def test_help_names_every_command() -> None:
    outcome = fimaq("--help")
    assert outcome.code == 0
    assert OPTIONS.keys() <= set(plain(outcome.out).split())


def test_methods_are_listed() -> None:
    outcome = fimaq("list", "methods")
    assert outcome.code == 0
    assert [line.split()[0] for line in outcome.out.splitlines()[1:]] == [name for name, _ in METHODS]


def test_models_are_listed() -> None:
    outcome = fimaq("list", "models")
    assert outcome.code == 0
    assert {"ViT", "DeiT", "Swin"} <= set(outcome.out.split())


def test_listed_model_names_are_whole_without_a_terminal() -> None:
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "COLUMNS"}
    command = [sys.executable, "-m", "fimaq", "list", "models"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert "swin_tiny_patch4_window7_224" in done.stdout
    assert "…" not in done.stdout


def test_an_unknown_list_is_refused() -> None:
    outcome = fimaq("list", "planets")
    assert outcome.code == 2
    assert "models" in outcome.err


def test_version() -> None:
    assert fimaq_process("--version") == Outcome(0, f"fimaq {__version__}\n", "")
