"""MXFP4 and NVFP4 in compressed-tensors: bytes as its own package reads them, and through every verb."""

import json
from dataclasses import replace

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

import nearplane
from families import VOCABULARY
from native_checkpoints import save_tiny
from nearplane import RecipeError
from nearplane.errors import FormatError
from nearplane.formats.compressed_tensors.compressed_tensors_format import FORMAT
from nearplane.formats.compressed_tensors.fp4_packed import MXFP4Packed, NVFP4Packed, apart
from nearplane.lattice.fits import FITS
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.lattice.scale import Steps
from nearplane.loading.dense_network import dense_network
from nearplane.number_formats import MXFP4, NVFP4, number_format
from nightly import daily

HEADS = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
SIZES = HEADS | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
BLOCKS = HEADS | {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
LAYOUT, WITH_GLOBAL_SCALE = MXFP4Packed(), NVFP4Packed()


def rounded(W, format):
    grid, _ = FITS[format.fit](W, W.new_ones(W.shape[1]), Steps(format=format, search="mse", storage=torch.float16))
    return QuantizedMatrix(codes=grid.round(W)[0].int(), grid=grid)


@pytest.fixture
def matrix(generator):
    return rounded(
        torch.randn(6, 64, generator=generator) * 2.0 ** torch.randint(-30, 30, (6, 1), generator=generator), MXFP4
    )


@pytest.fixture
def with_global_scale(generator):
    """Return a matrix of 40 rows whose weights span as many octaves as E4M3 has."""
    spread = 2.0 ** torch.randint(-8, 8, (40, 1), generator=generator)
    return rounded(torch.randn(40, 64, generator=generator) * spread, NVFP4)


@pytest.fixture
def tokens():
    return torch.randint(VOCABULARY, (8, 40), generator=torch.Generator().manual_seed(0))


def test_steps_are_powers_of_two_and_all_codes_are_read_back(matrix):
    exponents = matrix.grid.scale.log2()
    assert torch.equal(exponents, exponents.round())
    every = replace(matrix, codes=torch.arange(15).repeat(6, 5)[:, :64].int())
    for each in (matrix, every):
        tensors = FORMAT.layers.pack("a", each, torch.float16)
        assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
            "a.weight_packed": (6, 32), "a.weight_scale": (6, 2)
        }  # fmt: skip
        assert FORMAT.layers.shape_of("a", tensors) == (6, 64)
        assert FORMAT.layers.unpack("a", tensors, MXFP4).same_as(each)
        empty = FORMAT.layers.empty("a", (6, 64), MXFP4, torch.float32)
        assert {name: (t.shape, t.dtype) for name, t in empty.items()} == {
            name: (t.shape, t.dtype) for name, t in tensors.items()
        }


def test_the_package_reads_the_same_values(matrix):
    """compressed-tensors decodes to bfloat16, which holds these values exactly."""
    tensors = {name.removeprefix("a."): tensor for name, tensor in LAYOUT.pack("a", matrix, torch.float16).items()}
    scheme = QuantizationScheme(targets=["Linear"], weights=LAYOUT.weights(MXFP4, "natural"), format=LAYOUT.FORMAT)
    decoded = BaseCompressor.get_value_from_registry(LAYOUT.FORMAT).decompress(tensors, scheme)["weight"]
    assert decoded.dtype == torch.bfloat16
    assert torch.equal(decoded.float(), matrix.decode())


def test_blocks_with_a_global_scale_are_read_back_and_the_same_to_the_package(with_global_scale):
    every = replace(with_global_scale, codes=torch.arange(15).repeat(40, 5)[:, :64].int())
    for each in (with_global_scale, every):
        tensors = FORMAT.layers.pack("a", each, torch.float16)
        empty = FORMAT.layers.empty("a", (40, 64), NVFP4, torch.float32)
        assert {name: (t.shape, t.dtype) for name, t in empty.items()} == {
            name: (t.shape, t.dtype) for name, t in tensors.items()
        }
        assert FORMAT.layers.shape_of("a", tensors) == (40, 64)
        assert FORMAT.layers.unpack("a", tensors, NVFP4).same_as(each)
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=WITH_GLOBAL_SCALE.weights(NVFP4, "natural"),
        format=WITH_GLOBAL_SCALE.FORMAT,
    )
    named = {name.removeprefix("a."): tensor for name, tensor in tensors.items()}
    decoded = BaseCompressor.get_value_from_registry(WITH_GLOBAL_SCALE.FORMAT).decompress(named, scheme)["weight"]
    assert decoded.dtype == torch.bfloat16
    assert torch.equal(decoded, every.decode().bfloat16())


