"""Scores of lm-eval's tasks: metrics of a model beside the original's, paired differences, and answers that flip.

It computes on lm-eval's results and imports nothing of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

RESAMPLES = 1000  # of the documents, for errors of metrics that are no mean


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskScore:
    """One metric of one task or group of tasks; without an original, the fields from `original` on are None.

    Args:
        task, metric, filter: Names that lm-eval gives; the filter is "none" for most tasks.
        fewshot: Number of solved examples in each prompt; None for a group of tasks with different numbers.
        documents: Number of documents.
        value, error: The metric and its standard error, both by lm-eval; None if it has no error.
        original, original_error: The same of the original.
        difference: `value - original`.
        difference_error: Standard error of the difference, from the differences on each document.
        right_to_wrong, wrong_to_right: Numbers of documents that only the original or only the model answers rightly; None
            for metrics other than right or wrong.
        flipped, flipped_error: Share of both among all documents, and its standard error.
        p_value: Probability of numbers at least as uneven if both directions are equally likely (exact McNemar test).
    """

    task: str
    metric: str
    filter: str
    fewshot: int | None
    documents: int
    value: float
    error: float | None
    original: float | None = None
    original_error: float | None = None
    difference: float | None = None
    difference_error: float | None = None
    right_to_wrong: int | None = None
    wrong_to_right: int | None = None
    flipped: float | None = None
    flipped_error: float | None = None
    p_value: float | None = None


def scores(chosen: dict[str, Any], results: Sequence[dict[str, Any]]) -> list[TaskScore]:
    """Return all metrics of all tasks and groups.

    Args:
        chosen: Tasks and groups, as lm-eval's `TaskManager.load` returns them.
        results: Results of the model, and perhaps of the original, as lm-eval's `evaluate` returns them.
    """
    return [_score(chosen, results, *key) for key in _metrics(results[0])]


def _metrics(answered: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return (task, metric, filter) of all metrics of all tasks and groups."""
    keys = ((task, *key.partition(",")) for task, row in answered["results"].items() for key in row)
    return [(task, metric, by) for task, metric, comma, by in keys if comma and not metric.endswith("_stderr")]


def _score(chosen: dict[str, Any], results: Sequence[dict[str, Any]], name: str, metric: str, by: str) -> TaskScore:
    """Return one metric of a task or a group.

    Args:
        chosen: Tasks and groups.
        results: Results of the model, and perhaps of the original.
        name, metric, by: Name of the task or group, of the metric, and of the filter.
    """
    rows = [each["results"][name] for each in results]
    values = [float(row[f"{metric},{by}"]) for row in rows]
    errors = [row.get(f"{metric}_stderr,{by}") for row in rows]
    value_error, original_error = [float(e) if isinstance(e, float | int) else None for e in [*errors, None]][:2]
    group = chosen["groups"].get(name)
    leaves = [task.task_name for task in group.get_all_tasks()] if group else [name]
    parts = [_Paired.of(chosen["tasks"][leaf], results, metric, by) for leaf in leaves]
    parts = [part for part in parts if part.documents]
    plain = {
        "task": name,
        "metric": metric,
        "filter": by,
        "fewshot": results[0]["n-shot"].get(name),
        "documents": sum(part.documents for part in parts),
        "value": values[0],
        "error": value_error,
    }
    if len(results) == 1:
        return TaskScore(**plain)
    weighted = group is None or all(
        each.weight_by_size for each in group.aggregate_metric_list if each.metric == metric
    )
    total = _Paired.joined(parts, by_size=weighted)
    paired = plain | {
        "original": values[1],
        "original_error": original_error,
        "difference": values[0] - values[1],
        "difference_error": total.error,
    }
    if total.flips is None:
        return TaskScore(**paired)
    lost, won = total.flips
    share = (lost + won) / total.documents
    return TaskScore(
        **paired,
        right_to_wrong=lost,
        wrong_to_right=won,
        flipped=share,
        flipped_error=math.sqrt(share * (1 - share) / total.documents),
        p_value=mcnemar(lost, won),
    )


