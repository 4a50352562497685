"""Whether LLL reduction pays: Babai with one step in several orders and in the reduced basis, beside water-filling steps.

    python benchmarks/studies/reduction.py $ASSETS [--rates 2.125 3.125] [--damp 0.01] [--models babyllama105 stories260K]

Every linear layer of real models (16 windows of 256 tokens, inputs of the float model) and Gaussian weights under a rotated
spectrum k^-1.6. No group, no clipping, no correction; codes are the integers of the original columns in every row of the
table. Each method takes

- the step at which the natural order has the asked entropy, and reports its loss and its entropy against that of the natural order;
- the step at which its own entropy is as asked, and reports bits above the rate-distortion limit for its loss, exact and undamped.

Entropies are ideal ones, a table for every column, with Miller and Madow's correction; no side information is counted.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nearplane.calibration.activations import skeleton
from nearplane.calibration.separate_passes import observe
from nearplane.calibration.stages import stages
from nearplane.calibration.texts import Frame, read_windows
from nearplane.lattice.bounds import limit, quadratic
from nearplane.lattice.factor import factorize
from nearplane.lattice.grid import Grid
from nearplane.lattice.solvers import nearest_plane
from nearplane.models.model import open_model
from nearplane.theory.reduction import nearest_plane_reduced, reduce

Solve = Callable[[Tensor, Grid], Tensor]  # weights and grid to codes


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A way to round, prepared for one Hessian: steps relative to a common one, its profile, and what preparing took."""

    name: str
    step: Tensor  # (in,)
    profile: Tensor  # (in,) squared Gram-Schmidt lengths, steps included
    solve: Solve
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A matrix rounded at one step."""

    entropy: float
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one method did on one layer."""

    uneven: float  # bits, 1/2 log2(AM / GM) of the profile
    loss: float  # bits, 1/2 log2 of the loss against that of the natural order at the same step
    entropy: float  # bits, against that of the natural order at the same step
    above: float  # bits above the limit at the asked entropy
    seconds: float


def methods(H: Tensor, damp: float) -> Iterator[Method]:
    """Prepare every method; the first is what the others are compared with."""
    one = torch.ones(len(H), dtype=torch.float64)
    for order in ("natural", "activation", "pivoted"):
        began = time.perf_counter()
        factor = factorize(H, order, damp=damp)
        seconds = time.perf_counter() - began
        yield Method(
            name=order, step=one, profile=factor.d, seconds=seconds,
            solve=lambda W, grid, factor=factor: nearest_plane(W, grid, factor).codes,
        )  # fmt: skip
    factor = factorize(H, "activation", damp=damp)
    flat = torch.empty_like(factor.d)
    flat[factor.order] = (factor.d.log().mean() / 2).exp() / factor.d.sqrt()  # (in,), of geometric mean 1
    profile = factor.d * flat[factor.order].square()
    yield Method(
        name="water-filling steps", step=flat, profile=profile, seconds=0.0,
        solve=lambda W, grid, factor=factor: nearest_plane(W, grid, factor).codes,
    )  # fmt: skip
    for name, order, delta, step in (
        ("LLL from natural", "natural", 0.75, one),
        ("LLL from pivoted", "pivoted", 0.75, one),
        ("LLL 0.999 from pivoted", "pivoted", 0.999, one),
        ("LLL on water-filling steps", "activation", 0.75, flat),
    ):
        factor = factorize(H, order, damp=damp)
        began = time.perf_counter()
        reduced = reduce(factor, step=step, delta=delta)
        seconds = time.perf_counter() - began
        yield Method(
            name=name, step=step, profile=reduced.factor.d, seconds=seconds,
            solve=lambda W, grid, reduced=reduced: nearest_plane_reduced(W, grid, reduced).codes,
        )  # fmt: skip


def point(W: Tensor, H: Tensor, method: Method, log_step: float) -> Point:
    """Round at step `2^log_step`."""
    scale = (2.0**log_step * method.step)[None]
    grid = Grid(scale=scale, zero=torch.zeros_like(scale), group=torch.arange(W.shape[1]))
    codes = method.solve(W, grid)
    return Point(entropy=entropy(codes), loss=float(quadratic(W - grid.decode(codes), H).mean()) / W.shape[1])


def entropy(codes: Tensor) -> float:
    """Return the mean entropy of the columns of `codes` (out, in) in bits, corrected for small samples."""
    out, total = len(codes), 0.0
    for column in codes.T:
        counts = column.unique(return_counts=True)[1].double()
        total += float((counts * (out / counts).log2()).sum()) / out + (len(counts) - 1) / (2 * out * math.log(2))
    return total / codes.shape[1]


