"""Every figure of a certificate, from its definition in `record.py`, by numpy in float64."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import product

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearplane.coding.blob import Contents, decode, encode, size
from nearplane.lattice.bounds import limit
from nearplane.lattice.factor import order_by
from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.lattice.moments import Extra, Moments
from nearplane.lattice.pivoted_order import pivoted_order
from nearplane.lattice.product_grid import ProductGrid
from nearplane.matrix import certificate
from nearplane.matrix.certificate import SolvedMatrix, measured_rows, record_of
from nearplane.matrix.inputs import LayerInput, corrected
from nearplane.matrix.quantize_matrix import quantize_matrix, quantize_matrix_to_rate
from nearplane.recipe.rate_scheme import RateScheme
from nearplane.recipe.schemes import GridScheme
from nearplane.record.record import LayerRecord, row_groups
from nightly import daily_of_several
from pretended import Pretend, pretended
from strategies import problem

Array = NDArray[np.float64]
OUT, COLUMNS, TOKENS = 48, 32, 300
ELSEWHERE = torch.randn(2, 50, COLUMNS, generator=torch.Generator().manual_seed(9)) + 1  # extra rows: of both networks

SOURCES = (20, 30)  # extra rows of each of two texts


def inputs_of(seed: int = 0, *, dead: int = 2) -> tuple[Tensor, Tensor]:
    """Return weights (out, in) and inputs (tokens, in), some of them dead, their lengths a thousandfold apart."""
    p = problem(seed=seed, out=OUT, columns=COLUMNS, tokens=TOKENS, dead=dead)
    return p.W, p.X


def seen(X: Tensor, seed: int = 1) -> Moments:
    """Return what calibration knows where layers before are quantized: `X` was something else in the original network."""
    noise = torch.randn(X.shape, generator=torch.Generator().manual_seed(seed), dtype=X.dtype)
    original = X + 0.2 * (noise + X.roll(1, 1)) * (X != 0)

    def moments(tokens: slice) -> Moments:
        x, n = X[tokens], len(X[tokens])
        return Moments(H=x.T @ x / n, C=original[tokens].T @ x / n, tokens=n)

    alive = (original != 0).any(0)
    alive[(X == 0).all(0).nonzero()[:1]] = True  # one of the dead inputs was not dead before
    extra = Extra(X_hat=ELSEWHERE[1], X=ELSEWHERE[0], sizes=SOURCES)
    held_out = moments(slice(len(X) - len(X) // 5, None))
    return replace(moments(slice(None)), held_out=held_out, extra=extra, alive=alive)


class Plain:
    """A matrix measured by the definitions alone: arrays of numpy in float64, nothing taken from the library but the order."""

    def __init__(
        self, target: Tensor, matrix: QuantizedMatrix, base: float | None, H: Tensor, order: str, damp: float
    ) -> None:
        self.T, self.H = target.double().numpy(), H.numpy()
        self.codes = matrix.codes.numpy().astype(np.float64)
        self.low = self.high = None
        match matrix.grid:
            case Grid() as grid:
                group = grid.group.numpy()
                self.scale, self.zero = (
                    np.broadcast_to(part.double().numpy()[:, group], self.T.shape) for part in (grid.scale, grid.zero)
                )
                self.low, self.high, self.weight = grid.low, grid.high, np.ones(len(self.T))
                self.values = self.decoded = self.scale * (self.codes - self.zero)
            case ProductGrid() as grid:
                rows = 2.0 ** (grid.rows.numpy() / grid.row_resolution)
                columns = 2.0 ** (grid.columns.numpy() / grid.column_resolution)
                self.scale, self.zero = base * np.outer(rows, columns), np.zeros(self.T.shape)
                self.weight = rows**-2.0
                single = [x.astype(np.float32) for x in (self.codes, rows[:, None], grid.base * columns)]
                self.decoded = (single[0] * single[1] * single[2]).astype(
                    np.float64
                )  # as readers of the file do, in float32
                self.values = self.scale * self.codes  # what the sweep meant
        self.size = self.T.size
        self.shift = damp * H.diagonal().mean().item()
        damped = self.H + self.shift * np.eye(len(H))
        self.damped = damped
        pivoted = order == "pivoted"
        p = (pivoted_order(torch.from_numpy(damped)) if pivoted else order_by(H.diagonal(), order)).numpy()
        L = np.linalg.cholesky(damped[np.ix_(p, p)][::-1, ::-1])[::-1, ::-1]
        self.order, self.U, self.d = p, L / L.diagonal(), L.diagonal() ** 2
        self.profile = self.d * self.scale[:, p] ** 2  # (out, in)

    def loss(self, values: Array, H: Array | None = None) -> Array:
        """Return (out,) `e H e^T / in`."""
        E = self.T - values
        return np.einsum("oi,ij,oj->o", E, self.H if H is None else H, E) / E.shape[1]

    def nearest(self) -> Array:
        return self.scale * (self._limited(np.rint(self.T / self.scale + self.zero)) - self.zero)

    def sweep(self) -> tuple[Array, Array]:
        """Babai's sweep over all columns: values, and bool what was rounded lay outside the grid."""
        T, scale, zero = (x[:, self.order] for x in (self.T, self.scale, self.zero))
        E, outside = np.zeros_like(T), np.zeros(T.shape, dtype=bool)
        for j in range(T.shape[1]):
            x = (T[:, j] + E[:, :j] @ self.U[:j, j]) / scale[:, j] + zero[:, j]
            outside[:, j] = self.outside(x)
            E[:, j] = T[:, j] - scale[:, j] * (self._limited(np.rint(x)) - zero[:, j])
        values = np.empty_like(T)
        values[:, self.order] = T - E
        return values, outside

    def outside(self, x: Array) -> NDArray[np.bool_]:
        """Say which positions, in steps, lie outside the grid."""
        return np.zeros(x.shape, dtype=bool) if self.low is None else (x < self.low - 0.5) | (x > self.high + 0.5)

    def gamma(self, rows: Array) -> float | None:
        tails = self.profile[:, ::-1].cumsum(1)[:, ::-1]
        return float(np.sqrt((tails / self.profile).max(1))[rows].max()) if rows.any() else None

    def limit(self, loss: float) -> float:
        """Reverse water-filling over all pairs of rows and eigenvalues, the level found by bisection."""
        energy = (self.T**2).mean(1) * self.weight
        variances = np.outer(energy, np.linalg.eigvalsh(self.H).clip(0)).ravel()
        low, high = 0.0, variances.max()
        for _ in range(200):
            level = (low + high) / 2
            low, high = (level, high) if np.minimum(variances, level).mean() < loss else (low, level)
        return float((np.log2(variances[variances > level] / level) / 2).sum() / variances.size)

    def _limited(self, codes: Array) -> Array:
        return codes if self.low is None else codes.clip(self.low, self.high)


