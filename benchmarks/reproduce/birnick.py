"""The questions of Birnick, "The Lattice Geometry of Neural Network Quantization" (arXiv 2508.01077), put to real layers.

    python benchmarks/reproduce/birnick.py [--assets $ASSETS] [--folders MODEL ...] [--bits 3] [--inputs 4]

As far as we could find out (its public summaries say so; its figures are pictures of lattices), the paper has no table of
an experiment. It has a theorem, two bounds and two expectations. Each is a column here, on the layers of a network with the
inputs of the original, one step a matrix and no limit on codes:

    Theorem 2.1   GPTQ in the space of the weights, and Babai's algorithm in the space of the data, give the same codes
    Theorem 3.1   error^2 <= 1/4 sum L_ii^2 (the factor 1/4 is missing in print); the share of rows that keep it
    section 2     damping mu^2 = 0 is pure Babai, infinity is rounding to nearest; between, the error on other inputs is least
    section 4     LLL before Babai lowers the error, but its integers grow where damping is small: does it overfit?

Errors are |X w - X v|^2 / |X w|^2 in percent, without the damping rows, on calibration windows and on the windows after them.
Nothing is fetched: the demo is in the package, other models are folders.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from nearplane.calibration.activations import skeleton
from nearplane.calibration.separate_passes import observe
from nearplane.calibration.stages import stages
from nearplane.calibration.texts import Frame, read_windows
from nearplane.demo import CALIBRATION, MODEL
from nearplane.lattice.factor import factorize
from nearplane.lattice.grid import Grid
from nearplane.lattice.solvers import nearest_plane, round_to_nearest
from nearplane.models.model import open_model
from nearplane.theory.reduction import nearest_plane_reduced, reduce

DAMPS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)  # mu^2 relative to the mean square of the inputs
METHODS = ("nearest", "GPTQ", "LLL + Babai")
SEQLEN = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """Layers that share one input: second moments on two sets of windows, and their weights, all float64."""

    name: str
    fitted: Tensor  # (in, in)
    other: Tensor  # (in, in)
    weights: list[Tensor]  # (out, in) each


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One method on one layer at one damping: relative errors, and the largest entry of T."""

    fitted: float
    other: float
    largest: float = 1.0


def layers_of(folder: Path, text: Path, inputs: int, widest: int, windows: int) -> Iterator[Layers]:
    """Yield the first inputs of a network that have at most `widest` columns, with the moments of both sets of windows."""
    model, count = open_model(str(folder)), 0
    tokens = read_windows(model.tokenizer(), text, samples=2 * windows, seqlen=SEQLEN, frame=Frame())
    streams = [
        skeleton(model, part.split(8), device="cpu", dtype=torch.float32)
        for part in (tokens[:windows], tokens[windows:])
    ]
    for block in model.blocks:
        with block.on("cpu", torch.float32, original=False):
            both = [observe(block, stages(block, stream), stream) for stream in streams]
            for first, second in zip(*both, strict=True):
                if first.layers[0].shape[1] > widest:
                    continue
                if count == inputs:
                    return
                count += 1
                name = first.layers[0].name
                weights = [layer.read().double() for layer in first.layers]
                yield Layers(name=name, fitted=first.moments[name].H, other=second.moments[name].H, weights=weights)
            for stream in streams:
                stream.advance(block)


def grid_of(W: Tensor, bits: float) -> Grid:
    """Return a grid without limits whose one step gives about `bits` of entropy to Gaussian weights."""
    scale = torch.full((1, 1), 2 ** (2.05 - bits) * float(W.std()), dtype=W.dtype)
    n = W.shape[1]
    return Grid(scale=scale.expand(1, n), zero=torch.zeros(1, n, dtype=W.dtype), group=torch.arange(n))


def babai(W: Tensor, H: Tensor, mu2: float, grid: Grid) -> Tensor:
    """Return the codes of Babai's algorithm in the space of the data, as printed: the target `t = X w` loses `v_i X_i`.

    Args:
        W: (out, in) weights.
        H: (in, in) `X^T X`; any square root of it is data with the same lattice.
        mu2: mu^2, which appends the rows `mu I` to the data.
        grid: Grid with one step.
    """
    n, step = len(H), grid.scale[0, 0]
    values, vectors = torch.linalg.eigh(H)
    X = torch.cat([values.clamp(min=0).sqrt()[:, None] * vectors.T, mu2**0.5 * torch.eye(n, dtype=H.dtype)])
    Q, R = torch.linalg.qr(X.flip(1))  # X = Q L with L lower triangular: QR of the columns in reverse
    Q, L = Q.flip(1), R.flip(0, 1)
    t = W @ X.T  # (out, rows of X)
    codes = torch.empty_like(W)
    for i in range(n):
        codes[:, i] = (t @ Q[:, i] / (L[i, i] * step)).round()
        t -= step * codes[:, i, None] * X[:, i]
    return codes.to(torch.int32)


