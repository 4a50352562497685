"""Sizes as typed ("3.1GB") and as printed ("3.10 GB"), free space on a disk, and counts as text. Needs no torch."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from typing import NamedTuple

from nearplane.errors import RecipeError
from nearplane.system.paths import MAX_FILE, UNFINISHED

SIZE_UNITS = ("bytes", "KB", "MB", "GB", "TB")  # each is 1000 times the one before


RESERVE = 1.05  # factor of a recommended limit of memory, because resident memory at the start differs between runs


def enough(size: int) -> str:
    """Return a limit of memory that suffices for so many bytes, as the options take it."""
    return f"{math.ceil(RESERVE * size / 1e7) / 100:.2f}GB"


class Limits(NamedTuple):
    """Limits of a run's memory in bytes, of the host (--memory) and of a GPU (--device-memory); None: what is free counts."""

    host: int | None = None
    device: int | None = None

    @classmethod
    def of(cls, memory: str | int | None, device_memory: str | int | None) -> Limits:
        """Read both options.

        Raises:
            RecipeError: One is no size.
        """
        given = (("memory", memory), ("device-memory", device_memory))
        return cls(*(None if value is None else bytes_in(str(value), called) for called, value in given))

    def options(self) -> list[str]:
        """Return the options that are given."""
        return [name for name, limit in zip(("--memory", "--device-memory"), self, strict=True) if limit is not None]


NO_LIMITS = Limits()


def bytes_in(text: str, called: str = "size") -> int:
    """Return the number of bytes in a text like "350KB", "2.9GiB" or "1000000"; `called` is the option, for errors.

    Raises:
        RecipeError: The text is not a positive number, or has another unit.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(?:([KMGT])(I?)B|B?)\s*", text, re.ASCII | re.IGNORECASE)
    if not match or float(match[1]) <= 0:
        raise RecipeError(
            f"{called} is {text[:60]!r}; expected a number of bytes or one with a unit: 3.1GB, 800MB, 2.9GiB."
        )
    power = "KMGT".index(match[2].upper()) + 1 if match[2] else 0
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def check_room(out: Path, needed: int, *, joined: int = 0) -> None:
    """Refuse a folder for which its disk has too little free space; what a stopped run has written is not needed again.

    Args:
        out: Folder to write.
        needed: Bytes of the folder.
        joined: Bytes of weights that are joined to files, of which the largest is on the disk twice while it is made.

    Raises:
        RecipeError: The folder does not fit.
    """
    needed += min(joined, MAX_FILE)
    place = out.resolve()
    unfinished = place.with_name(place.name + UNFINISHED)
    written = sum(path.stat().st_size for path in unfinished.rglob("*") if path.is_file())
    free = shutil.disk_usage(next(folder for folder in place.parents if folder.is_dir())).free
    if needed - written > free:
        raise RecipeError(
            f"{out} needs about {size_text(needed - written)} of disk space, but only {size_text(free)} are free there. Free some "
            f"space or choose another folder."
        )


def size_text(size: int) -> str:
    """Return a number of bytes in three digits with a suitable unit: "512 bytes", "412 KB", "1.25 MB"."""
    value, unit = float(size), 0
    while abs(value) >= 999.5 and unit < len(SIZE_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    digits = 0 if unit == 0 or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:,.{digits}f} {SIZE_UNITS[unit]}"


def three_places(value: float | None) -> str:
    """Return a number with three decimal places, or a dash for None."""
    return "-" if value is None else f"{value:.3f}"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun in singular or plural: "1 window", "1,024 windows"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
