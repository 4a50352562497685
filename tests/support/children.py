"""Processes that are forked from this one: what they import is there already."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping

import torch

from nearplane.cli import app as cli


class Child:
    """A function that runs beside the test, in a process of its own."""

    def __init__(self, run: Callable[[], object]) -> None:
        self.out, self.err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self.process = os.fork()
        if not self.process:
            _be(run, self.out.fileno(), self.err.fileno())

    def runs(self) -> bool:
        return os.waitid(os.P_PID, self.process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def send(self, number: int) -> None:
        os.kill(self.process, number)

    def ended(self) -> tuple[int, str, str]:
        """Wait; return its code, what it printed, and what it said beside."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        said = []
        for file in (self.out, self.err):
            with file:
                file.seek(0)
                said.append(file.read().decode())
        return code, said[0], said[1]


def command(*words: object, streams: Mapping[int, str] | None = None) -> Child:
    """Start the command line with some words, perhaps with standard streams that are spoiled, see `spoil`."""

    def run() -> None:
        for number, state in (streams or {}).items():
            spoil(number, state)
        sys.argv = ["nearplane", *map(str, words)]
        cli.main()

    return Child(run)


def spoil(number: int, state: str) -> None:
    """Make a standard stream of this process "closed", "full", or "unread", which is a pipe without a reader."""
    name, stream = ("stdin", "stdout", "stderr")[number], None
    if state == "closed":
        os.close(number)
    else:
        reader, writer = (-1, os.open("/dev/full", os.O_WRONLY)) if state == "full" else os.pipe()
        os.dup2(writer, number)
        os.close(writer)
        if reader >= 0:
            os.close(reader)
        stream = open(number, "w", closefd=False)  # noqa: SIM115
    setattr(sys, name, stream)


def drop_rights() -> None:
    """Let the rights of files hold in this process, as they do not for root on Linux."""
    if not os.geteuid():
        header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()  # version 3, no capability
        assert not ctypes.CDLL(None).capset(header, none)


def without_rights(*words: object) -> Child:
    """Start the command line in a process for which the rights of files hold."""

    def run() -> None:
        drop_rights()
        sys.argv = ["nearplane", *map(str, words)]
        cli.main()

    return Child(run)


def _be(run: Callable[[], object], out: int, err: int) -> None:
    """Run; never return."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its background jobs ignore it
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        # a fork has no thread of torch's pool; two threads that first compute at a time would both make a new one ("Invalid
        # thread pool!" in torch 2.13)
        torch.set_num_threads(torch.get_num_threads())
        run()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:
                    stream.flush()
        except OSError:
            code = 120  # as Python ends
        os._exit(code)
