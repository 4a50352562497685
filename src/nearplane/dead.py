"""Inputs that were 0 for every calibration token, in words: made so by quantization, or in the original already. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from nearplane.record import LayerRecord, RunRecord

NOW = "their weights are 0 now"


def dead_inputs(record: RunRecord) -> Iterator[tuple[str, list[str]]]:
    """Yield sentences about inputs that were always 0, each with the layers it speaks of: "NAME (12 of 352)".

    Where a row of a layer was rounded to 0 as a whole, as may be of up and gate at few bits, an input of the layer behind became 0.
    """
    pruned, original, unknown = (list[tuple[LayerRecord, int]]() for _ in range(3))
    for layer in record.layers:
        if layer.pruned is None:
            unknown.append((layer, layer.dead))
        else:
            pruned.append((layer, layer.pruned))
            original.append((layer, layer.dead - layer.pruned))
    said: tuple[tuple[list[tuple[LayerRecord, int]], Callable[[int], str]], ...] = (
        (
            pruned,
            lambda n: (
                f"{n:,} neurons were pruned: quantization made these inputs 0 for every calibration token, and {NOW}"
            ),
        ),
        (original, lambda n: f"{n:,} inputs were 0 for every calibration token, in the original network too; {NOW}"),
        (unknown, lambda n: f"{n:,} inputs were 0 for every calibration token; {NOW}"),
    )
    for counts, sentence in said:
        if some := [(layer, count) for layer, count in counts if count]:
            names = [f"{layer.name} ({count} of {layer.in_features})" for layer, count in some]
            yield sentence(sum(count for _, count in some)), names
