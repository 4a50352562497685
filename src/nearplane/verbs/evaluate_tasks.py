"""evaluate_tasks(): answers of a model to lm-eval's tasks, beside the original's answers to the same documents.

lm-eval, which `pip install ".[eval]"` brings, makes the prompts, runs the network and scores each document.
Networks are loaded as `evaluate` loads them: decoded, in float32; model objects run as they are.
"""

from __future__ import annotations

import copy
import logging
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nearplane.errors import CalibrationError, ModelError, RecipeError, first_few, first_line
from nearplane.evaluation.predictions import Outline
from nearplane.evaluation.task_scores import RESAMPLES, TaskScore, scores
from nearplane.loading.loaded_network import only_token_settings
from nearplane.models.kinds import InputKind
from nearplane.models.pretrained import as_model_error
from nearplane.system.arguments import takes
from nearplane.system.device import Device
from nearplane.system.matmul_library import exact_float32
from nearplane.system.paths import name_of, refuse_tokenizer
from nearplane.system.progress import Tracked, in_steps, silent
from nearplane.verbs.evaluate import load_dense
from nearplane.verbs.evaluate_request import TasksRequest

PYTHON_SEED, SEED = 0, 1234  # of lm-eval's command line: for `random`; for numpy, torch and the choice of examples

log = logging.getLogger(__name__)


@takes(TasksRequest, tokenizer=PreTrainedTokenizerBase | None)
def evaluate_tasks(request: TasksRequest) -> list[TaskScore]:
    """Let a model, and perhaps its original, answer tasks of lm-eval.

    Returns:
        The scores of every task and metric, in lm-eval's order; groups come after their tasks.

    Raises:
        RecipeError: lm-eval is missing or has no such task, or an argument is out of range.
        CalibrationError: The documents of a task cannot be loaded.
        ModelError, FormatError: A model cannot be read, or answers no tasks.
    """
    request.check()
    model, tokenizer, trust_remote_code = request.model, request.tokenizer, request.trust_remote_code
    refuse_tokenizer(model, tokenizer)
    sources = [each for each in (model, request.against) if each is not None]
    for source in sources:
        _check_answers(Outline.of(source, trust_remote_code=trust_remote_code))
    if tokenizer is None and not isinstance(model, str | Path):
        raise RecipeError("A model object has no tokenizer: pass tokenizer=.")
    with _seeded(), _quiet():
        chosen = _load_tasks(request.tasks, request.task_path)
    _set_fewshot(chosen, request.fewshot)
    place = Device.named(request.device).place
    results = []
    for source in sources:
        network = source
        if isinstance(network, str | Path):
            network, tokenizer = load_dense(network, place, trust_remote_code=trust_remote_code)
        assert tokenizer is not None
        log.info("%s answers %s", name_of(source), first_few(list(chosen["tasks"])))
        with exact_float32():
            results.append(_answers(network, tokenizer, name_of(source), chosen, request))
        del network  # before the next one is loaded
    return scores(chosen, results)


