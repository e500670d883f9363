"""What runs an exported file leaves the process as it was."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import openvino
from openvino import opset13

PROGRAM = """
import gc, os, signal, sys
from pathlib import Path
from fimaq.export.sessions import OpenVinoSession

caught = []
signal.signal(signal.SIGUSR1, lambda *_: caught.append("caught"))
sessions = [OpenVinoSession(Path(sys.argv[1])) for _ in range(2)]
while sessions:
    del sessions[0]
    gc.collect()
os.kill(os.getpid(), signal.SIGUSR1)
print(*caught)
"""


def test_a_signal_after_two_openvino_sessions_is_caught(tmp_path: Path) -> None:
    images = opset13.parameter([1, 4], np.float32, name="images")
    model = openvino.Model([opset13.relu(images)], [images])
    openvino.save_model(model, str(tmp_path / "model.xml"))
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "model.xml")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (0, "caught\n"), ended.stderr
