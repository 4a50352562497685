"""JSON files of a checkpoint, which anybody may have written: read as objects, or refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nearplane.errors import FormatError, NearplaneError, first_line

LONGEST = 256 * 2**20  # bytes; the index of the largest models has ten million
DEEPEST = 64  # levels of lists and objects; a config has at most five


def read_object(path: Path, *, expected: str, error: type[NearplaneError] = FormatError) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Args:
        path: of the file; pipes and devices are not opened.
        expected: what the file should be and what to do, one sentence without a full stop.
        error: to raise.

    Raises:
        NearplaneError: of the kind `error`: there is no such file, or it is no JSON object, or a monstrous one.
    """
    try:
        if not path.is_file():
            raise ValueError("there is none" if not path.exists() else "it is no file")
        if (size := path.stat().st_size) > LONGEST:
            raise ValueError(f"it has {size:,} bytes")
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ValueError(f"it holds {_kind(data)}, not an object")
        if (levels := depth(data)) > DEEPEST:
            raise ValueError(f"it nests {levels} levels deep")
    except RecursionError as reason:
        raise error(f"{path} cannot be read (it nests too deep). {expected}.") from reason
    except (OSError, ValueError) as reason:
        raise error(f"{path} cannot be read ({first_line(reason)}). {expected}.") from reason
    return data


def depth(data: Any) -> int:
    """Return how many levels of lists and objects JSON has: 0 for a number."""
    levels, level = 0, [data]
    while level := [part for part in level if isinstance(part, dict | list)]:
        levels += 1
        level = [inner for part in level for inner in (part.values() if isinstance(part, dict) else part)]
    return levels


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    return {list: "a list", str: "text", bool: "true or false"}.get(type(value), "a number")


def unordered(value: Any) -> Any:
    """Return JSON with its lists sorted."""
    if isinstance(value, dict):
        return {key: unordered(part) for key, part in value.items()}
    return sorted((unordered(part) for part in value), key=str) if isinstance(value, list) else value
