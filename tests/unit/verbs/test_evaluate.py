"""Perplexity and divergence mean what they say."""

import logging
import math
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import nearplane
from families import FAMILIES, config_of, random_model
from nearplane.cli.evaluate_command import EvaluateFlags
from nearplane.demo import HELD_OUT, MODEL
from nearplane.evaluation.predictions import Held, Outline
from nearplane.models.divergence import divergence
from nearplane.system.progress import silent
from nearplane.system.ranks import ONE_PROCESS
from nearplane.verbs.evaluate import prepare_texts
from nearplane.verbs.evaluate_request import EvaluateRequest

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


def test_an_error_of_the_progress_display_is_no_fault_of_the_model():
    def progress(items, label, total):
        raise ZeroDivisionError("of the caller")
        yield

    with pytest.raises(ZeroDivisionError, match="of the caller"):
        nearplane.evaluate(MODEL, HELD_OUT, seqlen=64, samples=1, progress=progress)


def test_divergence_is_kullback_leibler():
    p, q = (torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(i)).log_softmax(-1) for i in (0, 1))
    found = divergence(p, q)
    expected = torch.nn.functional.kl_div(q, p, log_target=True, reduction="sum")
    assert found.kl == pytest.approx(float(expected), rel=1e-6)
    assert found.tokens == 15
    assert found.agreed == int((p.argmax(-1) == q.argmax(-1)).sum())


@pytest.fixture(scope="module")
def coarse(tmp_path_factory):
    """The demo's model with weights on a coarse grid, so that its predictions differ from the demo's."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data = (parameter.data * 32).round() / 32
    folder = tmp_path_factory.mktemp("coarse")
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def logits(coarse):
    """Function from tokens (windows, seqlen) to the logits of the coarse model and of the demo's, of all positions."""
    networks = [AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32) for each in (coarse, MODEL)]

    @torch.no_grad()
    def run(tokens):
        return [network(tokens).logits.double() for network in networks]

    return run


def test_statistics_in_parts_are_those_of_all_logits(coarse, logits, monkeypatch, caplog):
    """With a floor and two texts at once; each part has one or two positions of a batch."""
    monkeypatch.setattr("nearplane.evaluation.scoring.LOGITS", 20_000)
    monkeypatch.setattr("nearplane.evaluation.scoring.multiplies_bfloat16", lambda: True)
    monkeypatch.setattr("nearplane.evaluation.scoring.POSITIONS", 2)
    monkeypatch.setattr("nearplane.evaluation.predictions.BATCH_TOKENS", 96)
    with caplog.at_level(logging.INFO, "nearplane"):
        texts = [HELD_OUT, ["A list. " * 40]]
        request = EvaluateFlags(coarse, text=texts, seqlen=32, samples=8, against=MODEL, progress=silent)
        first, second = prepare_texts(request).measure()
    assert "at once" not in caplog.text
    found = first.evaluation
    ids = AutoTokenizer.from_pretrained(MODEL)(HELD_OUT.read_text()[:9000], add_special_tokens=False)["input_ids"]
    tokens = torch.tensor(ids[: 8 * 32]).view(8, 32)
    q, p = (each[:, :-1].log_softmax(-1) for each in logits(tokens))
    kl = (p.exp() * (p - q)).sum(-1)
    right = [each.gather(-1, tokens[:, 1:, None])[..., 0] for each in (q, p)]
    assert (found.tokens, found.windows, found.seqlen, found.protocol) == (248, 8, 32, "nearplane")
    assert found.kl == found.statistics.kl.value == pytest.approx(float(kl.mean()), rel=1e-4)
    assert found.statistics.kl.low < found.kl < found.statistics.kl.high
    assert found.statistics.kl_max == pytest.approx(float(kl.max()), rel=1e-4)
    assert found.statistics.reverse_kl.value == pytest.approx(float((q.exp() * (q - p)).sum(-1).mean()), rel=1e-4)
    assert found.agreement == pytest.approx(float((q.argmax(-1) == p.argmax(-1)).double().mean()))
    change = right[0].exp() - right[1].exp()
    assert found.statistics.probability_change_rms.value == pytest.approx(
        float(change.square().mean().sqrt()), rel=1e-4
    )
    assert found.original == pytest.approx(math.exp(-float(right[1].mean())), rel=1e-6)
    assert found.statistics.by_position[1].kl.value == pytest.approx(float(kl[:, 1:3].mean()), rel=1e-4)
    assert second.evaluation.text == "given in Python"
    assert second.evaluation.kl != found.kl
    assert found.floor.tokens == 248
    assert found.floor.dtype == "bfloat16"
    assert 0 < found.floor.kl < found.kl


def test_the_floor_is_quick_where_the_processor_has_no_products_in_bfloat16(coarse, caplog, monkeypatch):
    """It is measured on one window, which is said."""
    monkeypatch.setattr("nearplane.evaluation.scoring.multiplies_bfloat16", lambda: False)
    with caplog.at_level(logging.INFO, "nearplane"):
        found = nearplane.evaluate(coarse, HELD_OUT, seqlen=32, samples=8, against=MODEL, floor=True)
    assert (found.floor.windows, found.floor.tokens) == (1, 31)
    assert "the floor is measured on one window" in caplog.text