def _load_tasks(names: Sequence[str], task_path: str | Path | None) -> dict[str, Any]:
    """Return tasks with their documents, and groups, as lm-eval's `TaskManager.load` returns them.

    Raises:
        RecipeError: A name is unknown, or a task cannot be run.
        CalibrationError: The documents of a task cannot be loaded.
    """
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=task_path, include_defaults=False)
    groups = [manager.task_index[name].cfg or {} for name in names if name in manager.all_groups]
    needed = {*names, *(str(member) for group in groups for member in group["task"])}
    if not needed <= {*manager.all_subtasks, *manager.all_groups}:
        log.info("reading the list of lm-eval's tasks, which takes seconds")
        manager = TaskManager(include_path=task_path)
    chosen: dict[str, Any] = {"tasks": {}, "groups": {}}
    for name in names:
        matches = manager.match_tasks([name])
        if not matches:
            close = get_close_matches(name, manager.all_tasks, 3)
            advice = f"Did you mean {' or '.join(close)}?" if close else "lm_eval ls tasks lists them."
            if task_path is None:
                advice += " The folder of a task of your own is named with --task-path."
            raise RecipeError(f"--tasks {name}: lm-eval has no task of this name. {advice}")
        for match in matches:
            try:
                loaded = manager.load([match])
            except Exception as error:  # the network, the disk and Python files of tasks raise anything
                advice = (
                    "Its documents come from the hub, once: connect to it, or pass the folder of a task with its own files "
                    "with --task-path."
                    if task_path is None
                    else f"Check its files in {task_path}, or connect to the hub if its documents come from there."
                )
                raise CalibrationError(
                    f"The task {match} cannot be loaded ({type(error).__name__}: {first_line(error)}). {advice}"
                ) from error
            chosen["tasks"] |= loaded["tasks"]
            chosen["groups"] |= loaded["groups"]
    for name, task in chosen["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            kind = "has images or sound" if getattr(task, "MULTIMODAL", False) else "runs code that the model writes"
            raise RecipeError(
                f"--tasks {name}: the task {kind}, which nearplane does not do. Run it with lm-eval itself."
            )
    return chosen


def _set_fewshot(chosen: dict[str, Any], fewshot: int | None) -> None:
    """Set the number of examples in prompts as lm-eval's command line does: tasks that fix 0 keep it."""
    for task in chosen["tasks"].values():
        fixed = task.get_config("num_fewshot")
        if fixed is None or (fewshot is not None and fixed):
            task.set_config(key="num_fewshot", value=fewshot or 0)


def _check_answers(outline: Outline) -> None:
    """Refuse a network that does not answer text with tokens, before its weights are read.

    Raises:
        ModelError: It is an encoder, or takes something else than text.
    """
    if outline.embeds or outline.takes is not InputKind.TEXT:
        why = "has no vocabulary head" if outline.embeds else f"takes {outline.takes}"
        raise ModelError(f"{outline.name} {why}, so it answers no tasks. Pass a language model.")


class _Warnings(logging.Handler):
    """Warnings of lm-eval, each once, and the number of requests that it cut; its remarks on model objects are left out."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: dict[str, None] = {}
        self.cut = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a warning."""
        message = record.getMessage()
        if "runcat" in message:  # one for each request: "Truncating", "truncation applied"
            self.cut += 1
        elif not message.startswith(("`pretrained`", "Passed an already")):
            self.lines[message] = None


class _Answered:
    """What lm-eval tells of each answered request, which its own cache would store; here it is logged as progress."""

    def __init__(self, chosen: dict[str, Any], stack: ExitStack) -> None:
        self._chosen, self._stack = chosen, stack
        self._done: Callable[[int], None] | None = None

    def add_partial(self, kind: str, request: Any, answer: Any) -> None:
        """Count a request."""
        if self._done is None:  # all requests are built before the first answer
            total = sum(request.repeats for task in self._chosen["tasks"].values() for request in task.instances)
            self._done = self._stack.enter_context(in_steps(silent, Tracked(range(total), "answering", total)))
        self._done(1)


def _answers(
    network: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    label: str,
    chosen: dict[str, Any],
    request: TasksRequest,
) -> dict[str, Any]:
    """Return lm-eval's results with the scores of each document ("samples")."""
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM

    with (
        as_model_error(f"{label} does not answer the tasks"),
        only_token_settings(network),
        _seeded(),
        _quiet() as warnings,
        ExitStack() as stack,
    ):
        lm = HFLM(network, tokenizer=copy.deepcopy(tokenizer), batch_size=request.batch_size)
        lm.set_cache_hook(_Answered(chosen, stack))
        for task in chosen["tasks"].values():
            task.set_fewshot_seed(SEED)
        answered: dict[str, Any] = evaluate(lm, chosen, limit=request.limit, bootstrap_iters=RESAMPLES)
    for line in warnings.lines:
        log.warning("lm-eval: %s", line)
    if warnings.cut:
        log.warning("%s: %d requests were longer than its maximum length and lost their beginning", label, warnings.cut)
    return answered


@contextmanager
def _quiet() -> Iterator[_Warnings]:
    """A context in which lm-eval's bars are shown only on a terminal, its lines not at all, and its warnings are kept."""
    logger, warnings = logging.getLogger("lm_eval"), _Warnings()
    logger.addHandler(warnings)
    try:
        with open(os.devnull, "w") as nothing, redirect_stdout(nothing), ExitStack() as stack:
            if not sys.stderr.isatty():
                stack.enter_context(redirect_stderr(nothing))
            yield warnings
    finally:
        logger.removeHandler(warnings)


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
