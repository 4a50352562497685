"""Sensitivities of outputs: against the whole network differentiated at once."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from alive import forget, living
from families import config_of, random_model
from nearplane.calibration.sensitivity import draw_labels, sensitivity
from nearplane.errors import CalibrationError
from nearplane.models.model import open_model
from pretended import pretended
from unordered import Unordered

CPU = torch.device("cpu")


def at_once(model, tokens, names, seed):
    """The same figure by one backward pass through the whole network, with the same labels."""
    caught = {}
    for name in names:
        module = model.get_submodule(name)
        module.register_forward_hook(lambda _, __, output, name=name: caught.setdefault(name, []).append(output))
    generator = torch.Generator().manual_seed(seed)
    sums = dict.fromkeys(names, 0.0)
    for window in tokens:
        caught.clear()
        predicted = model(window[None], use_cache=False).logits[0].float().log_softmax(-1)
        uniform = torch.rand(len(predicted), 1, generator=generator)
        labels = torch.searchsorted(predicted.detach().exp().cumsum(-1), uniform).clamp(max=predicted.shape[-1] - 1)
        likelihood = predicted.gather(-1, labels).sum()
        order = [name for name in names if name in caught]
        for name, gradient in zip(
            order, torch.autograd.grad(likelihood, [caught[name][0] for name in order]), strict=True
        ):
            sums[name] = sums[name] + gradient.reshape(-1, gradient.shape[-1]).double().square().sum(0)
    return {name: total / tokens.numel() for name, total in sums.items()}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gemma2", "opt"])
def test_block_by_block_equals_all_at_once(family, saved, loaded, tokens):
    model = open_model(str(saved(family)))
    found = sensitivity(model, tokens, device=CPU, dtype=torch.float64, seed=5).outputs
    names = [layer.name for block in model.blocks for layer in block.layers]
    assert set(found) == set(names)

    expected = at_once(deepcopy(loaded(family)), tokens, names, 5)
    for name in names:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=1e-12)


def test_memory_does_not_grow_with_the_number_of_blocks(tmp_path, tokens):
    """Hidden states of every block are needed on the way back, and at no time more than those around one block are there."""
    forget()
    held = {}

    def count(*_):
        states = [x for x in living(torch.Tensor) if x.dtype == torch.float32 and x.shape[-2:] == (12, 32)]
        most = sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in states}.values())
        held[len(model.blocks)] = max(held.get(len(model.blocks), 0), most)

    for blocks in (2, 4):
        random_model(config_of("llama", num_hidden_layers=blocks)).save_pretrained(tmp_path / str(blocks))
        model = open_model(str(tmp_path / str(blocks)))
        for block in model.blocks:  # forwards, and on the way back
            block.empty.mlp.down_proj.register_forward_hook(count)
        sensitivity(model, tokens[:3], device=CPU, dtype=torch.float32)
    assert held[2] == held[4] > 0


def test_the_seed_decides(saved, tokens):
    model = open_model(str(saved("llama")))
    name = model.blocks[0].layers[0].name
    one, same, other = (
        sensitivity(model, tokens, device=CPU, dtype=torch.float64, seed=seed).outputs[name] for seed in (1, 1, 2)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_a_layer_that_no_gradient_reaches_is_left_out(saved, tokens):
    """As projections of positions are; it gets equal rows."""
    model = open_model(str(saved("llama")))
    model.blocks[1].empty.mlp.up_proj.register_forward_pre_hook(lambda _, args: (args[0].detach(),))
    found = sensitivity(model, tokens, device=CPU, dtype=torch.float32).outputs
    names = {layer.name for block in model.blocks for layer in block.layers}
    assert names - found.keys() == {"model.layers.1.mlp.up_proj"}


def test_gradients_that_are_not_finite_are_an_error_that_says_where(saved, tokens):
    model = open_model(str(saved("llama")))
    model.blocks[1].empty.mlp.up_proj.register_forward_pre_hook(lambda _, args: (args[0] + (0 * args[0]).sqrt(),))
    with pytest.raises(CalibrationError, match=r"before model\.layers\.1\..*--rows equal"):
        sensitivity(model, tokens, device=CPU, dtype=torch.float32)


def test_hidden_states_that_are_not_finite_are_an_error_that_says_where(saved, tokens):
    model = open_model(str(saved("llama")))
    model.blocks[1].empty.mlp.up_proj.register_forward_pre_hook(lambda _, args: (args[0] / 0,))
    with pytest.raises(CalibrationError, match=r"model\.layers\.1 returns NaN"):
        sensitivity(model, tokens, device=CPU, dtype=torch.float32)


def test_float16_is_computed_in_float32(saved, tokens):
    model = open_model(str(saved("llama")))
    half, single = (sensitivity(model, tokens, device=CPU, dtype=d).outputs for d in (torch.float16, torch.float32))
    assert all(torch.equal(half[name], single[name]) for name in single)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_gpu_finds_the_same_and_keeps_it_there(family, saved, tokens):
    model = open_model(str(saved(family)), embeddings=True, head=True)
    here, there = (sensitivity(model, tokens, device=torch.device(d), dtype=torch.float64) for d in ("cpu", "cuda"))
    assert {x.device.type for x in (*there.outputs.values(), there.embeddings)} == {"cuda"}
    torch.testing.assert_close(there.embeddings.cpu(), here.embeddings, rtol=1e-6, atol=1e-12)
    for name, expected in here.outputs.items():
        torch.testing.assert_close(there.outputs[name].cpu(), expected, rtol=1e-6, atol=1e-12)


def test_a_network_that_predicts_always_the_same_is_refused(saved, tokens):
    """All sensitivities were 0, and quantized embeddings became 0."""
    model = open_model(str(saved("llama")))
    model.blocks[-1].empty.register_forward_hook(lambda _, args, output: torch.zeros_like(output))
    with pytest.raises(CalibrationError, match="predicts the same for every token"):
        sensitivity(model, tokens, device=CPU, dtype=torch.float32)


def test_a_gpu_adds_in_a_fixed_order_and_is_waited_for_once_a_window_and_block(saved, tokens):
    """Labels are drawn with sums of integers, and attention is differentiated without kernels that add as they come."""
    model = open_model(str(saved("llama")), head=True)
    with pretended() as gpu, Unordered() as seen:
        found = sensitivity(model, tokens, device=torch.device("pretend:0"), dtype=torch.float64)
        again = sensitivity(model, tokens, device=torch.device("pretend:0"), dtype=torch.float64)
    assert seen.found == set()
    assert {"cumsum", "_softmax_backward_data"} <= seen.operations
    assert all(torch.equal(one.held, again.outputs[name].held) for name, one in found.outputs.items())
    waits = {name: each.synchronizations // 2 for name, each in gpu.traffic.items()}
    windows, blocks = len(tokens), len(model.blocks)
    assert waits["calibration/activations.py Stream.check"] == blocks
    assert waits["calibration/sensitivity.py _finite"] == 1 + blocks
    assert waits["models/divergence.py predicts_always_the_same"] == windows


def test_labels_follow_the_probabilities_on_a_gpu_too(generator):
    """Each with its frequency, those of probability 0 never; nearly all are the labels that the CPU draws."""
    p = torch.tensor([[0.0, 0.5, 0.0, 0.3, 0.2, 0.0]]).expand(20000, -1).contiguous()
    uniform = torch.rand(len(p), 1, generator=generator)
    here = draw_labels(p, uniform)
    with pretended():
        there = draw_labels(p.to("pretend:0"), uniform.to("pretend:0")).cpu()
        edges = draw_labels(p[:2].to("pretend:0"), torch.tensor([[0.0], [1 - 2**-24]]).to("pretend:0")).cpu()
    assert (there == here).float().mean() > 0.999
    assert edges.flatten().tolist() == [1, 4]
    torch.testing.assert_close(there.flatten().bincount(minlength=6) / len(p), p[0], rtol=0, atol=0.015)
