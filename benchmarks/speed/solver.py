"""How fast a layer is solved, beside textbook GPTQ and beside a matrix product of as many operations.

    python benchmarks/speed/solver.py [--columns 4096] [--rows 4096 1024] [--repeats 3]

One thread, one run, in turns; times are medians of that thread's CPU time, so that ratios hold on a busy machine.
Textbook GPTQ is Cholesky, inverse, Cholesky and a loop over columns with lazy blocks of 128 (Frantar et al., 2022),
in float32 and on the same grid. Fitting the grid is not part of the time.

The last table is of whole solves, with all defaults and steps that are searched: what other number formats take beside integers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from nearplane.lattice.factor import factorize
from nearplane.lattice.grid import Grid
from nearplane.lattice.scale import Steps
from nearplane.lattice.solvers import nearest_plane
from nearplane.matrix.quantize_matrix import quantize_matrix, quantize_matrix_to_rate
from nearplane.number_formats import integers
from nearplane.recipe.recipe import Recipe

DAMP = 0.01
FORMATS = ("int4-g64", "mxfp4", "nvfp4", "mxfp8", "fp8", "fp8-block")
GRIDS = {"symmetric, a step a row": (True, None), "asymmetric, groups of 128": (False, 128)}


def main() -> None:
    """Print a table of factorizations and a table of solves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--rows", type=int, nargs="*", default=(4096, 1024))
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    H = hessian(arguments.columns, generator)
    factors = compare_factors(H, arguments.repeats)
    print(
        "\nOurs with the factor chosen by condition; in parentheses with that in float64. Ratios to textbook count the factor;"
    )
    print("of product: time of the sweep over that of a matrix product of as many operations.\n")
    print("| rows | grid | textbook loop | sweep | of product | textbook / ours | same codes |")
    print("|---|---|---|---|---|---|---|")
    for rows in arguments.rows:
        W = torch.randn(rows, len(H), generator=generator) / len(H) ** 0.5
        for name, (symmetric, size) in GRIDS.items():
            steps = Steps(format=integers(4, size, symmetric=symmetric), search="minmax", storage=torch.float16)
            cells = compare_solves(W, H, steps.grid(W), factors, arguments.repeats)
            print(f"| {rows} | {name} | {cells} |", flush=True)
    compare_formats(H, torch.randn(512, len(H), generator=generator) / len(H) ** 0.5, arguments.repeats)


def compare_formats(H: Tensor, W: Tensor, repeats: int) -> None:
    """Print how much longer than with integers a weight takes in other number formats, in microseconds and multiplications."""
    schemes = {name: Recipe.from_spellings(grid=name).scheme for name in FORMATS}
    rate = Recipe.from_spellings(rate=3.125).scheme
    exact, A = H.double(), torch.randn_like(H)
    times = medians(repeats, {
        "product": lambda: A @ A,
        **{name: partial(quantize_matrix, W, exact, scheme) for name, scheme in schemes.items()},
        "coded": lambda: quantize_matrix_to_rate(W, exact, rate, 3.125),
    })  # fmt: skip
    multiplication = times.pop("product") / len(H) ** 3
    least = times.pop(FORMATS[0])
    print(
        f"\n| format, {len(W)} x {len(H)} | microseconds a weight more than {FORMATS[0]} | multiplications |\n|---|---|---|"
    )
    for name, seconds in times.items():
        more = (seconds - least) / W.numel()
        print(f"| {name} | {1e6 * more:.2f} | {more / multiplication:,.0f} |", flush=True)


