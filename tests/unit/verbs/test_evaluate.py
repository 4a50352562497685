"""Perplexity and divergence mean what they say."""

import math
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import nearplane
from nearplane.demo import HELD_OUT, MODEL
from nearplane.models.kinds import divergence

ASSETS = Path(os.environ.get("ASSETS", "../shared/assets"))


def test_perplexity_is_the_plain_formula_over_windows_that_do_not_overlap():
    """Computed here window by window with transformers' own loss, which also leaves the first token out."""
    result = nearplane.evaluate(MODEL, HELD_OUT, seqlen=32, samples=10)
    tokenizer, model = (
        AutoTokenizer.from_pretrained(MODEL),
        AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
    )
    ids = tokenizer(HELD_OUT.read_text(), add_special_tokens=False, verbose=False)["input_ids"]
    with torch.no_grad():
        losses = [model(w, labels=w).loss.item() for w in torch.tensor(ids[:320]).view(10, 1, 32)]
    assert result.nll == pytest.approx(sum(losses) / 10, rel=1e-6)
    assert result.perplexity == pytest.approx(math.exp(result.nll))
    assert (result.tokens, result.windows, result.seqlen) == (310, 10, 32)


def test_a_model_against_itself_diverges_nowhere():
    result = nearplane.evaluate(MODEL, HELD_OUT, seqlen=64, samples=4, against=MODEL)
    assert result.kl == 0.0
    assert result.agreement == 1.0


def test_divergence_is_kullback_leibler():
    p, q = (torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(i)).log_softmax(-1) for i in (0, 1))
    found = divergence(p, q)
    expected = torch.nn.functional.kl_div(q, p, log_target=True, reduction="sum")
    assert found.kl == pytest.approx(float(expected), rel=1e-6)
    assert found.tokens == 15
    assert found.agreed == int((p.argmax(-1) == q.argmax(-1)).sum())


def test_models_of_different_vocabularies_are_not_compared(tmp_path):
    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=2050
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(tmp_path)
    with pytest.raises(nearplane.ModelError, match="2050 tokens"):
        nearplane.evaluate(MODEL, HELD_OUT, seqlen=16, samples=1, against=tmp_path)


def test_more_positions_than_the_model_has_are_refused():
    with pytest.raises(nearplane.CalibrationError, match="maximum length"):
        nearplane.evaluate(MODEL, HELD_OUT, seqlen=4096)


@pytest.mark.skipif(not ASSETS.is_dir(), reason="needs the measuring models in $ASSETS")
def test_perplexity_of_a_known_model_is_the_known_one():
    text = ASSETS / "text" / "tinystories_valid.txt"
    result = nearplane.evaluate(ASSETS / "models" / "babyllama105", text, samples=128, seqlen=256)
    assert result.perplexity == pytest.approx(2.9316, abs=0.001)


def test_predictions_that_are_degenerate_are_said():
    """Both got their perplexity and a KL of 0, as if all were well."""
    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=96
    )
    tokens = torch.randint(3, 96, (2, 16), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    constant, wrong = LlamaForCausalLM(config), LlamaForCausalLM(config)
    assert nearplane.evaluate(constant, tokens).remarks == ()
    constant.model.norm.weight.data.zero_()
    wrong.lm_head.weight.data *= 1000
    assert nearplane.evaluate(constant, tokens, against=wrong).remarks == (
        "LlamaForCausalLM given in Python predicts the same for every token; check its files",
        "the original predicts worse than a guess among 96 tokens, whose perplexity is 96",
    )