def test_the_bytes_of_a_few_weights():
    """Of every level its nibble: sign, then the place of the magnitude; two a byte, the first in the lower half."""
    values = torch.tensor([0, 0.5, -0.5, 1, -1, 1.5, 2, -2, 3, -3, 4, -4, 6, -6, -1.5, 0] * 2)[None] * 2.0**-3
    grid = Steps(format=MXFP4, search="minmax", storage=torch.float16).grid(values)
    tensors = LAYOUT.pack("a", QuantizedMatrix(codes=grid.round(values)[0].int(), grid=grid), torch.float16)
    assert tensors["a.weight_scale"].tolist() == [[124]]
    assert bytes(tensors["a.weight_packed"][0, :8].tolist()).hex() == "10293ac4d5e6f70b"


def test_a_step_that_is_no_power_of_two_is_refused(matrix):
    wrong = replace(matrix, grid=replace(matrix.grid, scale=matrix.grid.scale * 1.5))
    with pytest.raises(FormatError, match="a step is not a power of two"):
        LAYOUT.pack("a", wrong, torch.float16)


@pytest.mark.parametrize("dtype", daily([torch.float32, torch.bfloat16], [torch.bfloat16]))
@pytest.mark.parametrize(
    ("grid", "rate", "sizes"),
    [
        pytest.param("mxfp4", 4.25, SIZES, marks=pytest.mark.nightly),
        ("nvfp4", 4.5, SIZES),
        pytest.param("fp8", 8.25, SIZES, marks=pytest.mark.nightly),
        ("fp8-block", 8.001, BLOCKS),
        pytest.param("mxfp8", 8.25, SIZES, marks=pytest.mark.nightly),
    ],
)
def test_a_model_is_quantized_verified_loaded_and_read_by_transformers(tmp_path, tokens, dtype, grid, rate, sizes):
    model, out = tmp_path / "model", tmp_path / "out"
    save_tiny(model, "llama", dtype, **sizes)
    record = nearplane.quantize(model, out, grid=grid, calibration=tokens)
    assert {layer.format for layer in record.layers} == {grid}
    if dtype == torch.bfloat16 or grid not in ("fp8", "fp8-block"):  # whose steps have the model's dtype
        assert record.rate == pytest.approx(rate, rel=2e-3)  # a global scale takes four bytes
    found = nearplane.verify(out, against=model, calibration=tokens)
    assert found.faults == ()
    assert found.measured
    ours = dense_network(out, dtype=dtype)
    options = {} if dtype == torch.bfloat16 else {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=dtype, **options)
    loaded = nearplane.load(out, packed=False)
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, ours(tokens).logits)
        if grid in ("nvfp4", "mxfp4", "mxfp8"):  # transformers decodes these to bfloat16 in any network
            for layer in record.layers:
                ours.get_parameter(f"{layer.name}.weight").copy_(ours.get_parameter(f"{layer.name}.weight").bfloat16())
        assert torch.equal(theirs(tokens).logits, ours(tokens).logits)
    nearplane.export(out, tmp_path / "dense", dtype="float32")
    measured = [nearplane.evaluate(each, tokens, against=model) for each in (out, tmp_path / "dense")]
    assert measured[0] == measured[1]


@pytest.mark.nightly
def test_layers_may_be_integers_beside_it(tmp_path, tokens):
    model, out = tmp_path / "model", tmp_path / "out"
    save_tiny(model, "llama", torch.bfloat16, **SIZES)
    layers = {"down_proj": {"grid": "int8-g32"}}
    record = nearplane.quantize(model, out, grid="mxfp4", layers=layers, calibration=tokens)
    assert {layer.format for layer in record.layers if "down_proj" in layer.name} == {"int8-g32"}
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    assert nearplane.verify(out, against=model, calibration=tokens).faults == ()
    theirs = AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():
        assert torch.equal(theirs(tokens).logits, dense_network(out, dtype=torch.bfloat16)(tokens).logits)


@pytest.mark.parametrize("solver", ["nearest-plane", "round-to-nearest"])
def test_layers_that_runtimes_join_have_one_global_scale_in_files(tmp_path, tokens, solver):
    """Also where no inputs are observed, so that nothing says which layers share one."""
    model, out = tmp_path / "model", tmp_path / "out"
    save_tiny(model, "llama", torch.bfloat16, **SIZES | {"num_hidden_layers": 2})
    nearplane.quantize(model, out, grid="nvfp4", solver=solver, calibration=tokens)
    tensors = {name: tensor for file in out.glob("*.safetensors") for name, tensor in load_file(file).items()}
    scales = {name: tensor for name, tensor in tensors.items() if name.endswith("global_scale")}
    for layers in ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"):
        for block in range(2):
            shared = [scale for name, scale in scales.items() if f".{block}." in name and name.split(".")[-2] in layers]
            assert len(shared) == len(layers)
            assert len(torch.cat(shared).unique()) == 1
    assert nearplane.verify(out).faults == ()


