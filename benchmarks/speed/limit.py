"""How far above the rate-distortion limit coded matrices are: Gaussian weights, known spectra, every byte counted.

python benchmarks/speed/limit.py [--quick]
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import replace

import torch
from torch import Tensor

from nearplane.coding.blob import Contents, encode
from nearplane.lattice.bounds import limit, quadratic
from nearplane.lattice.factor import factorize
from nearplane.matrix.inputs import LayerInput
from nearplane.matrix.quantize_matrix import quantize_matrix_to_rate
from nearplane.matrix.to_rate import Search, coded_rate, secant, waterfilled_steps
from nearplane.recipe.rate_scheme import RateScheme
from nearplane.theory.shrunken import shrunken
from nearplane.verbs.hptq import hptq

SPACE_FILLING = 0.5 * math.log2(2 * math.pi * math.e / 12)  # 0.2546 bit: what scalar quantization loses at high rate


def rotated(n: int, exponent: float, generator: torch.Generator) -> Tensor:
    """Return (n, n) a matrix with eigenvalues k^-exponent and random eigenvectors."""
    Q = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=generator)).Q
    return Q * torch.arange(1, n + 1, dtype=torch.float64).pow(-exponent) @ Q.T


def excess(W: Tensor, H: Tensor, rate: float) -> tuple[float, float]:
    """Quantize to a rate; return bits per weight in the file, and how many of them are above the limit."""
    scheme = RateScheme(rate=rate, damp=0.0, solver="nearest-plane")
    matrix, record = quantize_matrix_to_rate(W, H, scheme)
    coded = 8 * len(encode(Contents.of(matrix.codes, matrix.grid))) / W.numel()
    assert record.limit is not None
    return coded, coded - record.limit


def excess_of_hptq(W: Tensor, H: Tensor, rate: float) -> tuple[float, float]:
    """Quantize with one step and a Huffman code; the same figures as `excess`."""
    coded = hptq(W, H, RateScheme(rate=rate, damp=0.0, solver="nearest-plane"))
    T, found = W.double(), 8 * coded.bytes / W.numel()
    loss = float(quadratic(T - coded.matrix.decode().double(), H).mean() / W.shape[1])
    return found, found - limit(loss, T.square().mean(1), LayerInput.of(H).shared.eigenvalues)


def excess_of_shrunken(W: Tensor, H: Tensor, rate: float) -> tuple[float, float]:
    """Quantize targets that are shrunken for the noise of the rounding; the same figures as `excess`.

    Step and noise determine each other: `mu = c^2 / (12 mean(W^2))` is what damps the factor.
    """
    inputs = LayerInput.of(H)
    plain = RateScheme(rate=rate, damp=0.0, solver="nearest-plane")

    def searched(aim: Tensor, scheme: RateScheme) -> Search:
        factor = inputs.factor_of_the_sweep(scheme)
        return Search(
            T=aim, H=H, factor=factor, grid=waterfilled_steps(aim, factor, None), scheme=scheme, sized=coded_rate
        )

    log_step = searched(W, plain).first_step(rate)
    for _ in range(3):
        mu = 4.0**log_step / 12 / float(W.square().mean())
        scheme = replace(plain, damp=mu / float(H.diagonal().mean()))
        aim = shrunken(W, inputs.factor_of_the_sweep(scheme), mu)
        trial, _ = secant(searched(aim, scheme).attempt, log_step, rate)
        log_step = trial.log_step
    T, V = W.double(), trial.matrix.decode().double()
    V *= float((V @ H * T).sum() / (V @ H * V).sum())  # the scale of least loss, which costs nothing
    coded = 8 * len(encode(Contents.of(trial.matrix.codes, trial.matrix.grid))) / W.numel()
    least = limit(float(quadratic(T - V, H).mean() / W.shape[1]), T.square().mean(1), inputs.shared.eigenvalues)
    return coded, coded - least


def in_loop_gains(W: Tensor, H: Tensor, rate: float) -> tuple[float, float]:
    """Water-filling with a gain for every column inside the sweep (WaterSIC): entropy per column, bits above the limit.

    In the units of `nearest_plane`: the column's values are shrunken by their regression on the targets before their error is fed
    on. The entropies are ideal, no side information counted: the rival gets the benefit.
    """
    factor = factorize(H, "activation", damp=0.0)
    out, n = W.shape
    lengths = factor.d.sqrt()
    P = W[:, factor.order].double()
    low, high = -30.0, 30.0
    for _ in range(30):
        x = (low + high) / 2
        E, values, bits = torch.zeros_like(P), torch.zeros_like(P), 0.0
        for j in range(n):
            t = P[:, j] + E[:, :j] @ factor.U[:j, j]
            step = 2.0**x / float(lengths[j])
            codes = (t / step).round()
            energy = float((codes * codes).sum())
            gain = float((codes * t).sum()) / (step * energy) if energy else 0.0
            values[:, j] = gain * step * codes
            E[:, j] = P[:, j] - values[:, j]
            counts = codes.unique(return_counts=True)[1].double()
            bits += float((counts * (out / counts).log2()).sum()) / out + (len(counts) - 1) / (2 * out * math.log(2))
        if abs(bits / n - rate) < 0.001:
            break
        low, high = (x, high) if bits / n > rate else (low, x)
    Hp = H[factor.order[:, None], factor.order]
    loss = float(quadratic(E, Hp).mean() / n)
    return bits / n, bits / n - limit(loss, W.double().square().mean(1), torch.linalg.eigvalsh(H))


def predicted_hptq(H: Tensor) -> float:
    """Return what one step a matrix loses at high rate, `0.2546 + 1/2 log2(AM / GM)` of the squared lengths."""
    d = factorize(H, "activation", damp=0.0).d
    return SPACE_FILLING + 0.5 * float(d.mean().log2() - d.log2().mean())


def main() -> None:
    """Print one line a case: spectrum, method, asked, coded, above the limit, what theory says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1024 x 1024 instead of 4096 x 4096 in the first case")
    quick = parser.parse_args().quick
    g = torch.Generator().manual_seed(0)
    print(f"{'weights, H':34} {'method':22} {'asked':>6} {'coded':>7} {'above':>7} {'theory':>7} {'s':>6}")

    def line(case: str, method: str, rate: float, found: tuple[float, float], theory: float, began: float) -> None:
        seconds = time.perf_counter() - began
        print(
            f"{case:34} {method:22} {rate:6.3f} {found[0]:7.4f} {found[1]:7.4f} {theory:7.4f} {seconds:6.1f}",
            flush=True,
        )

    n = 1024 if quick else 4096
    began = time.perf_counter()
    found = excess(torch.randn(n, n, generator=g), torch.eye(n, dtype=torch.float64), 3.0)
    line(f"iid Gaussian {n} x {n}, identity", "waterfill", 3.0, found, SPACE_FILLING, began)
    n = 512
    H, W = rotated(n, 1.6, g), torch.randn(8 * n, n, generator=g)
    case = f"Gaussian {8 * n} x {n}, rotated k^-1.6"
    for method, rate, theory in (
        ("waterfill", 5.0, SPACE_FILLING),
        ("hptq", 5.0, predicted_hptq(H)),
        ("waterfill, shrunken", 3.0, SPACE_FILLING + 0.02),
        ("waterfill, shrunken", 1.0, math.nan),
        ("waterfill", 1.0, math.nan),
    ):
        began = time.perf_counter()
        if method == "waterfill, shrunken":
            found = excess_of_shrunken(W, H, rate)
        else:
            found = excess_of_hptq(W, H, rate) if method == "hptq" else excess(W, H, rate)
        line(case, method, rate, found, theory, began)
    began = time.perf_counter()
    line(case, "in-loop gains, entropy", 1.0, in_loop_gains(W, H, 1.0), math.nan, began)


if __name__ == "__main__":
    main()
