"""The command `nearplane quantize`: its flags in groups of the help, and its run record as a summary."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from cyclopts import Group, Parameter

from nearplane.calibration.text_files import check_named
from nearplane.cli.flags import DeviceFlag, Hidden, Switch
from nearplane.cli.printing import as_json, opening, say, table
from nearplane.errors import RecipeError
from nearplane.recipe.block_scheme import BlockScheme
from nearplane.recipe.rate_scheme import RateScheme
from nearplane.recipe.scheme import names_of
from nearplane.recipe.schemes import GridScheme
from nearplane.system.files import check_writable, write_whole
from nearplane.system.processes import check_processes, started
from nearplane.system.progress_bar import bar
from nearplane.verbs.quantize_request import QuantizeRequest

RUN_GROUP = Group("Running", sort_key=8)
GROUPS = {  # fields that are flags, by their group in the help; other fields are only for Python
    Group("Everyday", sort_key=1): "bits group_size symmetric grid embeddings format runtime activations kv_cache",
    Group("Entropy-coded, instead of --bits", sort_key=2): "size rate",
    Group(
        "A mix of formats for a size, instead of --bits", sort_key=3
    ): "mix bits_per_weight served_memory context weigh cost",
    Group("GGUF, for llama.cpp", sort_key=4): "pre like",
    Group("Calibration text", sort_key=5): "calibration samples seqlen first_token rare_experts",
    Group("Layer by layer", sort_key=6): "include_head include_embeddings allocate layers ignore max_loss",
    Group(
        "Solver: the defaults gave the best results", sort_key=7
    ): "solver beam polish rounds order damp correct tune",
    RUN_GROUP: "device compute_dtype overwrite memory device_memory plan_file trust_remote_code",
}
FLAGS = {name: group for group, names in GROUPS.items() for name in names.split()}
READ_AS = {  # types of flags that the command line reads otherwise than Python
    "mix": str | None,
    "layers": Annotated[tuple[str, ...], Parameter(name="--layer", negative="")],
    "ignore": Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative="")],
    "device": DeviceFlag,
    "overwrite": Switch,
    "memory": str | None,
    "device_memory": str | None,
    "plan_file": Path | None,
    "trust_remote_code": Switch,
}
PURPOSES = {
    GridScheme: "for weights on a fixed grid",
    BlockScheme: "for weights on a named grid",
    RateScheme: "for entropy-coded weights",
}


class QuantizeFlags(QuantizeRequest):
    """Flags of `nearplane quantize`.

    Args:
        layers: Options for some layers: REGEX=NAME:VALUE[,...], for example 'down_proj=bits:4,group_size:32'.
            May be repeated; the first matching pattern counts. A --rate then applies to the other layers.
    """

    def options(self) -> dict[str, Any]:
        """Return the options that were given, those of layers by their pattern."""
        given = super().options()
        return given | ({"layers": options_of_layers(given["layers"])} if "layers" in given else {})


class Unvalidated:
    """Mark of a type with which pydantic, if it is loaded, does not compare a default that is open."""

    def __get_pydantic_core_schema__(self, *_: Any) -> dict[str, str]:
        return {"type": "any"}


def _annotation(name: str, kind: Any) -> Any:
    """Return what cyclopts needs to know of a field: its type and its group, or that it is no flag."""
    if name in ("model", "out"):
        return {"model": str, "out": Path}[name]
    if name not in FLAGS:
        return Annotated[kind, Hidden, Unvalidated()]
    shown = None if FLAGS[name] is RUN_GROUP else False  # defaults of other flags are in their descriptions
    return Annotated[READ_AS.get(name, kind), Parameter(group=FLAGS[name], show_default=shown), Unvalidated()]


QuantizeFlags.__annotations__ = {
    name: _annotation(name, kind) for name, kind in get_type_hints(QuantizeRequest).items()
}


def quantize(
    request: Annotated[QuantizeFlags, Parameter(name="*")],
    *,
    processes: Annotated[int, Parameter(group=RUN_GROUP)] = 1,
    dry_run: Annotated[Switch, Parameter(group=RUN_GROUP)] = False,
    json: Annotated[Switch, Parameter(group=RUN_GROUP)] = False,
) -> None:
    """Quantize MODEL into the folder OUT.

    Example: nearplane quantize Qwen/Qwen3-0.6B out --bits 4 --calibration text.txt

    Args:
        processes: Number of processes on this machine that share the calibration windows. The files are the same with any
            number. On several machines, start nearplane by torchrun or srun.
        dry_run: Make the checks of the run, print what it would write and take, without --tune, and write no checkpoint. Of a
            mix, measure what formats cost, print the choices for all sizes, and draw the one that was asked for as OUT.svg; with
            --plan-file the run afterwards does not measure again.
        json: Print the run record as JSON instead of a summary.
    """
    check_named(request.model, calibration=request.options().get("calibration"))
    check_processes(processes)
    request.check(request.asked())
    if dry_run and request.asked().mix is not None:
        _show_choices(request, processes, json=json)
        return
    opening(request.model)
    if dry_run:
        from nearplane import preview

        with started(processes):
            expected = preview(replace(request, progress=bar))
        if json:
            print(as_json(expected.fields()))
        else:
            say(expected.lines())
        return
    from nearplane import quantize as run
    from nearplane.record.summary import summary

    with started(processes):
        record = run(replace(request, progress=bar))
    if json:
        print(record.to_json())
    else:
        say(summary(record, Path(request.out)))
    if record.exceeding:
        sys.exit(4)


def _show_choices(request: QuantizeRequest, processes: int, *, json: bool) -> None:
    """Measure what the formats of a mix cost, and print and draw the choices."""
    figure = Path(f"{request.out}.svg")
    check_writable(figure.absolute().parent)
    opening(request.model)
    from nearplane import frontier
    from nearplane.record.mix_summary import mix_figure, mix_lines, mix_table

    with started(processes):
        found = frontier(replace(request, progress=bar))
    if json:
        print(as_json(found.fields()))
    else:
        table(*mix_table(found))
        say(mix_lines(found))
    write_whole(figure, mix_figure(found.formats).encode())
    say([] if json else [f"the choice by depth is drawn in {figure}"])


def refuse_mixed(words: Sequence[str]) -> None:
    """Refuse a command line with flags of two kinds of scheme.

    Raises:
        RecipeError: The command line has flags of two kinds.
    """
    given = [word.split("=")[0].replace("--no-", "--") for word in words]
    if {"--mix", "--runtime", "--format"} & set(given):
        given = [word for word in given if word != "--size"]  # it may be that of a mix; the recipe knows
    kinds = {kind: {f"--{name.replace('_', '-')}" for name in names_of(kind) & FLAGS.keys()} for kind in PURPOSES}
    for kind in (GridScheme, BlockScheme):
        kinds[kind] -= {"--grid"}  # which grid it is decides the kind
    for first, second in combinations(PURPOSES, 2):
        one, other = (
            next((word for word in given if word in alone), None)
            for alone in (kinds[first] - kinds[second], kinds[second] - kinds[first])
        )
        if one is not None and other is not None and not any({one, other} <= kind for kind in kinds.values()):
            raise RecipeError(f"{one} is {PURPOSES[first]}, {other} is {PURPOSES[second]}. Leave out one of them.")


def options_of_layers(texts: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the options of `--layer 'PATTERN=NAME:VALUE,NAME:VALUE'` by pattern.

    Raises:
        RecipeError: A text does not have this form, or two have the same pattern.
    """
    layers: dict[str, dict[str, Any]] = {}
    for text in texts:
        pattern, _, changes = text.rpartition("=")
        pairs = [change.split(":", 1) for change in changes.split(",")]
        if not pattern or not all(len(pair) == 2 for pair in pairs):
            raise RecipeError(f"--layer {text!r} is not PATTERN=NAME:VALUE; expected for example 'down_proj=bits:4'.")
        changed = [name.strip() for name, _ in pairs]
        if twice := {name for name in changed if changed.count(name) > 1}:
            raise RecipeError(f"--layer {text!r} gives {min(twice)} twice. Leave out one of them.")
        if pattern in layers:
            raise RecipeError(
                f"--layer gives options of {pattern!r} twice, the second time as {text!r}. Put all options of a pattern into one "
                f"--layer, as in 'down_proj=bits:4,group_size:32'."
            )
        layers[pattern] = {name.strip(): _value(value.strip()) for name, value in pairs}
    return layers


def _value(text: str) -> Any:
    """Return the number, boolean or None that a text stands for, or else the text."""
    try:
        return None if text == "none" else json.loads(text)
    except ValueError:
        return text
