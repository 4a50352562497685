"""Moments equal what is computed plainly from two whole networks."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from bare_blocks import Convolution, Routed, Skipping, bare, both
from families import config_of, random_model
from nearplane.calibration.activations import Stream, skeleton
from nearplane.calibration.second_moments import Observed, refuse_unusable
from nearplane.calibration.separate_passes import observe
from nearplane.calibration.stages import stages
from nearplane.errors import CalibrationError
from nearplane.lattice.moments import Moments
from nearplane.models.layers import as_layer
from nearplane.models.model import Block, Model, open_model
from pretended import pretended

Saved = Callable[[str], Path]
Loaded = Callable[[str], PreTrainedModel]


def at(model: Model, tokens: Tensor, dtype: torch.dtype = torch.float64) -> Stream:
    return both(skeleton(model, tokens.split(2), device="cpu", dtype=dtype))


@dataclass
class Plain:
    """What a whole network saw: rows by layer, and the hidden states around the additions, (tokens, ...) each."""

    rows: dict[str, Tensor]
    added: dict[str, Tensor]


def plain(network: PreTrainedModel, tokens: Tensor, prefix: str, family: str) -> Plain:
    """Run the whole network on all tokens at once with the simplest hooks; r by knowledge of the architecture."""
    seen: dict[str, Tensor] = {}
    block = network.get_submodule(prefix)
    handles = []
    for name, module in block.named_modules():

        def before(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], name: str = name) -> None:
            seen[f"{name} input"] = args[0] if args else kwargs.get("hidden_states")

        def after(module: nn.Module, args: object, output: Tensor | tuple[Tensor, ...], name: str = name) -> None:
            seen[f"{name} output"] = output[0] if isinstance(output, tuple) else output

        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after))
    with torch.no_grad():
        network(tokens, use_cache=False)
    for handle in handles:
        handle.remove()
    hidden = seen[" input"]
    residuals = {
        "llama": {"self_attn.o_proj": hidden, "mlp.down_proj": seen.get("post_attention_layernorm input")},
        "gpt2": {"attn.c_proj": hidden, "mlp.c_proj": seen.get("ln_2 input")},
        "opt": {"self_attn.out_proj": hidden, "fc2": seen.get("final_layer_norm input")},
        "gpt_neox": {
            "attention.dense": seen.get("mlp.dense_4h_to_h output", 0) + hidden,
            "mlp.dense_4h_to_h": seen.get("attention.dense output", 0) + hidden,
        },
    }[family]
    layers = {name for name, module in block.named_modules() if as_layer(name, module)}
    flat = {name: seen[f"{name} input"].flatten(0, -2) for name in layers}
    return Plain(flat, {name: r.flatten(0, -2) for name, r in residuals.items()})


def perturbed(network: PreTrainedModel, blocks: list[str]) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """Return a copy with noise on every matrix of some blocks, and the noisy weights (out, in) by layer name."""
    network = deepcopy(network)
    generator = torch.Generator().manual_seed(7)
    weights: dict[str, Tensor] = {}
    for block in blocks:
        for name, module in network.get_submodule(block).named_modules(prefix=block):
            if layer := as_layer(name, module):
                W = layer.read()
                layer.write(W + 0.05 * torch.randn(W.shape, generator=generator, dtype=W.dtype))
                weights[name] = layer.read()
    return network, weights


def write(block: Block, weights: dict[str, Tensor], only: str = "") -> None:
    for layer in block.quantized_layers():
        if layer.name in weights and only in layer.name:
            layer.write(weights[layer.name])


@torch.no_grad()
def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12 * float(b.abs().max()))


def against_the_original(statistics: Moments) -> Tensor:
    """Return what tells of the original network: moments with its inputs, or what the output has lost."""
    assert (statistics.C is None) != (statistics.lost is None)
    return statistics.lost if statistics.C is None else statistics.C


def check(statistics: Moments, W: Tensor, name: str, original: Plain, quantized: Plain, rows: slice) -> None:
    """Compare with X^T X / tokens over some rows."""
    X, X_hat = original.rows[name][rows], quantized.rows[name][rows]
    assert statistics.tokens == len(X_hat)
    close(statistics.H, X_hat.T @ X_hat / len(X))
    if name not in original.added:
        close(statistics.C, X.T @ X_hat / len(X))
        assert statistics.lost is None
        return
    outputs = (X - X_hat) @ W.T + (original.added[name] - quantized.added[name])[rows]
    close(statistics.lost, outputs.T @ X_hat / len(X))
    assert statistics.C is None


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gpt_neox"])
def test_moments_equal_those_of_two_whole_networks(
    family: str, saved: Saved, loaded: Loaded, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of five windows are held out: the split falls into the middle of the second batch of two."""
    monkeypatch.setattr("nearplane.calibration.second_moments.HELD_OUT", 0.4)
    model = open_model(str(saved(family)))
    first, second = model.blocks[0], model.blocks[1]
    network, weights = perturbed(loaded(family), [first.name, second.name])
    original = plain(loaded(family), tokens, second.name, family)
    quantized = plain(network, tokens, second.name, family)
    stream = at(model, tokens)
    with first.on("cpu", torch.float64):
        write(first, weights)
        stream.advance(first)
    with second.on("cpu", torch.float64):
        write(second, weights)
        groups = stages(second, stream)
        seen = [one for group in groups for one in observe(second, [group], stream)]
    assert sum(len(observed.layers) for observed in seen) == len(original.rows)
    for observed in seen:
        for layer in observed.layers:
            statistics, name = observed.moments[layer.name], layer.name.removeprefix(f"{second.name}.")
            check(statistics, weights[layer.name], name, original, quantized, slice(0, 60))
            check(statistics.held_out, weights[layer.name], name, original, quantized, slice(36, 60))


