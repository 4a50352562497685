"""Rows and columns of a packed matrix: the same numbers as those of the whole, in either layer that multiplies by them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from coded import contents
from nearplane.coding.blob import Contents, decode_packed, encode
from nearplane.coding.packed_matrix import part
from nearplane.loading.coded_linear import CodedLinear
from nearplane.loading.packed_linear import PackedLinear

CASES = [
    contents(7, 13),
    contents(33, 64, spread=0.3),
    contents(40, 31, spread=20.0),
    contents(48, 96, outliers=25),
    contents(600, 512, outliers=9),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "x".join(map(str, case.codes.shape)))
@pytest.mark.parametrize("cut", ["rows", "columns", "both", "some"])
def test_a_part_has_the_numbers_of_the_whole(case: Contents, cut: str) -> None:
    out, width = case.codes.shape
    rows = np.arange(out // 2, out) if cut in ("rows", "both") else np.arange(out)
    columns = np.arange(width // 2) if cut in ("columns", "both") else np.arange(width)
    if cut == "some":
        rows, columns = rows[::3], columns[1::2]
    whole = decode_packed(encode(case))
    found, expected = part(whole, rows, columns), CodedLinear(whole, torch.float32).weight
    expected = expected[torch.from_numpy(rows)][:, torch.from_numpy(columns)]
    assert found.shape == tuple(expected.shape)
    assert torch.equal(CodedLinear(found, torch.float32).weight, expected)
    layer = PackedLinear(len(columns), len(rows), bias=False, dtype=torch.float32)
    layer.fill(found)
    assert torch.equal(layer.weight, expected)


def test_all_rows_and_columns_are_the_matrix_itself() -> None:
    whole = decode_packed(encode(CASES[0]))
    assert part(whole, np.arange(7), np.arange(13)) is whole
