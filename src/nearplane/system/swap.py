"""Swap two folders atomically, where the operating system can. Needs no torch."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

HERE, SWAP = -100, 2  # AT_FDCWD; RENAME_EXCHANGE of Linux and RENAME_SWAP of macOS


def swap(one: Path, other: Path) -> bool:
    """Swap the names of two folders of one file system; return False where the system cannot, and nothing was done."""
    if sys.platform not in ("linux", "darwin"):
        return False
    library, a, b = ctypes.CDLL(None, use_errno=True), os.fsencode(one), os.fsencode(other)
    if function := getattr(library, "renameat2", None):
        return bool(function(HERE, a, HERE, b, SWAP) == 0)
    if function := getattr(library, "renamex_np", None):
        return bool(function(a, b, SWAP) == 0)
    return False