def test_other_scales_among_layers_that_are_joined_are_found():
    """Whoever puts a file together from two runs gets it wrong; vLLM then takes one for both."""
    names = ["a.q_proj", "a.k_proj", "a.v_proj", "a.o_proj", "b.q_proj"]
    assert list(apart(dict.fromkeys(names, 3.0) | {"a.o_proj": 5.0, "b.q_proj": 4.0})) == []
    assert list(apart(dict.fromkeys(names, 3.0) | {"a.v_proj": 5.0})) == [("a.v_proj", "a.q_proj")]
    assert list(apart({"a.k_proj": 3.0, "a.v_proj": 5.0})) == [("a.v_proj", "a.k_proj")]  # with q unquantized


def test_a_layer_that_the_shared_scale_would_make_zero_is_named(tmp_path, tokens):
    model, out = tmp_path / "model", tmp_path / "out"
    save_tiny(model, "llama", torch.float32, **SIZES)
    file = model / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.weight"] *= 1e-7
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(RecipeError, match=r"layers\.0\.mlp\.up_proj has no weight above .* shares its global scale"):
        nearplane.quantize(model, out, grid="nvfp4", solver="round-to-nearest", calibration=tokens)
    assert not out.exists()


def test_a_second_global_scale_is_found(tmp_path, tokens):
    model, out = tmp_path / "model", tmp_path / "out"
    save_tiny(model, "llama", torch.bfloat16, **SIZES)
    nearplane.quantize(model, out, grid="nvfp4", solver="round-to-nearest", calibration=tokens)
    for file in out.glob("*.safetensors"):
        tensors = load_file(file)
        tensors |= {name: t * 2 for name, t in tensors.items() if name.endswith("up_proj.weight_global_scale")}
        save_file(tensors, file, {"format": "pt"})
    faults = [f.what for f in nearplane.verify(out).faults if f.where == "model.layers.0.mlp.up_proj"]
    assert any("vLLM takes one for both" in what for what in faults)


def test_experts_that_transformers_would_decode_wrong_are_refused_and_may_be_left(tmp_path, tokens):
    model, out = tmp_path / "model", tmp_path / "out"
    save_tiny(model, "qwen3_moe", torch.bfloat16, **SIZES | {"moe_intermediate_size": 32})
    with pytest.raises(RecipeError, match=r"experts\.0\.\w+: .* not load experts in nvfp4 from"):
        nearplane.quantize(model, out, grid="nvfp4", calibration=tokens)
    nearplane.quantize(model, out, grid="nvfp4", ignore=["experts"], solver="round-to-nearest", calibration=tokens)
    theirs = AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():
        assert torch.equal(theirs(tokens).logits, dense_network(out, dtype=torch.bfloat16)(tokens).logits)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "gptq"}, "gptq does not store mxfp4. Use --bits 2, 3, 4 or 8"),
        ({"format": "gguf", "grid": "fp8"}, "gguf does not store fp8. Use --bits 4, 5 or 8 --group-size 32"),
        ({"bits": 3}, "bits is 3, but --grid mxfp4 determines"),
        ({"rate": 3}, "grid is 'mxfp4' and rate 3"),
    ],
)
def test_what_does_not_go_with_it_is_refused(tmp_path, tokens, options, message):
    save_tiny(tmp_path / "model", "llama", **SIZES)
    with pytest.raises(RecipeError, match=message):
        nearplane.quantize(tmp_path / "model", tmp_path / "out", calibration=tokens, **{"grid": "mxfp4"} | options)


@pytest.mark.parametrize(
    ("grid", "sizes", "message"),
    [
        (
            "nvfp4",
            {"intermediate_size": 72},
            r"down_proj has 72 inputs, not a multiple of the group size 16\. Use another --grid",
        ),
        (
            "mxfp8",
            {"intermediate_size": 80},
            r"down_proj has 80 inputs, not a multiple of the group size 32\. Use another --grid",
        ),
        (
            "fp8-block",
            {"num_key_value_heads": 1},
            r"k_proj has 64 outputs, not a multiple of the 128 rows that share steps",
        ),
        ("fp8-block", {"intermediate_size": 192}, r"\w+ has 192 (in|out)puts, not a multiple of the"),
    ],
)
def test_widths_that_a_block_does_not_divide_are_refused_before_work_begins(tmp_path, tokens, grid, sizes, message):
    save_tiny(tmp_path / "model", "llama", **BLOCKS | sizes)
    with pytest.raises(RecipeError, match=message):
        nearplane.quantize(tmp_path / "model", tmp_path / "out", grid=grid, calibration=tokens)
    assert not (tmp_path / "out").exists()


def test_other_weights_in_the_config_are_refused_by_name():
    weights = LAYOUT.weights(MXFP4, "natural")
    assert LAYOUT.number_format(weights) is MXFP4 is number_format("mxfp4")
    with pytest.raises(FormatError, match=r"weights\.group_size is 16, expected 32"):
        LAYOUT.number_format(weights | {"group_size": 16})
