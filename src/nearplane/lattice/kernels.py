"""Kernels of the loops over columns and candidate steps, looked up by the device of a tensor, imported on first use.

Numba compiles them for the CPU, Triton those that it can for CUDA; all other devices use the torch forms, against which
the compiled ones are tested. To add a device, write a function that imports its kernels and returns a `Kernels`, and
add one line to the table below.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from torch import Tensor

from nearplane.errors import RecipeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The kernels of a device; each has the arguments and the effect of its form in `kernels_torch.py`.

    Args:
        sweep: Rounding of a block of columns with errors fed forward, for nearest-plane and coordinate descent.
        search: Selection of the best candidate step for every group.
        beam: Pass of several candidates per row through a block of columns.
        trace: Reconstruction of the candidates' codes back to the start of a block.
        solve_pass: Nearest plane through all columns as one kernel; None: column blocks by `sweep`.
        descend_pass: A pass of coordinate descent as one kernel; None: column blocks by `sweep`.
        beam_bytes: Limit in bytes for the targets and codes of a beam.
        lanes: Number of rows that the beam sweeps together.
    """

    sweep: Callable[..., None]
    search: Callable[..., Tensor]
    beam: Callable[..., tuple[Tensor, Tensor]]
    trace: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    beam_bytes: int
    lanes: int = 1
    solve_pass: Callable[..., None] | None = None
    descend_pass: Callable[..., None] | None = None


@cache
def _numba() -> Kernels:
    from nearplane.lattice import beam_cpu, kernels_cpu

    return Kernels(
        sweep=kernels_cpu.sweep_block,
        search=kernels_cpu.best_candidate,
        beam=beam_cpu.beam_block,
        trace=beam_cpu.trace,
        beam_bytes=beam_cpu.BEAM_BYTES,
        lanes=beam_cpu.LANES,
    )


@cache
def torch_kernels() -> Kernels:
    """Return the torch forms, which run on every device."""
    from nearplane.lattice import kernels_torch as forms

    return Kernels(
        sweep=forms.sweep_block,
        search=forms.best_candidate,
        beam=forms.beam_block,
        trace=forms.trace,
        beam_bytes=forms.BEAM_BYTES,
    )


@cache
def _triton() -> Kernels:
    try:
        from nearplane.lattice import kernels_triton, passes_triton
    except ImportError as error:
        raise RecipeError(
            "triton is not installed, which compiles what runs on a CUDA device. Run pip install triton, or use --device cpu."
        ) from error
    return replace(
        torch_kernels(),
        sweep=kernels_triton.sweep_block,
        search=kernels_triton.best_candidate,
        solve_pass=passes_triton.solve_pass,
        descend_pass=passes_triton.descend_pass,
    )


KERNELS: dict[str, Callable[[], Kernels]] = {"cpu": _numba, "cuda": _triton}


def kernels_of(tensor: Tensor) -> Kernels:
    """Return the kernels for a tensor's device; the torch forms if the device has no others."""
    return KERNELS.get(tensor.device.type, torch_kernels)()
