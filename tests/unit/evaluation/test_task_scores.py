"""Paired differences and flips, computed without lm-eval on results of its form; and what is refused without it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import nearplane
from nearplane.demo import MODEL
from nearplane.evaluation.task_scores import mcnemar, scores


def task(name, aggregate=np.mean):
    return SimpleNamespace(task_name=name, aggregation=lambda: {"m": aggregate}, higher_is_better=lambda: {"m": True})


def answered(values, aggregate=np.mean):
    """Return the results of one model: a task "t" with a metric "m", whose documents have these scores."""
    samples = [{"doc_id": i, "filter": "none", "metrics": ["m"], "m": value} for i, value in enumerate(values)]
    results = {"t": {"m,none": aggregate(values), "m_stderr,none": "N/A", "sample_len": len(values), "alias": "t"}}
    return {"results": results, "samples": {"t": samples}, "n-shot": {"t": 2}}


def test_answers_that_flip_are_counted_and_tested():
    model, original = [1, 0, 0, 0, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1, 0, 1]
    [score] = scores({"tasks": {"t": task("t")}, "groups": {}}, [answered(model), answered(original)])
    assert (score.right_to_wrong, score.wrong_to_right, score.flipped) == (5, 1, 0.75)
    assert score.p_value == pytest.approx(2 * (1 + 6) / 2**6)
    assert score.difference == pytest.approx(-0.5)
    assert score.difference_error == pytest.approx(np.std(np.subtract(model, original), ddof=1) / np.sqrt(8))


def test_the_error_of_a_metric_that_is_no_mean_is_that_of_resampled_documents():
    """For a mean over pairs (score, weight), whose error is known, both agree."""

    def weighted(pairs):
        return sum(a for a, _ in pairs) / sum(b for _, b in pairs)

    draw = np.random.default_rng(1)
    model, original = draw.normal(size=(2, 400))
    given = [answered([(x, 1) for x in each], weighted) for each in (model, original)]
    [score] = scores({"tasks": {"t": task("t", weighted)}, "groups": {}}, given)
    assert score.flipped is None
    assert score.difference_error == pytest.approx(np.std(model - original, ddof=1) / 20, rel=0.1)


@pytest.mark.parametrize(("lost", "won", "p"), [(0, 0, 1.0), (3, 3, 1.0), (0, 5, 2 / 32), (2, 8, 2 * 56 / 1024)])
def test_mcnemar_is_exact(lost, won, p):
    assert mcnemar(lost, won) == mcnemar(won, lost) == pytest.approx(p)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tasks": []}, "--tasks is empty"),
        ({"limit": 0}, "limit is 0"),
        ({"fewshot": -1}, "fewshot is -1"),
        ({}, r'Run pip install "lm_eval\[hf\]'),
        ({"installed": True, "task_path": MODEL}, "contains no .yaml file"),
    ],
)
def test_bad_arguments_are_refused_without_lm_eval(monkeypatch, options, said):
    installed = object() if options.pop("installed", False) else None
    monkeypatch.setattr("nearplane.verbs.evaluate_request.find_spec", lambda name: installed)
    with pytest.raises(nearplane.RecipeError, match=said):
        nearplane.evaluate_tasks(MODEL, **{"tasks": ["winogrande"]} | options)
