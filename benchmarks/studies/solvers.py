"""What solvers, polish and rounds are worth on fixed grids, and what they cost: losses, divergence and perplexity.

    ASSETS=... python benchmarks/studies/solvers.py [--models demo babyllama105 stories260K] [--bits 3 2] [--only REGEX]
    python benchmarks/studies/solvers.py --models --large 4096

Asymmetric grids, p-norm steps, groups of 32 (one step a row where 32 does not divide all layers). Three measurements:

- every layer solved once on the inputs of the float model, so that targets are the same: the exact loss against that of
  nearest plane in activation order, 1/2 log2 of the ratio, mean over layers, and the same of the damped loss, which the
  solver minimises; cost is CPU time of the solve (steps included, factor at hand, one thread, best of three) against it;
- whole models with correction, 128 x 256 tokens: KL(original || quantized) in nats a token on tuning windows, mean over
  calibrations on 104 and 128 windows, which stand in parentheses, and perplexity on other windows, after 128;
- `--large N`: seconds on one Gaussian N x N matrix in groups of 128 under a rotated spectrum k^-1.6.

`--quick` leaves out the whole models. Reduction (LLL) needs grids without limits and one step for all rows: it has its own
table, `benchmarks/studies/reduction.py`.
"""

from __future__ import annotations

import argparse
import math
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from orders import MODELS, SEQLEN, Case, case, observations
from torch import Tensor

import nearplane
from nearplane.calibration.second_moments import shared_inputs
from nearplane.calibration.texts import Frame, read_windows
from nearplane.evaluation.predictions import log_probabilities
from nearplane.lattice.bounds import quadratic
from nearplane.lattice.scale import Steps, StepStorage
from nearplane.lattice.solvers import nearest_plane
from nearplane.matrix.inputs import LayerInput, corrected
from nearplane.matrix.on_grid import solve
from nearplane.matrix.quantize_matrix import quantize_matrix
from nearplane.models.divergence import Divergence, divergence
from nearplane.recipe.schemes import GridScheme
from nearplane.verbs.evaluate import load_dense

PLAIN: dict[str, Any] = {"polish": 0, "rounds": 0}
REFERENCE = "nearest plane"  # in activation order
VARIANTS: dict[str, dict[str, Any]] = {
    "round to nearest": PLAIN | {"solver": "round-to-nearest"},
    "nearest plane, natural": PLAIN | {"order": "natural"},
    REFERENCE: PLAIN,
    "+ polish 1": {"polish": 1, "rounds": 0},
    "+ polish 3": {"polish": 3, "rounds": 0},
    "+ rounds 1": {"polish": 0, "rounds": 1},
    "+ polish 1, rounds 1": {"polish": 1, "rounds": 1},
    "+ polish 1, rounds 2": {"polish": 1, "rounds": 2},
    "+ polish 2, rounds 2": {"polish": 2, "rounds": 2},
    "+ polish 2, rounds 3": {"polish": 2, "rounds": 3},
    "+ polish 1, rounds 3": {"polish": 1, "rounds": 3},
    "pivoted": PLAIN | {"order": "pivoted"},
    "pivoted + polish 1": {"order": "pivoted", "polish": 1, "rounds": 0},
    "pivoted + polish 1, rounds 2": {"order": "pivoted", "polish": 1, "rounds": 2},
    "pivoted + polish 2, rounds 2": {"order": "pivoted", "polish": 2, "rounds": 2},
    "k-best 4": PLAIN | {"solver": "k-best", "beam": 4},
    "k-best 16": PLAIN | {"solver": "k-best", "beam": 16},
    "k-best 8 + polish 2, rounds 2": {"solver": "k-best", "beam": 8, "polish": 2, "rounds": 2},
}
LARGE = (REFERENCE, *(name for name in VARIANTS if name.startswith("+")), "k-best 4")
REPEATS, LONG = 3, 3.0  # a solve of more seconds is not timed again


