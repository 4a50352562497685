"""Checkpoints on grids load packed on the CPU, and answer as the decoded ones do."""

from __future__ import annotations

import copy
import logging
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, BertConfig, BertModel

import nearplane
from checkpoints import random_matrix, tiny_llama, write_folder
from families import config_of
from nearplane.errors import FormatError, ModelError, RecipeError
from nearplane.loading.from_pretrained import check_head
from nearplane.loading.grid_linear import GridLinear, rounded_to_8_bits
from nearplane.loading.packed_grids import PackedGrids, round_head

TOKENS = torch.tensor([[5, 9, 11, 40, 7, 3, 60, 22]])
FORMATS = {  # format, bits, group size, symmetric
    "compressed-tensors": ("compressed-tensors", 4, 32, True),
    "compressed-tensors, 8 bits": ("compressed-tensors", 8, None, True),
    "gptq_v2": ("gptq_v2", 4, 32, False),
    "gptq_v2, 2 bits": ("gptq_v2", 2, 32, False),
    "awq": ("awq", 4, 32, False),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    tiny_llama().to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("case", FORMATS)
def test_layers_stay_packed_and_answer_as_decoded(
    source: Path, tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    format, bits, group_size, symmetric = FORMATS[case]
    out = tmp_path / "out"
    written = write_folder(out, source, format, bits=bits, group_size=group_size, symmetric=symmetric)
    caplog.set_level(logging.INFO, "nearplane")
    packed = nearplane.load(out, device="cpu")
    assert f"of the quantized layers {len(written)} stay packed in {bits} bits" in caplog.messages
    assert {type(packed.get_submodule(name)) for name in written} == {GridLinear}
    assert type(packed.lm_head) is nn.Linear
    exact = nearplane.load(out, device="cpu", dtype=torch.float32, packed=False)
    dense = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval()
    dense.load_state_dict(packed.state_dict())
    with torch.no_grad():
        expected = exact(TOKENS).logits
        ours, theirs = ((part(TOKENS).logits - expected).norm() for part in (packed, dense))
    assert 0 < ours < 1.2 * theirs
    assert packed.generate(TOKENS, max_new_tokens=4, do_sample=False, pad_token_id=0).shape == (1, 12)


def test_a_packed_network_is_not_saved_decoded_without_a_word(source: Path, tmp_path: Path) -> None:
    written = write_folder(tmp_path / "out", source, "compressed-tensors", bits=4, group_size=32)
    packed = nearplane.load(tmp_path / "out", device="cpu")
    said = rf"^{len(written)} layers of this \w+ are packed, and .* Copy the folder .* nearplane export OUT FOLDER"
    for saving in (packed, copy.deepcopy(packed)):
        with pytest.raises(ModelError, match=said):
            saving.save_pretrained(tmp_path / "dense", safe_serialization=True)
    assert not (tmp_path / "dense").exists()
    nearplane.export(tmp_path / "out", tmp_path / "dense", dtype="bfloat16")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "dense").state_dict()
    assert read.keys() == packed.state_dict().keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in packed.state_dict().items())
    assert "save_pretrained" not in type(packed).__dict__, "other networks of the class are saved as before"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_networks_in_other_dtypes_stay_packed(source: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    write_folder(tmp_path / "out", source, "gptq_v2", bits=4, group_size=32)
    packed = nearplane.load(tmp_path / "out", device="cpu", dtype=dtype)
    assert any(isinstance(module, GridLinear) for module in packed.modules())
    exact = nearplane.load(tmp_path / "out", device="cpu", dtype=torch.float32, packed=False)
    with torch.no_grad():
        expected, ours = exact(TOKENS).logits, packed(TOKENS).logits
    assert ours.dtype == dtype
    assert (ours - expected).norm() <= 32 * torch.finfo(dtype).eps * expected.norm()


def test_networks_in_float64_and_decoded_ones_have_linear_layers(source: Path, tmp_path: Path) -> None:
    write_folder(tmp_path / "out", source, "gptq_v2", bits=4, group_size=32)
    for options in ({"dtype": torch.float64}, {"packed": False}):
        model = nearplane.load(tmp_path / "out", device="cpu", **options)
        assert not any(isinstance(module, GridLinear) for module in model.modules())


def test_tied_weights_and_unknown_layers_are_decoded() -> None:
    """The embeddings need the weight that the head shares with them."""
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config_of("qwen3"))
    grids = PackedGrids(network, ["lm_head", "model.layers.0.mlp.up_proj", "elsewhere"], torch.bfloat16)
    matrix = random_matrix(64, 32, bits=4, group_size=32, symmetric=True, dtype=torch.bfloat16)
    for name in ("lm_head", "elsewhere"):
        assert torch.equal(grids.take(name, matrix), matrix.decode())
    taken = grids.take("model.layers.0.mlp.up_proj", matrix)
    assert taken.shape == (64, 32)
    assert taken.untyped_storage().nbytes() == 2


