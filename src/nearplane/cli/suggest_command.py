"""The command `nearplane suggest`, and what it prints."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from nearplane.cli.flags import Flat, Switch
from nearplane.cli.printing import as_json, opening, say, table
from nearplane.cli.streams import say_error
from nearplane.recipe.runtimes import Runtime  # noqa: F401  cyclopts reads the type of the field
from nearplane.system.sizes import size_text
from nearplane.verbs.suggest_request import SuggestRequest

if TYPE_CHECKING:
    from nearplane.verbs.suggest import Suggestion, Suggestions

MORE = 5  # ways that are listed below the first


@dataclass(frozen=True)
class SuggestFlags(SuggestRequest):
    """Flags of `nearplane suggest`."""

    model: str
    memory: str = field(kw_only=True)


def suggest(request: Annotated[SuggestFlags, Flat], *, all: Switch = False, json: Switch = False) -> None:
    """Say which way to quantize MODEL fits in a memory and loses least, and list the next best, with their commands.

    MODEL's config.json is enough; weights are not fetched, and of those in a local folder the shapes are read. Counted are the
    weights, and the keys and values of one sequence in 16 bits. What a runtime needs besides is not counted.
    Losses are KL as a multiple of that of 4 bits, with the range over the small models on which it was measured. The exit code is
    1 if nothing fits.

    Args:
        all: List all ways, also those that do not fit and those that MODEL cannot be, with the reason.
        json: Print the result as JSON, with all ways.
    """
    request.check()
    opening(request.model)
    from nearplane import suggest as run

    found = run(request)
    if json:
        print(as_json(found.fields()))
    else:
        _print(found, every=all)
    if found.remedy:
        say_error(found.remedy)
        sys.exit(1)


def _print(found: Suggestions, *, every: bool) -> None:
    """Print the way that loses least with its command, then a table of others that fit, and what does not fit or is refused."""
    counted = found.cache is not None
    cache = f"take {size_text(found.cache or 0)}" if counted else "are not known and not counted"
    say([f"{found.parameters:,} weights; keys and values of {found.context:,} tokens {cache}"])
    if found.fitting:
        best, *others = found.fitting
        beside = f", {size_text(found.cache)} of keys and values" if found.cache else ""
        of_it = f"{size_text(best.weights or 0)} of tensors in the file{beside}"
        fits = f"{size_text(best.memory or 0)} of {size_text(found.limit)} ({of_it}), for {' and '.join(best.runtimes)}"
        say(["", f"of what fits, {best.options} loses least: {fits}", f"  {best.command}"])
        shown = others if every else others[:MORE]
        if shown:
            say(["", "beside the next ones:"])
            table(("options", "memory", "KL ratio", "runs in", "range", "weights"), map(_cells, (best, *shown)))
            say(row.command for row in shown)
        say(["", *_notes([best, *shown])])
    large = [f"{row.options} ({size_text(row.memory)})" for row in found.rows if row.memory and not row.fits]
    refused = [f"not possible: {row.options}: {row.refused}" for row in found.rows if row.refused]
    if every:
        say([f"too large: {', '.join(large)}"] if large and found.fitting else [])
        say(refused)
    elif found.fitting and (left := max(0, len(found.fitting) - 1 - MORE) + len(large) + len(refused)):
        say([f"{left} more ways fit less well, are too large or are not possible for this model: see --all"])


def _cells(row: Suggestion) -> tuple[str, ...]:
    """Return the cells of a way in the table."""
    return (
        row.options,
        size_text(row.memory or 0),
        f"{row.loss.mean:.2g}",
        ", ".join(row.runtimes),
        f"{row.loss.low:.2g} to {row.loss.high:.2g}",
        size_text(row.weights or 0),
    )


def _notes(rows: Sequence[Suggestion]) -> Iterator[str]:
    """Yield what the figures mean, and what is written otherwise than the options say."""
    yield "KL ratio: divergence from the original as a multiple of that of --bits 4; a mean over small models, with its range"
    for row in rows:
        if row.note:
            yield f"{row.options}: {row.note}; its loss is estimated from that"
