"""Finding the tensors of a GGUF in a checkpoint by their values, in every form that converters give them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from converted import write_gguf
from nearplane.errors import RecipeError
from nearplane.formats.gguf.architecture import rope_factors
from nearplane.formats.gguf.contents import Content
from nearplane.formats.gguf.like import Like, Source, compare

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
ORDER = torch.tensor([3, 1, 4, 0, 5, 2, 7, 6])


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def compared(
    tmp_path: Path,
    file: dict[str, Tensor],
    source: dict[str, Tensor],
    layers: tuple[str, ...] = (),
    config: dict[str, Any] | None = None,
) -> Like:
    sources = {name: Source(tuple(each.shape), lambda each=each: each) for name, each in source.items()}
    return compare(write_gguf(tmp_path / "like.gguf", file), sources, layers, config or {}, "MODEL")


def rows(like: Like, name: str) -> list[tuple[str, list[int]]]:
    content = next(c for i, c in zip(like.header.tensors, like.contents, strict=True) if i.name == name)
    return [(part.name, part.rows.index().tolist()) for part in content.parts]


@DTYPES
def test_matrices_are_found_whatever_the_order_of_their_rows(dtype: torch.dtype, tmp_path: Path) -> None:
    """Alone, permuted, stacked, one behind the other, and cut in two; the values are rounded to the file's dtype."""
    a, b, c = numbers(8, 32), numbers(8, 32, seed=1), numbers(8, 32, seed=2)
    file = {"a": a, "b": b[ORDER], "both": torch.stack([b, a]), "tail": torch.cat([c[4:], a]), "head": c[:4]}
    like = compared(
        tmp_path, {name: each.to(dtype) for name, each in file.items()}, {"A": a, "B": b, "C": c}, ("A", "B", "C")
    )
    every = list(range(8))
    assert rows(like, "a") == [("A", every)]
    assert [row for _, run in rows(like, "b") for row in run] == ORDER.tolist()
    assert rows(like, "both") == [("B", every), ("A", every)]
    assert rows(like, "tail") == [("C", [4, 5, 6, 7]), ("A", every)]
    assert rows(like, "head") == [("C", [0, 1, 2, 3])]
    assert like.placed == {"A", "B", "C"}
    assert not like.left


@DTYPES
def test_a_weight_along_another_axis_is_found_and_left(dtype: torch.dtype, tmp_path: Path) -> None:
    """As DeepSeek's attn_k_b: of 4 heads the first 32 of 48 rows, exchanged with their inputs."""
    W = numbers(4 * 48, 64)
    k, v = W.view(4, 48, 64).split([32, 16], 1)
    like = compared(
        tmp_path,
        {"k": k.mT.to(dtype), "v": v.to(dtype), "a": numbers(8, 64).to(dtype)},
        {"W": W, "A": numbers(8, 64)},
        ("W", "A"),
    )
    assert like.placed == {"A"}
    assert like.left == {"W": "like.gguf has it along another axis"}
    assert [c.turned for c in like.contents] == [True, False, False]
    assert [like.in_q8_0(i, c) for i, c in zip(like.header.tensors, like.contents, strict=True)] == [
        dtype != torch.float32,
        dtype != torch.float32,
        False,
    ]


def test_rows_that_several_tensors_have_go_to_the_tensor_beside_them(tmp_path: Path) -> None:
    """Rows of zeros, as of unused tokens and pruned outputs."""
    a, b = numbers(8, 32), numbers(8, 32, seed=1)
    a[3] = b[0] = b[7] = 0
    like = compared(
        tmp_path, {"both": torch.cat([a, b]), "a": a[ORDER]}, {"A": a, "B": b, "Z": torch.zeros(2, 32)}, ("A", "B")
    )
    assert rows(like, "both") == [("A", list(range(8))), ("B", list(range(8)))]
    assert [row for _, run in rows(like, "a") for row in run] == ORDER.tolist()


