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
AGAIN = "finished units are kept: run the command again with --resume"


class Watch:
    """A thread with a connection of its own to the store of keys that torchrun keeps for a job."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.gone: str | None = None
        """Who ended too early, once that is known."""
        self.all_started = False
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._prefix = f"fimaq/{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{attempt}"
        self._address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        self._host = socket.gethostname()
        self._said: set[str] = set()
        self._left = threading.Event()
        self._connecting = threading.Lock()
        self._connection: dist.TCPStore | None = None
        threading.Thread(target=self._watch, name="fimaq-watch", daemon=True).start()

    def first_to_say(self, message: str) -> bool:
        """Whether neither this rank nor another on the same machine has said this."""
        if message in self._said:
            return False
        self._said.add(message)
        try:
            return int(self._store().add(f"{self._prefix}/said/{self._host}/{message}", 1)) == 1
        except RuntimeError:  # no one can be asked
            return True

    def leave(self, failed: str | None = None) -> None:
        """Stop watching. `failed`: what the other ranks should know, where they cannot go on without this one."""
        self._left.set()
        if failed is not None:
            try:
                self._store().set(f"{self._prefix}/failed", f"rank {self.rank} on {self._host} failed: {failed}")
            except RuntimeError:  # then they see that for themselves
                return

    def who_is_gone(self, error: Exception) -> str:
        """Why a message failed: waits until that is known, or this process is ended by who started it."""
        deadline = time.monotonic() + SILENCE + GRACE
        try:
            self._store().check([self._prefix])
        except RuntimeError:
            self._lose_store()
        while self.gone is None and time.monotonic() < deadline:
            time.sleep(INTERVAL / 4)
        return self.gone or f"rank {self.rank} lost contact with the others: {str(error).strip().splitlines()[0]}"

    def _watch(self) -> None:
        try:
            self.gone = self._listen(self._store())
        except RuntimeError:
            if not self._left.is_set():
                self._lose_store()
        if self.gone is None or self._left.wait(GRACE):
            return
        self._say(self.gone)
        os._exit(1)  # the main thread may be waiting inside a library, where no exception reaches it

    def _lose_store(self) -> None:
        """The machine that keeps the store is gone. Said at once: torchrun sees it too, and ends this process."""
        host, port = self._address
        self.gone = f"the ranks on {host}, whose port {port} holds the job together, no longer answer; {AGAIN}"
        self._say(self.gone)

    def _listen(self, store: dist.TCPStore) -> str | None:
        """Returns when this rank leaves, or says who else did."""
        store.set(f"{self._prefix}/host/{self.rank}", self._host)
        other = (self.rank + 1) % self.size
        beats, heard = 0, time.monotonic()
        while not self._left.wait(INTERVAL):
            store.add(f"{self._prefix}/beats/{self.rank}", 1)
            count = store.add(f"{self._prefix}/beats/{other}", 0)  # a read that does not wait for the key
            if count > beats:
                beats, heard = count, time.monotonic()
            if time.monotonic() - heard > (SILENCE if beats or self.all_started else START):
                store.set(f"{self._prefix}/failed", f"{self._named(other, store)} no longer answers; {AGAIN}")
            if store.check([f"{self._prefix}/failed"]):
                return str(store.get(f"{self._prefix}/failed").decode())
        return None

    def _named(self, rank: int, store: dist.TCPStore) -> str:
        host = f"{self._prefix}/host/{rank}"
        return f"rank {rank}" + (f" on {store.get(host).decode()}" if store.check([host]) else "")

    def _say(self, message: str) -> None:
        if self.first_to_say(message):
            print(f"fimaq: {message}", file=sys.stderr, flush=True)

    def _store(self) -> dist.TCPStore:
        with self._connecting:
            if self._connection is None:
                wait = datetime.timedelta(seconds=START)
                self._connection = dist.TCPStore(*self._address, is_master=False, timeout=wait)
            return self._connection