def elsewhere(plain: Plain, w: Array) -> dict[str, object]:
    """Return what is measured on extra rows, output by output."""
    x, x_hat = ELSEWHERE.double().numpy()
    outputs = x @ w.T
    lost, nearest = ((outputs - x_hat @ V.T) ** 2 for V in (plain.decoded, plain.nearest()))
    return {
        "extra_loss": lost.mean() / w.shape[1],
        "extra_relative_loss": lost.sum() / (outputs**2).sum(),
        "extra_nearest_loss": nearest.mean() / w.shape[1],
        "extra_own_loss": ((x_hat @ (plain.T - plain.decoded).T) ** 2).sum() / (outputs**2).sum(),
        "extra_by_source": tuple(
            lost[rows].sum() / (outputs[rows] ** 2).sum() for rows in (slice(SOURCES[0]), slice(SOURCES[0], None))
        ),
        "pruned": min(1, int((np.diag(plain.H) == 0).sum())),
    }


NOWHERE = {
    "extra_loss": None,
    "extra_relative_loss": None,
    "extra_nearest_loss": None,
    "extra_own_loss": None,
    "extra_by_source": (),
    "pruned": None,
}


def expected(plain: Plain, W: Tensor, *, swept: bool = True, corrects: bool = False) -> dict[str, object]:
    """Return the measured fields of a record by their definitions; `row_losses` in full."""
    outside = plain.sweep()[1] if swept else plain.outside(plain.T / plain.scale + plain.zero)
    losses, w = plain.loss(plain.decoded), W.double().numpy()
    worst = float(plain.profile.sum(1).mean() / 4 / plain.T.shape[1])
    groups = np.array_split(losses, row_groups(*plain.T.shape))
    return {
        "loss": losses.mean(),
        "row_losses": tuple(group.mean() for group in groups),
        "relative_loss": losses.sum() * plain.T.shape[1] / np.einsum("oi,ij,oj->", w, plain.H, w),
        "nearest_loss": plain.loss(plain.nearest()).mean(),
        "damped_loss": plain.loss(plain.values, plain.damped).mean(),
        "worst_case": worst if swept else None,
        "expected": worst / 3 if swept else None,
        "gamma": plain.gamma(~outside.any(1)) if swept else None,
        "degenerate": "",
        "clipped": outside.mean(),
        "clipped_rows": outside.any(1).mean(),
        "limit": plain.limit((losses * plain.weight).mean()),
        "dead": int((np.diag(plain.H) == 0).sum()),
        "out_features": W.shape[0],
        "in_features": W.shape[1],
    } | (elsewhere(plain, w) if corrects else NOWHERE)  # fmt: skip


