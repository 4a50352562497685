"""Running the network without its blocks tells how to run the blocks without the network."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama import modeling_llama

from bare_blocks import both
from families import FAMILIES, MOE_FAMILIES, VOCABULARY, config_of, random_model
from model_types import save_type
from nearplane.calibration.activations import Dealt, Stream, skeleton
from nearplane.calibration.network_ends import readout
from nearplane.calibration.windows import Windows
from nearplane.errors import CalibrationError, ModelError
from nearplane.models.model import Model, open_model
from nearplane.system.ranks import ONE_PROCESS, Ranks
from nightly import daily

Saved = Callable[[str], Path]
Loaded = Callable[[str], PreTrainedModel]


def block_outputs(network: PreTrainedModel, names: list[str], tokens: Tensor) -> dict[str, Tensor]:
    """Run the whole network and return what comes out of every block."""
    outputs: dict[str, Tensor] = {}
    handles = []
    for name in names:

        def keep(module: nn.Module, args: object, output: Tensor | tuple[Tensor, ...], name: str = name) -> None:
            outputs[name] = output[0] if isinstance(output, tuple) else output

        handles.append(network.get_submodule(name).register_forward_hook(keep))
    with torch.no_grad():
        network(tokens, use_cache=False)
    for handle in handles:
        handle.remove()
    return outputs


def started(folder: Path, tokens: Tensor, dtype: torch.dtype = torch.float64) -> tuple[Model, Stream]:
    model = open_model(str(folder))
    return model, both(skeleton(model, tokens.split(2), device="cpu", dtype=dtype))


@pytest.mark.parametrize("family", daily([*FAMILIES, "bloom", "rwkv"], ["llama", "gemma2", "mixtral", "rwkv"]))
def test_block_by_block_equals_the_whole_network(family: str, tokens: Tensor, tmp_path: Path) -> None:
    """Also where blocks return tuples (bloom, rwkv), masks differ by layer (gemma), or experts are fused (mixtral)."""
    small = {
        "bloom": dict(hidden_size=32, n_layer=3, n_head=4, vocab_size=VOCABULARY),
        "rwkv": dict(hidden_size=32, num_hidden_layers=3, vocab_size=VOCABULARY),
    }
    dtype, tolerance = (torch.float32, 1e-5) if family in MOE_FAMILIES else (torch.float64, 1e-12)
    random_model(config_of(family, **small.get(family, {}))).save_pretrained(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    model, stream = started(tmp_path, tokens, dtype=dtype)
    expected = block_outputs(reference, [block.name for block in model.blocks], tokens)
    for block in model.blocks:
        with block.on("cpu", dtype):
            stream.advance(block)
        for hidden in (stream.quantized, stream.original):
            difference = (torch.cat(hidden) - expected[block.name]).abs().max()
            assert difference <= tolerance * expected[block.name].abs().max()
    assert [len(x) for x in stream.quantized] == [2, 2, 1]
    assert stream.calls == {}
    with readout(model, stream, device="cpu", dtype=dtype) as logits, torch.no_grad():
        found = [logits(part, x) for part, x in zip(tokens.split(2), stream.quantized, strict=True)]
        whole = reference(tokens, use_cache=False).logits
    assert (torch.cat(found) - whole).abs().max() <= tolerance * whole.abs().max()


def test_both_streams_start_as_the_same_tensors(saved: Saved, tokens: Tensor) -> None:
    model, stream = started(saved("llama"), tokens)
    assert all(a is b for a, b in zip(stream.original, stream.quantized, strict=True))
    with model.blocks[0].on("cpu", torch.float64) as block:
        stream.advance(block)
    assert not any(a is b for a, b in zip(stream.original, stream.quantized, strict=True))


def test_one_stream_needs_one_copy_of_each_block(saved: Saved, loaded: Loaded, tokens: Tensor) -> None:
    model, stream = started(saved("llama"), tokens)
    stream.original = None
    for block in model.blocks:
        with block.on("cpu", torch.float64, original=False):
            stream.advance(block)
    last = model.blocks[-1].name
    expected = block_outputs(loaded("llama"), [last], tokens)[last]
    torch.testing.assert_close(torch.cat(stream.quantized), expected, rtol=1e-12, atol=1e-12)


def test_masks_and_rotary_tables_are_kept_once_for_all_blocks_and_batches(saved: Saved, tokens: Tensor) -> None:
    _, stream = started(saved("gemma3_text"), tokens[:4])
    kept = {
        id(value)
        for calls in stream.calls.values()
        for call in calls
        for item in (*call.args, *call.kwargs.values())
        for value in (item if isinstance(item, tuple) else (item,))
        if isinstance(value, Tensor)
    }
    assert len(kept) <= 2 * 2 + 2 + 1, "cos and sin of both kinds of layers, their masks, positions"
    assert len(stream.calls["model.layers.0"]) == 2


def embeddings() -> int:
    """Count the embeddings of our models that are in memory now."""
    gc.collect()
    everything = (o for o in gc.get_objects() if issubclass(type(o), nn.Parameter))
    return sum(1 for o in everything if o.shape == (VOCABULARY, 32) and not o.is_meta)


def test_embeddings_are_in_memory_only_for_the_skeleton(saved: Saved, tokens: Tensor) -> None:
    before = embeddings()
    model, stream = started(saved("llama"), tokens)
    assert embeddings() == before
    with model.around([nn.Identity()] * 3, torch.device("cpu"), torch.float64):
        assert embeddings() == before + 1
    assert embeddings() == before
    assert len(stream.calls) == 3


def test_tokens_beyond_the_vocabulary_are_named(saved: Saved) -> None:
    with pytest.raises(CalibrationError, match=f"token id 200, but the model's vocabulary has {VOCABULARY}"):
        started(saved("llama"), torch.tensor([[1, 200, 3]]))


def test_the_skeleton_is_deterministic(saved: Saved, tokens: Tensor) -> None:
    _, first = started(saved("llama"), tokens)
    _, second = started(saved("llama"), tokens)
    assert all(torch.equal(a, b) for a, b in zip(first.quantized, second.quantized, strict=True))


def test_output_that_is_not_finite_is_named(saved: Saved, tokens: Tensor) -> None:
    model, stream = started(saved("llama"), tokens)
    with model.blocks[0].on("cpu", torch.float64) as block:
        block.quantized.mlp.down_proj.weight[0, 0] = float("inf")
        with pytest.raises(CalibrationError, match=r"model\.layers\.0 returns NaN or Inf"):
            stream.advance(block)


def rewired(order: Callable[[nn.ModuleList, Tensor, dict[str, object]], Tensor]) -> Callable[..., object]:
    """Return a forward of LlamaModel that runs its blocks in another way."""

    def forward(self: nn.Module, input_ids: Tensor, **kwargs: object) -> object:
        hidden = self.embed_tokens(input_ids)
        positions = torch.arange(hidden.shape[1])[None]
        tables = self.rotary_emb(hidden, positions)
        hidden = order(self.layers, hidden, {"attention_mask": None, "position_embeddings": tables})
        return modeling_llama.BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))

    return forward


def twice(layers: nn.ModuleList, hidden: Tensor, kwargs: dict[str, object]) -> Tensor:
    for layer in [*layers[:2], layers[0]]:
        hidden = layer(hidden, **kwargs)
    return hidden


def scaled(layers: nn.ModuleList, hidden: Tensor, kwargs: dict[str, object]) -> Tensor:
    for layer in layers:
        hidden = layer(hidden * 2, **kwargs)
    return hidden


def too_few(layers: nn.ModuleList, hidden: Tensor, kwargs: dict[str, object]) -> Tensor:
    for layer in layers[:2]:
        hidden = layer(hidden, **kwargs)
    return hidden


@pytest.mark.parametrize(
    ("order", "message"), [(twice, "out of order"), (scaled, "changes the hidden states"), (too_few, "did not run")]
)
def test_a_network_that_cannot_be_run_block_by_block_is_refused(
    order: Callable[..., Tensor], message: str, saved: Saved, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", rewired(order))
    with pytest.raises(ModelError, match=message):
        started(saved("llama"), tokens)


def test_hidden_states_with_tokens_before_windows_are_refused(tmp_path: Path, tokens: Tensor) -> None:
    """XLNet's: windows would be taken for tokens."""
    with pytest.raises(ModelError, match=r"shape \(\d+, \d+, 64\) for tokens of shape \(\d+, \d+\)\. .* windows along"):
        started(save_type(tmp_path, "xlnet"), tokens)


