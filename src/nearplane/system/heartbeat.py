"""Notices that another process of a run has failed or is gone, in a thread beside the work."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from nearplane.errors import RankError

BEAT = 2.0  # seconds between two signs of life
LOOK = 0.5  # seconds between two looks for the failure of another rank
LOST = 30.0  # seconds without a sign of life after which a rank counts as gone
FAILED, FAILURE, LEFT = "failed", "failure", "left"
REMEDY = "Repeat the command: it resumes after the last finished block, with any number of processes."


class Peer(NamedTuple):
    """A process of the run.

    Attributes:
        rank: Its number.
        host: Name of its machine.
        pid: Its process id.
        namespace: What the id is unique in; the same for all processes of a machine outside containers.
    """

    rank: int
    host: str
    pid: int
    namespace: str

    @classmethod
    def here(cls, rank: int) -> Peer:
        """Return this process."""
        namespace = Path("/proc/self/ns/pid")
        inside = str(namespace.readlink()) if namespace.is_symlink() else ""
        return cls(rank, socket.gethostname(), os.getpid(), inside)

    def __str__(self) -> str:
        return f"Rank {self.rank} (process {self.pid} on {self.host})"

    def ended(self, here: Peer) -> bool:
        """Whether this process is of the same machine as another one, `here`, and has ended."""
        if (self.host, self.namespace) != (here.host, here.namespace) or not Path("/proc/self/stat").exists():
            return False
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return True
        return state.rpartition(")")[2].split()[0] in "ZX"  # ended, and nobody has asked how


class Heartbeat:
    """A thread that gives signs of life through the store of a run, and looks for those of the others.

    Every rank watches the rank before it for signs of life, all processes of its own host, and the word of any rank that it
    failed. What it finds is raised in the main thread as a `RankError`, at once if Python runs there, or by `check`.

    Args:
        store: Store of the run.
        rank: Number of this rank.
        peers: All ranks.
    """

    def __init__(self, store: Any, rank: int, peers: list[Peer]) -> None:
        self.peers, self._store, self._rank = peers, store, rank
        self._failure: str | None = None
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nearplane heartbeat", daemon=True)
        self._seen = (-1, time.monotonic())  # signs of the rank before this one, and when they last grew
        self._restore: Callable[[], None] | None = None

    def __enter__(self) -> Heartbeat:
        if threading.current_thread() is threading.main_thread() and hasattr(signal, "pthread_kill"):
            before = signal.getsignal(signal.SIGUSR1)

            def raised(number: int, frame: Any) -> None:
                self.check()
                if callable(before):  # of the program, for a signal that is not ours
                    before(number, frame)

            signal.signal(signal.SIGUSR1, raised)
            self._restore = lambda: (signal.signal(signal.SIGUSR1, before or signal.SIG_DFL), None)[1]
        self._main = threading.main_thread().ident
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        self._ends.set()
        if self._thread.is_alive():
            self._thread.join(LOST)
        if self._restore is not None:
            self._restore()
            self._restore = None

    def check(self) -> None:
        """Raise what was found.

        Raises:
            RankError: Another rank failed or is gone.
        """
        if self._failure is not None:
            raise RankError(self._failure)

    def fail(self, what: str) -> None:
        """Tell all other ranks that this one failed; this one no longer looks for failures."""
        self._end()
        with suppress(RuntimeError):  # the store is gone
            if self._store.add(FAILED, 1) == 1:
                self._store.set(FAILURE, f"{self.peers[self._rank]} {what}")

    def leave(self, patience: float) -> None:
        """Say that this rank is done, and wait at most `patience` seconds for the others."""
        with suppress(RuntimeError):
            self._store.set(f"{LEFT}/{self._rank}", "")
            until = time.monotonic() + patience
            while time.monotonic() < until and not all(map(self._left, self.peers)):
                time.sleep(0.02)
        self._end()

    def _left(self, peer: Peer) -> bool:
        """Whether a rank is done, or has ended otherwise."""
        if self._store.check([f"{LEFT}/{peer.rank}"]):
            return True
        return peer.ended(self.peers[self._rank])

    def look(self) -> str | None:
        """Return what is wrong with another rank; None: nothing."""
        own = self.peers[self._rank]
        try:
            if self._store.add(FAILED, 0):
                return str(self._store.get(FAILURE).decode())
            for peer in self.peers:
                if peer.ended(own) and not self._store.check([f"{LEFT}/{peer.rank}"]):
                    return f"{peer} was killed. {REMEDY}"
            before = self.peers[self._rank - 1]
            signs, grew = self._store.add(f"beat/{before.rank}", 0), self._seen[1]
            if signs != self._seen[0]:
                self._seen = (signs, time.monotonic())
            elif time.monotonic() - grew > LOST and not self._store.check([f"{LEFT}/{before.rank}"]):
                return f"{before} has given no sign of life for {LOST:.0f} seconds. {REMEDY}"
        except RuntimeError:
            return f"{self.peers[0]}, through which all are connected, or torchrun on its host is gone. {REMEDY}"
        return None

    def _run(self) -> None:
        beat = 0.0
        while not self._ends.wait(LOOK):
            if time.monotonic() - beat >= BEAT:
                beat = time.monotonic()
                with suppress(RuntimeError):
                    self._store.add(f"beat/{self._rank}", 1)
            if (found := self.look()) is not None:
                self._failure = found
                with suppress(RuntimeError):
                    if self._store.add(FAILED, 1) == 1:
                        self._store.set(FAILURE, found)
                if self._restore is not None and self._main is not None:
                    signal.pthread_kill(self._main, signal.SIGUSR1)
                return
