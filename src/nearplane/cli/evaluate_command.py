"""The command `nearplane evaluate`: figures of a model on texts and scores of tasks, as text, JSON and a figure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from nearplane.cli.flags import DeviceFlag, Flat, Hidden, Several, Switch
from nearplane.cli.printing import as_json, opening, say, table
from nearplane.errors import RecipeError
from nearplane.evaluation.protocol_names import Protocol  # noqa: F401  cyclopts reads the type of the field
from nearplane.system.launch import launched
from nearplane.system.progress import Progress
from nearplane.system.progress_bar import bar
from nearplane.verbs.evaluate_request import EvaluateRequest, TasksRequest
from nearplane.verbs.figure_file import check_plot

if TYPE_CHECKING:
    from nearplane.evaluation.protocols import LlamaCppFigure
    from nearplane.evaluation.scoring import Floor
    from nearplane.evaluation.statistics import Estimate, PositionRange, Statistics
    from nearplane.evaluation.task_scores import TaskScore
    from nearplane.verbs.evaluate import Evaluation, Measured

NAME_WIDTH, POSITIONS_PER_LINE = 34, 4
TASK_GROUP = Group("Tasks of lm-eval, instead of --text or with it", sort_key=1)
COLUMNS = ("task", "metric", "shots", "documents", "model", "original", "difference", "right to wrong", "wrong to right",
           "flipped %", "p")  # fmt: skip


@dataclass(frozen=True)
class EvaluateFlags(EvaluateRequest):
    """Flags of `nearplane evaluate` for texts.

    Args:
        model: Folder or hub id of a transformers checkpoint, or of one that nearplane wrote, or a .gguf file.
        text: Texts to measure on, each with figures of its own: a .txt or .jsonl file, a folder of them, wikitext2 or c4.
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


def evaluate(
    request: Annotated[EvaluateFlags, Flat],
    *,
    tasks: Annotated[TaskFlags | None, Parameter(name="*", negative="", group=TASK_GROUP)] = None,
    plot: Path | None = None,
    json: Switch = False,
) -> None:
    """Measure the perplexity of MODEL on a text, and with --against how far its predictions are from the original's.

    With --tasks, MODEL and the original answer tasks of lm-eval.
    The text is cut into windows that do not overlap. Each begins with the token that the tokenizer sets before a text, if
    it sets one, as the model was trained.
    For an encoder, the similarity of its embeddings to the original's is measured.

    Args:
        plot: Figure to draw (.svg, .png or .pdf): KL by position, and a histogram of KL. Needs --against.
        json: Print the result as JSON; with several texts, a list; with --tasks, both under "texts" and "tasks".
    """
    model, texts = request.model, request.texts
    if not texts and tasks is None:
        raise RecipeError("evaluate needs --text with a text, --tasks with names of lm-eval's tasks, or both.")
    if not texts:
        _refuse_of_texts(request, plot)
    request.check()
    if plot is not None:
        if request.against is None:
            raise RecipeError("--plot draws the KL to the original. Pass it with --against, or leave out --plot.")
        check_plot(plot)
    asked = None if tasks is None else tasks.asked(request)
    if asked is not None:
        asked.check()
    opening(model)
    prepared = None
    if texts:
        from nearplane.verbs.evaluate import prepare_texts

        prepared = prepare_texts(request)
        if plot is not None and prepared.outlines[0].embeds:
            raise RecipeError(f"--plot draws predictions, which the encoder {model} does not make. Leave it out.")
    measured = [] if prepared is None else prepared.measure()
    if (launch := launched()) is not None and launch.rank > 0:
        return  # rank 0 alone runs tasks, prints and draws
    scores = []
    if asked is not None:
        from nearplane import evaluate_tasks

        scores = evaluate_tasks(asked)
    _print(measured, scores, json=json)
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
        "protocol": request.protocol != "nearplane",
    }
    if given := next((name for name, value in of_texts.items() if value), None):
        raise RecipeError(f"--{given} belongs to --text, which is not given. Pass a text, or leave out --{given}.")


def _print(measured: Sequence[Measured], scores: Sequence[TaskScore], *, json: bool) -> None:
    """Print the figures of all texts and tasks."""
    if json:
        parts = [asdict(each.evaluation) for each in measured]
        alone = parts[0] if len(parts) == 1 else parts
        print(as_json({"texts": parts, "tasks": [asdict(score) for score in scores]} if scores else alone))
        return
    for number, each in enumerate(measured):
        say([""] * bool(number))
        say(lines(each.evaluation))
    if scores:
        _print_scores(scores)


