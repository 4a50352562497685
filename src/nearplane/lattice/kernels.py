"""Kernels: what is computed column by column or step by step, looked up by a tensor's own device and imported on first use.

Numba compiles them for the CPU; every other device has the torch forms, which are also the oracles of the compiled ones. To add a
device, write a function that imports such a `Kernels`, and one line of the table below.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The kernels of a device; each takes and does what its form in `kernels_torch.py` says.

    Args:
        sweep: rounds a block of columns, errors fed forward; of nearest plane and of the descent on codes.
        search: finds the best of some steps for every group.
        beam: carries several candidates of every row through a block of columns.
        trace: follows these back to the block's start.
        memory: bytes that the targets and codes of a beam may take.
        lanes: rows that the beam takes at a time.
    """

    sweep: Callable[..., None]
    search: Callable[..., Tensor]
    beam: Callable[..., tuple[Tensor, Tensor]]
    trace: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    memory: Callable[[torch.device], int]
    lanes: int = 1


@cache
def _numba() -> Kernels:
    from nearplane.lattice import beam_cpu, kernels_cpu

    return Kernels(
        sweep=kernels_cpu.sweep_block,
        search=kernels_cpu.best_candidate,
        beam=beam_cpu.beam_block,
        trace=beam_cpu.trace,
        memory=beam_cpu.memory,
        lanes=beam_cpu.LANES,
    )


@cache
def torch_kernels() -> Kernels:
    """Return the torch forms, which every device can run."""
    from nearplane.lattice import kernels_torch as forms

    return Kernels(
        sweep=forms.sweep_block,
        search=forms.best_candidate,
        beam=forms.beam_block,
        trace=forms.trace,
        memory=forms.memory,
    )


KERNELS: dict[str, Callable[[], Kernels]] = {"cpu": _numba}


def kernels_of(tensor: Tensor) -> Kernels:
    """Return the kernels for a tensor's device; the torch forms where it has none of its own."""
    return KERNELS.get(tensor.device.type, torch_kernels)()