class Rank(Ranks):
    def __init__(self, rank, world):
        self.rank, self.world = rank, world


@given(st.integers(1, 40), st.integers(0, 9), st.integers(1, 8), st.integers(1, 5))
def test_every_batch_enters_the_sums_of_one_rank(count, extra, size, world):
    tokens = torch.arange(count + extra)[:, None]
    windows = Windows(seqlen=1, fitted=tokens[:count], extra=tokens[count:] if extra else None)
    alone, whole = windows.dealt(size, Ranks())
    assert [int(x) for batch in alone for x in batch] == [*range(count + extra)]
    summed, seen, run, most = [], [], [], set()
    for rank in range(world):
        batches, dealt = windows.dealt(size, Rank(rank, world))
        assert len(batches) == len(dealt.numbers) == len(dealt.starts)
        run.append(sum(map(len, batches)))
        most.add(dealt.most)
        assert (dealt.windows, dealt.extra_windows, dealt.batches) == (count, extra, whole.batches)
        for place, (batch, number, start) in enumerate(zip(batches, dealt.numbers, dealt.starts, strict=True)):
            assert torch.equal(batch, alone[number])
            assert int(batch[0]) == start
            if place or not dealt.repeated:
                (summed if place < dealt.fitted else seen).append(number)
    assert sorted(summed + seen) == [*range(whole.batches)]
    assert seen == sorted(seen), "extra windows come in their order"
    assert len(summed) == whole.fitted
    assert most == {max(run)}, "all ranks decide by the same number"


def test_a_stream_of_one_process_has_all_batches():
    dealt = Dealt.among(ONE_PROCESS, [1, 4, 2])
    assert [*dealt.numbers] == [0, 1, 2]
    assert [*dealt.starts] == [0, 1, 5]
    assert (dealt.fitted, dealt.windows, dealt.repeated) == (3, 7, False)
