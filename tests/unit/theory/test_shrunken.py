"""Shrunken targets, against their formula, and what they are worth on Gaussian weights."""

from __future__ import annotations

import torch

from nearplane.lattice.bounds import limit, quadratic
from nearplane.lattice.factor import factorize
from nearplane.lattice.grid import Grid
from nearplane.lattice.solvers import nearest_plane
from nearplane.planning.roundings import entropy
from nearplane.theory.shrunken import shrunken


def _random_problem(out=12, n=9, seed=3):
    g = torch.Generator().manual_seed(seed)
    X = torch.randn(200, n, dtype=torch.float64, generator=g)
    return torch.randn(out, n, dtype=torch.float64, generator=g), X.T @ X / 200


def test_shrunken_is_the_target_under_the_hessian_and_its_noise():
    T, H = _random_problem()
    mu = 0.3
    factor = factorize(H, "activation", damp=mu / float(H.diagonal().mean()))
    expected = T @ H @ torch.linalg.inv(H + mu * torch.eye(len(H), dtype=H.dtype))
    torch.testing.assert_close(shrunken(T, factor, mu), expected, rtol=1e-10, atol=1e-12)
    assert shrunken(T, factor, 0.0) is T


def test_shrunken_targets_are_worth_a_tenth_of_a_bit_at_one_bit() -> None:
    """Water-filling steps on Gaussian rows, powers of inputs that fall as k^-1.6: bits above the limit at the same rate.

    The noise that the factor and the target are made for is that of the step itself, `mu = c^2 / (12 mean(T^2))`.
    """
    out, n, rate = 2048, 128, 1.0
    g = torch.Generator().manual_seed(1)
    Q = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=g)).Q
    H = Q * torch.arange(1, n + 1, dtype=torch.float64).pow(-1.6) @ Q.T
    T = torch.randn(out, n, generator=g)

    def excess(noise: float) -> float:
        """Return bits per weight above the limit where `mu` is that share of the step's noise."""
        low, high = -6.0, 6.0  # log2 of c
        for _ in range(20):  # to the step whose codes have the entropy
            middle = (low + high) / 2
            mu = noise * 4.0**middle / 12 / float(T.square().mean())
            factor = factorize(H, "activation", damp=mu / float(H.diagonal().mean()))
            aim = shrunken(T, factor, mu)
            lengths = torch.empty_like(factor.d)
            lengths[factor.order] = factor.d.sqrt()
            scale = (2.0**middle / lengths)[None].float()
            matrix = nearest_plane(aim, Grid(scale=scale, zero=torch.zeros_like(scale), group=torch.arange(n)), factor)
            low, high = (middle, high) if entropy(matrix.codes) > rate else (low, middle)
        loss = float(quadratic((T - matrix.decode()).double(), H).mean()) / n
        return entropy(matrix.codes) - limit(loss, T.double().square().mean(1), torch.linalg.eigvalsh(H))

    assert excess(1.0) < excess(0.0) - 0.1
