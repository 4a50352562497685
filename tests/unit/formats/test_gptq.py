"""GPTQ, versions 1 and 2. gptqmodel needs an environment of its own: benchmarks/peers/check_gptqmodel.py asks it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints import config_of_grids, random_matrix
from nearplane.errors import FormatError, RecipeError
from nearplane.formats.gptq import FORMAT, FORMAT_V2, GPTQ
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.number_formats import integers

BLOCK = "model.layers.3.mlp"
V1, V2 = FORMAT.layers, FORMAT_V2.layers


def config(layout: GPTQ, bits: int = 4, group_size: int | None = 32, **changes: Any) -> dict[str, Any]:
    settings = {
        "quantized": [f"{BLOCK}.up_proj"],
        "ignore": ["lm_head"],
        "symmetric": True,
        "order": "natural",
    } | changes
    made = config_of_grids("gptq" if layout.less else "gptq_v2", bits=bits, group_size=group_size, **settings)
    return json.loads(json.dumps(made))


def unpacked(layout: GPTQ, name: str, tensors: dict[str, torch.Tensor], made: dict[str, Any]) -> QuantizedMatrix:
    return layout.configured(made).unpack(name, tensors, layout.grid_of(made, name))


def field(words: torch.Tensor, bits: int, i: int) -> int:
    """Code `i` of the stream of a 1-D tensor of words, in Python integers."""
    stream = sum((word & 0xFFFFFFFF) << (32 * r) for r, word in enumerate(words.tolist()))
    return (stream >> (bits * i)) & (2**bits - 1)


@given(st.data())
@settings(deadline=None)
def test_what_is_packed_reads_back_exactly(data: st.DataObject) -> None:
    layout, symmetric = data.draw(st.sampled_from([(V1, True), (V2, True), (V2, False)]))
    bits, group_size = data.draw(st.sampled_from([2, 3, 4, 8])), data.draw(st.sampled_from([32, 64, None]))
    permuted = data.draw(st.booleans()) and group_size is not None
    out, columns = (32, 192) if bits == 3 or group_size else data.draw(st.sampled_from([(33, 172), (1, 1), (32, 64)]))
    matrix = random_matrix(out, columns, bits=bits, group_size=group_size, symmetric=symmetric, permuted=permuted)
    tensors = layout.pack("a", matrix, torch.float16)
    made = config(layout, bits, group_size, symmetric=symmetric) | {"desc_act": permuted}  # others write such groups
    back = unpacked(layout, "a", tensors, made)
    assert torch.equal(back.codes, matrix.codes)
    assert torch.equal(back.grid.scale, matrix.grid.scale)
    assert torch.equal(back.grid.zero, matrix.grid.zero)
    assert torch.equal(back.grid.group, matrix.grid.group)
    assert torch.equal(back.decode(), matrix.decode())
    assert (back.grid.low, back.grid.high) == (matrix.grid.low, matrix.grid.high)


@pytest.mark.parametrize(
    ("layout", "bits", "word"),
    [
        (V1, 2, "55555555"),
        (V1, 4, "77777777"),
        (V1, 8, "7F7F7F7F"),
        (V2, 2, "AAAAAAAA"),
        (V2, 4, "88888888"),
        (V2, 8, "80808080"),
    ],
)
def test_symmetric_zeros_are_the_words_that_readers_know(layout: GPTQ, bits: int, word: str) -> None:
    tensors = layout.pack("a", random_matrix(32, 64, bits=bits, group_size=32, symmetric=True), torch.float16)
    assert {f"{w & 0xFFFFFFFF:08X}" for w in tensors["a.qzeros"].flatten().tolist()} == {word}


@pytest.mark.parametrize(
    ("layout", "words"), [(V1, ["DB6DB6DB", "B6DB6DB6", "6DB6DB6D"]), (V2, ["24924924", "49249249", "92492492"])]
)
def test_three_bit_zeros_straddle_words(layout: GPTQ, words: list[str]) -> None:
    """Thirty-two threes (version 1) or fours (version 2) of three bits in three words."""
    tensors = layout.pack("a", random_matrix(32, 64, bits=3, group_size=None, symmetric=True), torch.float16)
    assert [f"{w & 0xFFFFFFFF:08X}" for w in tensors["a.qzeros"][0].tolist()] == words


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_every_field_is_where_the_format_says(bits: int) -> None:
    """Codes run along the inputs of `qweight`, zeros along the outputs of `qzeros`, scales are (groups, out)."""
    matrix = random_matrix(32, 96, bits=bits, group_size=32, symmetric=False)
    tensors = V2.pack("a", matrix, torch.float16)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert shapes == {"a.qweight": (3 * bits, 32), "a.qzeros": (3, bits), "a.scales": (3, 32), "a.g_idx": (96,)}
    for n, k in ((0, 0), (31, 95), (5, 10), (7, 21), (1, 63)):
        assert field(tensors["a.qweight"][:, n], bits, k) == matrix.codes[n, k]
        assert field(tensors["a.qzeros"][k // 32], bits, n) == matrix.grid.zero[n, k // 32]
        assert tensors["a.scales"][k // 32, n] == matrix.grid.scale[n, k // 32]
    assert torch.equal(tensors["a.g_idx"], (torch.arange(96) // 32).to(torch.int32))


def test_config_says_what_readers_ask() -> None:
    made = config(V1, 4, None)
    assert made["quant_method"] == "gptq"
    assert made["checkpoint_format"] == made["format"] == "gptq"
    assert (made["bits"], made["group_size"], made["sym"], made["desc_act"]) == (4, -1, True, False)
    assert "dynamic" not in made
    assert made["meta"]["quantizer"] == ["nearplane:0"]  # never another producer's name
    assert config(V2)["checkpoint_format"] == "gptq_v2"


@pytest.mark.parametrize("order", ["natural", "activation", "pivoted"])
def test_desc_act_is_false_whatever_the_order(order: str) -> None:
    """Readers that see it take slower kernels, or refuse; groups are runs of neighbours."""
    assert config(V2, 4, 32, order=order)["desc_act"] is False


def test_ignored_layers_of_the_blocks_are_named_to_every_reader() -> None:
    quantized, ignored = [f"{BLOCK}.up_proj", f"{BLOCK}.down_proj"], ["lm_head", f"{BLOCK}.gate_proj"]
    made = config(V1, quantized=quantized, ignore=ignored)
    assert list(made["dynamic"]) == [r"-:^model\.layers\.3\.mlp\.gate_proj$"]
    pattern = next(iter(made["dynamic"])).removeprefix("-:")
    assert re.match(pattern, f"{BLOCK}.gate_proj")
    assert not re.match(pattern, f"{BLOCK}.gate_proj_2")
    assert made["modules_in_block_to_quantize"] == [quantized]


def check(layout: GPTQ, **changes: Any) -> None:
    case = {"bits": 4, "group_size": 32, "symmetric": True, "shape": (64, 352), "kind": "Linear"} | changes
    format = integers(case.pop("bits"), case.pop("group_size"), symmetric=case.pop("symmetric"))
    layout.check(f"{BLOCK}.up_proj", format=format, **case)


@pytest.mark.parametrize(
    ("changes", "reason", "way_out"),
    [
        ({"kind": "Conv2d"}, "is a Conv2d", "--ignore"),
        ({"bits": 5}, "int5", "--format compressed-tensors"),
        ({"bits": 6}, "int6", "--format compressed-tensors"),
        ({"bits": 7}, "int7", "--format compressed-tensors"),
        ({"symmetric": False}, "not store int4-g32-asym", "--format gptq_v2"),
        ({"group_size": 128}, "352 inputs", "--group-size"),
        ({"group_size": 8}, "has groups of 8", "16, 32"),
        ({"shape": (64, 172), "bits": 3, "group_size": None}, "172 inputs", "2, 4 or 8 bits"),
        ({"shape": (48, 352), "bits": 3}, "48 outputs", "multiple of 32"),
    ],
)
def test_what_readers_refuse_is_refused_before_any_work(changes: dict[str, Any], reason: str, way_out: str) -> None:
    with pytest.raises(RecipeError) as refusal:
        check(V1, **changes)
    assert f"{BLOCK}.up_proj" in str(refusal.value)
    assert reason in str(refusal.value)
    assert way_out in str(refusal.value)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", ["Linear", "Conv1D"])
def test_what_readers_take_passes(bits: int, kind: str) -> None:
    check(V1, bits=bits, kind=kind)
    check(V2, bits=bits, kind=kind, symmetric=False, group_size=None)
    check(V2, bits=bits, kind=kind, group_size=352)
    if bits != 3:
        check(V1, bits=bits, kind=kind, group_size=None, shape=(65, 173))


def test_scales_are_half_precision_in_every_model() -> None:
    assert {V1.scale_dtype(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)} == {torch.float16}


def test_integers_outside_their_range_are_never_packed() -> None:
    matrix = random_matrix(32, 64, bits=4, group_size=32, symmetric=False)
    for codes in (matrix.codes + 1, matrix.codes - 1):
        with pytest.raises(FormatError, match=r"a: codes range from .* expected 0 to 15"):
            V2.pack("a", replace(matrix, codes=codes), torch.float16)
    for zero, found in (
        (16.0, "zeros range from"),
        (-1.0, "zeros range from"),
        (3.5, "whole numbers"),
        (float("nan"), "zeros range from"),
    ):
        grid = replace(matrix.grid, zero=torch.full_like(matrix.grid.zero, zero))
        with pytest.raises(FormatError, match=f"a: {found}|a: zeros are not whole numbers"):
            V2.pack("a", replace(matrix, grid=grid), torch.float16)
    finer = replace(matrix.grid, scale=matrix.grid.scale * (1 + 2**-12))
    with pytest.raises(FormatError, match="a scale is not exact"):
        V2.pack("a", replace(matrix, grid=finer), torch.float16)
    with pytest.raises(FormatError, match="asymmetric"):
        V1.pack("a", matrix, torch.float16)
    with pytest.raises(FormatError, match="5 bits"):
        V1.pack("a", random_matrix(32, 64, bits=5, group_size=32, symmetric=True), torch.float16)


def test_every_zero_from_0_to_the_largest_code_survives_version_2() -> None:
    matrix = random_matrix(32, 32, bits=4, group_size=32, symmetric=False)
    matrix.grid.zero[:, 0] = torch.arange(32) % 16
    tensors = V2.pack("a", matrix, torch.float16)
    assert torch.equal(unpacked(V2, "a", tensors, config(V2, symmetric=False)).grid.zero, matrix.grid.zero)


def test_version_1_with_an_ambiguous_zero_is_refused_not_misread() -> None:
    """15 stored means 0 to who masks and 16 to who does not; where whole words were subtracted, neighbours are off."""
    matrix = random_matrix(32, 32, bits=4, group_size=32, symmetric=False)
    matrix.grid.zero.fill_(5)
    tensors = V2.pack("a", matrix, torch.float16)
    tensors["a.qzeros"] -= 0x11111111  # as gptqmodel does
    asymmetric = config(V1, symmetric=False)
    assert torch.equal(unpacked(V1, "a", tensors, asymmetric).decode(), matrix.decode())
    matrix.grid.zero[3] = 0
    tensors = V2.pack("a", matrix, torch.float16)
    tensors["a.qzeros"] -= 0x11111111
    with pytest.raises(FormatError, match="zero point of 0 and others as 16"):
        unpacked(V1, "a", tensors, asymmetric)


def test_permuted_groups_without_desc_act_are_refused() -> None:
    """Half of the readers would ignore `g_idx` then."""
    matrix = random_matrix(32, 64, bits=4, group_size=32, symmetric=True, permuted=True)
    tensors = V1.pack("a", matrix, torch.float16)
    with pytest.raises(FormatError, match="desc_act is false"):
        unpacked(V1, "a", tensors, config(V1))


@pytest.mark.parametrize(
    "damage",
    [
        {"a.scales": torch.ones(3, 32, dtype=torch.float16)},
        {"a.qzeros": torch.zeros(2, 5, dtype=torch.int32)},
        {"a.qweight": torch.zeros(7, 32, dtype=torch.int32)},
        {"a.qweight": torch.zeros(8, dtype=torch.int32)},
        {"a.g_idx": torch.zeros(64)},
        {"a.g_idx": None},
        {"a.qzeros": None},
    ],
)
def test_damaged_tensors_are_named(damage: dict[str, torch.Tensor | None]) -> None:
    tensors = V1.pack("a", random_matrix(32, 64, bits=4, group_size=32, symmetric=True), torch.float16)
    tensors = {name: tensor for name, tensor in (tensors | damage).items() if tensor is not None}
    with pytest.raises(FormatError, match=r"a\.(scales|qzeros|qweight|g_idx) is"):
        unpacked(V1, "a", tensors, config(V1))


@pytest.mark.parametrize(
    "changes",
    [
        {"bits": 5},
        {"pack_dtype": "int16"},
        {"rotation": "hadamard"},
        {"dynamic": {"+:a": {"pack_dtype": "int8"}}},
        {"dynamic": {"a": 8}},
    ],
)
def test_options_not_understood_are_refused_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match=f"GPTQ: {next(iter(changes))}"):
        unpacked(V1, "a", {}, config(V1) | changes)


SETS = {
    f"{BLOCK}.gate_proj": 2,
    f"{BLOCK}.up_proj": 2,
    f"{BLOCK}.down_proj": 4,
    "model.layers.3.self_attn.q_proj": 4,
    f"{BLOCK}.c": 4,
}
GRIDS = {name: integers(bits, 32) for name, bits in SETS.items()}


def test_layers_with_grids_of_their_own_read_back_exactly() -> None:
    """Bits, groups and zero-points may differ; what is most frequent is that of the file."""
    grids = {"model.layers.0.a": integers(4, 32), "model.layers.0.b": integers(8, None, symmetric=False)}
    made = config(V2, grids=grids | {"model.layers.0.c": integers(4, 32)}, quantized=list(grids))
    assert (made["bits"], made["group_size"], made["sym"]) == (4, 32, True)
    for name, own in grids.items():
        matrix = random_matrix(32, 64, bits=own.bits, group_size=own.group or 64, symmetric=own.symmetric)
        read = unpacked(V2, name, V2.pack(name, matrix, torch.float16), made)
        assert read.same_as(matrix)


@pytest.mark.parametrize("layout", [V1, V2])
def test_layers_with_widths_of_their_own_read_back_exactly(layout: GPTQ) -> None:
    made = config(layout, grids=GRIDS, bits=3.5, quantized=list(SETS))
    assert made["bits"] == 4  # the most frequent
    for name, bits in SETS.items():
        matrix = random_matrix(32, 64, bits=bits, group_size=32, symmetric=True)
        read = unpacked(layout, name, layout.pack(name, matrix, torch.float16), made)
        assert torch.equal(read.codes, matrix.codes)
        assert read.grid.high == matrix.grid.high


def test_fused_layers_find_their_width_under_the_name_that_runtimes_give_them() -> None:
    """vLLM and SGLang look up `gate_up_proj` where the checkpoint has `gate_proj` and `up_proj`."""
    dynamic = config(V2, grids=GRIDS, quantized=list(SETS), ignore=["lm_head", f"{BLOCK}.router"])["dynamic"]
    found = {key: value for key, value in dynamic.items() if key.startswith("+:")}
    fused = [key for key in found if re.match(key.removeprefix("+:"), f"{BLOCK}.gate_up_proj")]
    assert [found[key] for key in fused] == [{"bits": 2}]
    assert dynamic.keys() - found.keys() == {r"-:^model\.layers\.3\.mlp\.router$"}
    assert not any(re.match(key[2:], f"{BLOCK}.down_proj") for key in dynamic)


def test_the_first_pattern_that_matches_counts() -> None:
    """As gptqmodel, vLLM and SGLang have it; a pattern without a sign adds, too."""
    tensors = V2.pack("a.b", random_matrix(32, 64, bits=8, group_size=64, symmetric=True), torch.float16)
    dynamic = {"-:b": {}, "+:.*c": {"bits": 2}, "a": {"bits": 8, "group_size": 64}, "+:a.b": {"bits": 2}}
    assert unpacked(V2, "a.b", tensors, config(V2) | {"dynamic": dynamic}).grid.high == 127


@pytest.mark.parametrize(("key", "said"), [("-:a", "excludes it"), ("+:(", "not a regular expression")])
def test_a_quantized_layer_that_is_to_be_left_out_and_a_broken_pattern_are_refused(key: str, said: str) -> None:
    with pytest.raises(FormatError, match=said):
        unpacked(V2, "a", {}, config(V2) | {"dynamic": {key: {}}})
