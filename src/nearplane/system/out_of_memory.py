"""Errors of full devices and of the system's limits as one sentence: `DeviceMemoryError`, `SystemLimitError`. Imports no torch.

Memory is planned before a run (`planning/memory_bound.py`), so this error means that something else took memory, or that the plan
was wrong. It is converted where a verb ends (`arguments.py`), and work is never repeated on its account. Limits of the system are
also met outside of verbs (`terminal.py`), and by safetensors, whose own error would name another cause.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from nearplane.errors import DeviceMemoryError, NearplaneError, SystemLimitError, first_line

# what libraries of CUDA, pinned memory, kernels of Triton and Apple's GPUs say, which raise other errors than torch's own
FULL = re.compile(r"CU\w+_STATUS_ALLOC_FAILED|CUDA(\]| error): out of memory|MPS backend out of memory")
ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+ \w+)")
REMEDY = "Use fewer --samples, a shorter --seqlen, for quantize a smaller --device-memory, or --device cpu"

# what Python, torch and the loader of libraries say if the system refuses memory (ulimit -v), a thread or a process (ulimit -u)
REFUSED = re.compile(
    r"can't (start new thread|allocate (lock|memory))|[Cc]annot allocate memory|not enough memory|bad_alloc"
    r"|failed to map segment|Resource temporarily unavailable|unable to mmap"
)


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
