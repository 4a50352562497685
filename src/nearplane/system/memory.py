"""Free memory of the CPU, and functions that return unused memory to the system. Needs no torch."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

# bytes; forward passes often allocate smaller blocks: system calls took 14 % of a run with 4 MB here, 1 % with 16 MB
LARGE_BLOCK = 16 << 20
KEPT = (
    128 << 20
)  # bytes of freed memory that the C library may keep: fetching a page again costs more than all small sums
MALLINFO2 = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
PAUSE = 0.03  # seconds between questions how much freed memory the C library keeps
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # parameters of mallopt

_asked = -PAUSE  # time of the last question


def free_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process can still allocate on the CPU: free in the system and below its cgroup's limit.

    Memory that only caches files counts as free. Half of all memory is assumed if the system does not report what is free.

    Args:
        root: Folder that holds /proc and /sys; tests pass another.

    Returns:
        Free bytes, or None if they are unknown.
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
    """Return the resident memory of this process in bytes, or None if it is unknown."""
    for line in _lines(root / "proc/self/statm"):
        return int(line.split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return None


def return_large_blocks() -> None:
    """Make this process return freed blocks of `LARGE_BLOCK` bytes or more to the system at once.

    By default, glibc raises this limit to 32 MB and keeps smaller freed blocks. In a run of 3 GB they added up to a
    gigabyte between live activations, and to another amount in every run.
    """
    if option := getattr(_c_library(), "mallopt", None):
        option(M_MMAP_THRESHOLD, LARGE_BLOCK)
        option(M_TRIM_THRESHOLD, KEPT)  # glibc's own limit is no longer raised: 128 KB


def release() -> None:
    """Return memory that was freed to the system if the C library keeps more than `KEPT` of it (glibc may).

    Asking how much that is takes up to a millisecond, so this does nothing within `PAUSE` of the last call that asked: what
    was freed in so short a time is little.
    """
    global _asked
    if time.monotonic() < _asked + PAUSE:
        return
    _asked = time.monotonic()
    if (state := getattr(_c_library(), "mallinfo2", None)) is not None:  # glibc 2.33 and newer
        state.restype = _Mallinfo2
    if state is None or state().fordblks > KEPT:
        release_all()


def release_all() -> None:
    """Return all memory that was freed to the system, for the start of a run: what it keeps is not needed again soon."""
    if trim := getattr(_c_library(), "malloc_trim", None):
        trim(0)


class _Mallinfo2(ctypes.Structure):
    """What glibc says of its memory, see mallinfo(3); `fordblks` is the number of free bytes that it keeps."""

    _fields_ = [(name, ctypes.c_size_t) for name in MALLINFO2]


@cache
def _c_library() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if sys.platform == "linux" else None


def _left_of_limits(root: Path) -> Iterator[int]:
    """Yield the bytes left below the memory limits of the control groups of this process (containers have one)."""
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
            maximum, current = _lines(group / limit), _lines(group / used)
            if maximum and current and maximum[0].strip() != "max":
                caches = (line.split() for line in _lines(group / "memory.stat"))
                yield int(maximum[0]) - int(current[0]) + sum(int(bytes_) for name, bytes_ in caches if name == cached)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:  # no such file, or no right to read it
        return []