TOLERANCES = {"row_losses": 5e-9, "limit": 1e-6}  # 9 digits; a bisection


def agree(record: LayerRecord, wanted: dict[str, object]) -> None:
    """Compare all fields but those that only the run knows: `seconds`, what the file says of tensors, and of experts."""
    names = {field.name for field in fields(LayerRecord)} - {
        "seconds",
        "bytes",
        "checksum",
        "stored",
        "alike",
        "blended",
        "positions",
    }
    assert names == set(wanted)
    for name, value in wanted.items():
        found = getattr(record, name)
        if value is None or isinstance(value, str | int | bool):
            assert found == value, name
        else:
            assert found == pytest.approx(value, rel=TOLERANCES.get(name, 1e-9), abs=0), name


SCHEMES = {
    "as it comes": GridScheme(bits=3, group_size=8),
    "one solve": GridScheme(bits=3, group_size=8, polish=0, rounds=0),
    "two bits with zero-points": GridScheme(bits=2, group_size=8, symmetric=False, order="pivoted", damp=0.03, rounds=3, polish=2),
    "natural order, steps never fitted again": GridScheme(bits=4, group_size=16, order="natural", polish=2, rounds=0),
    "a beam, polished": GridScheme(bits=3, group_size=None, solver="k-best", beam=3, polish=1, rounds=1),
    "damped otherwise in the sweep": GridScheme(bits=3, group_size=8, sweep_damp=0.2, damp=0.001),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "corrects"),
    daily_of_several(product(SCHEMES, (False, True)), [*product(SCHEMES, [True]), (next(iter(SCHEMES)), False)]),
)
def test_every_figure_of_a_fixed_grid_is_its_definition(name: str, corrects: bool) -> None:
    scheme = SCHEMES[name]
    W, X = inputs_of()
    statistics = seen(X) if corrects else Moments(H=X.T @ X / len(X), tokens=len(X))
    matrix, record = quantize_matrix(W, statistics, scheme, name="mlp.up_proj")
    target, rho, *_ = corrected(W, LayerInput.of(statistics), scheme)
    sweep_damp = scheme.sweep_damp or (0.1 if corrects else scheme.damp)
    plain = Plain(target, matrix, None, statistics.H, scheme.order, sweep_damp)
    assert (rho > 0) == corrects
    agree(
        record,
        expected(plain, W, corrects=corrects) | {
            "name": "mlp.up_proj", "correction": rho, "damp": scheme.damp, "sweep_damp": sweep_damp, "tokens": TOKENS,
            "order": scheme.order, "format": scheme.number_format.name,
            "asked": None, "base": None, "entropy": None,
        },
    )  # fmt: skip
    assert record.damped_loss <= plain.loss(plain.sweep()[0], plain.damped).mean() * (1 + 1e-12)


