"""How often the steps of a solve wait for a GPU: a few times, however many columns, blocks, groups and rows there are.

Loops are made short by small blocks, so that each of them has several turns. Results are compared with the CPU's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nearplane.errors import NumericalError
from nearplane.lattice import bounds, kernels, polish
from nearplane.lattice.beam import k_best
from nearplane.lattice.bounds import certify, limit, losses_on_extra
from nearplane.lattice.factor import Factor, factorize
from nearplane.lattice.grid import Codebook, QuantizedMatrix
from nearplane.lattice.moments import Extra, trust
from nearplane.lattice.octaves import OctaveFit, octaves
from nearplane.lattice.pivoted_order import pivoted_order
from nearplane.lattice.polish import Fit, PlainFit, descend
from nearplane.lattice.product_grid import ProductGrid
from nearplane.lattice.scale import Steps
from nearplane.lattice.solvers import Solution, nearest_plane, round_to_nearest, sweep_planes
from nearplane.lattice.superblock_fit import SuperFit, fit_blocks
from nearplane.matrix.to_rate import scaled
from nearplane.number_formats import MXFP4, NVFP4, TYPES, BlockType, integers
from nightly import daily
from pretended import Gpu, Pretend, pretended
from strategies import Problem, problem

PASSES = 3


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    monkeypatch.setattr(kernels, "CPU", replace(kernels.CPU, cholesky=8))
    monkeypatch.setattr(kernels, "GPU", replace(kernels.GPU, cholesky=8, numbers=0))
    monkeypatch.setattr(polish, "SPAN", 8)
    monkeypatch.setattr(bounds, "MEASURED_ROWS", 4)
    with pretended() as opened:
        yield opened


def on_gpu(x: Tensor) -> Tensor:
    """Return a tensor on the card, nothing of it counted."""
    return Pretend(x.clone(), 0)


def moved(f: Factor) -> Factor:
    """Return a factor on the card."""
    return replace(f, order=on_gpu(f.order), U=on_gpu(f.U), d=on_gpu(f.d), dead=on_gpu(f.dead))


def waits(gpu: Gpu) -> int:
    """Return how often the CPU has waited for a value of the card."""
    return gpu.total.synchronizations + gpu.total.to_host


def solved(gpu: Gpu) -> tuple[Problem, Factor, Factor, QuantizedMatrix, QuantizedMatrix]:
    """Return a problem with factor and codes, on the CPU and on the card."""
    p = problem(0, out=12, columns=32, tokens=64)
    f = p.factor("activation")
    matrix = nearest_plane(p.W, p.grid, f)
    there = matrix.to("pretend:0")
    gpu.forget()
    return p, f, moved(f), matrix, there


def test_a_factorization_waits_twice(gpu: Gpu) -> None:
    H = problem(0, columns=32, tokens=64).H
    found, expected = factorize(on_gpu(H)), factorize(H)
    assert waits(gpu) == 2
    assert torch.equal(found.U.held, expected.U)
    assert torch.equal(found.d.held, expected.d)


@pytest.mark.parametrize("tokens", [3, 20])
def test_a_factorization_that_fails_names_the_same_column(gpu: Gpu, tokens: int) -> None:
    H = problem(0, columns=32, tokens=tokens).H
    with pytest.raises(NumericalError) as expected:
        factorize(H, damp=0)
    with pytest.raises(NumericalError) as found:
        factorize(on_gpu(H), damp=0)
    assert str(found.value) == str(expected.value)


def test_a_pivoted_order_waits_for_nothing(gpu: Gpu) -> None:
    H = problem(0, columns=32, tokens=64).H
    assert torch.equal(pivoted_order(on_gpu(H), panel=4).held, pivoted_order(H, panel=4))
    assert waits(gpu) == 0


def test_a_sweep_waits_once(gpu: Gpu) -> None:
    p, _, there, matrix, _ = solved(gpu)
    grid = p.grid.to("pretend:0")
    gpu.forget()
    found = sweep_planes(on_gpu(p.W), grid, there, block=8)
    assert waits(gpu) == 1
    assert torch.equal(found.matrix.codes.held, matrix.codes)


def test_a_beam_waits_once_and_copies_nothing(gpu: Gpu) -> None:
    p, f, there, matrix, on_card = solved(gpu)
    found = k_best(on_gpu(p.W), on_card.grid, there, beam=3, block=8)
    assert (waits(gpu), gpu.total.to_device) == (1, 0)
    assert torch.equal(found.codes.held, k_best(p.W, matrix.grid, f, beam=3, block=8).codes)


def test_a_beam_keeps_its_candidates_at_dead_inputs(gpu: Gpu) -> None:
    p = problem(1, out=12, columns=12, tokens=32, dead=4)
    f, grid = p.factor("activation"), p.grid.to("pretend:0")
    found = k_best(on_gpu(p.W), grid, moved(f), beam=3, block=4)
    assert torch.equal(found.codes.held, k_best(p.W, p.grid, f, beam=3, block=4).codes)


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_search_of_steps_waits_once(gpu: Gpu, symmetric: bool) -> None:
    W = problem(0, out=12, columns=32).W.float()
    steps = Steps(format=integers(3, 8, symmetric=symmetric), search="mse", storage=torch.float16)
    found, expected = steps.grid(on_gpu(W)), steps.grid(W)
    assert (waits(gpu), gpu.total.to_device) == (1, 1)
    assert torch.equal(found.scale.held, expected.scale)


@pytest.mark.parametrize("name", ["q4_1", "q3_k"])
def test_a_search_of_blocks_waits_once(gpu: Gpu, name: str) -> None:
    W, kind = problem(0, out=12, columns=256).W.float(), TYPES[name]
    importance = torch.linspace(0.5, 2, 256)
    found = fit_blocks(kind, on_gpu(W), on_gpu(importance), torch.float16)
    assert (waits(gpu), gpu.total.to_device) == (1, 0 if kind.single else 1)
    for key, part in fit_blocks(kind, W, importance, torch.float16).parts.items():
        assert torch.equal(found.parts[key].held, part)


def fits(name: str, W: Tensor) -> tuple[QuantizedMatrix, Fit]:
    """Return codes of W and a fit of their steps."""
    if name == "plain":
        grid = Steps(format=integers(3, 4), search="minmax", storage=torch.float32).grid(W)
        return QuantizedMatrix(codes=grid.round(W)[0].int(), grid=grid), PlainFit(torch.float32)
    if name == "octaves":
        grid, _ = octaves(W, torch.ones(W.shape[1]), Steps(format=MXFP4, search="mse", storage=torch.float32))
        return QuantizedMatrix(codes=grid.round(W)[0].int(), grid=grid), OctaveFit()
    kind = TYPES[name]
    assert isinstance(kind, BlockType)
    blocks = fit_blocks(kind, W, torch.ones(W.shape[1]), torch.float16)
    return QuantizedMatrix(codes=blocks.round(W)[0].int(), grid=blocks), SuperFit(blocks, kind, torch.float16)


@pytest.mark.parametrize("name", daily(["plain", "octaves", "q4_1", "q4_k"], ["plain", "q4_1"]))
def test_a_descent_reads_the_groups_once_and_a_flag_after_all_passes_but_the_last(
    gpu: Gpu, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "q4_k":
        monkeypatch.setattr(polish, "SPAN", 256)  # a whole block
    p = problem(0, out=12, columns=512 if name == "q4_k" else 64, tokens=600)
    W, H = p.W.float(), p.H.float()
    (matrix, fit), (_, same_fit) = fits(name, W), fits(name, W)
    there = matrix.to("pretend:0")
    if isinstance(same_fit, SuperFit):
        same_fit.parts = {key: on_gpu(part) for key, part in same_fit.parts.items()}
    gpu.forget()
    found, gained = descend(on_gpu(W), there, on_gpu(H), sweeps=PASSES, fit=same_fit)
    assert waits(gpu) == 1 + PASSES - 1
    assert gpu.total.to_device <= 1
    expected, expected_gain = descend(W, matrix, H, sweeps=PASSES, fit=fit)
    assert torch.equal(found.codes.held, expected.codes)
    assert torch.allclose(gained.held, expected_gain, rtol=1e-4, atol=0)


def test_codes_that_do_not_move_end_a_descent(gpu: Gpu) -> None:
    p, _, _, matrix, there = solved(gpu)
    H = p.H + torch.eye(32, dtype=torch.float64)
    still, _ = descend(p.W, matrix, H, sweeps=50)
    there = still.to("pretend:0")
    gpu.forget()
    descend(on_gpu(p.W), there, on_gpu(H), sweeps=50)
    assert waits(gpu) == 1


def test_levels_are_copied_once(gpu: Gpu) -> None:
    book = Codebook(low=0, high=len(NVFP4.levels) - 1, levels=torch.tensor(NVFP4.levels, dtype=torch.float64))
    x = on_gpu(torch.linspace(-7, 7, 40))
    for _ in range(3):
        codes = book.nearest(x)
        values = book.position(codes)
    assert gpu.total.to_device == 1
    assert torch.equal(values.held, book.position(book.nearest(x.held)))


@pytest.mark.parametrize("solver", ["swept", "to nearest", "neither"])
def test_a_certificate_waits_twice_and_extra_windows_not_at_all(gpu: Gpu, solver: str) -> None:
    p, f, there, matrix, _ = solved(gpu)
    matrix = round_to_nearest(p.W, p.grid) if solver == "to nearest" else matrix
    outside = torch.zeros(12, dtype=torch.int32) if solver == "swept" else None
    on_card = matrix.to("pretend:0")
    gpu.forget()
    solution = Solution(matrix=matrix, outside=outside)
    solution_there = Solution(matrix=on_card, outside=None if outside is None else on_gpu(outside))
    found = certify(on_gpu(p.W), on_gpu(p.W), solution_there, on_gpu(p.H), there)
    assert waits(gpu) == 2
    expected = certify(p.W, p.W, solution, p.H, f)
    for name, figure in expected._replace(row_losses=expected.row_losses.tolist())._asdict().items():
        found_too = found.row_losses.held.tolist() if name == "row_losses" else getattr(found, name)
        assert found_too == (figure if isinstance(figure, str | None) else pytest.approx(figure, rel=1e-12))
    gpu.forget()
    losses_on_extra(on_gpu(p.W), on_gpu(p.W), on_card, Extra(X_hat=on_gpu(p.X)))
    assert waits(gpu) == 0


def test_a_limit_waits_twice_where_all_energies_are_positive(gpu: Gpu) -> None:
    rows, lengths = torch.rand(20, dtype=torch.float64) + 0.1, torch.rand(30, dtype=torch.float64) + 0.1
    found = limit(0.05, on_gpu(rows), on_gpu(lengths))
    assert waits(gpu) == 2
    assert found == limit(0.05, rows, lengths)


def test_the_weight_of_a_correction_waits_once(gpu: Gpu) -> None:
    p = problem(0, out=12, columns=32, tokens=64)
    lost = p.W @ p.H
    found = trust(on_gpu(lost), on_gpu(p.H), on_gpu(p.W * 2))
    assert waits(gpu) == 1
    assert found == trust(lost, p.H, p.W * 2) == pytest.approx(0.5)


def test_the_factor_of_a_matrix_at_a_rate_waits_once(gpu: Gpu) -> None:
    p = problem(0, out=12, columns=32, tokens=64)
    ones = torch.zeros(32, dtype=torch.int32), torch.zeros(12, dtype=torch.int32)
    grid = ProductGrid(base=0.25, columns=ones[0], column_resolution=1, rows=ones[1], row_resolution=1)
    matrix = QuantizedMatrix(codes=(p.W / 0.25).round().int(), grid=grid)
    there = matrix.to("pretend:0")
    gpu.forget()
    found = scaled(there, on_gpu(p.W), on_gpu(p.H))
    assert waits(gpu) == 1
    assert found.grid.base == scaled(matrix, p.W, p.H).grid.base


@pytest.mark.parametrize(("largest", "size"), [(127, 1), (255, 1), (256, 2), (1 << 15, 4)])
def test_codes_leave_a_gpu_in_the_narrowest_dtype_that_holds_them(gpu: Gpu, largest: int, size: int) -> None:
    p = problem(0, out=4, columns=8)
    matrix = QuantizedMatrix(codes=torch.randint(0, largest, (4, 8), dtype=torch.int32), grid=p.grid)
    matrix.codes[0, 0] = largest
    there = matrix.to("pretend:0")
    gpu.forget()
    there.grid.to("cpu")
    of_the_grid = gpu.total.to_host_bytes
    gpu.forget()
    back = there.to("cpu")
    assert gpu.total.to_host_bytes - of_the_grid == size * 32
    assert back.codes.dtype == torch.int32
    assert torch.equal(back.codes, matrix.codes)