def lines(score: Evaluation) -> Iterator[str]:
    """Yield the lines that are printed of one evaluation."""
    if score.cosine is not None:
        yield (
            f"cosine of mean-pooled embeddings to the original's: mean {score.cosine:.5f}, least {score.worst_cosine:.5f} "
            f"({score.windows} windows of {score.seqlen}); no vocabulary head, so no perplexity"
        )
        return
    yield f"{score.text}, protocol {score.protocol}: {_protocol(score)}"
    if score.protocol == "llama.cpp":
        yield from (_row(each.name, _figure(each)) for each in score.llama_cpp)
    elif score.statistics is not None:
        yield from _perplexities(score, score.statistics)
        yield from _divergence(score.statistics)
    if score.floor is not None:
        yield from _floor(score.floor)
    yield from score.remarks
    if score.computed is not None:
        yield ""
        yield "as runtimes compute, with the inputs of layers rounded (above: the weights alone):"
        yield from (line for number, line in enumerate(lines(score.computed)) if number)


def _protocol(score: Evaluation) -> str:
    """Return what was scored, and by which number the sum is divided."""
    scored = f"{score.tokens:,} tokens scored in {score.windows:,} windows of {score.seqlen}"
    if score.protocol == "llama.cpp":
        return f"{scored}, of each the second half; per token, and errors (±) as if tokens were independent"
    if score.protocol == "lm-eval":
        documents = f"{score.documents:,} document{'s' * (score.documents > 1)}"
        return f"{scored}, rolling over {documents}; per word ({score.words:,}) and per byte ({score.bytes:,})"
    return f"{scored}, of each all but the first; per token"


def _perplexities(score: Evaluation, it: Statistics) -> Iterator[str]:
    """Yield the perplexities of both networks and their ratio."""
    if score.lm_eval is not None:
        for name, value in asdict(score.lm_eval).items():
            yield _row(name, f"{value:.4f}")
        for name, value in ({} if score.lm_eval_original is None else asdict(score.lm_eval_original)).items():
            yield _row(f"the original's {name}", f"{value:.4f}")
        return
    yield from _estimate("perplexity", it.perplexity, ".4f")
    yield from _estimate("the original's perplexity", it.original_perplexity, ".4f")
    yield from _estimate("ratio of the two", it.perplexity_ratio, ".5f")


def _divergence(it: Statistics) -> Iterator[str]:
    """Yield how far the predictions are from the original's."""
    if it.kl is None:
        return
    yield from _estimate("KL(original || model)", it.kl, ".5f", " nats per token")
    quantiles = (("median", it.kl_median), ("99 %", it.kl_99), ("99.9 %", it.kl_999), ("largest", it.kl_max))
    yield _row(
        "  of single tokens",
        ", ".join(f"{name} {value:.5f}" for name, value in quantiles if value is not None) + " nats",
    )
    yield from _estimate("KL(model || original)", it.reverse_kl, ".5f", " nats per token")
    yield from _estimate("same top token", it.same_top, ".2f", " %", 100)
    if it.same_top is not None:
        yield _row(
            "  in words", f"of 1,000 next-token choices {1000 * (1 - it.same_top.value):.0f} differ from the original's"
        )
    yield from _estimate(
        "right token's probability", it.probability_change, "+.3f", " percentage points on average", 100
    )
    yield from _estimate("  root mean square", it.probability_change_rms, ".3f", " percentage points", 100)
    for start in range(0, len(it.by_position), POSITIONS_PER_LINE):
        parts = it.by_position[start : start + POSITIONS_PER_LINE]
        cells = ", ".join(f"{_range(part)}: {part.kl.value:.5f}" for part in parts)
        yield _row("KL after 1, 2-3, .. tokens, nats" * (start == 0), cells)


def _estimate(name: str, it: Estimate | None, form: str, unit: str = "", factor: int = 1) -> Iterator[str]:
    """Yield a row with a figure and its interval, if there is one."""
    if it is None:
        return
    between = "no interval"
    if it.low is not None and it.high is not None:
        between = f"95 %: {factor * it.low:{form}} to {factor * it.high:{form}}"
    yield _row(name, f"{factor * it.value:{form}}{unit} ({between})")


def _range(part: PositionRange) -> str:
    return str(part.first) if part.first == part.last else f"{part.first}-{part.last}"


def _figure(it: LlamaCppFigure) -> str:
    """Return a figure of llama.cpp with as many places as it prints."""
    percent, places = (" %", 3) if it.name.endswith(("Δp", "top p")) or it.name.startswith("Cor") else ("", 6)
    return f"{it.value:.{places}f}" + ("" if it.error is None else f" ± {it.error:.{places}f}") + percent


def _floor(it: Floor) -> Iterator[str]:
    """Yield how far the original in its own dtype is from itself in float32."""
    if not it.windows:
        yield _row("floor of the KL", "not measured: the original is stored in float32")
        return
    yield _row("floor of the KL", f"{it.kl:.3g} nats per token, same top token {100 * it.agreement:.2f} %")
    yield _row("  the original by itself", f"in {it.dtype} against float32, first {it.tokens:,} tokens")


def _row(name: str, value: str) -> str:
    return f"{name:<{NAME_WIDTH}}{value}"


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