def mcnemar(lost: int, won: int) -> float:
    """Return the two-sided exact p value of two counts under equal chances: `2 P(X <= min)`, X ~ B(lost + won, 1/2)."""
    count = lost + won
    below = sum(math.comb(count, k) for k in range(min(lost, won) + 1))
    return float(min(1.0, 2 * below / 2**count))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Paired:
    """Difference of two models on the same documents.

    Args:
        documents: Number of documents.
        error: Standard error of the difference of the metric; None for fewer than two documents.
        flips: Numbers of documents that only the original, and only the model, answers rightly; None if the metric is
            not right or wrong.
    """

    documents: int
    error: float | None = None
    flips: tuple[int, int] | None = None

    @classmethod
    def of(cls, task: Any, results: Sequence[dict[str, Any]], metric: str, by: str) -> _Paired:
        """Compare the scores of a task's documents."""
        scores = [
            {each["doc_id"]: each[metric] for each in answered["samples"][task.task_name] if _has(each, metric, by)}
            for answered in results
        ]
        documents = sorted(set.intersection(*(set(each) for each in scores)))
        if len(results) == 1 or not documents:
            return cls(documents=len(documents))
        ours, theirs = ([each[document] for document in documents] for each in scores)
        binary = {*map(_number, ours), *map(_number, theirs)} <= {0.0, 1.0}
        flips = None
        if binary and task.higher_is_better().get(metric, True):
            pairs = list(zip(map(bool, ours), map(bool, theirs), strict=True))
            flips = pairs.count((False, True)), pairs.count((True, False))
        aggregate = task.aggregation().get(metric, np.mean)
        return cls(documents=len(documents), error=_difference_error(aggregate, ours, theirs), flips=flips)

    @classmethod
    def joined(cls, parts: Sequence[_Paired], *, by_size: bool) -> _Paired:
        """Join the tasks of a group, whose mean is weighted by their numbers of documents or not."""
        documents = sum(part.documents for part in parts)
        errors = [part.error for part in parts if part.error is not None]
        weights = [part.documents / documents if by_size else 1 / len(parts) for part in parts]
        flips = [part.flips for part in parts if part.flips is not None]
        return cls(
            documents=documents,
            error=math.hypot(*(w * e for w, e in zip(weights, errors, strict=True)))
            if len(errors) == len(parts)
            else None,
            flips=(sum(a for a, _ in flips), sum(b for _, b in flips)) if len(flips) == len(parts) else None,
        )


def _has(sample: dict[str, Any], metric: str, by: str) -> bool:
    return sample["filter"] == by and metric in sample["metrics"]


def _number(score: Any) -> float | None:
    """Return the score of a document as a number; None for a pair such as (log-likelihood, words)."""
    return float(score) if isinstance(score, int | float | np.number | np.bool_) else None


def _difference_error(aggregate: Callable[[list[Any]], float], ours: list[Any], theirs: list[Any]) -> float | None:
    """Return the standard error of the difference of a metric, from pairs of scores of the same documents.

    For a mean, it is that of the mean difference. For others, it is that of resampled documents (paired bootstrap).
    """
    count = len(ours)
    if count < 2:
        return None
    numbers = np.array([[_number(score) for score in each] for each in (ours, theirs)], dtype=float)  # None becomes NaN
    if all(math.isclose(aggregate(each), row.mean()) for each, row in zip((ours, theirs), numbers, strict=True)):
        differences = numbers[0] - numbers[1]
        return float(differences.std(ddof=1) / math.sqrt(count))
    draw, differences = np.random.default_rng(0), np.empty(RESAMPLES)
    for index in range(RESAMPLES):
        drawn = draw.integers(count, size=count)
        differences[index] = aggregate([ours[i] for i in drawn]) - aggregate([theirs[i] for i in drawn])
    return float(differences.std(ddof=1))