def observed_llama(saved: Saved, tokens: Tensor, *, correct: bool = True) -> dict[str, Observed]:
    """Observe the second block of a Llama whose first is perturbed, stage by stage; by the first layer's last name."""
    model = open_model(str(saved("llama")))
    stream = at(model, tokens)
    if not correct:
        stream.original = None
    for block in model.blocks[:2]:
        with block.on("cpu", torch.float64):
            if block is model.blocks[0]:
                for layer in block.quantized_layers():
                    layer.write(layer.read() * 1.05)
                stream.advance(block)
                continue
            groups = stages(block, stream)
            seen = [one for group in groups for one in observe(block, [group], stream)]
    return {observed.layers[0].name.split(".")[-1]: observed for observed in seen}


def test_layers_of_one_group_share_the_tensors(saved: Saved, tokens: Tensor) -> None:
    seen = observed_llama(saved, tokens)["q_proj"]
    q, k, v = (seen.moments[layer.name] for layer in seen.layers)
    assert q.H is k.H is v.H
    assert q.C is k.C is v.C
    assert q.held_out.H is v.held_out.H


def test_without_correction_there_is_only_a_hessian(saved: Saved, tokens: Tensor) -> None:
    corrected, alone = observed_llama(saved, tokens), observed_llama(saved, tokens, correct=False)
    for name, observed in alone.items():
        statistics = observed.moments[observed.layers[0].name]
        assert (statistics.C, statistics.lost, statistics.held_out) == (None, None, None)
        close(statistics.H, corrected[name].moments[observed.layers[0].name].H)


def test_one_window_is_not_split_and_two_always_are(saved: Saved, tokens: Tensor) -> None:
    for windows, held in [(1, None), (2, 12), (5, 12)]:
        seen = observed_llama(saved, tokens[:windows])["q_proj"]
        statistics = next(iter(seen.moments.values()))
        assert statistics.tokens == 12 * windows
        assert (statistics.held_out and statistics.held_out.tokens) == held


@pytest.mark.parametrize("last", [False, True])
def test_stopping_early_changes_nothing(last: bool, saved: Saved, tokens: Tensor) -> None:
    """All groups in one pass, which runs to the end for the last of them, against one pass each."""
    model = open_model(str(saved("llama")))
    stream = at(model, tokens)
    with model.blocks[0].on("cpu", torch.float64) as block:
        write(block, {layer.name: 1.05 * layer.read() for layer in block.quantized_layers()})
        groups = stages(block, stream)
        alone = [one for group in groups for one in observe(block, [group], stream)]
        together = observe(block, groups, stream, last=last)
    for a, b in zip(alone, together, strict=True):
        for name in a.moments:
            for key in ("H", "C", "lost"):
                x, y = getattr(a.moments[name], key), getattr(b.moments[name], key)
                assert (x is None and y is None) or torch.equal(x, y)


