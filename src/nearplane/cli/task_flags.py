"""Flags of `nearplane evaluate` for tasks of lm-eval, and the table of their scores."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from nearplane.cli.printing import say, table
from nearplane.errors import RecipeError
from nearplane.verbs.early_checks import check_evaluate_tasks

if TYPE_CHECKING:
    from nearplane.evaluation.task_scores import TaskScore

TASK_GROUP = Group("Tasks of lm-eval, instead of --text or with it", sort_key=1)
COLUMNS = ("task", "metric", "shots", "documents", "model", "original", "difference", "right to wrong", "wrong to right",
           "flipped %", "p")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TaskFlags:
    """Tasks, and how they are asked.

    Args:
        tasks: Names of tasks or groups, or patterns of names, for example --tasks winogrande,truthfulqa_mc1.
        task_path: Folder of further tasks, as YAML files of lm-eval. Python files that they name are run.
        fewshot: Number of solved examples in each prompt. Default: as each task says; tasks that fix 0 keep it.
        limit: Number of documents of each task, from its beginning. Default: all.
        batch_size: Number of requests of tasks that pass through the network together.
    """

    tasks: Annotated[list[str] | None, Parameter(consume_multiple=True, negative="", group=TASK_GROUP)] = None
    task_path: Annotated[Path | None, Parameter(group=TASK_GROUP)] = None
    fewshot: Annotated[int | None, Parameter(group=TASK_GROUP)] = None
    limit: Annotated[int | None, Parameter(group=TASK_GROUP)] = None
    batch_size: Annotated[int, Parameter(group=TASK_GROUP)] = 8

    def options(self) -> dict[str, Any]:
        """Return the arguments of `evaluate_tasks`."""
        return {
            "tasks": [name.strip() for names in self.tasks or () for name in names.split(",")],
            "task_path": self.task_path,
            "fewshot": self.fewshot,
            "limit": self.limit,
            "batch_size": self.batch_size,
        }

    def check(self, model: str, against: str | None) -> None:
        """Refuse what `evaluate_tasks` would refuse without torch."""
        if self.tasks is None:
            given = next((each.name for each in fields(self) if getattr(self, each.name) != each.default), "batch_size")
            raise RecipeError(f"--{given.replace('_', '-')} needs --tasks with names of lm-eval's tasks.")
        check_evaluate_tasks(model, against=against, **self.options())

    def scores(self, model: str, against: str | None, **options: Any) -> list[TaskScore]:
        """Let the models answer the tasks."""
        from nearplane import evaluate_tasks

        return evaluate_tasks(model, against=against, **self.options(), **options)


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