def test_codes_of_no_sweep_have_the_same_figures_without_bounds() -> None:
    scheme = GridScheme(bits=3, group_size=8, solver="round-to-nearest")
    W, X = inputs_of()
    statistics = Moments(H=X.T @ X / len(X), tokens=len(X))
    matrix, record = quantize_matrix(W, statistics, scheme)
    dead = statistics.H.diagonal() == 0
    plain = Plain(W.masked_fill(dead, 0), matrix, None, statistics.H, scheme.order, scheme.damp)
    agree(
        record,
        expected(plain, W, swept=False) | {
            "name": "matrix", "correction": 0.0, "damp": 0.01, "sweep_damp": 0.01, "tokens": TOKENS, "order": scheme.order,
            "format": "int3-g8", "asked": None, "base": None, "entropy": None,
        },
    )  # fmt: skip


RATES = {
    "waterfill": RateScheme(rate=3.0),
    "pivoted": RateScheme(rate=3.0, order="pivoted", damp=0.001),
    "one candidate": RateScheme(rate=2.5, solver="nearest-plane"),
    "a beam of two": RateScheme(rate=2.5, beam=2),
}


@pytest.mark.parametrize(
    ("name", "corrects"),
    daily_of_several(product(RATES, (False, True)), [*product(RATES, [True]), (next(iter(RATES)), False)]),
)
def test_every_figure_of_an_entropy_coded_matrix_is_its_definition(name: str, corrects: bool) -> None:
    scheme = RATES[name]
    """The loss refers to the file, whose matrix is scaled as a whole; what bounds hold for, to the step of the sweep, `base`."""
    W, X = inputs_of()
    statistics = seen(X) if corrects else Moments(H=X.T @ X / len(X), tokens=len(X))
    sensitivity = torch.exp(torch.randn(OUT, generator=torch.Generator().manual_seed(5)).mul(3))
    matrix, record = quantize_matrix_to_rate(W, statistics, scheme, sensitivity=sensitivity)
    target, rho, *_ = corrected(W, LayerInput.of(statistics), scheme)
    sweep_damp = 0.1 if corrects else scheme.damp
    plain = Plain(target, matrix, record.base, statistics.H, scheme.order, sweep_damp)
    coded = Contents.of(matrix.codes, matrix.grid)
    data = encode(coded)
    assert np.array_equal(decode(data).codes, coded.codes)
    side = size(coded).side
    assert record.entropy * W.numel() / 8 + side == pytest.approx(len(data), rel=0.005)
    agree(
        record,
        expected(plain, W, corrects=corrects) | {
            "name": "matrix", "correction": rho, "damp": scheme.damp, "sweep_damp": sweep_damp, "tokens": TOKENS,
            "order": scheme.order, "format": "coded",
            "asked": scheme.rate, "base": record.base, "entropy": record.entropy,
        },
    )  # fmt: skip
    assert len(set(plain.weight.tolist())) > 1
    assert record.damped_loss <= record.worst_case * (1 + 1e-6)  # swept in float32
    assert record.clipped == record.clipped_rows == 0.0


def test_in_rate_mode_the_damped_loss_is_that_of_the_step_of_the_sweep_not_of_the_file() -> None:
    W, X = inputs_of()
    H = X.T @ X / len(X)
    matrix, record = quantize_matrix_to_rate(W, Moments(H=H, tokens=len(X)), RateScheme(rate=1.2))
    assert record.base != matrix.grid.base
    plain = Plain(W.masked_fill(H.diagonal() == 0, 0), matrix, record.base, H, "activation", 0.01)
    assert record.damped_loss == pytest.approx(plain.loss(plain.values, plain.damped).mean(), rel=1e-9)
    assert record.damped_loss != pytest.approx(plain.loss(plain.decoded, plain.damped).mean(), rel=1e-3)
    assert record.loss == pytest.approx(plain.loss(plain.decoded).mean(), rel=1e-9)


