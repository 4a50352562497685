"""Steps on two levels: what the search finds, and what fitting them to codes gains."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nearplane.errors import NumericalError
from nearplane.formats.gguf.gguf_layers import packed_blocks, unpack
from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.lattice.kernels_torch import State
from nearplane.lattice.polish import descend
from nearplane.lattice.solvers import round_to_nearest
from nearplane.lattice.superblock import SuperGrid
from nearplane.lattice.superblock_fit import SuperFit, fit_blocks
from nearplane.number_formats import TYPES, BlockFormat, BlockType, integers

FITTED = [kind for kind in TYPES.values() if kind.fit == "blocks"]  # types with levels are fitted otherwise
KINDS = pytest.mark.parametrize("kind", FITTED, ids=lambda kind: kind.name)


@pytest.fixture(name="W")
def weights() -> Tensor:
    source = torch.Generator().manual_seed(0)
    columns = torch.rand(512, generator=source) + 0.2
    return torch.randn(24, 512, generator=source) * columns * 0.02 + 0.003


@pytest.fixture(name="H")
def hessian() -> Tensor:
    X = torch.randn(1024, 512, generator=torch.Generator().manual_seed(1))
    X[:, 1:] += 0.5 * X[:, :-1]
    return X.T @ X / len(X) + 0.02 * torch.eye(512)


def fitted(kind: BlockFormat, W: Tensor, storage: torch.dtype = torch.float16) -> SuperGrid:
    return fit_blocks(kind, W, torch.ones(W.shape[1]), storage)


@KINDS
def test_what_is_found_is_what_files_hold(kind: BlockType, W: Tensor) -> None:
    matrix = round_to_nearest(W, fitted(kind, W))
    back = unpack(kind, packed_blocks(kind, matrix), 512)
    assert back.same_as(matrix)
    assert torch.equal(back.decode(), matrix.decode())


@KINDS
def test_errors_are_those_of_a_good_step(kind: BlockType, W: Tensor) -> None:
    """At most a tenth above uniform errors between steps that reach from one end of every group to the other."""
    values = round_to_nearest(W, fitted(kind, W)).decode()
    groups = W.view(24, -1, kind.group)
    reach = groups.amax(-1) - groups.amin(-1) if not kind.symmetric else 2 * groups.abs().amax(-1)
    uniform = float((reach / (kind.high - kind.low)).square().mean() / 12)
    assert float((W - values).square().mean()) < 1.1 * uniform


def test_minima_are_not_negative_and_no_step_is_0(W: Tensor) -> None:
    for name in ("q2_k", "q4_k", "q5_k"):
        grid = fitted(TYPES[name], W + 0.2)  # whose own minima would be
        assert grid.dmin is not None
        assert bool((grid.dmin >= 0).all())
        assert bool((grid.scale > 0).all())
    assert bool((fitted(TYPES["q4_0"], W).d < 0).any())  # where the far end is positive


@KINDS
@pytest.mark.parametrize("scale", [0.0, 1e-9, 1e3])
def test_zeros_tiny_and_large_weights_have_finite_values(kind: BlockType, W: Tensor, scale: float) -> None:
    W = W * scale
    matrix = round_to_nearest(W, fitted(kind, W))
    assert bool(torch.isfinite(matrix.decode()).all())
    assert bool(torch.isfinite(matrix.grid.zero).all())
    assert float((W - matrix.decode()).abs().max()) <= max(float(W.abs().max()), 2.0**-24)
    packed_blocks(kind, matrix)


@KINDS
def test_weights_too_large_for_16_bits_are_refused(kind: BlockType, W: Tensor) -> None:
    with pytest.raises(NumericalError, match=r"does not fit torch\.float16"):
        fitted(kind, W * 1e12)


@KINDS
def test_fitting_lowers_the_loss_by_what_it_says(kind: BlockType, W: Tensor, H: Tensor) -> None:
    W, H = W.double(), H.double()
    matrix = round_to_nearest(W, fitted(kind, W).to(torch.float64))
    found, gained = descend(W, matrix, H, sweeps=2, fit=SuperFit(matrix.grid, kind, torch.float16))
    before, after = (((E @ H) * E).sum(1) for E in (W - matrix.decode(), W - found.decode()))
    torch.testing.assert_close(after - before, gained, rtol=1e-9, atol=1e-12)
    assert bool((gained <= 0).all())
    assert float(after.sum()) < 0.8 * float(before.sum())
    single = found.grid.to(torch.float32)
    assert packed_blocks(kind, type(found)(codes=found.codes, grid=single)).shape == (
        24,
        512 // kind.columns * kind.bytes,
    )


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("format", [integers(3, 64, minimum=True), integers(8, 32, minimum=True)], ids=lambda f: f.name)
def test_steps_and_minima_are_stored_in_the_dtype_of_the_model(
    format: BlockFormat, storage: torch.dtype, W: Tensor, H: Tensor
) -> None:
    """Of integers with a minimum, before and after the fit; the values are `step * code + minimum` in float32."""
    matrix = round_to_nearest(W + 0.05, fitted(format, W + 0.05, storage))
    found, gained = descend(W + 0.05, matrix, H, sweeps=2, fit=SuperFit(matrix.grid, format, storage))
    assert float(gained.sum()) < 0
    for grid in (matrix.grid, found.grid):
        assert isinstance(grid, SuperGrid)
        for part in (grid.d, grid.dmin):
            assert part is not None
            assert torch.equal(part.to(storage).float(), part)
        step, minimum = (each.repeat_interleave(format.group, 1) for each in (grid.d, -part))
        assert torch.equal(grid.decode(found.codes), step * found.codes + minimum)


@KINDS
def test_steps_alone_come_to_a_least_square(kind: BlockType, W: Tensor, H: Tensor) -> None:
    """From steps that are a tenth too large, with codes of the right ones: most of what that cost is won back."""
    W, H = W.double(), H.double()
    right = round_to_nearest(W, fitted(kind, W).to(torch.float64))
    wrong = right.grid.with_parts({"d": (right.grid.d * 1.1).half().double()})
    matrix = type(right)(codes=right.codes, grid=wrong)
    fit = SuperFit(wrong, kind, torch.float16)
    found = _only_steps(W, matrix, H, fit)
    losses = [float((((W - values) @ H) * (W - values)).sum()) for values in (right.decode(), matrix.decode(), found)]
    assert losses[2] - losses[0] < 0.05 * (losses[1] - losses[0])


def _only_steps(W: Tensor, matrix: QuantizedMatrix[Grid], H: Tensor, fit: SuperFit) -> Tensor:
    """Fit steps three times over while codes stay."""
    grid = matrix.grid
    state = State(
        group=grid.group,
        codebook=grid.codebook,
        scale=grid.scale.T.clone(),
        zero=grid.zero.T.clone(),
        codes=matrix.codes.T.contiguous(),
        E=(W - matrix.decode()).T.contiguous(),
        H=H,
        diagonal=H.diagonal(),
        gained=W.new_zeros(len(W)),
        fitted=W.new_zeros(len(W)),
        moved=torch.zeros((), dtype=torch.bool),
    )
    for _ in range(3):
        for a in range(0, W.shape[1], 256):
            EH = H[a : a + 256] @ state.E
            fit.fit(state, a, a + 256, EH)
            torch.testing.assert_close(EH, H[a : a + 256] @ state.E, rtol=1e-7, atol=1e-10)
    assert math.isfinite(float(state.fitted.sum()))
    return fit.grid(state, grid).decode(matrix.codes)
