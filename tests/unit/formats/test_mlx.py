"""MLX: bytes by hand, folders of other programs, what MLX does not load; its own reader is in tests/journeys/test_mlx.py."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import nearplane
from families import config_of
from native_checkpoints import save_tiny
from nearplane import FormatError, RecipeError
from nearplane.formats.mlx import FORMAT
from nearplane.lattice.fits import FITS
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.lattice.scale import Steps
from nearplane.loading.dense_network import dense_network
from nearplane.number_formats import integers
from nearplane.recipe.recipe import Recipe
from nearplane.recipe.runtimes import MLX_BITS, MLX_GROUP_SIZES
from nearplane.recipe.schemes import GridScheme
from plain_formats import decoded

HEADS = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
SIZES = HEADS | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
RTN = {"format": "mlx", "bits": 4, "group_size": 32, "solver": "round-to-nearest"}


def matrix_of(W, bits, group, storage):
    format = integers(bits, group, minimum=True)
    grid, _ = FITS[format.fit](W, torch.ones(W.shape[1]), Steps(format=format, search="mse", storage=storage))
    return format, QuantizedMatrix(codes=grid.round(W)[0].int(), grid=grid)


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("bits", MLX_BITS)
def test_all_numbers_are_read_back(bits, storage, generator):
    W = torch.randn(24, 128, generator=generator) + 0.3
    for group in MLX_GROUP_SIZES:
        format, matrix = matrix_of(W, bits, group, storage)
        tensors = FORMAT.layers.pack("a", matrix, storage)
        assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == {
            "a.weight": ((24, 4 * bits), torch.uint32),
            "a.scales": ((24, 128 // group), storage),
            "a.biases": ((24, 128 // group), storage),
        }
        empty = FORMAT.layers.empty("a", (24, 128), format, storage)
        assert {name: (t.shape, t.dtype) for name, t in tensors.items()} == {
            n: (t.shape, t.dtype) for n, t in empty.items()
        }
        assert FORMAT.layers.unpack("a", tensors, format).same_as(matrix)
        layers = FORMAT.layers.configured({"bits": bits, "group_size": 32, "a": {"bits": bits, "group_size": group}})
        assert layers.shape_of("a", tensors) == (24, 128)


def test_codes_are_a_bit_stream_from_the_lowest_bit():
    W = torch.arange(8.0).repeat(1, 4)  # codes 0 to 7, step 1, minimum 0
    _, matrix = matrix_of(W, 3, 32, torch.float32)
    tensors = FORMAT.layers.pack("a", matrix, torch.float32)
    assert torch.equal(matrix.codes, W.int())
    stream = sum(code << 3 * place for place, code in enumerate(W.int()[0].tolist()))
    assert sum(int(word) << 32 * place for place, word in enumerate(tensors["a.weight"][0].tolist())) == stream


def test_numbers_that_the_dtype_does_not_hold_are_refused(generator):
    _, matrix = matrix_of(torch.randn(8, 64, generator=generator), 4, 32, torch.float32)
    with pytest.raises(FormatError, match=r"a\.scales: a number is not exact in torch\.bfloat16"):
        FORMAT.layers.pack("a", matrix, torch.bfloat16)


@pytest.fixture
def model(tmp_path):
    save_tiny(tmp_path / "model", "llama", torch.float32, **SIZES)
    return tmp_path / "model"


def test_folders_of_mlx_lm_are_read(model, tmp_path):
    """It writes no quant_method, quantizes embeddings too, and takes the entry `quantization` for itself."""
    nearplane.quantize(model, tmp_path / "ours", include_embeddings=True, include_head=True, **RTN)
    tensors = {
        name: tensor for path in (tmp_path / "ours").glob("*.safetensors") for name, tensor in load_file(path).items()
    }
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    del config["transformers_weights"]
    config["quantization_config"] = config["quantization"]
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "config.json").write_text(json.dumps(config))
    save_file(tensors, theirs / "model.safetensors", {"format": "mlx"})
    ours = dense_network(tmp_path / "ours").state_dict()
    assert all(
        torch.equal(tensor, ours[name]) for name, tensor in nearplane.load(theirs, packed=False).state_dict().items()
    )
    config["quantization"]["model.layers.0.mlp.up_proj"] = {"group_size": 32, "bits": 6, "mode": "mxfp6"}
    (theirs / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        FormatError, match=r"up_proj has mode 'mxfp6'; nearplane reads only affine, mxfp4, nvfp4, mxfp8"
    ):
        nearplane.load(theirs)


def test_transformers_stops_and_names_the_way(model, tmp_path):
    nearplane.quantize(model, tmp_path / "out", **RTN)
    with pytest.raises(
        ValueError, match=re.escape("packed for MLX, which transformers does not read. Load them with mlx_lm.load")
    ):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_a_rope_that_transformers_nests_is_also_where_mlx_reads_it(tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 32
    save_tiny(tmp_path / "model", "llama", torch.float32, **SIZES, rope_parameters=rope)
    nearplane.quantize(tmp_path / "model", tmp_path / "out", **RTN)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_theta"] == 500.0
    assert config["rope_scaling"] == {name: value for name, value in rope.items() if name != "rope_theta"}
    assert (
        nearplane.load(tmp_path / "out").config.rope_parameters
        == config_of("llama", rope_parameters=rope).rope_parameters
    )


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        (
            "llama",
            {"bits": 7},
            "does not store int7-g32-min. Use --bits 2, 3, 4, 5, 6 or 8 --group-size 32",
        ),
        ("llama", {"group_size": 16}, "does not store int4-g16-min. Use --bits .* --group-size 32, 64 or 128"),
        ("llama", {"group_size": None}, "int4-row-min: only groups have a minimum. Use --group-size 32, 64 or 128"),
        ("llama", {"symmetric": True}, "in MLX every group has one. Use --bits without --symmetric"),
        (
            "llama",
            {"grid": "fp8"},
            "mlx does not store fp8. Use --bits .* --grid mxfp4, nvfp4 or mxfp8, or --format compressed-tensors",
        ),
        (
            "llama",
            {"format": "gptq_v2", "grid": "int4-g32-min"},
            "Only --format mlx stores minima",
        ),
        ("llama", {"format": "gptq", "include_head": True}, "Readers of gptq expect embeddings and head unquantized"),
        ("gpt2", {}, "is a Conv1D; MLX stores Linear layers only"),
        ("opt", {}, "mlx_lm was not tried with models of type opt, but with cohere, "),
    ],
)
def test_what_mlx_does_not_hold_is_refused(family, options, message, tmp_path):
    save_tiny(tmp_path / "model", family, torch.float32, **(SIZES if family == "llama" else {}))
    words = {name: value for name, value in RTN.items() if "grid" not in options or name not in ("bits", "group_size")}
    with pytest.raises(RecipeError, match=message):
        nearplane.quantize(tmp_path / "model", tmp_path / "out", **words | options)
    assert not (tmp_path / "out").exists()


def test_a_grid_with_minima_is_for_mlx():
    assert Recipe(scheme=GridScheme(grid="int3-g64-min")).format == "mlx"
    assert Recipe.from_spellings(bits=3, group_size=64, format="mlx").scheme == GridScheme(grid="int3-g64-min")
    with pytest.raises(
        RecipeError, match=r"the grid is without one. Use --bits, GridScheme\(minimum=True\), or --grid mxfp4"
    ):
        Recipe(scheme=GridScheme(bits=3, group_size=64), format="mlx")


def test_experts_are_left_on_demand(tmp_path):
    sizes = SIZES | {"num_experts": 2, "moe_intermediate_size": 32}
    save_tiny(tmp_path / "model", "qwen3_moe", torch.float32, **sizes)
    record = nearplane.quantize(tmp_path / "model", tmp_path / "out", ignore=["experts"], **RTN)
    assert all("experts" not in layer.name for layer in record.layers)
    plain = decoded(tmp_path / "out")
    for name, tensor in dense_network(tmp_path / "out").state_dict().items():
        if "experts" not in name:
            assert torch.equal(tensor, torch.from_numpy(plain[name].floats())), name