@dataclass(slots=True)
class Sums:
    """What one variant did on the layers of a model."""

    seconds: float = 0.0
    exact: list[float] = field(default_factory=list)  # bits
    damped: list[float] = field(default_factory=list)  # bits


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the least CPU seconds of up to three calls, those of all threads, and what came of the last."""
    least, result = math.inf, None
    for _ in range(REPEATS):
        began = time.process_time()
        result = call()
        least = min(least, time.process_time() - began)
        if least > LONG:
            break
    return least, result


def _once(call: Callable[[], Any]) -> float:
    """Return the CPU seconds of a call."""
    began = time.process_time()
    call()
    return time.process_time() - began


def on_layers(chosen: Case, bits: int, names: list[str]) -> dict[str, Sums]:
    """Solve every layer on the inputs of the float model."""
    found = {name: Sums() for name in names}
    for observed in observations(chosen):
        for layer, inputs in zip(observed.layers, shared_inputs(observed), strict=True):
            W, reference = layer.read().float(), (0.0, 0.0)
            for name in [REFERENCE, *(name for name in names if name != REFERENCE)]:
                scheme = GridScheme(
                    bits=bits, group_size=chosen.group_size, symmetric=False, correct=False, **VARIANTS[name]
                )
                target, _, *_ = corrected(W, inputs, scheme)
                seconds, matrix = timed(lambda: solve(target, inputs, scheme, StepStorage(torch.float16)).matrix)  # noqa: B023
                E = (W - matrix.decode()).double()
                damped = inputs.damped(inputs.factor(scheme.order, scheme.damp), torch.float64)
                losses = float(quadratic(E, inputs.moments.H).mean()), float(quadratic(E, damped).mean())
                if name == REFERENCE:
                    reference = losses
                exact, damped_ = (0.5 * math.log2(a / b) for a, b in zip(losses, reference, strict=True))
                found[name].seconds += seconds
                found[name].exact.append(exact)
                found[name].damped.append(damped_)
    return found


class Judge:
    """The original's predictions on a held-out text, against which quantized models are measured."""

    def __init__(self, chosen: Case) -> None:
        self.case = chosen
        self.model, tokenizer = load_dense(chosen.folder, torch.device("cpu"))
        self.windows = read_windows(tokenizer, chosen.held_out, samples=chosen.tuning[1], seqlen=SEQLEN, frame=Frame())
        self.expected = [log_probabilities(self.model, batch) for batch in self.batches(chosen.tuning)]

    def batches(self, span: tuple[int, int]) -> tuple[Tensor, ...]:
        """Return windows first .. last, eight at a time."""
        return self.windows[slice(*span)].split(8)

    def measure(self, folder: Path) -> tuple[float, float]:
        """Return the KL to the original on the tuning windows, and the perplexity on the scored ones."""
        model, _ = load_dense(folder, torch.device("cpu"))
        apart = Divergence()
        for batch, expected in zip(self.batches(self.case.tuning), self.expected, strict=True):
            apart += divergence(expected, log_probabilities(model, batch))
        return apart.kl / apart.tokens, self.perplexity(model)

    def perplexity(self, model: Any) -> float:
        """Return the perplexity on the scored windows."""
        nll = [
            -log_probabilities(model, batch).gather(-1, batch[:, 1:, None]).double()
            for batch in self.batches(self.case.scored)
        ]
        return math.exp(float(torch.cat(nll).mean()))


def whole_model(judge: Judge, bits: int, name: str, calibrations: list[int]) -> str:
    """Quantize the model once for every size of the calibration; returns the cells for KL and perplexity."""
    kls, perplexity = [], math.nan
    for samples in calibrations:  # the perplexity is that of the last
        with tempfile.TemporaryDirectory() as place:
            out = Path(place) / "out"
            nearplane.quantize(
                judge.case.folder, out, bits=bits, symmetric=False, group_size=judge.case.group_size, format="gptq_v2",
                calibration=str(judge.case.calibration), samples=samples, seqlen=SEQLEN, first_token="none", device="cpu",
                **VARIANTS[name],
            )  # fmt: skip
            kl, perplexity = judge.measure(out)
            kls.append(kl)
    return f"{mean(kls):.5f} ({', '.join(f'{kl:.5f}' for kl in kls)}) | {perplexity:.4f}"