def test_the_number_of_windows_is_said_before_they_run(coarse, caplog, monkeypatch):
    monkeypatch.setattr("nearplane.verbs.evaluate.opened", lambda *_, **__: pytest.fail("stopped here"))
    prepared = prepare_texts(EvaluateRequest(coarse, [HELD_OUT.read_text()], protocol="llama.cpp", seqlen=3))
    with caplog.at_level(logging.INFO, "nearplane"), pytest.raises(pytest.fail.Exception, match="stopped here"):
        prepared.measure()
    assert f"{len(prepared.texts[0][0].tokens):,} windows to evaluate (given in Python)" in caplog.text


def test_llama_cpp_and_lm_eval_sum_what_their_windows_say(coarse, logits):
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    text = HELD_OUT.read_text()[:1500]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    halves = nearplane.evaluate(coarse, [text], protocol="llama.cpp", seqlen=32, samples=4, against=MODEL)
    begins = tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    tokens = torch.tensor([tokenizer.bos_token_id] * begins + ids)[:128].view(4, 32).clone()
    shown = tokens.clone()
    if begins:
        shown[:, 0] = tokenizer.bos_token_id
    q = logits(shown)[0][:, 16:-1].log_softmax(-1).gather(-1, tokens[:, 17:, None])
    figures = {each.name: each.value for each in halves.llama_cpp}
    assert halves.tokens == q.numel() == 60
    assert figures["Mean PPL(Q)"] == halves.perplexity == pytest.approx(math.exp(-float(q.mean())), rel=1e-6)
    rolling = nearplane.evaluate(coarse, [text], protocol="lm-eval", seqlen=512, against=MODEL)
    stream = tokenizer(text)["input_ids"][:512]
    prefix = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    assert rolling.words == len(text.split()) + text.startswith((" ", "\n")) + text.endswith((" ", "\n"))
    if len(tokenizer(text)["input_ids"]) <= 512:
        q = (
            logits(torch.tensor([[prefix, *stream[:-1]]]))[0]
            .log_softmax(-1)
            .gather(-1, torch.tensor(stream)[None, :, None])
        )
        assert rolling.lm_eval.word_perplexity == pytest.approx(math.exp(-float(q.sum()) / rolling.words), rel=1e-6)
    assert rolling.lm_eval_original.bits_per_byte < rolling.lm_eval.bits_per_byte


def test_a_short_text_is_refused_before_weights_are_read(coarse, monkeypatch):
    def read(*args, **words):
        raise AssertionError("weights are read")

    monkeypatch.setattr("nearplane.verbs.evaluate.opened", read)
    for protocol, said in (("papers", "but a window has 512"), ("llama.cpp", "needs two windows of 512")):
        texts = [HELD_OUT, ["Short."]]
        request = EvaluateFlags(coarse, text=texts, protocol=protocol, against=MODEL, samples=1, seqlen=512)
        with pytest.raises(nearplane.CalibrationError, match=said):
            prepare_texts(request)


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_of_all_families_run_apart(family):
    """Each does something of its own behind the head: scales, caps, or nothing."""
    network = random_model(config_of(family)).float()
    tokens = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), Held(Outline.of(network), network, ONE_PROCESS).predicting(tokens, 2) as run:
        read = run(0)
        assert "_head_apart" in read.__qualname__
        torch.testing.assert_close(torch.cat([read(0, 5), read(5, 12)], 1), network(tokens).logits)


def test_what_lies_behind_a_body_in_no_known_way_runs_at_once(caplog):
    """Its head looks at the number of positions, so that parts differ."""
    network = random_model(config_of("llama")).float()
    network.lm_head.register_forward_hook(lambda module, args, output: output * output.shape[1])
    tokens = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    with caplog.at_level(logging.INFO, "nearplane"):
        found = nearplane.evaluate(network, tokens)
    assert "computes the logits of a whole batch at once" in caplog.text
    assert found.nll == pytest.approx(float(network(tokens, labels=tokens).loss), rel=1e-5)


@pytest.mark.parametrize("size", [205, 4098])
def test_models_of_different_vocabularies_are_not_compared(size, tmp_path):
    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=size
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(tmp_path)
    with pytest.raises(nearplane.ModelError, match=f"{size} tokens"):
        nearplane.evaluate(MODEL, HELD_OUT, seqlen=16, samples=1, against=tmp_path)


def test_more_positions_than_the_model_has_are_refused():
    with pytest.raises(nearplane.CalibrationError, match="maximum length"):
        nearplane.evaluate(MODEL, HELD_OUT, seqlen=4096)


@pytest.mark.skipif(not ASSETS.is_dir(), reason="needs the measuring models in $ASSETS")
def test_perplexity_of_a_known_model_is_the_known_one():
    text = ASSETS / "text" / "tinystories_valid.txt"
    result = nearplane.evaluate(ASSETS / "models" / "babyllama105", text, samples=128, seqlen=256, protocol="papers")
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