def remeasure(name: str, W: Tensor, inputs: LayerInput, scheme: GridScheme, known: SolvedMatrix) -> LayerRecord:
    """Measure a matrix with known codes and grid."""
    rows = measured_rows(W, slice(None), corrected(W, inputs, scheme), known, inputs, scheme)
    return record_of(name, [rows], known.matrix, inputs, scheme)


def test_measuring_again_what_was_solved_gives_the_same_record() -> None:
    """As `verify` does, from the codes and the grid in the file."""
    W, X = inputs_of()
    inputs = LayerInput.of(seen(X))
    for scheme in (GridScheme(bits=3, group_size=8), GridScheme(bits=3, group_size=8, solver="k-best", beam=2)):
        matrix, record = quantize_matrix(W, inputs, scheme)
        again = remeasure("matrix", W, inputs, scheme, SolvedMatrix(matrix=matrix))
        assert again == replace(record, seconds=0.0)


def test_one_code_moved_by_one_shows_in_its_group_of_rows() -> None:
    W, X = inputs_of()
    inputs, scheme = LayerInput.of(X.T @ X / len(X)), GridScheme(bits=3, group_size=8)
    matrix, record = quantize_matrix(W, inputs, scheme)
    codes = matrix.codes.clone()
    live = int(inputs.moments.H.diagonal().argmax())
    codes[-1, live] += 1 if int(codes[-1, live]) < 3 else -1
    moved = remeasure("matrix", W, inputs, scheme, SolvedMatrix(matrix=replace(matrix, codes=codes))).row_losses
    differ = [a != b for a, b in zip(moved, record.row_losses, strict=True)]
    assert differ == [False] * (len(differ) - 1) + [True]
    assert len(differ) == row_groups(OUT, COLUMNS) == 2


@pytest.mark.parametrize("bits", [2, 8])
def test_the_limit_is_that_of_all_eigenvalues_with_them_and_without(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 8 bits the water stands below all directions of these rows: there no eigenvalue is computed."""
    p = problem(out=OUT, columns=COLUMNS, tokens=TOKENS)
    H, W, computed = p.H, p.W, []
    eigenvalues = torch.linalg.eigvalsh
    monkeypatch.setattr(torch.linalg, "eigvalsh", lambda H: computed.append(len(H)) or eigenvalues(H))
    _, record = quantize_matrix(W, H, GridScheme(bits=bits, group_size=8))
    assert computed == ([] if bits == 8 else [COLUMNS])
    assert record.limit == pytest.approx(limit(record.loss, W.square().mean(1), eigenvalues(H)), rel=1e-8)


def test_the_solver_says_what_clipped_and_nothing_is_swept_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """But by `verify`, which has only the codes, and finds the same."""
    W, X = inputs_of()
    inputs, scheme, swept = LayerInput.of(seen(X)), GridScheme(bits=2, group_size=8), []
    sweep = certificate.sweep_planes
    monkeypatch.setattr(certificate, "sweep_planes", lambda *given: swept.append(given) or sweep(*given))
    matrix, record = quantize_matrix(W, inputs, scheme)
    assert record.clipped > 0
    assert not swept
    again = remeasure("matrix", W, inputs, scheme, SolvedMatrix(matrix=matrix))
    assert len(swept) == 1
    assert (again.clipped, again.clipped_rows) == (record.clipped, record.clipped_rows)


@pytest.mark.parametrize("count", [1, 3, 7, 50])
def test_a_gpu_takes_the_means_of_all_groups_of_rows_at_once(count: int) -> None:
    losses = torch.rand(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with pretended() as gpu:
        there = certificate.means(Pretend(losses, 0), count).held
    assert gpu.total.launches <= 3
    torch.testing.assert_close(there, certificate.means(losses, count), rtol=1e-12, atol=0)