def models(arguments: argparse.Namespace, names: list[str]) -> None:
    """Print one line a model, width and variant."""
    print(
        "| model | bits | solver | loss, bits | damped loss, bits | cost | KL, nats (by calibration) | perplexity |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    for model in arguments.models:
        chosen = case(model)
        judge = None if arguments.quick else Judge(chosen)
        if judge is not None:
            print(f"| {model} | - | original | | | | 0 | {judge.perplexity(judge.model):.4f} |", flush=True)
        for bits in arguments.bits:
            found = on_layers(chosen, bits, [REFERENCE, *(name for name in names if name != REFERENCE)])
            for name in names:
                one, whole = found[name], "- | -"
                if judge is not None:
                    whole = whole_model(judge, bits, name, arguments.calibrations)
                cost = one.seconds / found[REFERENCE].seconds
                print(
                    f"| {model} | {bits} | {name} | {mean(one.exact):+.4f} | {mean(one.damped):+.4f} | {cost:.2f} | {whole} |",
                    flush=True,
                )


def large(n: int, bits: int, names: list[str]) -> None:
    """Print what the solve of one (n, n) matrix takes, and what all of `quantize_matrix` does."""
    g = torch.Generator().manual_seed(0)
    Q = torch.linalg.qr(torch.randn(n, n, generator=g)).Q.double()
    inputs = LayerInput.of(Q * torch.arange(1, n + 1, dtype=torch.float64).pow(-1.6) @ Q.T)
    W = torch.randn(n, n, generator=g)
    schemes = {
        name: GridScheme(bits=bits, group_size=128, symmetric=False, correct=False, **VARIANTS[name]) for name in names
    }
    for scheme in schemes.values():  # compiles
        quantize_matrix(W[:128, :128].contiguous(), torch.eye(128, dtype=torch.float64), scheme)
    parts = {order: _once(lambda: inputs.factor(order, 0.01)) for order in ("activation", "pivoted")}  # noqa: B023
    factor, plain = parts["activation"], schemes[names[0]]
    parts["eigenvalues for the certificate"] = _once(inputs.eigenvalues)
    steps = Steps(format=plain.number_format, search=plain.scale, storage=torch.float16)
    parts["steps"], grid = timed(lambda: steps.grid(W))
    parts["sweep"], _ = timed(lambda: nearest_plane(W, grid, inputs.factor("activation", 0.01)))
    print(", ".join(f"{name} {seconds:.2f} s" for name, seconds in parts.items()) + "\n")
    print(f"| solver, {n} x {n}, {bits} bits | loss, bits | solve | ratio | with factor | quantize_matrix | ratio |")
    print("|---|---|---|---|---|---|---|")
    first: tuple[float, float, float] | None = None
    for name, scheme in schemes.items():
        seconds, matrix = timed(lambda: solve(W, inputs, scheme, StepStorage(torch.float16)).matrix)  # noqa: B023
        loss = float(quadratic((W - matrix.decode()).double(), inputs.moments.H).mean())
        whole, _ = timed(lambda: quantize_matrix(W, inputs, scheme))  # noqa: B023
        whole += factor + parts["eigenvalues for the certificate"]  # which `inputs` has kept
        first = first or (seconds, whole, loss)
        print(
            f"| {name} | {0.5 * math.log2(loss / first[2]):+.4f} | {seconds:.2f} s | {seconds / first[0]:.2f} | "
            f"{(seconds + factor) / (first[0] + factor):.2f} | {whole:.2f} s | {whole / first[1]:.2f} |",
            flush=True,
        )


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--bits", type=int, nargs="*", default=(3, 2))
    parser.add_argument("--only", default="", metavar="REGEX", help="variants whose whole name it matches")
    parser.add_argument("--calibrations", type=int, nargs="*", default=(104, 128), help="windows")
    parser.add_argument("--quick", action="store_true", help="layers only, no whole models")
    parser.add_argument("--large", type=int, default=0, metavar="N", help="time an N x N matrix")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = [name for name in VARIANTS if not arguments.only or re.fullmatch(arguments.only, name)]
    if arguments.models:
        models(arguments, names)
    if arguments.large:
        large(arguments.large, arguments.bits[0], [name for name in LARGE if name in names])


if __name__ == "__main__":
    main()
