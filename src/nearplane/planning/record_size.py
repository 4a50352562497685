"""How long a record may become, known before the run: files that have it inside keep room for it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any, get_type_hints

from nearplane.models.model import Model
from nearplane.record.record import (
    LayerRecord,
    RunRecord,
    one_line,
    row_groups,
)

DIGITS = 24  # of a figure: -1.2345678901234567e-308
WHOLE = 13  # digits of a number of bytes or tokens
FEWER = {"row_losses": 15, "lengths": 12}  # of figures that are written to 9 and 6 digits


def most_bytes(record: RunRecord) -> int:
    """Return the bytes that the JSON of a record takes at most, whatever its figures become."""

    def widest(part: Any, name: str = "") -> Any:
        if isinstance(part, dict):
            return {key: widest(inner, key) for key, inner in part.items()}
        if isinstance(part, list | tuple):
            return [widest(inner, name) for inner in part]
        digits = {float: FEWER.get(name, DIGITS), int: WHOLE}.get(type(part))
        return part if digits is None else 10 ** (digits - 1)

    return len(one_line(json.dumps(widest(asdict(replace(record, digest=64 * "0"))), indent=1)).encode())


def longest_record(model: Model, record: RunRecord) -> int:
    """Return the bytes that the record of a run takes at most in the end.

    Args:
        model: that is quantized.
        record: as it is when the run begins.
    """
    figures: dict[str, Any] = {
        name: 0.0 for name, kind in get_type_hints(LayerRecord).items() if kind in (float, float | None)
    }
    figures |= dict.fromkeys(("dead", "tokens", "pruned", "bytes"), 0)
    figures |= {"format": "q4_k", "checksum": 64 * "0", "order": record.recipe.scheme.order}
    layers = (
        LayerRecord(
            name=layer.name,
            stored=layer.written(model.weights),
            out_features=layer.shape[0],
            in_features=layer.shape[1],
            row_losses=(0.0,) * row_groups(*layer.shape),
            **figures,
        )
        for layer in model.layers
    )
    found = replace(
        record,
        layers=tuple(layers),
    )
    return most_bytes(found)
