"""The tables of quality: ours beside all peers on the same models, tokens and held-out windows, and how a change is judged.

    python benchmarks/quality/tables.py measure [--peers build/peers] [--llama build/llama/bin/python] [--mixture FOLDER] [--core 1]
    python benchmarks/quality/tables.py measure --published build/models --rows docs/results/real-models.jsonl
    python benchmarks/quality/tables.py show
    python benchmarks/quality/tables.py compare OLD.jsonl NEW.jsonl [--tools OLD NEW]

`measure` adds a line to docs/results/tables.jsonl for every cell that it does not hold yet. It may be stopped at any time, and
several may run at once, on a core each. --models, --tools, --settings and --calibrations choose cells; --set polish=0 changes an
option of nearplane, under a name of its own. A cell that failed stays so, unless --again is given. --published measures the
models of tools/published_models.py instead. --samples and --held-out choose other numbers of windows. `show` prints the tables from
that file alone. `compare` prints the ratio of KL of two versions or of two tools, over pairs of rows.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from rows import Estimate, Row, append, average, claimed, failures, key, paired, read, table, where

if TYPE_CHECKING:  # they import torch
    from cells import Batch, Bench
    from subjects import Subject

ROWS = Path(__file__).parents[2] / "docs" / "results" / "tables.jsonl"
PEERS = ("GPTQModel", "GPTQModel, mse", "llm-compressor", "llm-compressor, mse", "auto-round", "llama.cpp")
INTRODUCTION = """# Tables of quality

