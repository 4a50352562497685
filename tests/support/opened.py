"""Folders of one quantized layer, opened to be written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from checkpoints import config_of_grids
from nearplane.formats.container import Container, Place
from nearplane.formats.table import open_container

GRID = {"bits": 4, "group_size": 32, "symmetric": True}


def config(format: str, **changes: Any) -> dict[str, Any]:
    return config_of_grids(format, ["a"], **(GRID | {"order": "natural"} | changes))


def writer(out: Path, source: Path, format: str = "gptq", shards: int = 1, **options: Any) -> Container:
    place = Place(out=out, source=source, **options)
    return open_container(place, config(format), dtype=torch.float32, shards=shards)


def finish(opened: Container, shards: int = 1, during: Callable[[Container], object] = lambda w: None) -> None:
    """Write shards of one tensor each; `during` happens before the last one is written."""
    with opened as w:
        for i in range(shards - 1):
            w.close_block({f"x{i}": torch.ones(2)})
        during(w)
        w.close_block({f"x{shards - 1}": torch.ones(2)})
        w.record_json = "{}"
