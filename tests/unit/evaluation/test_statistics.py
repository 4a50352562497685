"""Statistics of predictions are the textbook formulas on all logits, and their intervals those of the field."""

import math

import numpy as np
import pytest
import torch

from nearplane.evaluation.statistics import TokenScores, score_tokens, summarize

WINDOWS, LENGTH, VOCABULARY = 8, 9, 11


@pytest.fixture(scope="module")
def logits():
    """Logits of a model and its original at all positions, and the right tokens."""
    generator = torch.Generator().manual_seed(0)
    original = 3 * torch.randn(WINDOWS, LENGTH, VOCABULARY, generator=generator)
    model = original + 0.3 * torch.randn(original.shape, generator=generator)
    return model, original, torch.randint(VOCABULARY, (WINDOWS, LENGTH), generator=generator)


@pytest.fixture(scope="module")
def scores(logits):
    """Scores in parts of two positions, as `evaluate` makes them."""
    model, original, right = logits
    window, position = torch.meshgrid(torch.arange(WINDOWS), torch.arange(1, LENGTH + 1), indexing="ij")
    parts = []
    for begin in range(0, LENGTH, 2):
        cut = (slice(None), slice(begin, begin + 2))
        pair = [each[cut].flatten(0, 1) for each in (model, original)]
        place = {"window": window[cut].flatten(), "position": position[cut].flatten()}
        parts.append(score_tokens(pair, right[cut].flatten(), **place)[0])
    return TokenScores.joined(parts)


@pytest.fixture(scope="module")
def naive(logits):
    """(KL, reverse KL, both nll, same top, probability change) of all tokens in numpy."""
    model, original, right = (each.numpy().astype(np.float64) for each in logits)
    q, p = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (model, original))
    chosen = right.astype(int)[..., None]
    ours, theirs = (np.take_along_axis(x, chosen, -1)[..., 0].flatten() for x in (q, p))
    return {
        "kl": (p * np.log(p / q)).sum(-1).flatten(),
        "reverse": (q * np.log(q / p)).sum(-1).flatten(),
        "nll": -np.log(ours),
        "original": -np.log(theirs),
        "same": (q.argmax(-1) == p.argmax(-1)).flatten(),
        "change": ours - theirs,
    }


def test_figures_are_the_textbook_formulas_on_all_logits(scores, naive):
    found = summarize(scores)
    expected = {
        "perplexity": math.exp(naive["nll"].mean()),
        "original_perplexity": math.exp(naive["original"].mean()),
        "perplexity_ratio": math.exp((naive["nll"] - naive["original"]).mean()),
        "kl": naive["kl"].mean(),
        "reverse_kl": naive["reverse"].mean(),
        "same_top": naive["same"].mean(),
        "probability_change": naive["change"].mean(),
        "probability_change_rms": np.sqrt((naive["change"] ** 2).mean()),
    }
    for name, value in expected.items():
        assert getattr(found, name).value == pytest.approx(value, rel=1e-9), name
    quantiles = (found.kl_median, found.kl_99, found.kl_999, found.kl_max)
    assert quantiles == pytest.approx(np.quantile(naive["kl"], (0.5, 0.99, 0.999, 1)), rel=1e-9)


def test_positions_are_ranges_of_powers_of_two(scores, naive):
    by_window = naive["kl"].reshape(WINDOWS, LENGTH)
    found = summarize(scores).by_position
    assert [(part.first, part.last, part.tokens) for part in found] == [(1, 1, 8), (2, 3, 16), (4, 7, 32), (8, 9, 16)]
    for part in found:
        assert part.kl.value == pytest.approx(by_window[:, part.first - 1 : part.last].mean(), rel=1e-9)


def test_intervals_are_those_of_the_normal_distribution_where_it_holds():
    """Tokens of one window are alike here: an interval that took them for independent would be five times narrower."""
    windows, length = 400, 25
    values = torch.randn(windows, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    scores = TokenScores(
        window=torch.arange(windows).repeat_interleave(length),
        position=torch.arange(1, length + 1).repeat(windows),
        nll=values.repeat_interleave(length),
    )
    found = summarize(scores).perplexity
    error = float(values.std() / windows**0.5)
    assert math.log(found.low) == pytest.approx(float(values.mean()) - 1.96 * error, abs=0.1 * error)
    assert math.log(found.high) == pytest.approx(float(values.mean()) + 1.96 * error, abs=0.1 * error)
    assert summarize(scores) == summarize(scores)


def test_a_ratio_is_surer_than_its_parts(scores):
    """Both perplexities are resampled on the same windows."""
    found = summarize(scores)
    width = {name: math.log(getattr(found, name).high / getattr(found, name).low) for name in found.__slots__[:3]}
    assert width["perplexity_ratio"] < 0.5 * width["perplexity"]


@pytest.mark.parametrize(("windows", "has"), [(1, False), (7, False), (8, True)])
def test_few_windows_have_no_interval(windows, has):
    """Resamples of few windows are too much alike."""
    place = {"window": torch.arange(windows).repeat(3), "position": torch.arange(1, 4).repeat_interleave(windows)}
    few = TokenScores(**place, nll=torch.rand(3 * windows).double())
    assert (summarize(few).perplexity.low is not None) == has


def test_tokens_that_a_network_excludes_count_for_nothing_in_its_mean():
    """Some networks set logits of padded vocabulary to minus infinity."""
    original, model = torch.tensor([[0.0, 0.0, -torch.inf]]), torch.tensor([[0.0, 0.0, 0.0]])
    place = {"window": torch.tensor([0]), "position": torch.tensor([1])}
    both, _ = score_tokens([original, original], torch.tensor([0]), **place)
    assert float(both.kl) == float(both.reverse_kl) == 0
    apart, _ = score_tokens([model, original], torch.tensor([0]), **place)
    assert float(apart.kl) == pytest.approx(math.log(1.5))
    assert float(apart.reverse_kl) == math.inf


def test_quantiles_below_an_infinite_divergence_are_numbers():
    place = {"window": torch.arange(8), "position": torch.ones(8, dtype=torch.int64)}
    original = torch.zeros(8, 3)
    model = original.clone()
    model[7, 2] = -torch.inf  # a model that excludes what the original does not
    found = summarize(score_tokens([model, original], torch.zeros(8, dtype=torch.int64), **place)[0])
    assert found.kl.value == found.kl_max == math.inf
    assert found.kl_median == 0
    assert found.same_top.value == 1
