"""What is given as one matrix and its Hessian: arrays of torch or numpy, or one sentence that says what is wrong with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from nearplane import GridScheme, NumericalError, RateScheme, quantize_matrix, quantize_matrix_to_rate

W = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
X = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
H = X.T @ X / len(X)
CALLS = {
    "on a grid": lambda W, H: quantize_matrix(W, H, GridScheme(bits=3, group_size=4)),
    "to a rate": lambda W, H: quantize_matrix_to_rate(W, H, RateScheme(rate=3.0)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("dtype", [">f4", "<f4", "f8", "f2"])
def test_arrays_of_numpy_are_taken(call: Any, dtype: str) -> None:
    """They ended in an AttributeError."""
    given = W.numpy().astype(dtype), H.numpy().astype("f8" if dtype == "f8" else "f4")
    (matrix, record), (expected, _) = (
        call(*given),
        call(*(torch.from_numpy(a.astype(a.dtype.newbyteorder("="))) for a in given)),
    )
    assert isinstance(matrix.codes, torch.Tensor)
    assert torch.equal(matrix.codes, expected.codes)
    assert record.loss > 0
    given[0].flags.writeable = False
    assert call(given[0][:, ::-1], given[1][::-1, ::-1])[0].codes.shape == matrix.codes.shape, (
        "backwards, and read only"
    )


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(
    ("weights", "hessian", "said"),
    [
        (W, H[:7, :7], r"H is 7 x 7, W has 8 inputs .columns.. Expected 8 x 8"),
        (W.T, H, r"H is 8 x 8, W has 6 inputs"),
        (W, H[:, :7], r"H is 8 x 7, W has 8"),
        (W, H[0], r"H has the shape \(8,\)"),
        (W[0], H, r"W has the shape \(8,\)"),
        (W[:0], H, r"W has the shape \(0, 8\)"),
        (W, H + torch.eye(8).roll(1, 0), r"H is not symmetric: entries across the diagonal differ by up to 1"),
        (W, H.masked_fill(torch.eye(8) > 0, float("nan")), "H contains NaN or Inf"),
        (W, H.masked_fill(torch.eye(8) > 0, float("inf")), "H contains NaN or Inf"),
        (W, H.long(), "H is of int64; expected .* in float32 or float64"),
        (W.long().numpy(), H, "W is of int64"),
        (W, (H > 0).numpy(), "H is of bool"),
        (W.to(torch.complex64), H, "W is of complex64"),
        (W, H.tolist(), "H is a list; expected"),
        (np.array([["a"]]), H, "W is an array of <U1; expected"),
        (np.array([[None]]), H, "W is an array of object; expected"),
        (None, H, "W is a NoneType; expected"),
        (W.masked_fill(W > 1, float("nan")), H, "matrix"),
        (W, -H, "matrix"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else None,
)
def test_what_is_no_problem_on_a_lattice_is_one_sentence(call: Any, weights: Any, hessian: Any, said: str) -> None:
    with pytest.raises(NumericalError, match=said):
        call(weights, hessian)


def test_what_a_product_in_float32_rounds_is_symmetric_enough() -> None:
    noisy = H + 1e-6 * torch.randn(8, 8, generator=torch.Generator().manual_seed(2))
    assert quantize_matrix(W, noisy, GridScheme(bits=3, group_size=4))[1].loss > 0
