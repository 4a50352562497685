"""What is given as one matrix and its Hessian: arrays of torch or numpy, or one sentence that says what is wrong with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from nearplane import (
    BlockScheme,
    GridScheme,
    NumericalError,
    RateScheme,
    RecipeError,
    quantize_matrix,
    quantize_matrix_to_rate,
)

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
        (W.to_sparse(), H, r"W is sparse: convert it with to_dense\(\); expected \(out, in\) weights"),
        (W, H.to_sparse(), "H is sparse"),
        (W.to("meta"), H, r"W has no values \(meta device\)"),
        (W.masked_fill(W > 1, float("nan")), H, "matrix: W contains NaN or Inf"),
        (W.masked_fill(W > 1, float("inf")), H, "matrix: W contains NaN or Inf"),
        (W.numpy().astype(np.longdouble), H, "W is an array of .*; expected"),
        (W, H.double() * 1e40, "largest entry of H is .*e[+]4.; expected 1e-36 to 1e[+]36"),
        (W, H.double() * 1e-40, "largest entry of H is .*e-.*; expected 1e-36 to 1e[+]36"),
        (W, -H, "matrix"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else None,
)
def test_what_is_no_problem_on_a_lattice_is_one_sentence(call: Any, weights: Any, hessian: Any, said: str) -> None:
    with pytest.raises(NumericalError, match=said):
        call(weights, hessian)


@pytest.mark.parametrize("scheme", [GridScheme(bits=3.5, group_size=4), BlockScheme("4.5")], ids=str)
def test_a_mean_over_layers_is_no_number_of_bits_of_one_matrix(scheme: Any) -> None:
    with pytest.raises(RecipeError, match=r"chosen by measuring .*pass a whole number of bits, or the grid of a type"):
        quantize_matrix(W, H, scheme)


@pytest.mark.parametrize("wrong", [{"rate": -1.0}, {"rate": 1e9}, {"max_loss": 0.0}, {"max_loss": 2.0}], ids=str)
def test_a_rate_and_a_loss_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(RecipeError, match=f"{next(iter(wrong))} is .*; expected"):
        quantize_matrix_to_rate(W, H, RateScheme(rate=3.0), **wrong)


def test_a_sensitivity_of_other_rows_is_refused() -> None:
    with pytest.raises(NumericalError, match=r"sensitivity is \(2,\); expected one number per row, \(6,\)"):
        quantize_matrix_to_rate(W, H, RateScheme(rate=3.0), sensitivity=torch.ones(2))


@pytest.mark.parametrize("sensitivity", [-1.0, float("nan"), float("inf")])
def test_a_sensitivity_that_gives_no_step_is_refused(sensitivity: float) -> None:
    with pytest.raises(
        NumericalError, match=r"matrix .*The step is .*: a weight or sensitivity is NaN, Inf or negative"
    ):
        quantize_matrix_to_rate(W, H, RateScheme(rate=3.0), sensitivity=torch.full((6,), sensitivity))


def test_what_a_product_in_float32_rounds_is_symmetric_enough() -> None:
    noisy = H + 1e-6 * torch.randn(8, 8, generator=torch.Generator().manual_seed(2))
    assert quantize_matrix(W, noisy, GridScheme(bits=3, group_size=4))[1].loss > 0


@pytest.mark.parametrize("storage", [torch.int8, torch.complex64, torch.float64, torch.float8_e4m3fn])
def test_steps_are_stored_in_no_other_dtype(storage: torch.dtype) -> None:
    with pytest.raises(RecipeError, match=r"storage is torch\.\w+; expected torch\.float16, torch\.bfloat16 or"):
        quantize_matrix(W, H, GridScheme(bits=3, group_size=4), storage=storage)
