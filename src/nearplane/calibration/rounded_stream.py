"""Rounding of inputs in the quantized network, as runtimes do it, so that targets make up for it.

Modules of the quantized copy of a block multiply rounded inputs. Observers see inputs before that and round them alike. A
global scale is measured at the stage of its layers, over the calibration windows; until then their inputs pass unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, partial

from torch import Tensor

from nearplane.lattice.rounded_inputs import rounded
from nearplane.lattice.shared_grid import divisor_of
from nearplane.models.layers import Layer
from nearplane.number_formats import E2M1, InputRounding

HEADROOM = 4.0  # a power of two changes no step within the range of E4M3; docs/results/tuning.md compares others


class RoundedStream:
    """Rounding of the inputs of quantized layers.

    Args:
        how: Function from the name of a layer to the numbers to which its inputs are rounded; None: they are not.
        known: {layer name: global scale of its inputs} that are not measured.
        headroom: Factor between the largest measured input and the largest one that a measured global scale allows.

    Attributes:
        scales: {layer name: global scale of its inputs}, as far as they are known or measured; empty if they have none.
    """

    def __init__(self, how: Callable[[str], InputRounding | None], known: Mapping[str, float], headroom: float) -> None:
        self.how, self._known, self._headroom, self.scales = cache(how), known, headroom, dict(known)

    def rounded(self, name: str, x: Tensor) -> Tensor:
        """Return inputs (..., in) of a layer as the runtime multiplies them; unchanged before their scale is measured."""
        how = self.how(name)
        if how is None or self._lacks_scale(name):
            return x
        return rounded(x, how, self.scales.get(name))

    def measures(self, group: Iterable[Layer]) -> bool:
        """Return whether layers that share an input still need a global scale."""
        return any(self._lacks_scale(layer.name) for layer in group)

    def _lacks_scale(self, name: str) -> bool:
        how = self.how(name)
        return how is not None and how.global_scale and name not in self.scales

    def measured(self, group: Iterable[Layer], peak: float) -> None:
        """Set the global scale of layers that share an input, which has this largest magnitude."""
        self.scales |= dict.fromkeys((layer.name for layer in group), divisor_of(self._headroom * peak, E2M1[-1]))

    @contextmanager
    def applied(self, layers: Iterable[Layer]) -> Iterator[None]:
        """Let these layers multiply rounded inputs in this context."""
        with ExitStack() as hooks:
            for layer in layers:
                hooks.enter_context(layer.replacing(partial(self.rounded, layer.name)))
            yield
        self.scales = dict(self._known)
