"""Reading of folders: formats, configs and damage of them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from checkpoints import random_matrix, write_folder
from nearplane.errors import FormatError
from nearplane.formats.stored import quantization_of, read_dense, read_matrices
from opened import GRID, finish, writer

FORMAT_NAMES = ("compressed-tensors", "gptq", "gptq_v2")


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "eetq", "bits": 4},
        {"quant_method": "gptq", "checkpoint_format": "gptq_p", "bits": 4},
        {"quant_method": "gptq", "checkpoint_format": "marlin", "bits": 4},
        {"bits": 4},
    ],
)
def test_formats_not_understood_are_refused(tmp_path: Path, plain: Path, quantization: dict[str, Any]) -> None:
    out = tmp_path / "out"
    finish(writer(out, plain))
    (out / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    for read in (read_dense, read_matrices):
        with pytest.raises(FormatError, match="nearplane reads compressed-tensors, gptq, gptq_v2"):
            list(read(out))


def test_folders_of_the_first_gptq_writers_are_read(tmp_path: Path, plain: Path) -> None:
    """They say neither checkpoint_format nor format: that is version 1."""
    matrix = random_matrix(32, 64, **GRID)
    with writer(tmp_path / "out", plain) as w:
        w.add("a", matrix)
        w.close_block({})
        w.record_json = "{}"
    old = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    (tmp_path / "out" / "config.json").write_text(json.dumps({"quantization_config": old}))
    assert torch.equal(dict(read_dense(tmp_path / "out"))["a.weight"], matrix.decode())


def test_a_dense_folder_reads_as_it_is(source: Callable[..., Path]) -> None:
    model = source(torch.float32)
    assert quantization_of(model) is None
    assert list(read_matrices(model)) == []
    state = LlamaForCausalLM.from_pretrained(model).state_dict()
    dense = dict(read_dense(model))
    assert dense.keys() == state.keys()
    assert all(torch.equal(dense[name], tensor) for name, tensor in state.items())


def test_a_folder_without_a_readable_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"config\.json cannot be read"):
        quantization_of(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(FormatError, match=r"config\.json cannot be read"):
        quantization_of(tmp_path)


def test_shared_steps_are_equal_to_spelled_out_ones_on_the_way_back(tmp_path: Path, plain: Path) -> None:
    matrix = random_matrix(32, 64, **GRID)
    shared = replace(matrix, grid=replace(matrix.grid, scale=matrix.grid.scale[:1], zero=matrix.grid.zero[:1]))
    with writer(tmp_path / "out", plain) as w:
        w.add("a", shared)
        w.close_block({})
        w.record_json = "{}"
    assert torch.equal(dict(read_dense(tmp_path / "out"))["a.weight"], shared.decode())


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, source: Callable[..., Path]) -> Callable[[str], tuple[Path, str]]:
    """Return a function from a format to a folder in it, and the text of its config.json, which tests may replace."""

    @cache
    def folder_of(format: str) -> tuple[Path, str]:
        out = tmp_path_factory.mktemp("written") / "out"
        write_folder(out, source(torch.bfloat16), format, bits=4, group_size=32)
        return out, (out / "config.json").read_text()

    return folder_of


@pytest.mark.parametrize("format", FORMAT_NAMES)
@pytest.mark.parametrize(
    "value",
    [None, "", "16", 0, -2, True, 1.5, 2.0, 10**400, [], [16], {}, {"a": 1}, "x" * 10**5],
    ids=lambda v: str(v)[:12],
)
def test_a_config_of_other_types_is_one_sentence(
    written: Callable[[str], tuple[Path, str]], format: str, value: object
) -> None:
    """`group_size: ""` was a ValueError of int(), `dynamic: []` an AttributeError, a group size of 0 a division by zero."""
    out, text = written(format)
    whole = json.loads(text)

    def read(**changes: object) -> None:
        quantization = json.loads(json.dumps(whole["quantization_config"]))
        for name, new in changes.items():
            *path, last = name.split("__")
            part = quantization
            for key in path:
                part = part[key]
            part[last] = new
        (out / "config.json").write_text(json.dumps(whole | {"quantization_config": quantization}))
        list(read_matrices(out))

    weights = "config_groups__group_0__weights"
    places = (
        (
            weights,
            f"{weights}__group_size",
            f"{weights}__num_bits",
            f"{weights}__symmetric",
            f"{weights}__strategy",
            "config_groups",
            "format",
            "quantization_status",
        )
        if format == "compressed-tensors"
        else ("bits", "group_size", "sym", "dynamic", "format")
    )
    for place in places:
        with contextlib.suppress(FormatError):
            read(**{place: value})
