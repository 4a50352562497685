"""Memory: what is free on the CPU, how unused memory goes back to the system, and errors where there is none left. Needs no torch.

Memory is planned before a run (`planning/memory_bound.py`), so a full device means that something else took memory, or that the
plan was wrong. The error of torch is converted where a verb ends (`arguments.py`), and work is never repeated on its account.
Limits of the system are also met outside of verbs (`terminal.py`), and by safetensors, whose own error would name another cause.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from nearplane.errors import DeviceMemoryError, NearplaneError, SystemLimitError, first_line

# bytes; forward passes often allocate smaller blocks: system calls took 14 % of a run with 4 MB here, 1 % with 16 MB
LARGE_BLOCK = 16 << 20
# bytes of freed memory that the C library may keep: with half of this, 1.6 times as many pages are fetched again
KEPT = 256 << 20
MALLINFO2 = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
PAUSE = 0.03  # seconds between questions how much freed memory the C library keeps
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # parameters of mallopt

_asked = -PAUSE  # time of the last question
_others = 0  # bytes of this process that the C library does not count, when they were last measured
# what libraries of CUDA, pinned memory, kernels of Triton and Apple's GPUs say, which raise other errors than torch's own
FULL = re.compile(r"CU\w+_STATUS_ALLOC_FAILED|CUDA(\]| error): out of memory|MPS backend out of memory")
ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+ \w+)")
REMEDY = "Use fewer --samples, a shorter --seqlen, for quantize a smaller --device-memory, or --device cpu"

# what Python, torch and the loader of libraries say if the system refuses memory (ulimit -v), a thread or a process (ulimit -u)
REFUSED = re.compile(
    r"can't (start new thread|allocate (lock|memory))|[Cc]annot allocate memory|not enough memory|bad_alloc"
    r"|failed to map segment|Resource temporarily unavailable|unable to mmap"
)


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
    return None if (pages := _pages(root)) is None else pages[0] * os.sysconf("SC_PAGE_SIZE")


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
    uncounted = _uncounted()
    if uncounted is None or uncounted - _others > KEPT:
        release_all()


def release_all() -> None:
    """Return all memory that was freed to the system, for the start of a run: what it keeps is not needed again soon."""
    global _others
    if trim := getattr(_c_library(), "malloc_trim", None):
        trim(0)
        _others = _uncounted() or 0


def _uncounted() -> int | None:
    """Return the bytes of this process that the C library does not count as used: freed pages, and those of others.

    It counts as free also what it has returned to the system, so that its number of free bytes would not do. None if the
    system or the library does not say.
    """
    ask, pages = getattr(_c_library(), "mallinfo2", None), _pages(Path("/"))  # glibc 2.33 and newer
    if ask is None or pages is None:
        return None
    ask.restype = _Mallinfo2
    found, (all_pages, of_files) = ask(), pages
    return (all_pages - of_files) * os.sysconf("SC_PAGE_SIZE") - int(found.uordblks) - int(found.hblkhd)


def _pages(root: Path) -> tuple[int, int] | None:
    """Return the resident pages of this process, all and those of files; None if they are unknown."""
    for line in _lines(root / "proc/self/statm"):
        every, of_files = map(int, line.split()[1:3])
        return every, of_files
    return None


class _Mallinfo2(ctypes.Structure):
    """What glibc says of its memory, see mallinfo(3): bytes in use are `uordblks`, and `hblkhd` in blocks of their own."""

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


@contextmanager
def working_on(name: str) -> Iterator[None]:
    """Name the block or layer in out-of-memory errors that are raised within; the innermost name counts."""
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            error.add_note(name)
        raise


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether torch raised this error because a device is full."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, torch.OutOfMemoryError) or FULL.search(str(error)) is not None


def device_full(error: BaseException) -> DeviceMemoryError:
    """Return the error to raise in place of one of torch: with the layer, the bytes that were asked for, and what to change."""
    notes, asked = getattr(error, "__notes__", []), ASKED.search(str(error))
    where = f"{notes[0]}: the device" if notes else "The device"
    size = f"{asked[1]} more" if asked else "more"
    return DeviceMemoryError(f"{where} has no room for {size}. {REMEDY}.")


def is_refused(error: BaseException) -> bool:
    """Return whether an error says that the system refuses this process memory, a thread or another process."""
    if isinstance(error, NearplaneError):  # may quote such a message
        return False
    return isinstance(error, MemoryError) or REFUSED.search(str(error)) is not None


def system_limit(error: Exception) -> SystemLimitError:
    """Return the error to raise in place of one for which `is_refused` holds, with its notes on files and layers."""
    notes = " ".join(getattr(error, "__notes__", []))
    return SystemLimitError(
        f"The system gives this process no more memory or threads ({first_line(error)}). Raise its limits (ulimit -v, ulimit -u, "
        f"or those of the container or job), close other programs, or use fewer threads (OMP_NUM_THREADS). {notes}".strip()
    )
