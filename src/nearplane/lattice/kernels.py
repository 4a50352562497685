"""Kernels of the loops over columns and candidate steps, looked up by the device of a tensor, imported on first use.

Numba compiles them for the CPU, Triton those that it can for CUDA; all other devices use the torch forms, against which
the compiled ones are tested. To add a device, write a function that imports its kernels and returns a `Kernels`, and
add one line to the table below.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from subprocess import CalledProcessError

import torch
from torch import Tensor

from nearplane.errors import RecipeError, first_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The kernels of a device; each has the arguments and the effect of its form in `kernels_torch.py`.

    Args:
        sweep: Rounding of a block of columns with errors fed forward, for nearest-plane and coordinate descent.
        search: Selection of the best candidate step for every group.
        beam: Pass of several candidates per row through a block of columns.
        blocks: Search for the steps of blocks, which `superblocks_torch.py` has in torch.
        add_exactly: Addition of a product to an exact sum.
        solve_pass: Nearest plane through all columns as one kernel; None: column blocks by `sweep`.
        descend_pass: A pass of coordinate descent as one kernel; None: column blocks by `sweep`.
        beam_bytes: Limit in bytes for the targets and codes of a beam.
        beam_block: Columns that the beam sweeps before their errors reach the later ones as one matrix product.
        lanes: Number of rows that the beam sweeps together.
        fit_columns: Fit of the steps of blocks to codes; None: `SuperFit` computes it in torch.
        fit_steps, fit_octaves: Fits of the steps of small groups to codes in float32; None: they are computed in torch.
        least_squares: Search among steps by squared errors in float32; None: it is computed in torch.
    """

    sweep: Callable[..., None]
    search: Callable[..., Tensor]
    beam: Callable[..., tuple[Tensor, Tensor, Tensor]]
    blocks: Callable[..., dict[str, Tensor]]
    add_exactly: Callable[..., Tensor]
    beam_bytes: int
    beam_block: int = 64
    lanes: int = 1
    solve_pass: Callable[..., tuple[Tensor, Tensor]] | None = None
    descend_pass: Callable[..., None] | None = None
    fit_columns: Callable[..., None] | None = None
    fit_steps: Callable[..., None] | None = None
    fit_octaves: Callable[..., None] | None = None
    least_squares: Callable[..., Tensor] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """Sizes of the pieces that a device computes at once: a CPU has caches, a GPU takes long to start an operation.

    Args:
        strip_rows: Rows of a layer that are solved together; the last strip may have fewer.
        numbers: Numbers of the rows that are handled at once, if these are more than those asked for.
        span: Columns of a block of `X^T X`, of which only blocks on and above the diagonal are formed.
        summed: Numbers of an exact sum that are converted at once.
        cholesky: Columns that are factored at once.
        triangle: Rows of a triangular system that are solved at once, by one thread; None: all, by the device's own solver.
        products: Most products by which rows are multiplied with a triangle; None: one for every 512 columns.
        waits: Whether a number that is read from the device waits for all that it has begun.
    """

    strip_rows: int
    numbers: int
    span: int
    summed: int
    cholesky: int
    triangle: int | None
    products: int | None
    waits: bool


CPU = Tiling(strip_rows=512, numbers=0, span=256, summed=1 << 16, cholesky=192, triangle=96, products=None, waits=False)
GPU = Tiling(
    strip_rows=4096, numbers=1 << 24, span=1024, summed=1 << 22, cholesky=4096, triangle=None, products=4, waits=True
)


def tiling_of(device: torch.device) -> Tiling:
    """Return the sizes of a device, which need none of its kernels."""
    return CPU if device.type == "cpu" else GPU


@cache
def _numba() -> Kernels:
    from nearplane.lattice import beam_cpu, kernels_cpu, steps_cpu, superblocks_cpu, superblocks_torch

    return Kernels(
        sweep=kernels_cpu.sweep_block,
        search=kernels_cpu.best_candidate,
        beam=beam_cpu.beam_paths,
        blocks=partial(
            superblocks_torch.search, search_groups=superblocks_cpu.groups_of, search_blocks=superblocks_cpu.blocks_of
        ),
        add_exactly=kernels_cpu.add_exactly,
        beam_bytes=beam_cpu.BEAM_BYTES,
        lanes=beam_cpu.LANES,
        fit_steps=steps_cpu.fit_steps,
        fit_octaves=steps_cpu.fit_octaves,
        least_squares=steps_cpu.least_squares,
    )


@cache
def torch_kernels() -> Kernels:
    """Return the torch forms, which run on every device."""
    from nearplane.lattice import kernels_torch as forms
    from nearplane.lattice import superblocks_torch

    return Kernels(
        sweep=forms.sweep_block,
        search=forms.best_candidate,
        beam=forms.beam_paths,
        blocks=superblocks_torch.search,
        add_exactly=forms.add_exactly,
        beam_bytes=forms.BEAM_BYTES,
    )


@cache
def _triton() -> Kernels:
    if find_spec("triton") is None:
        raise RecipeError(
            "triton is not installed, which compiles what runs on a CUDA device. Run pip install triton, or use --device cpu."
        )
    if torch.cuda.is_available():
        _check_triton()
    from nearplane.lattice import (
        beam_triton,
        kernels_triton,
        passes_triton,
        superblocks_triton,
        superfit_triton,
    )

    return replace(
        torch_kernels(),
        sweep=kernels_triton.sweep_block,
        search=kernels_triton.best_candidate,
        solve_pass=passes_triton.solve_pass,
        descend_pass=passes_triton.descend_pass,
        beam=beam_triton.beam_paths,
        blocks=superblocks_triton.search,
        add_exactly=kernels_triton.add_exactly,
        beam_block=beam_triton.BLOCK,
        fit_columns=superfit_triton.fit_columns,
    )


def _check_triton() -> None:
    """Let Triton start its own library for the GPU, which it compiles when it is first used.

    Raises:
        RecipeError: It cannot.
    """
    from triton.runtime import driver

    try:
        driver.active.get_current_target()
    except (RuntimeError, OSError, AssertionError, CalledProcessError) as error:
        raise RecipeError(
            f"triton does not start on the CUDA device: {first_line(error)} It needs a C compiler and the headers of Python, "
            f"for example by apt install gcc python3-dev. Or use --device cpu."
        ) from error


KERNELS: dict[str, Callable[[], Kernels]] = {"cpu": _numba, "cuda": _triton}


def kernels_of(tensor: Tensor) -> Kernels:
    """Return the kernels for a tensor's device; the torch forms if the device has no others."""
    return KERNELS.get(tensor.device.type, torch_kernels)()
