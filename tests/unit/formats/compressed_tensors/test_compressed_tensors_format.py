"""compressed-tensors, judged by the readers that will meet it: transformers and compressed-tensors themselves."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, LlamaForCausalLM

import nearplane
from checkpoints import config_of_grids, random_matrix, write_folder
from nearplane.errors import FormatError, RecipeError
from nearplane.formats.compressed_tensors.compressed_tensors_format import FORMAT
from nearplane.formats.stored import read_dense
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.number_formats import MXFP4, NumberFormat, integers
from nearplane.recipe.readers import Weights, readers_of
from nearplane.system.paths import RECORD
from nightly import daily_of_several

layout = FORMAT.layers
IDS = torch.arange(48)[None] % 64


def config(bits: int = 4, group_size: int | None = 32, symmetric: bool = True, **changes: Any) -> dict[str, Any]:
    grid = {"bits": bits, "group_size": group_size, "symmetric": symmetric}
    made = config_of_grids("compressed-tensors", ["a"], ignore=["lm_head"], order="pivoted", damp="auto", **grid)
    return json.loads(json.dumps(made | changes))  # as a reader gets it


def check(**changes: Any) -> None:
    case = {"bits": 4, "group_size": 32, "symmetric": True, "shape": (64, 352), "kind": "Linear"} | changes
    format = integers(case.pop("bits"), case.pop("group_size"), symmetric=case.pop("symmetric"))
    layout.check("model.layers.3.mlp.up_proj", format=format, **case)


def unpacked(name: str, tensors: dict[str, torch.Tensor], made: dict[str, Any]) -> QuantizedMatrix:
    return layout.unpack(name, tensors, FORMAT.layers.grid_of(made, name))


WIDTHS = [(2, 32), (3, 32), (3, None), (4, 32), (4, None), (5, 32), (6, None), (7, 32), (8, 32)]
CASES = [(*width, dtype) for dtype in (torch.float32, torch.bfloat16) for width in WIDTHS]


@pytest.mark.parametrize(("bits", "group_size", "dtype"), daily_of_several(CASES, CASES[::2]))
def test_from_pretrained_gives_exactly_the_logits_of_the_decoded_weights(
    tmp_path: Path, source: Callable[..., Path], dtype: torch.dtype, bits: int, group_size: int | None
) -> None:
    """The whole point of the format: no package of ours is needed, and nothing is lost on the way."""
    folder = source(dtype)
    write_folder(tmp_path / "out", folder, "compressed-tensors", bits=bits, group_size=group_size)
    assert_loads_as_decoded(tmp_path / "out", folder, dtype)


def test_groups_of_128_and_ignored_layers_load_too(tmp_path: Path, source: Callable[..., Path]) -> None:
    ignored = ("lm_head", "model.layers.1.mlp.down_proj", "model.layers.0.mlp.down_proj")
    folder = source(torch.bfloat16)
    matrices = write_folder(tmp_path / "out", folder, "compressed-tensors", bits=4, group_size=128, ignore=ignored)
    assert not set(ignored) & matrices.keys()
    assert_loads_as_decoded(tmp_path / "out", folder, torch.bfloat16)


def width_of(name: str) -> int:
    """Bits that differ from block to block and from set to set; layers that runtimes fuse have the same."""
    block = int(name.split(".")[2])
    return (3 if "self_attn" in name else 4) + block if "down_proj" not in name else 8 - 6 * block


def test_layers_with_widths_of_their_own_load_too(tmp_path: Path, source: Callable[..., Path]) -> None:
    folder = source(torch.bfloat16)
    matrices = write_folder(tmp_path / "out", folder, "compressed-tensors", bits=4, group_size=32, width=width_of)
    assert {matrix.grid.high for matrix in matrices.values()} == {2 ** (bits - 1) - 1 for bits in (2, 3, 4, 5, 8)}
    assert_loads_as_decoded(tmp_path / "out", folder, torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        (
            "mlp.up_proj.weight_shape",
            lambda shape: shape.flip(0),
            "mlp.up_proj.weight_packed is 128 x 352, but config.json describes 352 x 128",
        ),
        (
            "input_layernorm.weight",
            lambda norm: norm.to(torch.int32),
            "input_layernorm.weight is stored as int32, expected a weight",
        ),
    ],
)
def test_what_would_fail_when_it_is_called_does_not_load(
    tmp_path: Path, source: Callable[..., Path], name: str, change: Callable[[torch.Tensor], torch.Tensor], said: str
) -> None:
    """transformers loads a stored shape that is not the layer's, and integers in the place of weights."""
    out, part = tmp_path / "out", f"model.layers.0.{name}"
    write_folder(out, source(torch.float32), "compressed-tensors", bits=4, group_size=32)
    (out / RECORD).unlink()
    path = out / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {part: change(tensors[part])}, path, {"format": "pt"})
    with pytest.raises(FormatError, match=f"model.layers.0.{said}"):
        nearplane.load(out, dtype="float32")