def compare_factors(H: Tensor, repeats: int) -> dict[str, float]:
    """Print how long factorizations take; "product" is a product of two matrices of the size of `H`."""
    A = torch.randn_like(H)
    double = H.double()
    times = medians(repeats, {
        "product": lambda: A @ A,
        "textbook": lambda: cholesky_of_inverse(H),
        "float32": lambda: factorize(H, damp=DAMP),
        "float64": lambda: factorize(double, damp=DAMP),
        "by condition": lambda: factorize(H, damp=DAMP, dtype="auto"),
        "float32, pivoted": lambda: factorize(H, "pivoted", damp=DAMP),
        "float64, pivoted": lambda: factorize(double, "pivoted", damp=DAMP),
    })  # fmt: skip
    rate = 2 * len(H) ** 3 / times["product"]
    print(f"product of two {len(H)} x {len(H)} float32 matrices: {times['product']:.2f} s, {rate / 1e9:.0f} GFLOP/s\n")
    print("| factor | seconds | textbook / it |\n|---|---|---|")
    for name in list(times)[1:]:
        print(f"| {name} | {times[name]:.3f} | {times['textbook'] / times[name]:.2f} |", flush=True)
    return times


def compare_solves(W: Tensor, H: Tensor, grid: Grid, factors: dict[str, float], repeats: int) -> str:
    """Return the cells of one row of the table of solves."""
    G = cholesky_of_inverse(H)
    single, double = (factorize(H, damp=DAMP, dtype=dtype) for dtype in ("auto", torch.float64))
    times = medians(repeats, {
        "textbook": lambda: textbook(W, G, grid),
        "ours": lambda: nearest_plane(W, grid, single),
        "ours, float64 factor": lambda: nearest_plane(W, grid, double),
    })  # fmt: skip
    limit = factors["product"] * len(W) / (2 * len(H))  # the sweep multiplies half as much as W times H does
    total = factors["textbook"] + times["textbook"]
    ratio = total / (factors["by condition"] + times["ours"])
    ratio_double = total / (factors["float64"] + times["ours, float64 factor"])
    codes = textbook(W, G, grid)
    same, same_double = (
        100 * float((nearest_plane(W, grid, factor).codes == codes).double().mean()) for factor in (single, double)
    )
    return (
        f"{times['textbook']:.2f} s | {times['ours']:.3f} s | {times['ours'] / limit:.2f} | "
        f"{ratio:.2f} ({ratio_double:.2f}) | {same:.3f} % ({same_double:.3f} %)"
    )


def medians(repeats: int, calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median CPU seconds of every call; all are called in turn, after one round that is not counted."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            start = time.thread_time()
            call()
            taken[name].append(time.thread_time() - start)
    return {name: statistics.median(seconds[1:]) for name, seconds in taken.items()}


def hessian(n: int, generator: torch.Generator) -> Tensor:
    """Return float32 second moments of 2n tokens: noise, and 64 directions that stand out."""
    X = torch.randn(2 * n, n, generator=generator)
    X += 0.5 * torch.randn(2 * n, 64, generator=generator) @ torch.randn(64, n, generator=generator)
    return X.T @ X / len(X)


def cholesky_of_inverse(H: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the inverse of damped `H`, the way GPTQ computes it."""
    damped = H.clone()
    damped.diagonal().add_(DAMP * H.diagonal().mean())
    return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)


def textbook(W: Tensor, G: Tensor, grid: Grid, *, block: int = 128) -> Tensor:
    """Return the codes of GPTQ's column loop with lazy updates of the columns after a block."""
    W, codes = W.clone(), torch.empty_like(W, dtype=torch.int32)
    for a in range(0, W.shape[1], block):
        b = min(a + block, W.shape[1])
        current, triangle = W[:, a:b].clone(), G[a:b, a:b]
        errors = torch.zeros_like(current)
        for j in range(b - a):
            code, value = grid.round(current[:, j], a + j)
            codes[:, a + j] = code
            error = (current[:, j] - value) / triangle[j, j]
            current[:, j:] -= error[:, None] @ triangle[None, j, j:]
            errors[:, j] = error
        W[:, b:] -= errors @ G[a:b, b:]
    return codes


if __name__ == "__main__":
    main()
