"""Descriptions of what tensors of a GGUF hold: few numbers for any regular order of rows, and JSON that is checked."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nearplane.formats.gguf.contents import Content, Part, Strided, strided
from nearplane.formats.gguf.gguf_header import Info


@given(st.integers(0, 9), st.lists(st.tuples(st.integers(1, 4), st.integers(1, 40)), min_size=1, max_size=3))
def test_regular_rows_are_one_run(start: int, loops: list[tuple[int, int]]) -> None:
    rows = Strided(start=start, shape=tuple(n for n, _ in loops), strides=tuple(s for _, s in loops))
    (found,) = strided(rows.index())
    assert torch.equal(found.index(), rows.index())
    assert len(found) == len(rows)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30))
def test_any_rows_come_back(numbers: list[int]) -> None:
    assert torch.cat([rows.index() for rows in strided(torch.tensor(numbers))]).tolist() == numbers


def test_the_rows_of_rotary_heads_are_one_run() -> None:
    heads = torch.arange(64).view(4, 2, 8).transpose(1, 2).reshape(-1)
    assert list(strided(heads)) == [Strided(start=0, shape=(4, 8, 2), strides=(16, 1, 8))]


PARTS = (
    Part(name="q.weight", shape=(8, 4), rows=Strided(start=0, shape=(8,), strides=(1,))),
    Part(name="k.weight", shape=(4, 4), rows=Strided(start=0, shape=(2, 2), strides=(1, 2))),
)
INFO = Info(name="blk.0.attn_qk.weight", shape=(12, 4), type=0, begin=64, size=192)


def test_a_content_is_what_its_json_says() -> None:
    content = Content(parts=PARTS, change="+1", kept=False)
    assert Content.from_json(content.to_json()) == content
    assert [(info.begin, info.size, info.shape) for info, _ in content.pieces(INFO)] == [
        (64, 128, (8, 4)),
        (192, 64, (4, 4)),
    ]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("change", "+2"),
        ("turned", True),
        ("parts", [["q.weight", [8, 4], 1, [8], [1]]]),
        ("parts", [["q.weight", [8, 4], 0, [8], [-1]]]),
        ("parts", [["q.weight", [8, 0], 0, [8], [1]]]),
        ("parts", [["q.weight", [8, 4], 0, [8, 1], [1]]]),
        ("parts", "q.weight"),
    ],
)
def test_descriptions_that_cannot_be_are_refused(field: str, value: Any) -> None:
    fields = json.loads(Content(parts=PARTS).to_json()) | {field: value}
    with pytest.raises((ValueError, TypeError)):
        Content.from_json(json.dumps(fields))


def test_parts_that_are_not_the_whole_tensor_are_refused() -> None:
    with pytest.raises(ValueError, match="8 rows of"):
        Content(parts=PARTS[:1]).pieces(INFO)
