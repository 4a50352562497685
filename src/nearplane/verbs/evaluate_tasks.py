"""evaluate_tasks(): answers of a model to lm-eval's tasks, beside the original's answers to the same documents.

lm-eval, which `pip install "nearplane[eval]"` brings, makes the prompts, runs the network and scores each document.
Networks are loaded as `evaluate` loads them: decoded, in float32; model objects run as they are.
"""

from __future__ import annotations

import copy
import logging
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nearplane.calibration.given import check_model, model_label, refuse_tokenizer
from nearplane.errors import CalibrationError, ModelError, RecipeError, first_few, first_line
from nearplane.models.kinds import InputKind, has_head, input_kind
from nearplane.models.pretrained import as_model_error
from nearplane.system.arguments import checked
from nearplane.system.device import Device
from nearplane.verbs.early_checks import check_evaluate_tasks
from nearplane.verbs.evaluate import load_dense

PYTHON_SEED, SEED = 0, 1234  # of lm-eval's command line: for `random`; for numpy, torch and the choice of examples
RESAMPLES = 1000  # of the documents, for errors of metrics that are no mean

log = logging.getLogger(__name__)


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


@checked("model", "against")
def evaluate_tasks(
    model: str | Path | PreTrainedModel,
    tasks: Sequence[str],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    against: str | Path | PreTrainedModel | None = None,
    fewshot: int | None = None,
    limit: int | None = None,
    task_path: str | Path | None = None,
    batch_size: int = 8,
    device: str = "auto",
    trust_remote_code: bool = False,
) -> list[TaskScore]:
    """Let a model, and perhaps its original, answer tasks of lm-eval.

    Args:
        model: Folder, hub id or .gguf file as for `evaluate`, or a model object.
        tasks: Names of tasks or groups of lm-eval, or patterns of names such as "mmlu_*".
        tokenizer: Tokenizer of a model object.
        against: The original model. It answers the same documents after the model, so that one is in memory at a time.
        fewshot: Number of solved examples in each prompt. None: as each task says. Tasks that fix 0 keep it.
        limit: Number of documents of each task, from its beginning. None: all.
        task_path: Folder with tasks as YAML files, searched before lm-eval's own. Python files that they name are run.
        batch_size: Number of requests that pass through the network together.
        device: Device to compute on.
        trust_remote_code: Whether to run model code that comes with the checkpoint.

    Returns:
        The scores of every task and metric, in lm-eval's order; groups come after their tasks.

    Raises:
        RecipeError: lm-eval is missing or has no such task, or an argument is out of range.
        CalibrationError: The documents of a task cannot be loaded.
        ModelError, FormatError: A model cannot be read, or answers no tasks.
    """
    check_evaluate_tasks(
        model, tasks, against=against, fewshot=fewshot, limit=limit, task_path=task_path, batch_size=batch_size
    )
    refuse_tokenizer(model, tokenizer)
    with _seeded():
        chosen = _load_tasks(tasks, task_path)
    _set_fewshot(chosen, fewshot)
    place = Device.named(device).place
    results = []
    for source in (model,) if against is None else (model, against):
        network, words = _loaded(source, tokenizer, place, trust_remote_code)
        log.info("%s answers %s", model_label(source), first_few(list(chosen["tasks"])))
        results.append(_answers(network, words, model_label(source), chosen, limit, batch_size))
        del network  # before the next one is loaded
    return [_score(chosen, results, *key) for key in _metrics(results[0])]


