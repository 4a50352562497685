"""Contradictions in a run record that cannot be true for any data, for `nearplane verify`. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator

from nearplane.number_formats import BlockType
from nearplane.recipe.layer_plan import Plan
from nearplane.record.record import LayerRecord, RunRecord
from nearplane.record.tuning_record import KL_TOLERANCE, Tuning


def contradictions(record: RunRecord) -> Iterator[tuple[LayerRecord, str]]:
    """Yield (layer, contradiction) for certificates of a record that cannot be true for any data."""
    recipe = record.recipe.grouped(layer.in_features for layer in record.layers)
    plan = Plan.of(recipe, [layer.name for layer in record.layers])
    own = any(layer.extra_own_loss is not None for layer in record.layers)
    for layer in record.layers:
        yield from ((layer, what) for what in _contradicting(layer, plan))
        if own and (layer.extra_own_loss is None) != (layer.extra_loss is None):
            yield layer, f"extra_own_loss is {layer.extra_own_loss}, but extra_loss is {layer.extra_loss}"


def _contradicting(layer: LayerRecord, plan: Plan) -> Iterator[str]:
    """Yield the contradictions in the certificate of a layer, beside what was decided of it."""
    size, larger = divmod(layer.out_features, max(1, len(layer.row_losses)))  # rows of a group; the first have 1 more
    rows = (size + (index < larger) for index in range(len(layer.row_losses)))
    loss = sum(group * count for group, count in zip(layer.row_losses, rows, strict=True)) / layer.out_features
    if not math.isclose(loss, layer.loss, rel_tol=1e-8, abs_tol=1e-300):
        yield f"row_losses average {loss:.9g}, but loss is {layer.loss:.9g}"
    third = (layer.expected or 0.0) * 3
    if layer.worst_case is not None and not math.isclose(third, layer.worst_case, rel_tol=1e-12, abs_tol=1e-300):
        yield f"expected is {layer.expected}, but a third of worst_case is {layer.worst_case / 3}"
    if plan.recipe.ignores(layer.name):
        yield "the recipe ignores it"
        return
    scheme = plan.layers[layer.name].scheme
    if plan.recipe.allocate == "slope" or isinstance(layer.number_format, BlockType):
        scheme = scheme.stored_in(layer.number_format)
    actual, expected = (layer.format, layer.order), (scheme.number_format.name, scheme.order)
    if actual != expected:
        yield f"number format and order are {actual}, but {expected} in the recipe"
    if not 0 <= layer.clipped <= layer.clipped_rows <= 1:
        yield f"clipped is {layer.clipped}, but clipped_rows is {layer.clipped_rows}"
    if layer.worst_case is not None and layer.clipped_rows == 0 and layer.damped_loss > layer.worst_case * (1 + 1e-9):
        yield f"damped_loss {layer.damped_loss:.6g} is more than worst_case {layer.worst_case:.6g} although nothing clips"


def tuning_contradictions(tuning: Tuning) -> Iterator[str]:
    """Yield contradictions in a record of tuning that cannot be true for any data."""
    fitting = [point for point in tuning.curve if tuning.most is None or (point.bytes or 0) <= tuning.most]
    best = min(fitting, key=lambda point: point.held_out, default=None)
    if best is None:
        yield f"all states of the tuning curve exceed the allowed {tuning.most:,} bytes"
    elif best.step != tuning.kept:
        yield f"the state of step {tuning.kept} was kept, but step {best.step} is the best on the held-out windows"
    kept = next((point.held_out for point in tuning.curve if point.step == tuning.kept), math.nan)
    if not math.isclose(kept, tuning.held_out, rel_tol=KL_TOLERANCE, abs_tol=1e-12):
        yield f"the held-out KL is {tuning.held_out:.9g} from the files, but {kept:.9g} on the curve"
    if [point.step for point in tuning.curve] != sorted({point.step for point in tuning.curve}):
        yield "the steps of the tuning curve do not ascend"
    if not tuning.kept and (tuning.norms or tuning.codes):
        yield "norms or codes have changed although the start was kept"