def test_the_original_streams_last_pass_is_its_way_to_the_next_block(saved: Saved, tokens: Tensor) -> None:
    streams = []
    for last in (False, True):
        model = open_model(str(saved("llama")))
        stream = at(model, tokens)
        with model.blocks[0].on("cpu", torch.float64) as block:
            groups = stages(block, stream)
            write(block, {layer.name: 1.05 * layer.read() for layer in block.quantized_layers()})
            observe(block, groups[-1:], stream, last=last)
            assert stream.ahead == last
            stream.advance(block)
        assert not stream.ahead
        streams.append(stream)
    one, other = ([*stream.original, *stream.quantized] for stream in streams)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert not torch.equal(streams[0].original[0], streams[0].quantized[0])


def test_one_pass_may_look_and_go_on_to_the_next_block(saved: Saved, tokens: Tensor) -> None:
    """What a probe does: it looks at a block as it stays."""
    states, moments = [], []
    for onward in (False, True):
        model = open_model(str(saved("llama")))
        stream = skeleton(model, tokens.split(2), device="cpu", dtype=torch.float64)
        with model.blocks[0].on("cpu", torch.float64, original=False) as block:
            found = observe(block, stages(block, stream), stream, onward=onward)
            moments.append([found_of.H for one in found for found_of in one.moments.values()])
            if onward:
                stream.passed(block)
            else:
                stream.advance(block)
        states.append(stream.quantized)
    assert all(torch.equal(a, b) for pair in (states, moments) for a, b in zip(*pair, strict=True))


