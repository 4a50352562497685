"""Tables of evaluations for the model card, from what `nearplane evaluate --json` prints. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nearplane.errors import FormatError

EXPECTED = "expected what nearplane evaluate --json prints"
Cells = tuple[str, ...]


def read_evaluation(path: Path) -> dict[str, Any]:
    """Return an evaluation, {"texts": [...], "tasks": [...], "chat": {...} or None}, from a JSON file.

    Raises:
        FormatError: The file cannot be read, or is no output of `nearplane evaluate --json`.
    """
    if not path.exists():
        raise FormatError(f"{path} does not exist; {EXPECTED}.")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(f"{path} cannot be read as JSON ({error}); {EXPECTED}.") from error
    if isinstance(found, list) or (isinstance(found, dict) and "tasks" not in found):
        found = {"texts": found if isinstance(found, list) else [found], "tasks": []}
    if not isinstance(found, dict) or not all(isinstance(found.get(key), list) for key in ("texts", "tasks")):
        raise FormatError(f"{path} holds no evaluation; {EXPECTED}.")
    evaluation = {key: found[key] for key in ("texts", "tasks")} | {"chat": found.get("chat")}
    try:
        rows = [row for each in evaluation["texts"] for row in _text_rows(each)] + [
            *map(_task_row, evaluation["tasks"])
        ]
        rows += [(_chat(each),) for each in _chats(evaluation)]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{path} holds no evaluation ({type(error).__name__}: {error}); {EXPECTED}.") from error
    if not rows:
        raise FormatError(f"{path} holds an empty evaluation; {EXPECTED}.")
    return evaluation


def evaluation_tables(evaluations: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of a Markdown table of texts, of one of tasks, and sentences on conversations, as far as there are any."""
    texts = [row for evaluation in evaluations for each in evaluation["texts"] for row in _text_rows(each)]
    tasks = [_task_row(each) for evaluation in evaluations for each in evaluation["tasks"]]
    if texts:
        columns = (
            "text",
            "protocol",
            "tokens",
            "perplexity",
            "the original's",
            "KL to the original (95 %)",
            "same top token",
        )
        yield from _table(columns, texts)
        yield ""
        yield "KL in nats per token. For encoders the cosine of the embeddings to the original's stands in place of the perplexity."
    if tasks:
        yield from [""] * bool(texts)
        yield from _table(("task", "metric", "few-shot", "documents", "this model", "the original"), tasks)

    chats = [each for evaluation in evaluations for each in _chats(evaluation)]
    if chats:
        yield from [""] * bool(texts or tasks)
        yield from map(_chat, chats)


def _chats(evaluation: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the evaluation on conversations, if there is one."""
    return [] if evaluation.get("chat") is None else [evaluation["chat"]]


def _chat(score: Mapping[str, Any]) -> str:
    """Return a sentence on an evaluation on conversations."""
    statistics = score["statistics"]
    return (
        f"In {int(score['conversations']):,} conversations, which the original answers ({int(score['tokens']):,} tokens): KL to "
        f"the original {_interval(statistics['kl'])} nats per token, the same next token for "
        f"{100 * statistics['same_top']['value']:.2f} %."
    )


def _table(columns: Cells, rows: Sequence[Cells]) -> Iterator[str]:
    yield from (_line(columns), _line(("---",) * len(columns)), *map(_line, rows))


def _line(cells: Cells) -> str:
    return f"| {' | '.join(' '.join(cell.replace('|', '/').replace('<', '&lt;').split()) for cell in cells)} |"


def _text_rows(score: Mapping[str, Any]) -> list[Cells]:
    """Return the row of an evaluation on one text; two where inputs were also rounded, as runtimes round them."""
    if (computed := score.get("computed")) is None:
        return [_text_row(score)]
    how = rounded_in_words(computed.get("rounded") or ("inputs",))
    return [_text_row(score, ", weights alone"), _text_row(computed, f", {how}, as runtimes compute")]


def rounded_in_words(parts: Sequence[str]) -> str:
    """Return what a network rounded as runtimes do, in words."""
    words = {"inputs": "inputs rounded", "cache": "keys and values in fp8"}
    return " and ".join(words[part] for part in parts)


def _text_row(score: Mapping[str, Any], how: str = "") -> Cells:
    """Return the cells of an evaluation on one text; `how` is added to its name."""
    statistics = score["statistics"] or {}
    same, cosine = score["agreement"], score["cosine"]
    perplexity = _number(score["perplexity"], ".3f")
    if cosine is not None:
        perplexity = f"cosine {cosine:.5f}, least {score['worst_cosine']:.5f}"
    return (
        Path(str(score["text"])).name + how,
        f"{score['protocol']}, windows of {int(score['seqlen'])}",
        f"{int(score['tokens']):,}",
        perplexity,
        _number(score["original"], ".3f"),
        _interval(statistics.get("kl")),
        "-" if same is None else f"{100 * same:.2f} %",
    )


def _task_row(score: Mapping[str, Any]) -> Cells:
    """Return the cells of one metric of a task."""
    shots = score["fewshot"]
    return (
        str(score["task"]),
        str(score["metric"]),
        "-" if shots is None else f"{int(shots)}",
        f"{int(score['documents']):,}",
        _with_error(score["value"], score["error"]),
        _with_error(score["original"], score["original_error"]),
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def _interval(estimate: Mapping[str, Any] | None) -> str:
    if not estimate:
        return "-"
    low, high = estimate["low"], estimate["high"]
    between = "" if low is None or high is None else f" ({low:.5f} to {high:.5f})"
    return f"{estimate['value']:.5f}{between}"


def _with_error(value: float | None, error: float | None) -> str:
    return "-" if value is None else f"{value:.4f}" + ("" if error is None else f" ± {error:.4f}")
