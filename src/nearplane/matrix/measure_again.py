"""A matrix that is there already, measured anew: what `verify` compares with, and what a tuned checkpoint says of itself."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nearplane.lattice.grid import QuantizedMatrix
from nearplane.matrix.certificate import measure
from nearplane.matrix.inputs import Inputs, corrected
from nearplane.recipe.schemes import AnyScheme
from nearplane.record.record import LayerRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of a matrix that is there already.

    Args:
        matrix: codes and grid as stored.
        told: what the record says of it: its width and step are taken from there.
        tuned: whether codes and steps were trained after the sweep, which then bounds nothing.
    """

    matrix: QuantizedMatrix
    told: LayerRecord
    tuned: bool = False


def measured_again(name: str, W: Tensor, inputs: Inputs, scheme: AnyScheme, known: Known) -> LayerRecord:
    """Return what a run would record of a layer whose codes and grid are known.

    Args:
        name: of the layer.
        W: (out, in) its original weight.
        inputs: what was seen of its input.
        scheme: of the layer.
        known: its codes and grid, and what is told of them.

    Raises:
        NumericalError: a Hessian cannot be factored.
    """
    told, matrix = known.told, known.matrix.to(W.device)
    target, rho = corrected(W, inputs, scheme)
    own = scheme.storing(told.number_format)
    return measure(name, W, target, matrix, inputs, own, correction=rho, base=told.base, tuned=known.tuned)