Made by `python benchmarks/quality/tables.py show` from `tables.jsonl`. What is measured, and how to measure it again,
is in [index.md](index.md). Figures are means over calibrations, whose number is in parentheses, with the standard
error of the mean. Ratios are of KL, with their standard error, over pairs with the same calibration. The *best peer* is
the best of those that do not train. auto-round trains codes and steps, for about 18 times the CPU time of nearplane.
*nearest* is nearplane with `--solver round-to-nearest`. *mse* of llm-compressor is its search for steps; for NVFP4 that
is `nvfp4_expanded_mse`, the best of its observers. [formats.md](formats.md) has more of the formats that people
download.
"""
TRAINED = "auto-round"  # the peer that trains
PUBLISHED_TOOLS = ("nearplane", "nearest", *PEERS, "mlx_lm")
PUBLISHED_SETTINGS = ("4", "3", "2", "3.125", "2.125", "nvfp4", "mxfp4", "fp8", "q4_k_m", "q3_k_m", "mlx4")
OURS = ("nearplane", "nearest")  # what is compared with peers, and its rounding without calibration
ORDER = (
    "4", "4-asymmetric", "3", "2", "3-symmetric", "2-symmetric", "nvfp4", "mxfp4", "fp8", "fp8-block", "mxfp8", "q4_k_m", "q3_k_m",
    "q2_k", "3.125", "2.125", "1.5",
)  # fmt: skip


def measure(asked: argparse.Namespace) -> None:
    """Measure all cells that were asked for and are not in the file."""
    if find_spec("gguf") is None:
        sys.exit("gguf is not installed. Run pip install gguf")
    import torch
    from cells import TOOLS, Bench, chosen, plan
    from subjects import published_subjects, subjects

    torch.set_num_threads(1)
    models = subjects(asked.assets, asked.study, asked.mixture)
    if asked.published is not None:
        models = published_subjects(asked.published, asked.assets)
    if missing := set(asked.models) - set(models):
        sys.exit(
            f"{', '.join(missing)}: no such model. There are {', '.join(models)}; the mixture needs --mixture FOLDER, "
            f"and smollm2, gemma3 and smollm2-noise need --published FOLDER, see tools/published_models.py."
        )
    models = {name: resized(models[name], asked.samples, asked.held_out) for name in asked.models or models}
    for subject in models.values():
        files = [subject.folder, *(file for text in subject.texts for file in (text.calibration, text.held_out))]
        if missing := [str(file) for file in files if file is not None and not file.exists()]:
            sys.exit(
                f"{subject.name} needs {missing[0]}, which does not exist. Pass the folder of models and texts with --assets, or "
                f"measure the demo alone with --models demo."
            )
        if asked.published is not None and max(asked.calibrations, default=0) >= subject.calibrations:
            sys.exit(
                f"{subject.name} has {subject.calibrations} calibrations of {subject.samples} windows that share none, 0 to "
                f"{subject.calibrations - 1}. Choose among them with --calibrations, or use fewer --samples."
            )
    options = {name: _value(text) for name, text in (pair.split("=", 1) for pair in asked.set)}
    if asked.published is not None:
        asked.settings, asked.calibrations = asked.settings or PUBLISHED_SETTINGS, asked.calibrations or [0]
        asked.tools = asked.tools or PUBLISHED_TOOLS
    if asked.settings:
        batches = chosen(models, asked.tools or TOOLS, asked.calibrations or range(3), asked.settings)
    else:
        batches = list(plan(models))
    ours = [tool for tool, (function, _, _) in TOOLS.items() if function.startswith("nearplane")]
    tools = [tool for tool in asked.tools or TOOLS if tool in ours or not options]
    with tempfile.TemporaryDirectory() as place:
        bench = Bench(
            peers=asked.peers, llama=asked.llama, core=asked.core, place=Path(place), options=options,
            iterations=asked.iterations,
        )  # fmt: skip
        for tool in tools:
            bench.python(tool)
        for batch in batches:
            if batch.tool in tools and batch.calibration in (asked.calibrations or range(10)):
                complete(asked, bench, models[batch.model], batch)


def resized(subject: Subject, samples: int | None, held_out: int | None) -> Subject:
    """Return a model with other numbers of windows: for calibration, and held out of each text."""
    windows = subject.windows if held_out is None else held_out * len(subject.texts)
    return replace(subject, samples=samples or subject.samples, windows=windows)


def complete(asked: argparse.Namespace, bench: Bench, subject: Subject, batch: Batch) -> None:
    """Measure the cells of a batch that the file does not hold, unless another process is at it."""
    tool = bench.label(batch.tool)
    with claimed(asked.rows, f"{batch.model} {tool} {batch.calibration} {' '.join(batch.settings)}") as mine:
        same = {"sha": subject.sha, "text": subject.digest(batch.calibration), "calibration": batch.calibration}
        there = {key(row) for row in read(asked.rows) if "error" not in row or not asked.again}
        cells = {setting: key(same | {"tool": tool, "setting": setting}) for setting in batch.settings}
        missing = tuple(setting for setting in batch.settings if cells[setting] not in there)
        if mine and missing:
            for row in bench.measure(subject, replace(batch, settings=missing)):
                append(asked.rows, row)
                print(time.strftime("%H:%M:%S"), json.dumps(row), file=sys.stderr, flush=True)


def _value(text: str) -> Any:
    """Read a number or true or false; anything else is a word."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def show(asked: argparse.Namespace) -> None:
    """Print the page of tables."""
    rows = [row for row in read(asked.rows) if not asked.models or row["model"] in asked.models]
    print(INTRODUCTION)
    for model in dict.fromkeys(row["model"] for row in rows):
        newest = [row["sha"] for row in rows if row["model"] == model][-1]
        measured = [row for row in where(rows, model=model, sha=newest) if "kl" in row]
        if not measured:
            continue
        commits = sorted({row["commit"] for row in measured if row["version"].startswith("nearplane")})
        versions = sorted({row["version"] for row in measured if not row["version"].startswith("nearplane")})
        print(f"\n## {model}\n\nSHA-256 of the weights: {measured[0]['sha']}..., perplexity of the original")
        tools_used = f"nearplane at {', '.join(commits)}, {', '.join(versions)}"
        print(fill(f"{measured[0]['original']}. Measured with {tools_used}.", 119))
        tools = [tool for tool in (*OURS, *PEERS) if where(measured, tool=tool)]
        print("\nKL, untuned:\n")
        print("\n".join(untuned(measured, tools)))
        if any("kinds" in row for row in measured):
            print("\nRatio of KL to that of the best peer, by kind of text:\n")
            print("\n".join(by_kind(measured, tools)))
        for name, title in (("perplexity", "Perplexity"), ("cpu", "CPU seconds to load, quantize and write")):
            print(f"\n{title}:\n")
            print("\n".join(by_tool(measured, tools, name)))
        if where(measured, tool="nearplane tuned"):
            print("\nTools that train: KL, CPU seconds:\n")
            print("\n".join(tuned(measured)))
        counts = {row["tool"]: row["weights"] for row in measured}
        if len({*counts.values()}) > 1:
            print(f"\nThe tools do not quantize as many weights: {counts}")
    print(failures(rows), end="")


