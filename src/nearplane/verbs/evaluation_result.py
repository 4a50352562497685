"""Result of `evaluate`, and how it reads in lines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from nearplane.evaluation.protocol_names import Protocol
from nearplane.evaluation.protocols import LlamaCppFigure, LmEvalFigures
from nearplane.evaluation.scoring import Floor
from nearplane.evaluation.statistics import MIN_WINDOWS, Estimate, PositionRange, Statistics
from nearplane.record.evaluation_table import rounded_in_words
from nearplane.record.words import word_for

NAME_WIDTH, POSITIONS_PER_LINE = 34, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Result of `evaluate`.

    Args:
        perplexity: exp(nll); None for a model without vocabulary head (an encoder).
        nll: Mean negative log-likelihood in nats per scored token; None likewise.
        tokens: Number of scored tokens, which excludes the first of each window; all tokens for encoders.
        windows, seqlen: Number of windows, and tokens per window (1 for images).
        kl: Mean KL(original || model) in nats per scored token; None without an original.
        agreement: Fraction of scored tokens for which both models have the same most likely token; None likewise.
        original: Perplexity of the original; None likewise.
        cosine: Encoders only: mean over windows of the cosine of both embeddings (means of the last hidden states).
        worst_cosine: Smallest of these cosines.
        remarks: Sentences about a network whose predictions are degenerate: worse than a guess, or always the same.
        text: Name of the text.
        protocol: Protocol of the windows, see `protocols.py`.
        statistics: All statistics with their intervals; None for encoders.
        floor: The floor of the divergence; None unless asked for, and for model objects.
        llama_cpp: Figures of `llama-perplexity`, only by this protocol.
        lm_eval, lm_eval_original: Perplexities of lm-eval of the model and of the original, only by this protocol.
        words, bytes, documents: Sizes of the text, by which lm-eval divides; 0 for other protocols.
        computed: The same of the network that rounds inputs or keys and values as runtimes do; None unless asked for.
        rounded: What the network rounded: inputs, cache (keys and values, in fp8), or both.
    """

    perplexity: float | None = None
    nll: float | None = None
    tokens: int
    windows: int
    seqlen: int
    kl: float | None = None
    agreement: float | None = None
    original: float | None = None
    cosine: float | None = None
    worst_cosine: float | None = None
    remarks: tuple[str, ...] = field(default=(), compare=False)  # they name folders
    text: str = field(default="", compare=False)
    protocol: Protocol = "nearplane"
    statistics: Statistics | None = None
    floor: Floor | None = None
    llama_cpp: tuple[LlamaCppFigure, ...] = ()
    lm_eval: LmEvalFigures | None = None
    lm_eval_original: LmEvalFigures | None = None
    words: int = 0
    bytes: int = 0
    documents: int = 0
    computed: Evaluation | None = None
    rounded: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the figures as lines, as the command prints them."""
        return "\n".join(_lines(self))


def _lines(score: Evaluation) -> Iterator[str]:
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
        how = rounded_in_words(score.computed.rounded)
        yield f"as runtimes compute, with {how} (above: the weights alone):"
        yield from (line for number, line in enumerate(_lines(score.computed)) if number)


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
            "  in words",
            f"{word_for(it.kl.value)}; of 1,000 next-token choices {1000 * (1 - it.same_top.value):.0f} differ from the original's",
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
    between = f"no interval, which takes {MIN_WINDOWS} windows"
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