def test_a_block_costs_less_than_five_forwards(tokens: Tensor, tmp_path: Path) -> None:
    """Multiplications by weights, counted; the probe of the stages is one more batch. MLP twice the attention."""
    config = config_of("llama", num_key_value_heads=4, intermediate_size=2 * 128 // 3, num_hidden_layers=1)
    random_model(config).save_pretrained(tmp_path)
    model = open_model(str(tmp_path))
    stream = at(model, tokens)
    work = 0

    def count(module: nn.Linear, args: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal work
        work += args[0].shape[:-1].numel() * module.weight.numel()

    with model.blocks[0].on("cpu", torch.float64) as block:
        one = tokens.numel() * sum(layer.module.weight.numel() for layer in block.quantized_layers())
        for module in (block.original, block.quantized):
            for layer in block.layers_of(module):
                layer.module.register_forward_hook(count)
        groups = stages(block, stream)
        probe, work = work, 0
        for group in groups:
            observe(block, [group], stream, last=group is groups[-1])
        stream.advance(block)
    assert probe / one == pytest.approx(2 / 5)
    assert work / one < 4.4


def test_the_same_inputs_give_the_same_bits(saved: Saved, tokens: Tensor) -> None:
    first, second = observed_llama(saved, tokens), observed_llama(saved, tokens)
    for name, observed in first.items():
        for layer, statistics in observed.moments.items():
            again = second[name].moments[layer]
            assert torch.equal(statistics.H, again.H)
            assert torch.equal(against_the_original(statistics), against_the_original(again))


def test_in_half_precision_moments_are_float64_sums_of_float32_products(saved: Saved, tokens: Tensor) -> None:
    model = open_model(str(saved("llama")))
    stream = at(model, tokens, torch.bfloat16)
    with model.blocks[0].on("cpu", torch.bfloat16) as block:
        groups = stages(block, stream)
        X = torch.cat([block.quantized.input_layernorm(x) for x in stream.quantized]).reshape(-1, 32)
        seen = observe(block, groups[:1], stream)[0]
    statistics = next(iter(seen.moments.values()))
    assert statistics.H.dtype == statistics.C.dtype == torch.float64
    expected = X.double().T @ X.double() / len(X)
    torch.testing.assert_close(statistics.H, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("which", ["original", "quantized"])
def test_an_input_that_is_not_finite_names_the_layer_and_the_network(which: str, saved: Saved, tokens: Tensor) -> None:
    model = open_model(str(saved("llama")))
    stream = at(model, tokens)
    with model.blocks[0].on("cpu", torch.float64) as block:
        groups = stages(block, stream)
        getattr(block, which).self_attn.v_proj.weight[0, 0] = float("nan")
        observe(block, groups[:1], stream)
        with pytest.raises(
            CalibrationError, match=rf"layers\.0\.self_attn\.o_proj contains NaN .*in the {which} network"
        ):
            observe(block, groups[1:2], stream)


def test_convolutions_are_observed_by_the_rows_of_their_patches() -> None:
    """Also where the held-out split falls between two windows of one batch."""
    block, stream = bare(Convolution(), 2, 5, 5)
    seen = observe(block, stages(block, stream), stream)[0]
    statistics, rows = seen.moments["block.conv"], seen.layers[0].rows(torch.cat(stream.quantized))
    assert (statistics.tokens, statistics.held_out.tokens) == (4 * 25, 25)
    close(statistics.H, rows.T @ rows / len(rows))
    close(statistics.held_out.H, rows[75:].T @ rows[75:] / 25)
    assert statistics.corrects
    for lost in (statistics.C if statistics.lost is None else None, statistics.held_out.lost):
        assert lost is None or not lost.any()  # the networks agree


def test_layers_that_see_other_tokens_in_the_two_networks_are_named() -> None:
    block, stream = bare(Routed(), 6, 4)
    groups = stages(block, stream)
    assert len(observe(block, groups, stream)) == 2
    with torch.no_grad():
        block.quantized.first.bias[0] += 9.0
    with pytest.raises(CalibrationError, match=r"block\.expert receives \d+ tokens in the original network and 12 in"):
        observe(block, groups, stream)
    stream.original = None
    assert observe(block, groups, stream)[1].moments["block.expert"].tokens == 24


def test_from_pretrained_and_streamed_networks_agree_after_writing(saved: Saved, tokens: Tensor) -> None:
    """What a layer writes is what the network computes with."""
    network = AutoModelForCausalLM.from_pretrained(saved("gpt2"), dtype=torch.float64).eval()
    noisy, weights = perturbed(network, ["transformer.h.0"])
    model = open_model(str(saved("gpt2")))
    stream = at(model, tokens)
    with model.blocks[0].on("cpu", torch.float64) as block:
        write(block, weights)
        stream.advance(block)
    expected = plain(noisy, tokens, "transformer.h.1", "gpt2")
    close(torch.cat(stream.quantized).flatten(0, 1), expected.added["attn.c_proj"])


def test_a_layer_that_no_token_of_a_batch_reaches_has_the_moments_of_the_other_batches_on_any_device() -> None:
    """Its rows in that batch are none, on the device of the network."""

    def moments(device: str) -> Tensor:
        block, stream = bare(Skipping(), 3, 4)
        stream.quantized = [x.abs().mul(sign).to(device) for x, sign in zip(stream.quantized, (1, -1), strict=True)]
        assert block.original is not None
        assert block.quantized is not None
        block.original.to(device)
        block.quantized.to(device)
        groups = [(layer,) for layer in block.quantized_layers() if layer.name == "block.expert"]
        (seen,) = observe(block, groups, both(stream))
        return seen.moments["block.expert"].H

    with pretended():
        on_gpu = moments("pretend:0").cpu()
    assert torch.equal(on_gpu, moments("cpu"))
    assert on_gpu.any()


def test_inputs_that_outgrow_exact_sums_are_refused_by_name() -> None:
    """Of the sums of a stage the first at fault is named, with its network."""
    yes, no = torch.tensor([True]), torch.tensor([False])
    refuse_unusable("gate, up", [("quantized", yes, yes), ("original", yes, yes)])
    with pytest.raises(CalibrationError, match=r"^Inputs of gate, up in the original network grow far beyond .*2\^38"):
        refuse_unusable("gate, up", [("quantized", yes, yes), ("original", yes, no)])
    with pytest.raises(CalibrationError, match="input of gate, up contains NaN or Inf in the quantized network"):
        refuse_unusable("gate, up", [("quantized", no, no), ("original", yes, no)])
