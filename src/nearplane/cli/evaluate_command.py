"""The command `nearplane evaluate`: figures of a model on one or several texts, as text, JSON and a figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from nearplane.cli.flags import DeviceFlag
from nearplane.cli.printing import as_json, opening, say
from nearplane.cli.task_flags import TaskFlags, print_scores
from nearplane.cli.terminal import bar
from nearplane.errors import RecipeError
from nearplane.evaluation.evaluate_request import Protocol
from nearplane.system.launch import launched
from nearplane.verbs.early_checks import check_evaluate, check_plot

if TYPE_CHECKING:
    from nearplane.evaluation.protocols import LlamaCppFigure
    from nearplane.evaluation.scoring import Floor
    from nearplane.evaluation.statistics import Estimate, PositionRange, Statistics
    from nearplane.evaluation.task_scores import TaskScore
    from nearplane.verbs.evaluate import Evaluation, Measured

Switch = Annotated[bool, Parameter(negative="")]
Several = Parameter(consume_multiple=1, negative="")
NAME_WIDTH, POSITIONS_PER_LINE = 34, 4


def evaluate(
    model: str,
    *,
    text: Annotated[list[Path] | None, Several] = None,
    tasks: Annotated[TaskFlags | None, Parameter(name="*")] = None,
    protocol: Protocol = "nearplane",
    seqlen: int | None = None,
    samples: int | None = None,
    against: str | None = None,
    activations: Switch = False,
    plot: Path | None = None,
    device: DeviceFlag = "auto",
    trust_remote_code: Switch = False,
    json: Switch = False,
) -> None:
    """Measure the perplexity of MODEL on a text, and with --against how far its predictions are from the original's.

    With --tasks, MODEL and the original answer tasks of lm-eval.
    The text is cut into windows that do not overlap. Each begins with the token that the tokenizer sets before a text, if
    it sets one, as the model was trained.
    For an encoder, the similarity of its embeddings to the original's is measured.

    Args:
        model: Folder or hub id of a transformers checkpoint, or of one that nearplane wrote, or a .gguf file.
        text: Texts to measure on, each with figures of its own: a .txt or .jsonl file, a folder of them, wikitext2 or c4.
        protocol: Windows and units: nearplane (windows of 2048, per token), papers (the same without the tokenizer's first
            token), llama.cpp (as llama-perplexity: windows of 512, of which the second half is scored), or lm-eval
            (rolling, per word and per byte).
        seqlen: Tokens per window. Default: 2048, or 512 for llama.cpp, or the model's maximum length if that is shorter.
        samples: Number of windows, or for lm-eval of documents (a .txt file is one), from the beginning of the text.
            Default: all.
        against: The original model. Adds the divergence of the predictions. Encoders need it.
        activations: Measure a second time as runtimes compute, which round the inputs of layers if MODEL was quantized with
            --activations. Without this option, the weights alone are measured.
        plot: Figure to draw (.svg, .png or .pdf): KL by position, and a histogram of KL. Needs --against.
        device: Device to compute on: auto (the GPU if there is one), cpu, cuda, or one of several GPUs as cuda:1.
        trust_remote_code: Run model code that comes with the checkpoint.
        json: Print the result as JSON; with several texts, a list; with --tasks, both under "texts" and "tasks".
    """
    counts, texts = {"seqlen": seqlen, "samples": samples}, text or []
    if not texts and tasks is None:
        raise RecipeError("evaluate needs --text with a text, --tasks with names of lm-eval's tasks, or both.")
    of_texts = {
        **counts,
        "plot": plot,
        "activations": activations or None,
        "protocol": None if protocol == "nearplane" else protocol,
    }
    if not texts and (given := [name for name, value in of_texts.items() if value is not None]):
        raise RecipeError(
            f"--{given[0]} belongs to --text, which is not given. Pass a text, or leave out --{given[0]}."
        )
    check_evaluate(model, texts, against=against, protocol=protocol, **counts)
    if plot is not None:
        if against is None:
            raise RecipeError("--plot draws the KL to the original. Pass it with --against, or leave out --plot.")
        check_plot(plot)
    if tasks is not None:
        tasks.check(model, against)
    opening(model)
    prepared = None
    if texts:
        from nearplane.verbs.evaluate import EvaluationOptions, prepare_texts

        options = EvaluationOptions(
            protocol=protocol,
            **counts,
            against=against,
            device=device,
            trust_remote_code=trust_remote_code,
            floor=True,
            activations=activations,
            progress=bar,
        )
        prepared = prepare_texts(model, texts, options)
        if plot is not None and prepared.outlines[0].embeds:
            raise RecipeError(f"--plot draws predictions, which the encoder {model} does not make. Leave it out.")
    measured = [] if prepared is None else prepared.measure()
    if (launch := launched()) is not None and launch.rank > 0:
        return  # rank 0 alone runs tasks, prints and draws
    scores = [] if tasks is None else tasks.scores(model, against, device=device, trust_remote_code=trust_remote_code)
    _print(measured, scores, json=json)
    if plot is not None:
        from nearplane.verbs.evaluate_figure import draw

        draw(measured, plot)


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
        print_scores(scores)


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
