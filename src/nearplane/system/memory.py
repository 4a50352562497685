"""How much memory is free on the CPU, and giving back what is not used. Needs no torch."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

# smaller ones come and go in forwards: asking the system for each took 14 % of a run's time at 4 MB, 1 % here
LARGE = 16 << 20
M_MMAP_THRESHOLD = -3  # of mallopt


def free_memory(root: Path = Path("/")) -> int | None:
    """Return how many bytes this process can still take, on the CPU: what the system has, or what the limit of its group leaves.

    Memory that only caches files is free. Where the system does not say what is free, half of all memory is taken for it.

    Args:
        root: below which the system's own files lie; for tests.

    Returns:
        Bytes; None where the system tells nothing.
    """
    meminfo = [line for line in _lines(root / "proc/meminfo") if line.startswith("MemAvailable:")]
    available = [int(line.split()[1]) * 1024 for line in meminfo]  # without swapping
    if known := [*available, *_left_of_limits(root)]:
        return max(0, min(known))
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, ValueError, OSError):  # Windows
        return None


def resident(root: Path = Path("/")) -> int | None:
    """Return how many bytes of memory this process holds now; None where the system does not say."""
    for line in _lines(root / "proc/self/statm"):
        return int(line.split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return None


def give_back_large() -> None:
    """Let memory of `LARGE` bytes or more go back to the system as soon as it is freed, in this process from now on.

    glibc otherwise comes to keep what is freed, up to 32 MB at a time, for whoever asks next: what waits between
    activations that live on was a gigabyte in a run of 3 GB, and never twice the same.
    """
    if option := getattr(_c_library(), "mallopt", None):
        option(M_MMAP_THRESHOLD, LARGE)


def release() -> None:
    """Give memory that was freed back to the system, where the C library keeps it (glibc does); takes milliseconds."""
    if trim := getattr(_c_library(), "malloc_trim", None):
        trim(0)


@cache
def _c_library() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if sys.platform == "linux" else None


def _left_of_limits(root: Path) -> Iterator[int]:
    """Yield what is left below the limits of the control groups that this process is in (containers have one)."""
    for line in _lines(root / "proc/self/cgroup"):
        number, kinds, path = line.split(":", 2)
        if number == "0":
            place, limit, used, cached = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in kinds.split(","):
            place, limit, used = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cached = "total_inactive_file"
        else:
            continue
        inner = Path(path.strip().lstrip("/"))
        for group in (root / place / each for each in (inner, *inner.parents)):
            most, now = _lines(group / limit), _lines(group / used)
            if most and now and most[0].strip() != "max":
                caches = (line.split() for line in _lines(group / "memory.stat"))
                yield int(most[0]) - int(now[0]) + sum(int(bytes_) for name, bytes_ in caches if name == cached)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:  # no such file, or no right to read it
        return []