def _load_tasks(names: Sequence[str], task_path: str | Path | None) -> dict[str, Any]:
    """Return tasks with their documents, and groups, as lm-eval's `TaskManager.load` returns them.

    Raises:
        RecipeError: A name is unknown, or a task cannot be run.
        CalibrationError: The documents of a task cannot be loaded.
    """
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=task_path, include_defaults=False)
    if not {*names} <= {*manager.all_subtasks}:  # reading all of lm-eval's own tasks takes seconds
        manager = TaskManager(include_path=task_path)
    chosen: dict[str, Any] = {"tasks": {}, "groups": {}}
    for name in names:
        matches = manager.match_tasks([name])
        if not matches:
            close = get_close_matches(name, manager.all_tasks, 3)
            advice = f"Did you mean {' or '.join(close)}?" if close else "List its tasks with lm-eval ls tasks."
            raise RecipeError(f"--tasks {name}: lm-eval has no task of this name. {advice}")
        for match in matches:
            try:
                loaded = manager.load([match])
            except Exception as error:  # the network, the disk and Python files of tasks raise anything
                raise CalibrationError(
                    f"The task {match} cannot be loaded ({type(error).__name__}: {first_line(error)}). Its documents come from "
                    f"the hub, once: connect to it, or pass the folder of a task with its own files with --task-path."
                ) from error
            chosen["tasks"] |= loaded["tasks"]
            chosen["groups"] |= loaded["groups"]
    for name, task in chosen["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            kind = "images or sound" if getattr(task, "MULTIMODAL", False) else "runs code that the model writes"
            raise RecipeError(f"--tasks {name}: the task {kind}, which nearplane does not do. Run it with lm-eval itself.")
    return chosen


def _set_fewshot(chosen: dict[str, Any], fewshot: int | None) -> None:
    """Set the number of examples in prompts as lm-eval's command line does: tasks that fix 0 keep it."""
    for task in chosen["tasks"].values():
        fixed = task.get_config("num_fewshot")
        if fixed is None or (fewshot is not None and fixed):
            task.set_config(key="num_fewshot", value=fewshot or 0)


def _loaded(
    source: str | Path | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    device: torch.device,
    trust_remote_code: bool,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a network that answers text with tokens, and its tokenizer.

    Raises:
        ModelError, FormatError: It cannot be read, or does not answer text with tokens.
        RecipeError: A model object has no tokenizer.
    """
    if isinstance(source, str | Path):
        network, tokenizer = load_dense(source, device, trust_remote_code=trust_remote_code)
    else:
        network = check_model(source)
    if not has_head(network) or input_kind(network) is not InputKind.TEXT:
        why = "has no vocabulary head" if not has_head(network) else f"takes {input_kind(network)}"
        raise ModelError(f"{model_label(source)} {why}, so it answers no tasks. Pass a language model.")
    if tokenizer is None:
        raise RecipeError("A model object has no tokenizer: pass tokenizer=.")
    return network, tokenizer


class _Cut(logging.Filter):
    """Count of requests that were cut, in place of lm-eval's warning for each; drops its warning about model objects."""

    count = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a warning is shown."""
        message = record.getMessage()
        self.count += "runcat" in message
        return "runcat" not in message and not message.startswith(("`pretrained`", "Passed an already"))


def _answers(
    network: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    label: str,
    chosen: dict[str, Any],
    limit: int | None,
    batch_size: int,
) -> dict[str, Any]:
    """Return lm-eval's results with the scores of each document ("samples")."""
    from lm_eval.evaluator import evaluate
    from lm_eval.models import huggingface

    cut = _Cut()
    huggingface.eval_logger.addFilter(cut)
    try:
        with as_model_error(f"{label} does not answer the tasks"), _seeded(), redirect_stdout(sys.stderr):
            lm = huggingface.HFLM(network, tokenizer=copy.deepcopy(tokenizer), batch_size=batch_size)
            for task in chosen["tasks"].values():
                task.set_fewshot_seed(SEED)
            answered: dict[str, Any] = evaluate(lm, chosen, limit=limit, bootstrap_iters=RESAMPLES)
    finally:
        huggingface.eval_logger.removeFilter(cut)
    if cut.count:
        log.warning("%s: %d requests were longer than its maximum length, and lost their beginning", label, cut.count)
    return answered


@contextmanager
def _seeded() -> Iterator[None]:
    """A context with the seeds of lm-eval's command line; the random states from before come back after it."""
    python, numpy = random.getstate(), np.random.get_state()
    random.seed(PYTHON_SEED)
    np.random.seed(SEED)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(SEED)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


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
    weighted = group is None or all(each.weight_by_size for each in group.aggregate_metric_list if each.metric == metric)
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
    return min(1.0, 2 * below / 2**count)


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
        return cls(documents=len(documents), error=_difference_error(_aggregation(task, metric), ours, theirs), flips=flips)

    @classmethod
    def joined(cls, parts: Sequence[_Paired], *, by_size: bool) -> _Paired:
        """Join the tasks of a group, whose mean is weighted by their numbers of documents or not."""
        documents = sum(part.documents for part in parts)
        errors = [part.error for part in parts if part.error is not None]
        weights = [part.documents / documents if by_size else 1 / len(parts) for part in parts]
        flips = [part.flips for part in parts if part.flips is not None]
        return cls(
            documents=documents,
            error=math.hypot(*(w * e for w, e in zip(weights, errors, strict=True))) if len(errors) == len(parts) else None,
            flips=(sum(a for a, _ in flips), sum(b for _, b in flips)) if len(flips) == len(parts) else None,
        )


def _has(sample: dict[str, Any], metric: str, by: str) -> bool:
    return sample["filter"] == by and metric in sample["metrics"]


def _number(score: Any) -> float | None:
    """Return the score of a document as a number; None for a pair such as (log-likelihood, words)."""
    return float(score) if isinstance(score, int | float | np.number | np.bool_) else None


def _aggregation(task: Any, metric: str) -> Callable[[list[Any]], float] | None:
    """Return the function that makes a metric from the scores of all documents; None for their mean."""
    from lm_eval.api.metrics import mean

    function = task.aggregation().get(metric, mean)
    return None if function is mean else function


def _difference_error(aggregate: Callable[[list[Any]], float] | None, ours: list[Any], theirs: list[Any]) -> float | None:
    """Return the standard error of the difference of a metric, from pairs of scores of the same documents.

    For a mean, it is that of the mean difference. For others, it is that of resampled documents (paired bootstrap).
    """
    count = len(ours)
    if count < 2:
        return None
    if aggregate is None:
        differences = np.array(ours, dtype=float) - np.array(theirs, dtype=float)
        return float(differences.std(ddof=1) / math.sqrt(count))
    draw, differences = np.random.default_rng(0), np.empty(RESAMPLES)
    for index in range(RESAMPLES):
        chosen = draw.integers(count, size=count)
        differences[index] = aggregate([ours[i] for i in chosen]) - aggregate([theirs[i] for i in chosen])
    return float(differences.std(ddof=1))
