"""The command `nearplane suggest`, and the table that it prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from nearplane.cli.printing import as_json, opening, say, table
from nearplane.planning.modes import Runtime
from nearplane.system.sizes import size_text
from nearplane.verbs.early_checks import check_suggest

if TYPE_CHECKING:
    from nearplane.verbs.suggest import Suggestions

Switch = Annotated[bool, Parameter(negative="")]


def suggest(
    model: str,
    *,
    memory: str,
    context: int | None = None,
    runtime: Runtime | None = None,
    trust_remote_code: Switch = False,
    json: Switch = False,
) -> None:
    """List the ways to quantize MODEL that fit in a memory, those with the least loss first, with their commands.

    MODEL's config.json is enough; weights are not fetched, and of those in a local folder the shapes are read. Counted are the
    weights, and the keys and values of one sequence in 16 bits. What a runtime needs besides is not counted.
    Losses are KL as a multiple of that of 4 bits, with the range over the small models on which it was measured.

    Args:
        model: Local folder with config.json, or hub id.
        memory: Memory of the device that shall run the model, for example 8GB.
        context: Number of tokens of the sequence. Default: 8192, or the model's maximum length if that is shorter.
        runtime: Program that shall run the model. Default: any.
        trust_remote_code: Run model code that comes with the config.
        json: Print the result as JSON, with the ways that do not fit.
    """
    check_suggest(model, memory, context)
    opening(model)
    from nearplane import suggest as run

    found = run(model, memory, context=context, runtime=runtime, trust_remote_code=trust_remote_code)
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
