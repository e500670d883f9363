"""Seeing that a process of the same job died. Each says every second that it lives, and listens to the next one.

A process that is killed says nothing, and who waits for its message could wait for hours. torchrun ends the others
on the same machine; those on other machines, and processes that were started in another way, end by this.
"""

import datetime
import os
import socket
import sys
import threading
import time

import torch.distributed as dist

INTERVAL = 1.0
SILENCE = 25.0
"""Seconds after which who says nothing any more is dead."""
GRACE = 5.0
"""Seconds for a process to end by itself after another one has."""
START = 600.0
"""Seconds for all to start."""


class Watch:
    """A thread with a connection of its own to the store of keys that torchrun keeps for a job."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.gone: str | None = None
        """Who ended too early, once that is known."""
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._prefix = f"fimaq/{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{attempt}"
        self._left = threading.Event()
        self._connecting = threading.Lock()
        self._store: dist.TCPStore | None = None
        self._thread = threading.Thread(target=self._watch, name="fimaq-watch", daemon=True)
        self._thread.start()

    def first_to_say(self, message: str) -> bool:
        """Whether no other rank on this machine has said this."""
        try:
            return int(self._connected().add(f"{self._prefix}/said/{socket.gethostname()}/{message}", 1)) == 1
        except RuntimeError:
            return True

    def leave(self, failed: str | None = None) -> None:
        """Stop watching. `failed`: what the other ranks should know, where they cannot go on without this one."""
        self._left.set()
        try:
            if failed is not None:
                self._connected().set(
                    f"{self._prefix}/failed", self._name(self.rank, socket.gethostname()) + failed
                )
        except RuntimeError:
            return

    def who_is_gone(self, error: Exception) -> str:
        """Why a message failed: waits until that is known, or this process is ended by who started it."""
        deadline = time.monotonic() + SILENCE + GRACE
        while self.gone is None and time.monotonic() < deadline:
            time.sleep(INTERVAL / 4)
        return self.gone or f"rank {self.rank} lost contact with the others: {str(error).strip().splitlines()[0]}"

    def _watch(self) -> None:
        try:
            self._listen(self._connected())
        except RuntimeError:
            place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            self.gone = f"the machine of rank 0 no longer answers at {place}"
        if self.gone is None or self._left.wait(GRACE):
            return
        if self.first_to_say(self.gone):
            print(
                f"fimaq: {self.gone}; finished units are kept: run again with --resume",
                file=sys.stderr,
                flush=True,
            )
        os._exit(1)  # the main thread may be waiting inside a library, where no exception reaches it

    def _listen(self, store: dist.TCPStore) -> None:
        """Returns when this rank leaves, or another one is `gone`."""
        store.set(f"{self._prefix}/host/{self.rank}", socket.gethostname())
        other = (self.rank + 1) % self.size
        beats, heard, limit = 0, time.monotonic(), START
        while not self._left.wait(INTERVAL):
            store.add(f"{self._prefix}/beats/{self.rank}", 1)
            count = store.add(f"{self._prefix}/beats/{other}", 0)  # a read that does not wait for the key
            if count > beats:
                beats, heard, limit = count, time.monotonic(), SILENCE
            if time.monotonic() - heard > limit:
                known = store.check([f"{self._prefix}/host/{other}"])
                host = store.get(f"{self._prefix}/host/{other}").decode() if known else ""
                store.set(f"{self._prefix}/failed", self._name(other, host) + "no longer answers")
            if store.check([f"{self._prefix}/failed"]):
                self.gone = store.get(f"{self._prefix}/failed").decode()
                return

    def _name(self, rank: int, host: str) -> str:
        return f"rank {rank} of {self.size}{f' on {host}' if host else ''} "

    def _connected(self) -> dist.TCPStore:
        with self._connecting:
            if self._store is None:
                host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
                self._store = dist.TCPStore(host, port, is_master=False, timeout=datetime.timedelta(seconds=START))
            return self._store
