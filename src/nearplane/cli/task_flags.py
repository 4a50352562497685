"""Flags of `nearplane evaluate` for tasks of lm-eval, and the table of their scores."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group

from nearplane.cli.flags import Hidden, Several
from nearplane.cli.printing import say, table
from nearplane.errors import RecipeError
from nearplane.verbs.evaluate_request import EvaluateRequest, TasksRequest

if TYPE_CHECKING:
    from nearplane.evaluation.task_scores import TaskScore

TASK_GROUP = Group("Tasks of lm-eval, instead of --text or with it", sort_key=1)
COLUMNS = ("task", "metric", "shots", "documents", "model", "original", "difference", "right to wrong", "wrong to right",
           "flipped %", "p")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TaskFlags(TasksRequest):
    """Flags of `nearplane evaluate` for tasks; those that it shares with texts are added by `asked`."""

    model: Annotated[Any, Hidden] = ""
    tasks: Annotated[list[str] | None, Several] = None  # type: ignore[assignment]  # missing
    tokenizer: Annotated[Any, Hidden] = None
    against: Annotated[Any, Hidden] = None
    task_path: Path | None = None
    device: Annotated[str, Hidden] = "auto"
    trust_remote_code: Annotated[bool, Hidden] = False

    def asked(self, texts: EvaluateRequest) -> TasksRequest:
        """Return what is asked of `evaluate_tasks`, with the models and the device of the request for texts.

        Raises:
            RecipeError: No task is named.
        """
        if self.tasks is None:
            given = next((each.name for each in fields(self) if getattr(self, each.name) != each.default), "batch_size")
            raise RecipeError(f"--{given.replace('_', '-')} needs --tasks with names of lm-eval's tasks.")
        names = [name.strip() for several in self.tasks for name in several.split(",")]
        return replace(
            self,
            model=texts.model,
            tasks=names,
            against=texts.against,
            device=texts.device,
            trust_remote_code=texts.trust_remote_code,
        )


def print_scores(scores: Iterable[TaskScore]) -> None:
    """Print a table of scores, and below it what its errors are."""
    scores = list(scores)
    columns = COLUMNS if scores[0].original is not None else COLUMNS[:5]
    table(columns, (tuple(_cells(score))[: len(columns)] for score in scores))
    say(["± is one standard error, over the documents of a task."])
    if len(columns) > 5:
        say(["The difference is that of the two models on the same documents; p is that of McNemar's exact test."])


def _cells(score: TaskScore) -> Iterable[str]:
    """Yield the cells of one score."""
    yield score.task
    yield score.metric if score.filter == "none" else f"{score.metric}, {score.filter}"
    yield "-" if score.fewshot is None else f"{score.fewshot}"
    yield f"{score.documents:,}"
    yield _with_error(score.value, score.error)
    yield _with_error(score.original, score.original_error)
    yield _with_error(score.difference, score.difference_error, sign="+")
    yield "-" if score.right_to_wrong is None else f"{score.right_to_wrong:,}"
    yield "-" if score.wrong_to_right is None else f"{score.wrong_to_right:,}"
    share, error = score.flipped, score.flipped_error
    yield "-" if share is None or error is None else f"{100 * share:.1f} ± {100 * error:.1f}"
    yield "-" if score.p_value is None else f"{score.p_value:.3f}"


def _with_error(value: float | None, error: float | None, sign: str = "") -> str:
    """Return a value with its standard error."""
    if value is None:
        return "-"
    return f"{value:{sign}.4f}" + ("" if error is None else f" ± {error:.4f}")
