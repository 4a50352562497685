"""The command `nearplane evaluate`: figures of a model on texts and scores of tasks, as text, JSON and a figure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from nearplane.cli.flags import DeviceFlag, Flat, Hidden, Several, Switch
from nearplane.cli.printing import as_json, opening, say, table
from nearplane.errors import RecipeError
from nearplane.evaluation.protocol_names import Protocol  # noqa: F401  cyclopts reads the type of the field
from nearplane.recipe.scheme import CacheNumbers  # noqa: F401  likewise
from nearplane.system.launch import launched
from nearplane.system.progress import Progress
from nearplane.system.progress_bar import bar
from nearplane.verbs.chat_request import ChatRequest
from nearplane.verbs.evaluate_request import EvaluateRequest, TasksRequest
from nearplane.verbs.figure_file import check_plot

if TYPE_CHECKING:
    from nearplane.evaluation.task_scores import TaskScore
    from nearplane.verbs.evaluate import Measured
    from nearplane.verbs.evaluate_chat import ChatEvaluation

TASK_GROUP = Group("Tasks of lm-eval, instead of --text or with it", sort_key=1)
CHAT_GROUP = Group("Conversations, instead of --text or with it", sort_key=2)
COLUMNS = ("task", "metric", "shots", "documents", "model", "original", "difference", "right to wrong", "wrong to right",
           "flipped %", "p")  # fmt: skip


@dataclass(frozen=True)
class EvaluateFlags(EvaluateRequest):
    """Flags of `nearplane evaluate` for texts.

    Args:
        model: Folder or hub id of a transformers checkpoint, or of one that nearplane wrote, or a .gguf file.
        text: Texts to measure on, each with figures of its own: a .txt or .jsonl file, a folder of them, wikitext2,
            c4, or self: text that the original writes (needs --against).
    """

    model: str
    text: Annotated[list[Path], Parameter(consume_multiple=1, show_default=False)] = field(  # type: ignore[assignment]
        default_factory=list, kw_only=True
    )  # several, each measured by itself
    tokenizer: Annotated[Any, Hidden] = field(default=None, kw_only=True)
    against: str | None = field(default=None, kw_only=True)
    floor: Annotated[bool, Hidden] = field(default=True, kw_only=True)
    device: DeviceFlag = field(default="auto", kw_only=True)
    progress: Annotated[Progress, Hidden] = field(default=bar, kw_only=True)

    @property
    def texts(self) -> Sequence[Any]:
        """All texts; none if only tasks are asked."""
        return self.text


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


@dataclass(frozen=True, kw_only=True)
class ChatFlags(ChatRequest):
    """Flags of `nearplane evaluate` for conversations; those that it shares with texts are added by `asked`."""

    model: Annotated[Any, Hidden] = ""
    chat: Path | None = None  # type: ignore[assignment]  # missing
    against: Annotated[Any, Hidden] = None
    tokenizer: Annotated[Any, Hidden] = None
    samples: Annotated[int | None, Parameter(name="--conversations")] = None
    device: Annotated[str, Hidden] = "auto"
    trust_remote_code: Annotated[bool, Hidden] = False
    progress: Annotated[Progress, Hidden] = bar

    def asked(self, texts: EvaluateRequest) -> ChatRequest:
        """Return what is asked of `evaluate_chat`, with the models and the device of the request for texts.

        Raises:
            RecipeError: No file is named.
        """
        if self.chat is None:
            raise RecipeError("--answer-tokens and --conversations belong to --chat with a file of conversations.")
        shared = {name: getattr(texts, name) for name in ("model", "against", "device", "trust_remote_code")}
        return replace(self, **shared)


def evaluate(
    request: Annotated[EvaluateFlags, Flat],
    *,
    chat: Annotated[ChatFlags | None, Parameter(name="*", negative="", group=CHAT_GROUP)] = None,
    tasks: Annotated[TaskFlags | None, Parameter(name="*", negative="", group=TASK_GROUP)] = None,
    plot: Path | None = None,
    json: Switch = False,
) -> None:
    """Measure the perplexity of MODEL on a text, and with --against how far its predictions are from the original's.

    With --tasks, MODEL and the original answer tasks of lm-eval. With --chat, the original answers conversations, and MODEL's
    predictions of these answers are compared with its own.
    The text is cut into windows that do not overlap. Each begins with the token that the tokenizer sets before a text, if
    it sets one, as the model was trained.
    For an encoder, the similarity of its embeddings to the original's is measured.

    Args:
        plot: Figure to draw (.svg, .png or .pdf): KL by position, and a histogram of KL. Needs --against.
        json: Print the result as JSON; with several texts, a list; with --tasks or --chat, under "texts", "tasks" and "chat".
    """
    model, texts = request.model, request.texts
    if not texts and tasks is None and chat is None:
        raise RecipeError(
            "evaluate needs --text with a text, --tasks with names of lm-eval's tasks, or --chat with conversations."
        )
    if not texts:
        _refuse_of_texts(request, plot)
    request.check()
    if plot is not None:
        if request.against is None:
            raise RecipeError("--plot draws the KL to the original. Pass it with --against, or leave out --plot.")
        check_plot(plot)
    asked = None if tasks is None else tasks.asked(request)
    conversations = None if chat is None else chat.asked(request)
    for each in (asked, conversations):
        if each is not None:
            each.check()
    opening(model)
    prepared = None
    if texts:
        from nearplane.verbs.evaluate import prepare_texts

        prepared = prepare_texts(request)
        if plot is not None and prepared.outlines[0].embeds:
            raise RecipeError(f"--plot draws predictions, which the encoder {model} does not make. Leave it out.")
    chat_ready = None
    if conversations is not None:  # refused before the texts are measured
        from nearplane.verbs.evaluate_chat import prepare_chat

        chat_ready = prepare_chat(conversations)
    measured = [] if prepared is None else prepared.measure()
    if (launch := launched()) is not None and launch.rank > 0:
        return  # rank 0 alone runs tasks, prints and draws
    scores = []
    if asked is not None:
        from nearplane import evaluate_tasks

        scores = evaluate_tasks(asked)
    chatted = None if chat_ready is None else chat_ready.measured()
    _print(measured, scores, chatted, json=json)
    if plot is not None:
        from nearplane.verbs.evaluate_figure import draw

        draw(measured, plot)


def _refuse_of_texts(request: EvaluateFlags, plot: Path | None) -> None:
    """Refuse an option that only texts have.

    Raises:
        RecipeError: The message names the option.
    """
    of_texts = {
        "seqlen": request.seqlen is not None,
        "samples": request.samples is not None,
        "plot": plot is not None,
        "activations": request.activations,
        "kv-cache": request.kv_cache != "none",
        "protocol": request.protocol != "nearplane",
    }
    if given := next((name for name, value in of_texts.items() if value), None):
        raise RecipeError(f"--{given} belongs to --text, which is not given. Pass a text, or leave out --{given}.")


def _print(
    measured: Sequence[Measured], scores: Sequence[TaskScore], chatted: ChatEvaluation | None, *, json: bool
) -> None:
    """Print the figures of all texts, tasks and conversations."""
    if json:
        parts = [asdict(each.evaluation) for each in measured]
        alone = parts[0] if len(parts) == 1 else parts
        every: dict[str, Any] = {"texts": parts, "tasks": [asdict(score) for score in scores]}
        if chatted is not None:
            every["chat"] = asdict(chatted)
        print(as_json(every if scores or chatted is not None else alone))
        return
    for number, each in enumerate(measured):
        say([""] * bool(number))
        say(str(each.evaluation).split("\n"))
    if scores:
        _print_scores(scores)
    if chatted is not None:
        say([""] * bool(measured or scores))
        say(str(chatted).split("\n"))


def _print_scores(scores: Iterable[TaskScore]) -> None:
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
