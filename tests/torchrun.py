"""Several processes on one machine, started by torchrun as a user does."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PATIENCE = 300.0
"""Seconds that no job here needs, however busy the machine."""
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}


def command(size: int, *arguments: str | Path) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    return [*launcher, *map(str, arguments)]


def torchrun(size: int, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """A job of `size` processes, from its start to its end. `arguments`: a script or -m MODULE, and its own."""
    return subprocess.run(
        command(size, *arguments), env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE, check=False
    )


@contextlib.contextmanager
def started(size: int, *arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    """A job that is running. Its processes are in a session of their own, of which none is left at the end."""
    job = subprocess.Popen(
        command(size, *arguments),
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield job
    finally:
        for process in [*processes(job).values(), job.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        job.communicate()


def processes(job: subprocess.Popen[str]) -> dict[int, int]:
    """Rank -> process, of those that run."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            variables = (folder / "environ").read_bytes().split(b"\0")
            ranks = [int(v[5:]) for v in variables if v.startswith(b"RANK=")]
            if parent == job.pid and ranks:
                found[ranks[0]] = int(folder.name)
    return found
