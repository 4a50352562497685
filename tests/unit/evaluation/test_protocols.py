"""Protocols read the windows and score the tokens that llama-perplexity and lm-eval do, checked against plain loops."""

import json
import math
import re

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import nearplane
from nearplane.evaluation.protocols import NOT_SCORED, llama_cpp_figures, lm_eval_figures, scored_text
from nearplane.evaluation.statistics import TokenScores

LETTERS = "abcdefghijklmnopqrstuvwxyz"
BOS, EOS = 0, 1


def tokenizer(*, begins: bool) -> PreTrainedTokenizerFast:
    """Return a tokenizer of single words, which are letters."""
    vocabulary = {word: number for number, word in enumerate(["<s>", "</s>", *LETTERS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="</s>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    if begins:
        words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>")


def ids_of(text):
    return [2 + LETTERS.index(word) for word in text.split()]


TEXT = " ".join(LETTERS[(7 * i * i) % 26] for i in range(53))


@pytest.mark.parametrize("begins", [True, False])
def test_llama_cpp_scores_the_second_half_of_windows(begins):
    """As its loop: BOS replaces the first token of each window; n / 2 + 1 to n - 1 are scored."""
    length, stream = 8, [BOS] * begins + ids_of(TEXT)
    expected = []
    for start in range(0, len(stream) // length * length, length):
        window = stream[start : start + length]
        shown = [BOS, *window[1:]] if begins else window
        expected += [(shown[: place + 1], window[place + 1]) for place in range(length // 2, length - 1)]
    found = scored_text("llama.cpp", tokenizer(begins=begins), [TEXT], seqlen=length, samples=None)
    assert predicted(found) == expected


@pytest.mark.parametrize(("protocol", "first"), [("nearplane", [BOS]), ("papers", [])])
def test_windows_begin_as_the_tokenizer_begins_a_text_but_those_of_papers_do_not(protocol, first):
    length, ids = 8, ids_of(TEXT)
    step = length - len(first)
    windows = [[*first, *ids[start : start + step]] for start in range(0, len(ids) // step * step, step)]
    expected = [(window[: place + 1], window[place + 1]) for window in windows for place in range(length - 1)]
    assert predicted(scored_text(protocol, tokenizer(begins=True), [TEXT], seqlen=length, samples=None)) == expected
    plain = scored_text(protocol, tokenizer(begins=False), [TEXT], seqlen=length, samples=None)
    assert plain.tokens.tolist() == torch.tensor(ids[: len(ids) // length * length]).view(-1, length).tolist()


@pytest.mark.parametrize("length", [53, 20, 8])
@pytest.mark.parametrize("begins", [True, False])
def test_lm_eval_rolls_over_each_document(begins, length):
    """Every token once; the last window of a document has as much context as fits."""
    texts = [TEXT, "a b c"]
    expected = []
    for text in texts:
        ids = [BOS] * begins + ids_of(text)
        for place, token in enumerate(ids):
            first = place // length * length
            if first + length > len(ids) and first:
                first = len(ids) - length
            expected.append((([BOS, *ids])[first : place + 1], token))
    found = scored_text("lm-eval", tokenizer(begins=begins), texts, seqlen=length, samples=None)
    assert predicted(found) == expected
    assert (found.documents, found.words) == (2, 53 + 3)
    assert found.bytes == sum(len(text.encode()) for text in texts)


def predicted(scored):
    """Return (tokens before, right token) of all scored tokens, in order."""
    return [
        (window[: place + 1].tolist(), int(targets[place]))
        for window, targets in zip(scored.tokens, scored.targets, strict=True)
        for place in range(len(window))
        if targets[place] != NOT_SCORED
    ]


def test_words_and_bytes_are_those_of_the_task_wikitext(tmp_path):
    """Words are split at whitespace, empty ones at the ends included; --samples counts documents."""
    lines = ["  two words\n", "é", "not read"]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    found = scored_text("lm-eval", tokenizer(begins=False), tmp_path / "a.jsonl", seqlen=8, samples=2)
    assert found.words == sum(len(re.split(r"\s+", line)) for line in lines[:2]) == 5
    assert found.bytes == 12 + 2
    figures = lm_eval_figures(torch.tensor([1.0, 2.5]), found)
    assert figures.word_perplexity == pytest.approx(math.exp(3.5 / 5))
    assert figures.byte_perplexity == pytest.approx(math.exp(3.5 / 14))
    assert figures.bits_per_byte == pytest.approx(math.log2(figures.byte_perplexity))


def test_a_text_that_llama_perplexity_refuses_is_refused():
    with pytest.raises(
        nearplane.CalibrationError, match=r"has 53 tokens, but --protocol llama\.cpp needs two windows of 27"
    ):
        scored_text("llama.cpp", tokenizer(begins=False), [TEXT], seqlen=27, samples=None)


def test_errors_of_llama_cpp_are_those_of_independent_tokens():
    generator = torch.Generator().manual_seed(0)
    base = torch.rand(500, generator=generator, dtype=torch.float64) * 5
    nll = base + 0.1 * torch.randn(500, generator=generator, dtype=torch.float64)
    kl, same = torch.rand(500, generator=generator, dtype=torch.float64), torch.arange(500) % 10 > 0
    every = torch.arange(500)
    scores = TokenScores(window=every, position=every, nll=nll, original_nll=base, kl=kl, reverse_kl=kl, same_top=same)
    found = {each.name: (each.value, each.error) for each in llama_cpp_figures(scores)}
    a, b, change = nll.numpy(), base.numpy(), 100 * (np.exp(-nll.numpy()) - np.exp(-base.numpy()))
    root = 499**0.5
    ppl_errors = np.exp(a.mean()) * a.std() / root, np.exp(b.mean()) * b.std() / root
    difference = np.sqrt(
        ppl_errors[0] ** 2 + ppl_errors[1] ** 2 - 2 * np.exp(a.mean() + b.mean()) * np.cov(a, b, ddof=0)[0, 1] / 499
    )
    rms = np.sqrt((change**2).mean())
    expected = {
        "Mean PPL(Q)": (np.exp(a.mean()), ppl_errors[0]),
        "Mean PPL(base)": (np.exp(b.mean()), ppl_errors[1]),
        "Cor(ln(PPL(Q)), ln(PPL(base)))": (100 * np.corrcoef(a, b)[0, 1], None),
        "Mean ln(PPL(Q)/PPL(base))": ((a - b).mean(), (a - b).std() / root),
        "Mean PPL(Q)-PPL(base)": (np.exp(a.mean()) - np.exp(b.mean()), difference),
        "Mean KLD": (kl.numpy().mean(), kl.numpy().std() / root),
        "99.9% KLD": (np.quantile(kl.numpy(), 0.999), None),
        "Mean Δp": (change.mean(), change.std() / root),
        "RMS Δp": (rms, (change**2).std() / root / (2 * rms)),
        "Same top p": (90.0, 100 * (0.9 * 0.1 / 499) ** 0.5),
    }
    for name, (value, error) in expected.items():
        assert found[name][0] == pytest.approx(value, rel=1e-9), name
        assert found[name][1] == (None if error is None else pytest.approx(error, rel=1e-6)), name