def assert_loads_as_decoded(out: Path, folder: Path, dtype: torch.dtype, **options: Any) -> None:
    reference = LlamaForCausalLM.from_pretrained(folder).eval()
    untouched = reference(IDS).logits
    reference.load_state_dict({name: tensor.to(dtype) for name, tensor in read_dense(out)})
    loaded = AutoModelForCausalLM.from_pretrained(out, **options)
    assert loaded.dtype == dtype
    with torch.no_grad():
        expected, found = reference(IDS).logits, loaded(IDS).logits
    assert torch.equal(found, expected)
    assert not torch.equal(found, untouched)


@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (3, None)])
def test_asymmetric_files_are_for_servers_and_the_reason_not_to_write_them_for_transformers_holds(
    tmp_path: Path, source: Callable[..., Path], bits: int, group_size: int | None
) -> None:
    """The plain load fails on the shape of zero-points; the dequantizing load agrees with our reading of them."""
    usual = readers_of("compressed-tensors", None)
    with pytest.raises(RecipeError, match=rf"\b{re.escape(transformers.__version__.rpartition('.')[0])}\b"):
        usual.check("a", Weights(integers(bits, group_size, symmetric=False)))
    folder, out = source(torch.bfloat16), tmp_path / "out"
    write_folder(out, folder, "compressed-tensors", bits=bits, group_size=group_size, symmetric=False)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        AutoModelForCausalLM.from_pretrained(out)
    dequantize = CompressedTensorsConfig(dequantize=True)
    assert_loads_as_decoded(out, folder, torch.bfloat16, quantization_config=dequantize)


@pytest.mark.parametrize(
    ("changes", "reason", "way_out"),
    [
        ({"symmetric": False, "shape": (100, 352)}, "100 outputs", "symmetric weights"),
        ({"kind": "Conv1D"}, "is a Conv1D", "--format gptq "),
        ({"kind": "Conv2d"}, "is a Conv2d", "--ignore"),
        ({"bits": 9}, "int9", "2 to 8"),
        ({"bits": 1}, "int1", "2 to 8"),
        ({"group_size": 128}, "352 inputs", "--group-size"),
    ],
)
def test_what_readers_refuse_is_refused_before_any_work(changes: dict[str, Any], reason: str, way_out: str) -> None:
    with pytest.raises(RecipeError) as refusal:
        check(**changes)
    assert "model.layers.3.mlp.up_proj" in str(refusal.value)
    assert reason in str(refusal.value)
    assert way_out in str(refusal.value)


@pytest.mark.parametrize("bits", range(2, 9))
def test_what_readers_take_passes(bits: int) -> None:
    check(bits=bits)
    check(bits=bits, group_size=None, shape=(65, 173))


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, torch.float32),
        (torch.float64, torch.float32),
    ],
)
def test_scales_have_the_dtype_of_the_model(dtype: torch.dtype, expected: torch.dtype) -> None:
    assert layout.scale_dtype(dtype) == expected


def test_groups_by_g_idx_are_read() -> None:
    """Older writers store act-order groups so; the group of a column is what `weight_g_idx` says."""
    matrix = random_matrix(4, 64, bits=4, group_size=16, symmetric=True, permuted=True)
    tensors = layout.pack("a", matrix, torch.float16)
    tensors["a.weight_g_idx"] = matrix.grid.group.to(torch.int32)
    back = unpacked("a", tensors, config(4, 16))
    assert torch.equal(back.decode(), matrix.decode())
    tensors["a.weight_g_idx"][0] = 4
    with pytest.raises(FormatError, match="outside 0 to 3"):
        unpacked("a", tensors, config(4, 16))


