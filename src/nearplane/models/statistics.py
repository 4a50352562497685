"""What calibration knows of one layer's inputs: second moments and their roots, plain tensors. Imports no transformers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """Second moments of rows that nothing is fitted to: what the outputs of a layer differ by from the original's.

    Args:
        H: (in, in) float64, `X_hat^T X_hat / tokens`.
        K: (in, in) float64, `(X - X_hat)^T X_hat / tokens`; None where the original network did not run.
        Q: (in, in) float64, `(X - X_hat)^T (X - X_hat) / tokens`; None likewise.
    """

    H: Tensor
    K: Tensor | None = None
    Q: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Second moments of the rows that a layer multiplies, averaged over tokens.

    Args:
        H: (in, in) float64, `X_hat^T X_hat / tokens` of the quantized network's inputs.
        tokens: rows that were averaged.
        C: (in, in) float64, `X^T X_hat / tokens` with X the original network's inputs; None where no correction is wanted.
        S: (out, in) float64, `E[(r - r_hat) x_hat^T]`, the mismatch of the residual stream that the layer's output is
            added to; None where it is added to none.
        held_out: the same moments over the last fifth of the windows alone (they are part of the whole); None without C.
        root: (in, in) float64 upper triangular, `R^T R = tokens * H` from QR of the inputs; None where it was not asked for. With
            it the factor never sees H, which then serves the nearest loss and the right-hand side of the correction alone.
        fitting_root: the same of the tokens that are not held out, which the correction is first fitted on; None where
            none are held out. It cannot be had from the other: taking rows out of a root costs what squaring costs.
        extra: moments of windows that entered none of the above; None where there were none, or no row of them came here.
        alive: (in,) share of the tokens at which the input was not 0 in the original network; None without C.
    """

    H: Tensor
    tokens: int
    C: Tensor | None = None
    S: Tensor | None = None
    held_out: Statistics | None = None
    root: Tensor | None = None
    fitting_root: Tensor | None = None
    extra: Extra | None = None
    alive: Tensor | None = None
