"""A layer of entropy-coded integers on the CPU multiplies as the dense one would, whichever way it goes about it."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from coded import contents
from nearplane.coding.blob import Contents, decode_packed, encode
from nearplane.coding.packed_matrix import PackedMatrix
from nearplane.formats.native import matrix_of
from nearplane.loading import product_cpu
from nearplane.loading.coded_linear import CodedLinear
from nearplane.loading.product_coded import FIELDS, NARROW, WIDTHS
from nearplane.loading.words_linear import MAX_ROWS


def filled(packed: PackedMatrix, bias: Tensor | None = None, *, dtype: torch.dtype = torch.float32) -> CodedLinear:
    """Return a layer that holds a matrix."""
    layer = CodedLinear(packed, dtype)
    if bias is not None:
        layer.bias = nn.Parameter(bias.to(dtype), requires_grad=False)
    return layer


CASES = [
    contents(7, 13),
    contents(1, 1),
    contents(33, 64, spread=0.3),
    contents(40, 31, spread=20.0),
    contents(48, 96, outliers=25),
    contents(600, 512, outliers=9),
    contents(3, NARROW + 5, outliers=3),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "x".join(map(str, case.codes.shape)))
def test_weight_is_the_decoded_matrix(case: Contents) -> None:
    layer = filled(decode_packed(encode(case)))
    assert torch.equal(layer.weight, matrix_of(case).decode())


@pytest.mark.parametrize("tokens", [1, MAX_ROWS, MAX_ROWS + 1, 40])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "x".join(map(str, case.codes.shape)))
def test_products_are_those_of_the_decoded_matrix(case: Contents, tokens: int, generator: torch.Generator) -> None:
    values = matrix_of(case).decode()
    out, columns = values.shape
    bias = torch.randn(out, generator=generator)
    x = torch.randn(tokens, columns, generator=generator)
    exact = x.double() @ values.double().T + bias.double()
    y = filled(decode_packed(encode(case)), bias)(x)
    # what rounding errors are relative to: codes of 4 and 5 bits are summed with an offset of 8 and 16
    steps = matrix_of(case).grid.row_scale()[:, None] * matrix_of(case).grid.column_scale()
    size = x.double().abs() @ (values.abs() + 16 * steps).double().T + bias.double().abs()
    assert y.dtype == torch.float32
    assert ((y - exact).abs() <= 2e-6 * size).all()


@pytest.mark.parametrize("tokens", [1, MAX_ROWS + 1])
def test_columns_of_zeros_give_zero_however_large_their_steps(tokens: int, generator: torch.Generator) -> None:
    case = contents(7, 13, spread=0.0)
    case.codes[:, 3], case.scales.columns[:3], case.scales.columns[4:] = 1, 120, 120  # 2^30 times the step of column 3
    layer = filled(decode_packed(encode(case)))
    assert torch.equal(layer.weight, matrix_of(case).decode())
    x = torch.randn(tokens, 13, generator=generator)
    assert (layer(x) - x @ layer.weight.T).abs().max() <= 1e-5 * layer.weight.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_come_back_and_lose_no_more_than_the_dense_layer(
    dtype: torch.dtype, generator: torch.Generator
) -> None:
    values = matrix_of(CASES[5]).decode()
    layer = filled(decode_packed(encode(CASES[5])), dtype=dtype)
    x = torch.randn(MAX_ROWS + 1, 512, generator=generator).to(dtype)
    exact = x.double() @ values.double().T
    for part in (x, x[:6], x[:1]):
        wanted = exact[: len(part)]
        y, dense = layer(part), part @ values.to(dtype).T
        assert y.dtype == dtype
        assert (y - wanted).norm() <= 1.1 * (dense - wanted).norm()


def test_a_cast_of_the_module_does_not_round_its_scales() -> None:
    layer = filled(decode_packed(encode(CASES[4])), torch.zeros(48))
    layer.to(torch.bfloat16)
    assert layer.bias is not None
    assert layer.bias.dtype == torch.bfloat16
    assert torch.equal(layer.weight, matrix_of(CASES[4]).decode())


def loaded_again(layer: CodedLinear) -> CodedLinear:
    return pickle.loads(pickle.dumps(layer))


def saved_and_loaded(layer: CodedLinear) -> CodedLinear:
    torch.save(layer, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [deepcopy, loaded_again, saved_and_loaded])
@pytest.mark.parametrize("patches_alone", [False, True])
def test_a_copy_of_a_layer_computes_with_its_own_codes(
    copied: Callable[[CodedLinear], CodedLinear], patches_alone: bool, generator: torch.Generator
) -> None:
    case = contents(256, 96)
    if patches_alone:
        case.codes[:] = 0
        case.codes[3, 5] = 1
    layer, x = filled(decode_packed(encode(case))), torch.randn(1, 96, generator=generator)
    expected = layer(x)  # before the copy: what it has found out about its own tensors is not copied
    assert bool(layer.words.numel()) != patches_alone
    copy = copied(layer)
    for tensor in layer.buffers():
        tensor.zero_()
    assert torch.equal(copy(x), expected)
    assert (layer(x) == 0).all()


def test_a_layer_that_is_shared_between_processes_is_read_where_it_lies_now(generator: torch.Generator) -> None:
    layer, x = filled(decode_packed(encode(CASES[5]))), torch.randn(1, 512, generator=generator)
    expected = layer(x)
    before = layer.addressed
    layer.share_memory()  # moves what the tensors hold, which stay the same objects
    assert torch.equal(layer(x), expected)
    assert layer.addressed.numbers != before.numbers


@pytest.mark.parametrize("usual", ["bfloat16", "float64", "meta"])
def test_the_usual_dtype_and_device_do_not_matter(usual: str, generator: torch.Generator) -> None:
    layer, x = filled(decode_packed(encode(CASES[5]))), torch.randn(MAX_ROWS + 1, 512, generator=generator)
    expected = layer.weight, layer(x), layer(x[:1]), layer.rows(torch.tensor([599, 0]))
    before = torch.get_default_dtype()
    try:
        if usual != "meta":
            torch.set_default_dtype(getattr(torch, usual))
        with torch.device("meta" if usual == "meta" else "cpu"):
            wanted = torch.tensor([599, 0], device="cpu")
            found = layer.weight, layer(x), layer(x[:1]), layer.rows(wanted)
    finally:
        torch.set_default_dtype(before)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("row", [-1, 48, 10**7])
def test_a_row_that_is_not_there_is_refused(row: int) -> None:
    with pytest.raises(IndexError, match="of a matrix of 48 rows"):
        filled(decode_packed(encode(CASES[4]))).rows(torch.tensor([3, row]))


def test_compiled_products_are_kept_for_the_next_process(tmp_path: Path) -> None:
    code = (
        "import torch; from coded import contents; from nearplane.coding.blob import decode_packed, encode;"
        "from nearplane.loading.coded_linear import CodedLinear;"
        "layer = CodedLinear(decode_packed(encode(contents(70, 96))), torch.float32);"
        "layer(torch.ones(1, 96)); layer.weight"
    )
    counts = []
    for _ in range(2):
        environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run([sys.executable, "-c", code], env=environment, check=True)
        counts.append(len(list(tmp_path.rglob("product_coded*.nbc"))))
    assert counts[0] == counts[1] > 0


def test_leading_dimensions_are_kept_and_gradients_reach_the_input(generator: torch.Generator) -> None:
    layer = filled(decode_packed(encode(CASES[4])))
    x = torch.randn(1, 2, 96, generator=generator, requires_grad=True)
    y = layer(x)
    assert y.shape == (1, 2, 48)
    y.sum().backward()
    expected = matrix_of(CASES[4]).decode().sum(0).expand(1, 2, 96)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_threads_share_rows_without_changing_them(monkeypatch: pytest.MonkeyPatch, generator: torch.Generator) -> None:
    layer = filled(decode_packed(encode(CASES[5])))
    x = torch.randn(2, 512, generator=generator)
    one = layer(x)
    monkeypatch.setattr(product_cpu, "MIN_THREADED_WEIGHTS", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    assert torch.equal(layer(x), one)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "x".join(map(str, case.codes.shape)))
def test_rows_are_those_of_the_decoded_matrix(case: Contents, generator: torch.Generator) -> None:
    wanted = torch.randint(len(case.codes), (9,), generator=generator)
    rows = filled(decode_packed(encode(case))).rows(wanted)
    assert torch.equal(rows, matrix_of(case).decode()[wanted])
    assert rows.is_contiguous(), "processes add their rows up"


@pytest.mark.parametrize("spread", [0.3, 0.6, 1.0, 2.0, 4.0])
def test_resident_bits_are_little_more_than_those_of_the_file(spread: float) -> None:
    blob = encode(contents(1024, 512, spread=spread))
    held = 8 * sum(tensor.nbytes for tensor in filled(decode_packed(blob)).buffers())
    assert held <= 8 * len(blob) + 1.25 * 1024 * 512


def test_each_width_is_taken_by_columns_that_need_it(generator: torch.Generator) -> None:
    case = contents(256, 7 * 20)
    for n, bits in enumerate((0, *WIDTHS)):
        low, high = -(1 << bits >> 1), max(1, 1 << bits >> 1)
        case.codes[:, n::7] = torch.randint(low, high, (256, 20), generator=generator).numpy()
    layer = filled(decode_packed(encode(case)))
    assert all(layer.addressed.codes.counts)
    assert sum(layer.addressed.codes.counts) < sum(-(-20 // (32 // bits)) for bits in WIDTHS), (
        "fields of 2 bits stand beside others"
    )
    assert len(layer.addressed.codes.columns) == sum(map(int.__mul__, layer.addressed.codes.counts, FIELDS))
    assert torch.equal(layer.weight, matrix_of(case).decode())
