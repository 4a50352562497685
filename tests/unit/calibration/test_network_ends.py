"""Before and behind the blocks: what embeddings cost the network, streams of other embeddings, inputs of the head."""

import pytest
import torch

from nearplane.calibration.activations import skeleton
from nearplane.calibration.network_ends import finish
from nearplane.calibration.sensitivity import sensitivity
from nearplane.models.model import open_model

CPU = torch.device("cpu")
FAMILIES = ["llama", "qwen3", "gpt2", "gemma2", "opt"]


def head_inputs(network, tokens):
    """What enters the head, (windows, seqlen, hidden), by a hook."""
    seen = []
    handle = network.get_output_embeddings().register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        network(tokens, use_cache=False)
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_streams_of_other_embeddings_reach_the_head_as_in_a_network_that_has_them(family, saved, loaded, tokens):
    network = loaded(family)
    weight = network.get_input_embeddings().weight
    other = 0.5 * weight.detach() + 0.1
    model = open_model(str(saved(family)))
    stream = skeleton(model, tokens.split(2), device=CPU, dtype=torch.float64, embeddings=other)
    for block in model.blocks:
        with block.on(CPU, torch.float64):
            stream.advance(block)
    finish(model, stream, tokens, torch.float64)
    torch.testing.assert_close(torch.cat(stream.original), head_inputs(network, tokens))
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.copy_(other)
        expected = head_inputs(network, tokens)
        weight.copy_(kept)
    torch.testing.assert_close(torch.cat(stream.quantized), expected)
    assert not torch.allclose(expected, torch.cat(stream.original))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gemma2"])
def test_the_cost_of_errors_in_embeddings_is_measured_at_the_rows_that_are_looked_up(family, saved, loaded, tokens):
    """Against gradients by the looked-up rows, for the same labels; a factor on them (Gemma) is part of it."""
    network, model = loaded(family), open_model(str(saved(family)), embeddings=True)
    found = sensitivity(model, tokens, device=CPU, dtype=torch.float64, seed=5)
    generator = torch.Generator().manual_seed(5)
    total = torch.zeros(32, 32, dtype=torch.float64)
    spread = torch.zeros(96, dtype=torch.float64)
    for window in tokens:
        rows = network.get_input_embeddings().weight.detach()[window[None]].requires_grad_()
        handle = network.get_input_embeddings().register_forward_hook(
            lambda module, _, __, rows=rows: rows * getattr(module, "embed_scale", 1.0)
        )
        predicted = network(window[None], use_cache=False).logits.squeeze(0).float().log_softmax(-1)
        handle.remove()
        p = predicted.detach().exp()
        uniform = torch.rand(len(p), 1, generator=generator)
        labels = torch.searchsorted(p.cumsum(-1), uniform).clamp(max=p.shape[-1] - 1)
        (gradient,) = torch.autograd.grad(predicted.gather(-1, labels).sum(), rows)
        total += gradient[0].T @ gradient[0]
        spread += (p * (1 - p)).sum(0)
    expected = total / tokens.numel()
    name = model.embeddings.name
    if model.tied:
        x = head_inputs(network, tokens).flatten(0, 1)
        expected = expected + x.T @ x / len(x)
        torch.testing.assert_close(found.outputs[name], spread / tokens.numel(), rtol=1e-5, atol=1e-9)
    else:
        often = (tokens.flatten().bincount(minlength=96) + 1) / (tokens.numel() + 96)
        assert torch.equal(found.outputs[name], often)
    rtol = 0.2 if family == "gpt2" else 1e-5  # the factor is fitted, beside positions
    assert (found.embeddings - expected).norm() <= rtol * expected.norm()


def test_ends_are_found_only_where_asked_for(saved):
    model = open_model(str(saved("llama")), head=True)
    assert (model.embeddings, model.head.name, model.tied) == (None, "lm_head", False)
    assert model.layers[-1].shape == (96, 32)
    tied = open_model(str(saved("qwen3")), head=True)
    assert (tied.embeddings.name, tied.head, tied.tied) == ("model.embed_tokens", None, True)
    assert tied.layers[0].kind == "Embedding"
    left = open_model(str(saved("qwen3")), head=True, ignore=["lm_head"])
    assert (left.embeddings, left.head, left.ignored) == (None, None, ["model.embed_tokens"])