def test_vectors_are_found_as_they_are_shifted_and_permuted(tmp_path: Path) -> None:
    norm, bias, decay, gate = numbers(16), numbers(16, seed=1), numbers(16, seed=2), numbers(1, 16)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    file = {"blk.1.norm": norm + 1, "blk.1.bias": bias[order], "decay": -decay.exp(), "gate": gate[0]}
    file["decays"] = -numbers(16, 4).exp()
    source = {"layers.0.norm": norm, "layers.1.norm": norm, "layers.1.bias": bias, "decay": decay, "gate": gate}
    like = compared(tmp_path, file, source | {"decays": numbers(16, 4)})
    assert [c.change for c in like.contents] == ["+1", "", "-exp", "", "-exp"]
    assert rows(like, "blk.1.norm") == [("layers.1.norm", list(range(16)))]  # of the same block
    assert [row for _, run in rows(like, "blk.1.bias") for row in run] == order.tolist()


def test_rotary_factors_are_compared_with_the_config(tmp_path: Path) -> None:
    rope = dict(rope_type="llama3", rope_theta=500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    rope |= dict(original_max_position_embeddings=32)
    config = dict(rope_parameters=rope, hidden_size=32, num_attention_heads=2)
    factors = rope_factors(config)
    like = compared(tmp_path, factors, {"A": numbers(8, 32)}, config=config)
    assert like.contents == (Content(),)
    with pytest.raises(RecipeError, match=r"the values of rope_freqs\.weight are in no tensors"):
        compared(tmp_path, factors, {"A": numbers(8, 32)}, config=config | {"rope_parameters": rope | {"factor": 4.0}})


@pytest.mark.parametrize("name", ["matrix", "vector"])
def test_one_value_that_differs_is_refused_by_the_name_of_its_tensor(name: str, tmp_path: Path) -> None:
    source = {"matrix": numbers(8, 32), "vector": numbers(16)}
    changed = source[name].clone()
    changed.view(-1).view(torch.int32)[5] += 1  # the last bit
    with pytest.raises(
        RecipeError, match=f"the values of {name} are in no tensors of MODEL, in any order of rows. Convert"
    ):
        compared(tmp_path, source | {name: changed}, source)


def test_layers_that_a_file_does_not_hold_alone_are_left(tmp_path: Path) -> None:
    a, b, c = numbers(8, 32), numbers(8, 32, seed=1), numbers(8, 32, seed=2)
    file = {"mixed": torch.cat([a, b]), "some": c[:4]}
    like = compared(tmp_path, file, {"A": a, "B": b, "C": c, "D": numbers(8, 32, seed=3)}, ("A", "C", "D"))
    assert like.left == {
        "A": "like.gguf has it in one tensor with rows that are not quantized",
        "C": "like.gguf has only some of its rows",
        "D": "like.gguf does not have it",
    }


def test_a_file_without_the_head_of_the_model_is_refused(tmp_path: Path) -> None:
    """llama.cpp would compute with the embeddings, as config.json of the converted folder said."""
    source = {"model.embed_tokens.weight": numbers(8, 32), "lm_head.weight": numbers(8, 32, seed=1)}
    file = {"token_embd.weight": source["model.embed_tokens.weight"]}
    assert compared(tmp_path, file, source, config={"tie_word_embeddings": True})
    with pytest.raises(RecipeError, match=r"has no output\.weight, but the head of MODEL is not its embeddings"):
        compared(tmp_path, file, source, config={"tie_word_embeddings": False})


def test_files_that_are_quantized_or_one_of_several_or_truncated_are_refused(tmp_path: Path) -> None:
    source = {"A": Source((8, 32), lambda: numbers(8, 32))}
    part = write_gguf(tmp_path / "part.gguf", {"a": numbers(8, 32)}, **{"split.count": 3})
    with pytest.raises(RecipeError, match=r"is one of 3 files\. Join them with llama-gguf-split"):
        compare(part, source, (), {}, "MODEL")
    whole = write_gguf(tmp_path / "whole.gguf", {"a": numbers(8, 32)})
    whole.write_bytes(whole.read_bytes()[:-8])
    with pytest.raises(RecipeError, match="bytes, expected"):
        compare(whole, source, (), {}, "MODEL")
