"""Weights stay on disk; what is materialised equals what from_pretrained loads, and is freed again."""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, GPT2Model, PreTrainedModel, PreTrainedTokenizerFast

from families import FAMILIES, config_of
from nearplane.errors import ModelError, NumericalError
from nearplane.models.model import open_model, positions_of
from pretended import pretended

Saved = Callable[[str], Path]
Loaded = Callable[[str], PreTrainedModel]


def state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters and all buffers, also those that are not saved."""
    return dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_streamed_block_equals_from_pretrained(family: str, saved: Saved, loaded: Loaded) -> None:
    model, reference = open_model(str(saved(family))), loaded(family)
    assert len(list(saved(family).glob("*.safetensors"))) > 1
    for block in model.blocks:
        expected = state(reference.get_submodule(block.name))
        with block.on("cpu", torch.float64):
            for module in (block.original, block.quantized):
                assert state(module).keys() == expected.keys()
                for name, tensor in state(module).items():
                    assert torch.equal(tensor, expected[name]), name
                    assert not tensor.requires_grad
                    assert tensor.dtype == expected[name].dtype


@pytest.mark.parametrize("family", FAMILIES)
def test_what_surrounds_the_blocks_equals_from_pretrained(family: str, saved: Saved, loaded: Loaded) -> None:
    """Embeddings, norms and computed buffers: rotary frequencies, scales of embeddings."""
    model, expected = open_model(str(saved(family))), state(loaded(family))
    with model.around([torch.nn.Identity() for _ in model.blocks], torch.device("cpu"), torch.float64) as network:
        real = {name: tensor for name, tensor in state(network).items() if not tensor.is_meta}
        assert all(torch.equal(tensor, expected[name]) for name, tensor in real.items())
        outside = {name for name in expected if not name.startswith(f"{model.stacks[0]}.")}
        assert outside - real.keys() <= {"lm_head.weight", "embed_out.weight"}


def test_the_head_of_an_untied_model_is_not_loaded(saved: Saved) -> None:
    model = open_model(str(saved("llama")))
    with model.around([torch.nn.Identity() for _ in model.blocks], torch.device("cpu"), torch.float64) as network:
        assert network.lm_head.weight.is_meta


@pytest.mark.parametrize("family", FAMILIES)
def test_block_names_and_the_rest_are_all_names_once(family: str, saved: Saved) -> None:
    model = open_model(str(saved(family)))
    names = [name for index in range(len(model.blocks)) for name in model.block_names(index)] + model.rest()
    assert sorted(names) == sorted(model.reader.names())


def test_renamed_parameters_are_found_under_their_name_in_the_checkpoint(tmp_path: Path) -> None:
    """A checkpoint of the base model has no "transformer." before its names; as the original GPT-2 on the hub."""
    base = GPT2Model(config_of("gpt2"))
    base.save_pretrained(tmp_path)
    model = open_model(str(tmp_path))
    assert model.weights.source_name("transformer.h.1.attn.c_attn.weight") == "h.1.attn.c_attn.weight"
    assert model.weights.source_name("lm_head.weight") == "wte.weight"
    assert "h.2.ln_1.bias" in model.block_names(2)
    with model.blocks[1].on("cpu", torch.float32) as block:
        assert torch.equal(block.quantized.attn.c_attn.weight, base.h[1].attn.c_attn.weight)


def test_unused_tensors_of_a_block_belong_to_it(tmp_path: Path) -> None:
    """Old GPT-2 files hold the causal mask; a copy of the checkpoint keeps it beside its block."""
    GPT2Model(config_of("gpt2")).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"h.1.attn.bias": torch.ones(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    model = open_model(str(tmp_path))
    assert "h.1.attn.bias" in model.block_names(1)
    assert "h.1.attn.bias" not in model.rest()


def test_tied_parameters_resolve_to_the_one_that_is_stored(saved: Saved) -> None:
    model = open_model(str(saved("qwen3")))
    assert "lm_head.weight" not in model.reader.names()
    assert model.weights.source_name("lm_head.weight") == "model.embed_tokens.weight"


def test_fused_parameters_have_no_name_of_their_own(saved: Saved) -> None:
    model = open_model(str(saved("mixtral")))
    assert any(".experts.3." in name for name in model.block_names(0))
    with pytest.raises(ModelError, match="made of 8 tensors"):
        model.weights.source_name("model.layers.0.mlp.experts.gate_up_proj")


def test_a_model_is_described_without_reading_weights(saved: Saved) -> None:
    model = open_model(str(saved("llama")), ignore=["k_proj"])
    layer = model.blocks[1].layers[0]
    assert (layer.name, layer.kind, layer.shape) == ("model.layers.1.self_attn.q_proj", "Linear", (32, 32))
    assert all(parameter.is_meta for parameter in model.network.parameters())
    assert (model.dtype, model.positions, model.skipped) == (torch.float64, 64, [])
    assert model.ignored == [f"model.layers.{index}.self_attn.k_proj" for index in range(3)]


def test_positions_are_found_under_every_name() -> None:
    assert positions_of(config_of("gpt2")) == 64
    assert positions_of(config_of("opt")) == 64
    assert positions_of(config_of("bloom")) is None


def test_the_two_copies_share_no_memory(saved: Saved) -> None:
    with open_model(str(saved("llama"))).blocks[0].on("cpu", torch.float64) as block:
        layer = block.quantized_layers()[0]
        layer.write(torch.zeros(layer.shape))
        assert block.original.self_attn.q_proj.weight.count_nonzero() > 0
        assert block.quantized.self_attn.q_proj.weight.count_nonzero() == 0


def test_without_correction_only_one_copy_is_made(saved: Saved) -> None:
    with open_model(str(saved("llama"))).blocks[0].on("cpu", torch.float32, original=False) as block:
        assert block.original is None
        assert block.quantized.self_attn.q_proj.weight.dtype == torch.float32


def test_a_block_is_freed_after_its_context_even_if_a_layer_is_held(saved: Saved) -> None:
    model = open_model(str(saved("llama")))
    alive: list[weakref.ref[torch.Tensor]] = []
    held = []
    for block in model.blocks:
        with block.on("cpu", torch.float64):
            alive += [weakref.ref(p) for module in (block.original, block.quantized) for p in module.parameters()]
            held += block.quantized_layers()
        assert [ref for ref in alive if ref() is not None] == []
        assert block.original is None
        assert block.quantized is None
    assert all(layer.module.weight.is_meta for layer in held)


def test_a_block_is_freed_after_an_exception(saved: Saved) -> None:
    block = open_model(str(saved("llama"))).blocks[0]
    with contextlib.suppress(KeyError), block.on("cpu", torch.float64):
        parameter = weakref.ref(block.quantized.self_attn.q_proj.weight)
        raise KeyError
    assert parameter() is None
    assert block.quantized is None


def changed(source: Path, folder: Path, name: str, tensor: torch.Tensor | None) -> Path:
    """Copy a model with one tensor replaced, or left out."""
    tensors = {}
    for file in source.glob("*.safetensors"):
        tensors |= load_file(file)
    tensors.pop(name)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text((source / "config.json").read_text())
    save_file(tensors | ({} if tensor is None else {name: tensor}), folder / "model.safetensors", {"format": "pt"})
    return folder


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(bad: float, saved: Saved, tmp_path: Path) -> None:
    tensor = torch.ones(32, dtype=torch.float64)
    tensor[3] = bad
    model = open_model(str(changed(saved("llama"), tmp_path, NORM, tensor)))
    with model.blocks[0].on("cpu", torch.float64):
        pass
    with pytest.raises(NumericalError, match=f"{NORM} contains NaN or Inf"), model.blocks[1].on("cpu", torch.float64):
        pass


def test_a_part_of_a_split_tensor_that_is_not_finite_is_named(tmp_path: Path) -> None:
    """One stored tensor has queries, keys and values, of which only the first are NaN."""
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=64)
    AutoModel.from_config(AutoConfig.for_model("nomic_bert", **sizes)).save_pretrained(tmp_path)
    name = "encoder.layers.0.attn.Wqkv.weight"
    joined = load_file(tmp_path / "model.safetensors")[name]
    joined[0] = torch.nan
    model = open_model(str(changed(tmp_path, tmp_path / "changed", name, joined)))
    with pytest.raises(NumericalError, match=f"{name} contains NaN or Inf"), model.blocks[0].on("cpu", torch.float32):
        pass


def test_weights_that_overflow_in_the_dtype_asked_for_are_named(saved: Saved, tmp_path: Path) -> None:
    folder = changed(saved("llama"), tmp_path, NORM, torch.full((32,), 1e5, dtype=torch.float64))
    with pytest.raises(NumericalError, match=f"{NORM} .* torch.float16"):  # noqa: SIM117
        with open_model(str(folder)).blocks[1].on("cpu", torch.float16):
            pass


def test_a_missing_tensor_is_named_at_once(saved: Saved, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"lack 1 of .* {NORM}"):
        open_model(str(changed(saved("llama"), tmp_path, NORM, None)))


def test_a_tensor_of_another_shape_is_named(saved: Saved, tmp_path: Path) -> None:
    folder = changed(saved("llama"), tmp_path, NORM, torch.ones(31, dtype=torch.float64))
    with pytest.raises(ModelError, match=rf"{NORM} is \(31,\), but config.json describes \(32,\)"):
        open_model(str(folder))
    changed(saved("llama"), tmp_path, NORM, torch.ones(1, 32, dtype=torch.float64))
    with pytest.raises(ModelError, match=rf"{NORM} has shape \(1, 32\), but .* \(32,\)"):
        open_model(str(folder))


@pytest.mark.parametrize(("dtype", "name"), [(torch.int16, "I16"), (torch.complex64, "C64")])
def test_no_floats_in_the_place_of_weights_are_named(
    dtype: torch.dtype, name: str, saved: Saved, tmp_path: Path
) -> None:
    """They became a parameter of integers in a network of floating-point numbers."""
    with pytest.raises(ModelError, match=rf"{NORM} is stored as {name}, but weights are floating-point numbers"):
        open_model(str(changed(saved("llama"), tmp_path, NORM, torch.ones(32, dtype=dtype))))


def test_files_without_tensors_are_refused(saved: Saved, tmp_path: Path) -> None:
    folder = changed(saved("llama"), tmp_path, NORM, None)
    save_file({}, folder / "model.safetensors")
    with pytest.raises(ModelError, match="the weight files hold no tensors"):
        open_model(str(folder))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dtype": "int8"}, r"dtype is 'int8'. Expected float64, float32"),
        ({"transformers_weights": "other.safetensors"}, "transformers_weights is 'other.safetensors', a file that"),
        ({"transformers_weights": "model.safetensors", "dtype": "half"}, ""),
    ],
)
def test_a_config_with_which_the_quantized_model_would_not_load_is_refused(
    change: dict[str, str], said: str, saved: Saved, tmp_path: Path
) -> None:
    folder = changed(saved("llama"), tmp_path, NORM, torch.ones(32))
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=said) if said else contextlib.nullcontext():
        open_model(str(folder))


def test_a_truncated_file_is_named(saved: Saved, tmp_path: Path) -> None:
    folder = changed(saved("llama"), tmp_path, NORM, torch.ones(32))
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        open_model(str(folder))


def test_a_quantized_model_is_refused(saved: Saved, tmp_path: Path) -> None:
    folder = changed(saved("llama"), tmp_path, NORM, torch.ones(32))
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "gptq"}}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        load_file(folder / "model.safetensors") | {"a.qweight": torch.zeros(2, 2, dtype=torch.int32)},
        folder / "model.safetensors",
    )
    with pytest.raises(ModelError, match=r"already quantized with gptq\. Pass the original"):
        open_model(str(folder))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "config.json cannot be read"),
        ("{", "config.json cannot be read"),
        ('{"model_type": "nothing"}', "cannot build"),
    ],
)
def test_a_folder_without_a_usable_config_is_refused(
    config: str | None, message: str, saved: Saved, tmp_path: Path
) -> None:
    folder = changed(saved("llama"), tmp_path, NORM, torch.ones(32))
    (folder / "config.json").unlink()
    if config is not None:
        (folder / "config.json").write_text(config)
    with pytest.raises(ModelError, match=message):
        open_model(str(folder))


def test_a_model_that_is_no_language_model_is_refused(saved: Saved, tmp_path: Path) -> None:
    folder = changed(saved("llama"), tmp_path, NORM, torch.ones(32))
    (folder / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ModelError, match="cannot build a language model"):
        open_model(str(folder))


@pytest.mark.parametrize("source", ["./nothing", "/nothing/there", "../a/b", "a/b/c", "nothing", "~/nothing-here"])
def test_a_missing_folder_is_no_question_for_the_hub(source: str) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        open_model(source)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="is a file"):
        open_model(str(tmp_path / "model.safetensors"))


def test_the_tokenizer_comes_from_the_folder(saved: Saved, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    folder = changed(saved("llama"), tmp_path, NORM, torch.ones(32))
    model = open_model(str(folder))
    with pytest.raises(ModelError, match="no tokenizer"):
        model.tokenizer()
    tokenizer.save_pretrained(folder)
    assert model.tokenizer()("abc")["input_ids"] == tokenizer("abc")["input_ids"]


def test_opening_twice_gives_the_same_plan(saved: Saved) -> None:
    first, second = open_model(str(saved("mixtral"))), open_model(str(saved("mixtral")))
    assert first.block_names(1) == second.block_names(1)


def test_blocks_in_turn_are_read_once_each_and_one_ahead_on_a_gpu(saved: Saved) -> None:
    """From pinned memory, without a wait; on the CPU none is read before it is asked for."""
    model = open_model(str(saved("llama")))
    with pretended() as gpu:
        place = torch.device("pretend:0")
        for number, block in enumerate(model.in_turn(model.blocks, place)):
            ahead = [each.coming is not None for each in model.blocks]
            assert ahead == [number <= index <= number + 1 for index in range(len(model.blocks))]
            with block.on(place, torch.float64, original=False):
                assert block.coming is None
        loop = model.in_turn(model.blocks, place)
        next(loop)
        loop.close()
        assert all(each.coming is None for each in model.blocks)
        gpu.forget()
        for block in model.in_turn(model.blocks, place):
            with block.on(place, torch.float64, original=False):
                pass
        read, filled = (gpu.of(f"models/conversion.py Weights.{name}") for name in ("read", "fill"))
        assert (read.pinned, filled.waiting) == (filled.to_device, 0)
    for _ in model.in_turn(model.blocks, torch.device("cpu")):
        assert all(each.coming is None for each in model.blocks)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt2"])
def test_a_block_that_was_read_ahead_equals_one_that_was_not(family: str, saved: Saved) -> None:
    model, place = open_model(str(saved(family))), torch.device("pretend:0")
    for index, block in enumerate(model.blocks):
        with block.on("cpu", torch.float32, original=False):
            expected = state(block.quantized)
        with pretended() as gpu:
            ahead = next(model.in_turn(model.blocks[index:], place))
            gpu.forget()
            with ahead.on(place, torch.float32):
                counted = gpu.total
                found = {name: tensor.cpu() for name, tensor in state(ahead.quantized).items()}
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        assert counted.synchronizations == 1
