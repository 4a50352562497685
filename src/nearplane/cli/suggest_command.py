"""The command `nearplane suggest`, and the table that it prints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from nearplane.cli.flags import Flat, Switch
from nearplane.cli.printing import as_json, opening, say, table
from nearplane.planning.modes import Runtime  # noqa: F401  cyclopts reads the type of the field
from nearplane.system.sizes import size_text
from nearplane.verbs.suggest_request import SuggestRequest

if TYPE_CHECKING:
    from nearplane.verbs.suggest import Suggestions


@dataclass(frozen=True)
class SuggestFlags(SuggestRequest):
    """Flags of `nearplane suggest`."""

    model: str
    memory: str = field(kw_only=True)


def suggest(request: Annotated[SuggestFlags, Flat], *, json: Switch = False) -> None:
    """List the ways to quantize MODEL that fit in a memory, those with the least loss first, with their commands.

    MODEL's config.json is enough; weights are not fetched, and of those in a local folder the shapes are read. Counted are the
    weights, and the keys and values of one sequence in 16 bits. What a runtime needs besides is not counted.
    Losses are KL as a multiple of that of 4 bits, with the range over the small models on which it was measured.

    Args:
        json: Print the result as JSON, with the ways that do not fit.
    """
    request.check()
    opening(request.model)
    from nearplane import suggest as run

    found = run(request)
    if json:
        print(as_json(found.fields()))
    else:
        _print(found)


def _print(found: Suggestions) -> None:
    """Print what fits as a table with the commands below it, then what does not, and what a model cannot be."""
    cache = "are not known and not counted" if found.cache is None else f"take {size_text(found.cache)}"
    print(f"{found.parameters:,} weights; keys and values of {found.context:,} tokens {cache}")
    if found.fitting:
        table(
            ("options", "weights", "memory", "KL ratio", "range", "runs in"),
            (
                (
                    row.options,
                    size_text(row.weights or 0),
                    size_text(row.memory or 0),
                    f"{row.loss.mean:.2g}",
                    f"{row.loss.low:.2g} to {row.loss.high:.2g}",
                    ", ".join(row.runtimes),
                )
                for row in found.fitting
            ),
        )
        say(row.command for row in found.fitting)
    large = [f"{row.options} ({size_text(row.memory)})" for row in found.rows if row.memory and not row.fits]
    if large and found.fitting:
        say([f"Too large: {', '.join(large)}"])
    say(f"Not possible: {row.options}: {row.refused}" for row in found.rows if row.refused)
    say([found.remedy] if found.remedy else [])