def relative(W: Tensor, values: Tensor, H: Tensor) -> float:
    """Return |X w - X v|^2 / |X w|^2 over all rows, in percent."""
    E = W - values
    return 100 * float(((E @ H) * E).sum() / ((W @ H) * W).sum())


def study(layers: Layers, damp: float, bits: float) -> tuple[dict[str, list[Result]], list[float], list[float]]:
    """Return the results of all methods on the layers of one input, shares of equal codes, and of rows within the bound."""
    H = layers.fitted
    factor = factorize(H, "natural", damp=damp)
    reduced = reduce(factor)
    results: dict[str, list[Result]] = {method: [] for method in METHODS}
    same, within = [], []
    for W in layers.weights:
        grid = grid_of(W, bits)
        gptq = nearest_plane(W, grid, factor)
        same.append(float((babai(W, H, factor.shift, grid) == gptq.codes).double().mean()))
        E = W - gptq.decode()
        damped = ((E @ H) * E).sum(1) + factor.shift * E.square().sum(1)
        bound = float(grid.scale[0, 0].square() * factor.d.sum()) / 4
        within.append(float((damped <= bound * (1 + 1e-9)).double().mean()))
        made = {"nearest": round_to_nearest(W, grid), "GPTQ": gptq}
        made["LLL + Babai"] = nearest_plane_reduced(W, grid, reduced)
        for method, matrix in made.items():
            values = matrix.decode()
            largest = float(reduced.T.abs().max()) if method == "LLL + Babai" else 1.0
            results[method].append(
                Result(
                    fitted=relative(W, values, H), other=relative(W, values, layers.other), largest=largest
                )
            )  # fmt: skip
    return results, same, within


def main() -> None:
    """Print one table for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, help="folder with models/babyllama105 and its text")
    parser.add_argument("--folders", type=Path, nargs="*", default=[], help="more models, on the text of the demo")
    parser.add_argument("--bits", type=float, default=3.0, help="entropy of Gaussian weights at the step")
    parser.add_argument("--inputs", type=int, default=4, help="number of inputs of each model")
    parser.add_argument("--widest", type=int, default=256, help="largest number of columns; LLL takes about its cube")
    parser.add_argument("--windows", type=int, default=16, help="calibration windows; as many follow for other inputs")
    parser.add_argument("--damps", type=float, nargs="+", default=DAMPS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cases = [("demo", MODEL, CALIBRATION), *((folder.name, folder, CALIBRATION) for folder in arguments.folders)]
    if arguments.assets is not None:
        stories = arguments.assets / "text" / "tinystories_train_2m.txt"
        cases.append(("babyllama105", arguments.assets / "models" / "babyllama105", stories))
    print(
        "| model | mu^2 | GPTQ and Babai: same codes | rows within the bound | "
        + " | ".join(f"{method}: error, on other inputs" for method in METHODS)
        + " | largest entry of T |"
    )
    print("|" + "---|" * (5 + len(METHODS)))
    for name, folder, text in cases:
        inputs = list(layers_of(folder, text, arguments.inputs, arguments.widest, arguments.windows))
        for damp in arguments.damps:
            print(row(name, damp, inputs, arguments.bits), flush=True)


def row(name: str, damp: float, inputs: list[Layers], bits: float) -> str:
    """Return one line: means over all layers of the inputs."""
    results: dict[str, list[Result]] = {method: [] for method in METHODS}
    same, within = [], []
    for layers in inputs:
        made, equal, kept = study(layers, damp, bits)
        for method, each in made.items():
            results[method] += each
        same += equal
        within += kept
    errors = " | ".join(
        f"{fmean(result.fitted for result in results[method]):.3f}, {fmean(result.other for result in results[method]):.3f}"
        for method in METHODS
    )
    largest = max(result.largest for result in results["LLL + Babai"])
    return f"| {name} | {damp:g} | {100 * fmean(same):.3f} % | {100 * fmean(within):.1f} % | {errors} | {largest:.0f} |"


if __name__ == "__main__":
    main()
