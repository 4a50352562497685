"""What layers rounded together cost: the divergence of the whole network with those weights, on several texts in one pass."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from families import config_of, random_model
from nearplane.errors import CalibrationError
from nearplane.models.divergence import divergence
from nearplane.models.model import open_model
from nearplane.planning.divergences import divergences
from nearplane.planning.roundings import Rounded
from translating import predicted, save_translating

CPU = torch.device("cpu")


def shaken(W, inputs, gradients):
    """A rounding that needs no statistics."""
    return Rounded(W + 0.05 * torch.roll(W, 1, 0))


FAMILIES = ["llama", "qwen3", "gpt2", "opt", "gpt_neox"]


@pytest.mark.parametrize(
    "family", ["gemma2", "mixtral", *(pytest.param(x, marks=pytest.mark.nightly) for x in FAMILIES)]
)
def test_rounded_layers_cost_what_the_whole_network_loses(family, tmp_path):
    """On each of several texts; layers without a rounding stay as they are."""
    dtype = torch.float32 if family == "mixtral" else torch.float64
    random_model(config_of(family)).to(dtype).save_pretrained(tmp_path)
    network = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    tokens = torch.randint(3, 96, (7, 12), generator=torch.Generator().manual_seed(1))
    model, texts = open_model(str(tmp_path)), (tokens[2:5], tokens[5:])
    layers = [layer for block in model.blocks for layer in block.layers][1:]
    roundings = {layer.name: shaken for layer in layers}
    found = divergences(model, tokens[:2], texts, roundings, {}, device=CPU, dtype=dtype)
    before = [predictions(network, text) for text in texts]
    for layer in [layer.under(network, "") for layer in layers]:
        layer.write(shaken(layer.read().clone(), None, None).values)
    for text, original, loss in zip(texts, before, found, strict=True):
        expected = divergence(original, predictions(network, text))
        assert loss == pytest.approx(expected.kl / expected.tokens, rel=1e-6 if dtype == torch.float64 else 1e-3)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_predictions_are_compared_some_tokens_at_a_time(family, tmp_path, monkeypatch):
    random_model(config_of(family)).double().save_pretrained(tmp_path)
    tokens = torch.randint(3, 96, (5, 12), generator=torch.Generator().manual_seed(1))
    model = open_model(str(tmp_path))
    roundings = {layer.name: shaken for layer in model.layers}
    found = []
    for logits in (1 << 24, 5 * 96, 2 * 96):
        monkeypatch.setattr("nearplane.planning.divergences.COMPARED_LOGITS", logits)
        found += divergences(model, tokens[:2], [tokens[2:]], roundings, {}, device=CPU, dtype=torch.float64)
    assert found[1:] == pytest.approx([found[0]] * 2, rel=1e-12)


def test_of_two_stacks_the_decoder_is_compared(tmp_path):
    """Their hidden states stand behind those of the encoder."""
    save_translating(tmp_path / "model", "bart")
    network = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model").eval()
    tokens = torch.randint(3, 96, (5, 12), generator=torch.Generator().manual_seed(1))
    model = open_model(str(tmp_path / "model"))
    layers = [layer for block in model.blocks for layer in block.layers]
    (found,) = divergences(model, tokens[:2], [tokens[2:]], {layer.name: shaken for layer in layers}, {}, device=CPU)

    @torch.no_grad()
    def decoded():
        return predicted(network, tokens[2:]).roll(-1, 1)[:, :-1].log_softmax(-1)

    original = decoded()
    for layer in [layer.under(network, "") for layer in layers]:
        layer.write(shaken(layer.read().clone(), None, None).values)
    expected = divergence(original, decoded())
    assert found == pytest.approx(expected.kl / expected.tokens, rel=1e-3)


def predictions(network, tokens):
    with torch.no_grad():
        return network(tokens, use_cache=False).logits[:, :-1].log_softmax(-1)


def test_a_network_that_predicts_always_the_same_is_not_measured(tmp_path):
    random_model(config_of("llama")).save_pretrained(tmp_path)
    model, tokens = open_model(str(tmp_path)), torch.randint(3, 96, (4, 32))
    handle = model.blocks[-1].empty.register_forward_hook(lambda _, args, output: torch.ones_like(output))
    try:
        with pytest.raises(CalibrationError, match="predicts the same for every token"):
            divergences(model, tokens, [tokens], {}, {}, device=CPU)
    finally:
        handle.remove()