@pytest.mark.parametrize("packed", [True, False])
def test_steps_that_are_not_finite_are_refused_without_a_run_record(source: Path, tmp_path: Path, packed: bool) -> None:
    write_folder(tmp_path, source, "compressed-tensors", bits=4, group_size=32)
    path = min(tmp_path.glob("*.safetensors"))
    tensors = load_file(path)
    name = next(each for each in tensors if each.endswith("_scale"))
    tensors[name][0, 0] = torch.nan
    save_file(tensors, path)
    with pytest.raises(FormatError, match=f"{name.rpartition('.')[0]} has steps or offsets that are NaN or Inf"):
        nearplane.load(tmp_path, device="cpu", packed=packed)


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_is_rounded_to_8_bits_and_the_embeddings_stay(
    tmp_path: Path, tied: bool, caplog: pytest.LogCaptureFixture
) -> None:
    dense = tiny_llama().to(torch.bfloat16)
    dense.config.tie_word_embeddings = tied
    if tied:
        dense.lm_head.weight = dense.model.embed_tokens.weight
    dense.save_pretrained(tmp_path)
    caplog.set_level(logging.INFO, "nearplane")
    rounded = nearplane.load(tmp_path, device="cpu", head="int8")
    tokens = dense.config.vocab_size
    assert f"the head is rounded to 8 bits, with a step for each of {tokens} tokens" in caplog.messages
    grows = "the embeddings, which shared the weight of the head, keep it, so that memory grows by"
    assert any(message.startswith(grows) for message in caplog.messages) == tied
    assert torch.equal(rounded.get_input_embeddings().weight, dense.get_input_embeddings().weight)
    head, weight = rounded.get_output_embeddings(), dense.get_output_embeddings().weight
    steps = weight.float().abs().amax(1, keepdim=True) / 127
    assert ((head.weight.float() - weight.float()).abs() <= 0.5 * steps + 2**-8 * weight.float().abs()).all()
    with torch.no_grad():
        error = (rounded(TOKENS).logits - dense(TOKENS).logits).norm() / dense(TOKENS).logits.norm()
    assert 0 < error < 0.02
    rounded.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(again.lm_head.weight, head.weight)


def test_a_head_that_cannot_be_rounded_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="head is 'int4'; expected int8"):
        nearplane.load(source, head="int4")
    with pytest.raises(RecipeError, match="head is int8, which is for the CPU; the device is cuda:1"):
        check_head("int8", torch.device("cuda:1"))
    BertModel(BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)).save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match=r"head is int8, but BertModel has no head\. Leave head out"):
        nearplane.load(tmp_path, device="cpu", head="int8")
    network = tiny_llama()
    network.lm_head = rounded_to_8_bits(network.lm_head.weight.detach())
    with pytest.raises(RecipeError, match="the head is quantized in the file and stays packed as it is"):
        round_head(network)


def test_a_head_of_few_tokens_is_said_to_gain_nothing(caplog: pytest.LogCaptureFixture) -> None:
    network = AutoModelForCausalLM.from_config(config_of("llama", vocab_size=8))
    round_head(network)
    (message,) = caplog.messages
    assert re.fullmatch(
        r"head=int8 hardly makes this model faster: the head is [0-4]\.\d % of what a token reads", message
    )


def test_a_copy_of_a_packed_layer_has_words_of_its_own() -> None:
    layer, x = rounded_to_8_bits(torch.randn(70, 32)), torch.randn(1, 32)
    copied, expected = copy.deepcopy(layer), layer(x)
    layer.words.zero_()
    assert torch.equal(copied(x), expected)