def untuned(rows: list[Row], tools: list[str]) -> Iterator[str]:
    """Yield the table of KL before tuning, with ratios to the best peer and to the one that trains, over pairs."""
    lines = []
    for setting in (name for name in ORDER if where(rows, setting=name)):
        cells = {tool: where(rows, setting=setting, tool=tool) for tool in tools}
        ours = cells.get("nearplane", [])
        against = _ratio(_best_peer(cells), ours), _ratio(cells.get(TRAINED, []), ours)
        bits = next((f"{row['bits']:.3f}" for row in cells.get("nearplane", [])), "-")
        lines.append((_title(setting), bits, *(_shown(cells[tool], "kl") for tool in tools), *against))
    return table(("setting", "bits per weight", *tools, "ratio to the best peer", f"ratio to {TRAINED}"), lines)


def by_kind(rows: list[Row], tools: list[str]) -> Iterator[str]:
    """Yield the table of ratios to the best peer on every kind of text."""
    kinds = list(next(row["kinds"] for row in rows if "kinds" in row))
    lines = []
    for setting in (name for name in ORDER if where(rows, setting=name)):
        cells = {tool: [row for row in where(rows, setting=setting, tool=tool) if "kinds" in row] for tool in tools}
        sides = _best_peer(cells), cells.get("nearplane", [])
        ratios = [_ratio(*([row | {"kl": row["kinds"][kind]} for row in side] for side in sides)) for kind in kinds]
        lines += [(_title(setting), *ratios)] if all(sides) else []
    return table(("setting", *kinds), lines)


def _best_peer(cells: dict[str, list[Row]]) -> list[Row]:
    """Return the rows of the peer with the lowest mean KL among those that do not train; none if there are none."""
    peers = [some for tool, some in cells.items() if some and tool not in (*OURS, TRAINED)]
    return min(peers, key=lambda some: average([row["kl"] for row in some]).value, default=[])


def by_tool(rows: list[Row], tools: list[str], name: str) -> Iterator[str]:
    """Yield the table of another figure of the same cells."""
    settings = [setting for setting in ORDER if where(rows, setting=setting)]
    lines = [
        (_title(setting), *(_shown(where(rows, setting=setting, tool=tool), name) for tool in tools))
        for setting in settings
    ]
    return table(("setting", *tools), lines)


def tuned(rows: list[Row]) -> Iterator[str]:
    """Yield the table of tools that train, over the calibrations of `nearplane tuned`."""
    names = ("nearplane", "nearplane tuned", "auto-round")
    lines = []
    for setting in (name for name in ORDER if where(rows, setting=name, tool="nearplane tuned")):
        done = {row["text"] for row in where(rows, setting=setting, tool="nearplane tuned")}
        cells = {
            tool: [row for row in where(rows, setting=setting, tool=tool) if row["text"] in done] for tool in names
        }
        shown = [f"{_shown(cells[tool], 'kl')}, {_shown(cells[tool], 'cpu')} s" for tool in names]
        ratios = [_ratio(cells[tool], cells["nearplane tuned"]) for tool in ("nearplane", "auto-round")]
        lines.append((_title(setting), *shown, *ratios))
    return table(("setting", *names, "tuned / untuned", "tuned / auto-round"), lines)