def at_entropy(W: Tensor, H: Tensor, method: Method, rate: float) -> tuple[float, Point]:
    """Return the log2 of the step at which the entropy is `rate` to 0.002 bit, and what came of it."""
    log_step = float(W.square().mean().log2()) / 2 + 2.05 - rate
    known: list[tuple[float, float]] = []
    for _ in range(15):
        found = point(W, H, method, log_step)
        if abs(found.entropy - rate) < 0.002:
            break
        known = sorted([*known, (abs(found.entropy - rate), log_step, found.entropy)])[:2]
        slope = -1.0
        if len(known) == 2 and known[0][1] != known[1][1]:
            slope = min(-0.3, (known[0][2] - known[1][2]) / (known[0][1] - known[1][1]))
        log_step = known[0][1] + (rate - known[0][2]) / slope
    return log_step, found


def compare(W: Tensor, H: Tensor, prepared: list[Method], rate: float) -> dict[str, Row]:
    """Run every method on one matrix."""
    eigenvalues, energy = torch.linalg.eigvalsh(H).clamp(min=0), W.square().mean(1)
    log_step, first = at_entropy(W, H, prepared[0], rate)
    rows = {}
    for method in prepared:
        same = point(W, H, method, log_step)
        _, own = at_entropy(W, H, method, rate)
        rows[method.name] = Row(
            uneven=0.5 * float(method.profile.mean().log2() - method.profile.log2().mean()),
            loss=0.5 * math.log2(same.loss / first.loss), entropy=same.entropy - first.entropy,
            above=own.entropy - limit(own.loss, energy, eigenvalues), seconds=method.seconds,
        )  # fmt: skip
    return rows


def layers(folder: Path, text: Path) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Yield the Hessian of every group of layers that share their input, and their weights, float64."""
    model = open_model(str(folder))
    tokens = read_windows(model.tokenizer(), text, samples=16, seqlen=256, frame=Frame())
    stream = skeleton(model, tokens.split(8), device="cpu", dtype=torch.float32)
    for block in model.blocks:
        with block.on("cpu", torch.float32, original=False):
            for observed in observe(block, stages(block, stream), stream):
                weights = [layer.read().double() for layer in observed.layers]
                yield observed.moments[observed.layers[0].name].H, weights
            stream.advance(block)


def rotated(n: int, rows: int) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Yield (n, n) a matrix with eigenvalues k^-1.6 and random eigenvectors, and Gaussian weights."""
    g = torch.Generator().manual_seed(0)
    Q = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=g)).Q
    H = Q * torch.arange(1, n + 1, dtype=torch.float64).pow(-1.6) @ Q.T
    yield H, [torch.randn(rows, n, dtype=torch.float64, generator=g)]


def table(case: str, problems: Iterator[tuple[Tensor, list[Tensor]]], rates: list[float], damp: float) -> None:
    """Print one line a rate and method, means over all layers weighted by their size."""
    rows: dict[tuple[float, str], list[tuple[int, Row]]] = {}
    for H, weights in problems:
        prepared = list(methods(H, damp))
        for W in weights:
            for rate in rates:
                for name, row in compare(W, H, prepared, rate).items():
                    rows.setdefault((rate, name), []).append((W.numel(), row))
    for (rate, name), found in rows.items():
        size = sum(count for count, _ in found)
        means = [
            sum(count * getattr(row, field) for count, row in found) / size
            for field in ("uneven", "loss", "entropy", "above")
        ]
        slowest = max(row.seconds for _, row in found)
        figures = f"{means[0]:.4f} | {means[1]:+.4f} | {means[2]:+.4f} | {means[3]:.4f} | {slowest:.3f}"
        print(f"| {case} | {rate} | {name} | {figures} |", flush=True)


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("assets", type=Path)
    parser.add_argument("--models", nargs="*", default=["babyllama105", "stories260K"])
    parser.add_argument("--rates", type=float, nargs="*", default=[2.125, 3.125])
    parser.add_argument("--damp", type=float, default=0.01)
    parser.add_argument("--columns", type=int, default=512, help="of the random problem; 0 leaves it out")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    reduce(factorize(torch.eye(2, dtype=torch.float64)))  # compiles
    print(
        "| case | bits | method | uneven profile, bits | loss at the same step, bits | entropy there, bits "
        "| above the limit at the same entropy, bits | slowest preparation, s |"
    )
    print("|---|---|---|---|---|---|---|---|")
    text = arguments.assets / "text" / "tinystories_train_2m.txt"
    for name in arguments.models:
        table(name, layers(arguments.assets / "models" / name, text), arguments.rates, arguments.damp)
    if arguments.columns:
        problems = rotated(arguments.columns, 4 * arguments.columns)
        table(f"Gaussian, rotated k^-1.6, {arguments.columns}", problems, arguments.rates, 0.0)


if __name__ == "__main__":
    main()
