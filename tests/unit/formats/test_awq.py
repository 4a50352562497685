"""AWQ: bytes by hand, the same codes as gptq_v2, what readers do not take, and gptqmodel's own reader where installed."""

import json

import pytest
import torch

import nearplane
from families import VOCABULARY
from native_checkpoints import save_tiny
from nearplane import RecipeError
from nearplane.errors import FormatError
from nearplane.formats.awq import FORMAT
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.lattice.scale import Steps
from nearplane.loading.dense_network import dense_network
from nearplane.number_formats import integers

GRID = integers(4, 32, symmetric=False)
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
WORDS = {"bits": 4, "group_size": 32, "symmetric": False, "format": "awq"}


@pytest.fixture
def tokens():
    return torch.randint(VOCABULARY, (8, 40), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model(tmp_path):
    save_tiny(tmp_path / "model", "llama", torch.float16, **SIZES)
    return tmp_path / "model"


def test_eight_outputs_are_in_a_word_in_the_order_of_the_format():
    W = torch.arange(16.0)[:8].repeat(32, 1).T.contiguous()
    grid = Steps(format=GRID, search="minmax", storage=torch.float16).grid(W)
    codes = torch.arange(8).repeat(32, 1).T.int()
    tensors = FORMAT.layers.pack("a", QuantizedMatrix(codes=codes, grid=grid), torch.float16)
    assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == {
        "a.qweight": ((32, 1), torch.int32), "a.qzeros": ((1, 1), torch.int32), "a.scales": ((1, 8), torch.float16)
    }  # fmt: skip
    assert (
        f"{int(tensors['a.qweight'][0, 0]):08x}" == "75316420"
    )  # output 0 in the lowest bits, then 2, 4, 6, 1, 3, 5, 7


def test_all_codes_are_read_back(generator):
    W = torch.randn(24, 64, generator=generator)
    grid = Steps(format=GRID, search="mse", storage=torch.float16).grid(W)
    matrix = QuantizedMatrix(codes=grid.round(W)[0].int(), grid=grid)
    tensors = FORMAT.layers.pack("a", matrix, torch.float16)
    assert FORMAT.layers.shape_of("a", tensors) == (24, 64)
    assert FORMAT.layers.unpack("a", tensors, GRID).same_as(matrix)
    empty = FORMAT.layers.empty("a", (24, 64), GRID, torch.float32)
    assert {name: (t.shape, t.dtype) for name, t in empty.items()} == {
        name: (t.shape, t.dtype) for name, t in tensors.items()
    }


def test_the_weights_are_those_of_gptq_in_fewer_bytes(model, tokens, tmp_path):
    found = {}
    for format in ("awq", "gptq_v2"):
        record = nearplane.quantize(model, tmp_path / format, calibration=tokens, **WORDS | {"format": format})
        found[format] = record.bytes, dense_network(tmp_path / format).state_dict()
    assert found["awq"][0] < found["gptq_v2"][0]
    assert all(torch.equal(weights, found["gptq_v2"][1][name]) for name, weights in found["awq"][1].items())
    assert nearplane.verify(tmp_path / "awq", against=model, calibration=tokens).faults == ()
    loaded = nearplane.load(tmp_path / "awq", dtype="float32")
    assert torch.equal(loaded(tokens).logits, dense_network(tmp_path / "awq")(tokens).logits)


def test_layers_that_are_left_are_named_in_the_config(model, tokens, tmp_path):
    nearplane.quantize(model, tmp_path / "out", calibration=tokens, ignore=[r"layers\.1\.mlp"], **WORDS)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    parts = ("down_proj", "gate_proj", "up_proj")
    assert {"lm_head", *(f"model.layers.1.mlp.{part}" for part in parts)} == set(config["modules_to_not_convert"])
    assert nearplane.verify(tmp_path / "out", against=model, calibration=tokens).faults == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"symmetric": True},
            "awq does not store int4-g32. Use --no-symmetric",
        ),
        ({"bits": 3}, "awq does not store int3-g32-asym. Use --bits 4 --no-symmetric"),
        (
            {"layers": {"down_proj": {"group_size": 16}}},
            "one group size for all layers; found int4-g32-asym and int4-g16",
        ),
    ],
)
def test_what_awq_does_not_hold_is_refused(model, tokens, tmp_path, options, message):
    with pytest.raises(RecipeError, match=message):
        nearplane.quantize(model, tmp_path / "out", calibration=tokens, **WORDS | options)
    assert not (tmp_path / "out").exists()


def test_other_configs_are_refused_by_name():
    config = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": -1, "zero_point": True}
    assert FORMAT.layers.grid_of(config, "a") == integers(4, None, symmetric=False)
    for name, value in (("version", "gemv"), ("bits", 8), ("zero_point", False)):
        with pytest.raises(FormatError, match=f"AWQ: {name} is {value!r}, expected"):
            FORMAT.layers.grid_of(config | {name: value}, "a")


@pytest.mark.nightly
def test_gptqmodel_decodes_the_same_weights(model, tokens, tmp_path):
    pytest.importorskip("gptqmodel")
    from transformers import AutoModelForCausalLM, AwqConfig

    nearplane.quantize(model, tmp_path / "out", calibration=tokens, **WORDS)
    options = {"dtype": torch.float16, "quantization_config": AwqConfig(backend="torch_awq")}
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", device_map="cpu", **options)
    for name, module in dense_network(tmp_path / "out").named_modules():
        if name.endswith("_proj"):
            decoded = theirs.get_submodule(name)(torch.eye(module.in_features, dtype=torch.float16)).T
            assert torch.equal(decoded, module.weight.half())
