"""Shapes of tensors in a folder of safetensors files, for refusals before torch is loaded. Needs no torch."""

from __future__ import annotations

import re
from pathlib import Path

from safetensors import SafetensorError, safe_open


def shapes_in(folder: Path, pattern: re.Pattern[str]) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of the tensors whose names match, from the headers of the files.

    A file that cannot be read is left out: whoever reads the tensors says what is wrong with it.

    Args:
        folder: Folder of the files.
        pattern: Regular expression for whole names.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "np") as file:
                names = [name for name in file.keys() if pattern.fullmatch(name)]  # noqa: SIM118  it is no mapping
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in names}
        except (SafetensorError, OSError):
            continue
    return shapes
