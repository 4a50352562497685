"""Records of runs that reports are made of: layers on a grid, and at rates of their own."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from nearplane import GridScheme, RateScheme
from nearplane.recipe.recipe import Recipe
from nearplane.record.record import LayerRecord, RunRecord

SHAPES = {
    "self_attn.q_proj": (128, 128), "self_attn.k_proj": (64, 128), "self_attn.v_proj": (64, 128), "self_attn.o_proj": (128, 128),
    "mlp.gate_proj": (352, 128), "mlp.up_proj": (352, 128), "mlp.down_proj": (128, 352),
}  # fmt: skip
RUN = {
    "versions": {"torch": "2.9", "nearplane": "0"}, "device": "cpu", "windows": 256, "seqlen": 256, "tokens": 65536, "seconds": 3.8,
}  # fmt: skip


def on_a_grid(block: int, kind: str, number: int) -> LayerRecord:
    """Return the record of a layer on a 4-bit grid: smooth in the block, other sizes for other kinds, rows clip in every third."""
    out, columns = SHAPES[kind]
    loss = 1e-6 * math.exp(0.9 * number + math.sin(block / 9) + 0.3 * math.sin(7 * block + number))
    clips = 0.02 * (block % 3 == 0)
    return LayerRecord(
        name=f"model.layers.{block}.{kind}", out_features=out, in_features=columns, loss=loss, row_losses=(loss,),
        relative_loss=0.002 * math.exp(0.2 * number + 0.1 * math.cos(block)), nearest_loss=loss * (2 + math.sin(block)),
        damped_loss=1.1 * loss, worst_case=3.5 * loss, expected=3.5 / 3 * loss, gamma=20.0 + number, clipped=clips,
        clipped_rows=20 * clips, correction=0.8, damp=0.01, sweep_damp=0.1, dead=0, tokens=65536, order="activation",
        format="int4-g32", limit=3.6 - 0.1 * number, seconds=0.1, bytes=out * columns * 9 // 16,
    )  # fmt: skip


def entropy_coded(block: int, kind: str, number: int) -> LayerRecord:
    """Return the record of a layer at a rate of its own; those with most inputs have no limit."""
    out, columns = SHAPES[kind]
    rate = 2.5 + 0.5 * math.cos(block / 20) - 0.1 * number
    loss = 1e-5 * math.exp(0.5 * number + math.sin(block))
    return LayerRecord(
        name=f"model.layers.{block}.{kind}", out_features=out, in_features=columns * 32, loss=loss, row_losses=(loss,),
        relative_loss=4.0 ** -(rate + 0.2 * number), nearest_loss=1.5 * loss, damped_loss=1.1 * loss, worst_case=3.3 * loss,
        expected=1.1 * loss, gamma=8.0 + number, correction=0.8, damp=0.01, sweep_damp=0.1, dead=0,
        tokens=65536, order="activation", format="coded", asked=rate, entropy=rate - 0.06, base=0.01,
        limit=rate - 0.3 - 0.01 * number if columns == 128 else None, seconds=0.1, bytes=round(out * columns * 32 * rate / 8),
    )  # fmt: skip


def run_of(blocks: int, layer, **changes) -> RunRecord:
    """Return the record of a run over so many blocks."""
    layers = tuple(layer(block, kind, number) for block in range(blocks) for number, kind in enumerate(SHAPES))
    size = sum(one.bytes for one in layers)
    said = RUN | {"recipe": Recipe(), "source": "somewhere/small-llama", "bytes": size + 5000, "folder": size + 70_000}
    return RunRecord(**(said | {"layers": layers} | changes))


GRID = run_of(5, on_a_grid, recipe=Recipe(scheme=GridScheme(bits=4, group_size=32)))
CODED = run_of(5, entropy_coded, recipe=Recipe(scheme=RateScheme(rate=GRID.rate)))
CODED = replace(CODED, recipe=Recipe(scheme=RateScheme(rate=round(CODED.rate, 3))))


def saved(record: RunRecord, folder: Path) -> Path:
    """Write a record as a checkpoint has it, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "nearplane.json").write_text(record.to_json())
    return folder