@pytest.mark.parametrize(
    "damage",
    [
        {"a.weight_scale": torch.ones(4, 3, dtype=torch.float16)},
        {"a.weight_scale": torch.ones(4, 2, dtype=torch.float64)},
        {"a.weight_packed": torch.zeros(4, 9, dtype=torch.int32)},
        {"a.weight_packed": torch.zeros(4, 8, dtype=torch.int64)},
        {"a.weight_shape": torch.tensor([4, 65])},
        {"a.weight_shape": None},
        {"a.weight_scale": None},
    ],
)
def test_damaged_tensors_are_named(damage: dict[str, torch.Tensor | None]) -> None:
    tensors = layout.pack("a", random_matrix(4, 64, bits=4, group_size=32, symmetric=True), torch.float16)
    tensors = {name: tensor for name, tensor in (tensors | damage).items() if tensor is not None}
    with pytest.raises(FormatError, match=r"a\.weight_\w+ is"):
        unpacked("a", tensors, config())


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("format", "naive-quantized"),
        ("quantization_status", "frozen"),
        ("kv_cache_scheme", {"num_bits": 8}),
        ("input_activations", {"num_bits": 8}),
        ("strategy", "block"),
        ("type", "float"),
        ("num_bits", 1),
    ],
)
def test_schemes_not_understood_are_refused_by_name(option: str, value: object) -> None:
    tensors = layout.pack("a", random_matrix(4, 64, bits=4, group_size=32, symmetric=True), torch.float16)
    broken = config()
    scheme = broken["config_groups"]["group_0"]
    for place in (broken, scheme, scheme["weights"]):
        if option in place:
            place[option] = value
            break
    with pytest.raises(FormatError, match=option):
        unpacked("a", tensors, broken)


def schemes(*targets: list[str]) -> dict[str, Any]:
    """A config with a scheme of 2, 3, 4, ... bits for each list of targets."""
    made = config()["config_groups"]["group_0"]
    groups = [made | {"targets": t, "weights": made["weights"] | {"num_bits": 2 + i}} for i, t in enumerate(targets)]
    return config(config_groups={f"group_{i}": group for i, group in enumerate(groups)})


@pytest.mark.parametrize(
    ("targets", "bits"),
    [
        ((["b.a"], ["a"], ["Linear"]), 3),
        ((["Linear"], ["a", "b"]), 3),
        ((["re:.*b$", "Linear"], ["re:a"]), 3),
        ((["re:a"], ["a"], ["re:.*"]), 3),
        ((["b"], ["Linear"]), 3),
    ],
)
def test_the_most_specific_target_counts(targets: tuple[list[str], ...], bits: int) -> None:
    """As compressed-tensors has it: a name before a pattern before a class, whatever their order."""
    tensors = layout.pack("a", random_matrix(4, 64, bits=bits, group_size=32, symmetric=True), torch.float16)
    assert unpacked("a", tensors, schemes(*targets)).grid.high == 2 ** (bits - 1) - 1


@pytest.mark.parametrize("targets", [(["a"], ["a"]), (["b"], ["c"]), (["re:a", "b"], ["re:.*"]), ()])
def test_layers_that_no_scheme_names_or_several_do_are_refused(targets: tuple[list[str], ...]) -> None:
    with pytest.raises(FormatError, match="config_groups"):
        unpacked("a", {}, schemes(*targets))


def test_a_target_that_is_no_pattern_is_refused() -> None:
    with pytest.raises(FormatError, match="not a regular expression"):
        unpacked("a", {}, schemes(["re:("], ["b"]))


def test_numbers_that_no_packing_holds_are_refused_before_work_begins() -> None:
    """Those of other levels, and those of the levels of mxfp4 whose steps are stored otherwise."""
    for levels, group in (((-1.0, 0.0, 1.0), 32), (MXFP4.levels, 64)):
        format = NumberFormat(name="other", bits=4, group=group, levels=levels)
        with pytest.raises(
            RecipeError,
            match=r"layer: .* does not store other\. Use --bits 2 to 8, or .*fp8",
        ):
            FORMAT.layers.check("layer", (64, 64), "Linear", format)
    FORMAT.layers.check("layer", (64, 64), "Linear", MXFP4)


def test_codes_without_steps_are_refused() -> None:
    with pytest.raises(FormatError, match=r"a\.weight_scale is missing beside a\.weight_packed"):
        FORMAT.layers.parts(["b.weight_packed", "b.weight_scale", "a.weight_packed", "a.weight_shape"])