def _title(setting: str) -> str:
    """Return a setting in words."""
    return f"rate {setting}" if "." in setting else f"{setting} bits" if setting.isdigit() else setting


def _shown(rows: list[Row], name: str) -> str:
    """Return the mean of a figure over calibrations; of KL with its error and the number of calibrations."""
    if not rows:
        return "-"
    mean = average([row[name] for row in rows])
    return f"{mean} ({mean.count})" if name == "kl" else f"{mean.value:.{0 if name == 'cpu' else 3}f}"


def _ratio(old: list[Row], new: list[Row]) -> str:
    """Return the ratio of KL with its error; "-" without pairs."""
    pairs = paired(old, new).values()
    return ", ".join(f"**{it.value:.3f}**" + ("" if it.error is None else f" ± {it.error:.3f}") for it in pairs) or "-"


def compare(asked: argparse.Namespace) -> None:
    """Print ratios of KL, new over old."""
    for path in (asked.old, asked.new):
        if not path.exists():
            sys.exit(f"{path} does not exist.")
    old, new = (
        [row for row in read(path) if row["tool"] == tool]
        for path, tool in zip((asked.old, asked.new), asked.tools, strict=True)
    )
    found = paired(old, new)
    if not found:
        sys.exit(
            f"{asked.old} has no row of {asked.tools[0]} with the model, windows and setting of one of {asked.tools[1]}."
        )

    def line(name: tuple[str, str], it: Estimate) -> tuple[str, ...]:
        error = "-" if it.error is None else f"{it.error:.4f}"
        verdict = (
            "one calibration says nothing"
            if it.needed is None
            else "yes"
            if it.needed <= it.count
            else f"no: {it.needed} needed"
        )
        return (*name, f"{it.value:.4f}", error, str(it.count), verdict)

    heads = ("model", "setting", "KL, new / old", "standard error", "calibrations", "two errors at most 1.5 %")
    print("\n".join(table(heads, [line(name, it) for name, it in found.items()])))


def main() -> None:
    """Do one of the three."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("measure")
    one.set_defaults(run=measure)
    one.add_argument("--rows", type=Path, default=ROWS)
    one.add_argument("--models", nargs="+", default=[])
    one.add_argument("--tools", nargs="+", default=[])
    one.add_argument("--settings", nargs="+", default=[])
    one.add_argument("--calibrations", nargs="+", type=int, default=[])
    one.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE")
    one.add_argument("--again", action="store_true", help="measure failed cells again")
    one.add_argument("--assets", type=Path, default=Path(os.environ.get("ASSETS", "../shared/assets")))
    one.add_argument("--study", type=Path, default=Path(__file__).parents[1] / "models" / "study")
    one.add_argument("--published", type=Path, help="folder that tools/published_models.py wrote")
    one.add_argument("--samples", type=int, help="windows of a calibration")
    one.add_argument("--held-out", type=int, help="held-out windows of each text")
    one.add_argument("--iterations", type=int, default=200, help="of auto-round, for each block")
    one.add_argument("--mixture", type=Path, help="folder that tools/train_model.py wrote")
    one.add_argument("--peers", type=Path, default=Path("build/peers"), help="folder of the environments")
    one.add_argument("--llama", type=Path, default=Path("build/llama/bin/python"))
    one.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    two = commands.add_parser("show")
    two.set_defaults(run=show)
    two.add_argument("--rows", type=Path, default=ROWS)
    two.add_argument("--models", nargs="+", default=[])
    three = commands.add_parser("compare")
    three.set_defaults(run=compare)
    three.add_argument("old", type=Path)
    three.add_argument("new", type=Path)
    three.add_argument("--tools", nargs=2, default=("nearplane", "nearplane"), metavar=("OLD", "NEW"))
    asked = parser.parse_args()
    asked.run(asked)


if __name__ == "__main__":
    main()
