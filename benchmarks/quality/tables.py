"""The tables of quality: ours beside all peers on the same models, tokens and held-out windows, and how a change is judged.

    python benchmarks/quality/tables.py measure [--peers build/peers] [--llama build/llama/bin/python] [--mixture FOLDER] [--core 1]
    python benchmarks/quality/tables.py show
    python benchmarks/quality/tables.py compare OLD.jsonl NEW.jsonl [--tools OLD NEW]

`measure` adds a line to docs/results/tables.jsonl for every cell that it does not hold yet. It may be stopped at any time, and several
may run at once, on a core each. --models, --tools, --settings and --calibrations choose cells; --set polish=0 changes an option of
nearplane, under a name of its own. A cell that failed stays so, unless --again is given. `show` prints the tables from that file
alone. `compare` prints the ratio of KL of two versions or of two tools, over pairs of rows.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rows import Estimate, Row, append, average, claimed, each, key, of, paired, read, table

ROWS = Path(__file__).parents[2] / "docs" / "results" / "tables.jsonl"
PEERS = ("GPTQModel", "GPTQModel, mse", "llm-compressor", "llm-compressor, mse", "auto-round", "llama.cpp")
ORDER = ("4", "3", "2", "q4_k_m", "q3_k_m", "q2_k", "3.125", "2.125", "1.5")
SHOWN = {each: f"{each} bits" for each in "432"} | {each: f"rate {each}" for each in ORDER if "." in each}


def measure(asked: argparse.Namespace) -> None:
    """Measure all cells that were asked for and are not in the file."""
    import torch
    from cells import Batch, Bench, plan, subjects

    torch.set_num_threads(1)
    models = subjects(asked.assets, asked.study, asked.mixture)
    models = {name: models[name] for name in asked.models or models}
    options = {name: _value(text) for name, text in (pair.split("=", 1) for pair in asked.set)}
    for batch in plan(models):
        settings = [each for each in batch.settings if not asked.settings or each in asked.settings]
        if not settings or (asked.tools and batch.tool not in asked.tools):
            continue
        if asked.calibrations and batch.calibration not in asked.calibrations:
            continue
        subject = models[batch.model]
        label = batch.tool + "".join(f", {name}={value}" for name, value in options.items())
        name = f"{batch.model} {label} {batch.calibration} {' '.join(settings)}"
        with claimed(asked.rows, name) as mine:
            same = {"sha": subject.sha, "text": subject.digest(batch.calibration), "tool": label}
            there = {key(row) for row in read(asked.rows) if "error" not in row or not asked.again}
            cells = {each: key(same | {"setting": each, "calibration": batch.calibration}) for each in settings}
            missing = tuple(each for each in settings if cells[each] not in there)
            if not mine or not missing:
                continue
            with tempfile.TemporaryDirectory() as place:
                bench = Bench(
                    peers=asked.peers, llama=asked.llama, core=asked.core, place=Path(place), options=options
                )
                todo = Batch(model=batch.model, tool=batch.tool, calibration=batch.calibration, settings=missing)
                for row in bench.measure(subject, todo):
                    append(asked.rows, row)
                    print(time.strftime("%H:%M:%S"), json.dumps(row), file=sys.stderr, flush=True)


def _value(text: str) -> Any:
    """Read a number or true or false; anything else is a word."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def show(asked: argparse.Namespace) -> None:
    """Print the tables."""
    rows = [row for row in read(asked.rows) if not asked.models or row["model"] in asked.models]
    for model in dict.fromkeys(row["model"] for row in rows):
        newest = of(rows, model=model)[-1]["sha"]
        here = of(rows, model=model, sha=newest)
        perplexity = next(row["original"] for row in here if "original" in row)
        print(f"\n**{model}** (perplexity of the original: {perplexity})\n")
        print("\n".join(untuned(here)))
        if any(row["tool"] == "nearplane tuned" for row in here):
            print()
            print("\n".join(tuned(here)))
    errors = [row for row in rows if "error" in row]
    for row in errors:
        print(f"\n{row['model']}, {row['tool']}, {row['setting']}, calibration {row['calibration']}: {row['error']}")


def untuned(rows: list[Row]) -> Iterator[str]:
    """Yield the table of KL before tuning: all tools on the calibrations that all of them have."""
    tools = [tool for tool in ("nearplane", *PEERS) if any(row["tool"] == tool for row in rows)]
    heads = ("setting", "bits per weight", *tools, "ratio to the best peer")
    lines = []
    for setting in (each for each in ORDER if of(rows, setting=each)):
        of_tools = {tool: [row for row in of(rows, setting=setting, tool=tool) if "kl" in row] for tool in tools}
        peers = {tool: average([row["kl"] for row in of_tools[tool]]) for tool in tools[1:] if of_tools[tool]}
        best = min(peers, key=lambda tool: peers[tool].value, default=None)
        against = "-" if best is None else _ratio(of_tools[best], of_tools["nearplane"])
        cells = [_kl(of_tools[tool]) for tool in tools]
        bits = next((f"{row['bits']:.3f}" for row in of_tools["nearplane"]), "-")
        lines.append((SHOWN.get(setting, setting), bits, *cells, against))
    return table(heads, lines)


def tuned(rows: list[Row]) -> Iterator[str]:
    """Yield the table of tools that train."""
    names = ("nearplane", "nearplane tuned", "auto-round")
    heads = ("setting", *(f"{name}: KL, CPU s" for name in names), "tuned / untuned", "tuned / auto-round")
    lines = []
    for setting in (each for each in ORDER if of(rows, setting=each, tool="nearplane tuned")):
        of_tools = {tool: [row for row in of(rows, setting=setting, tool=tool) if "kl" in row] for tool in names}
        count = len(of_tools["nearplane tuned"])
        of_tools["nearplane"] = of_tools["nearplane"][:count]
        cells = [f"{_kl(of_tools[tool])}, {each(of_tools[tool], 'cpu', lambda it: f'{it.value:.0f}')}" for tool in names]
        ratios = [_ratio(of_tools[tool], of_tools["nearplane tuned"]) for tool in ("nearplane", "auto-round")]
        lines.append((SHOWN.get(setting, setting), *cells, *ratios))
    return table(heads, lines)


def _kl(rows: list[Row]) -> str:
    """Return the mean KL with its error and the number of calibrations."""
    return each(rows, "kl", lambda it: f"{it} ({it.count})")


def _ratio(old: list[Row], new: list[Row]) -> str:
    return ", ".join(f"**{it.value:.3f}**" + (f" ± {it.error:.3f}" if it.error else "") for it in paired(old, new).values())


def compare(asked: argparse.Namespace) -> None:
    """Print ratios of KL, new over old."""
    old, new = ([row for row in read(path) if row["tool"] == tool] for path, tool in zip((asked.old, asked.new), asked.tools, strict=True))
    found = paired(old, new)
    if not found:
        sys.exit(f"{asked.old} has no row of {asked.tools[0]} with the model, windows and setting of one of {asked.tools[1]}.")

    def line(name: tuple[str, str], it: Estimate) -> tuple[str, ...]:
        error = "-" if it.error is None else f"{it.error:.4f}"
        verdict = "one calibration says nothing" if it.needed is None else "yes" if it.needed <= it.count else f"no: {it.needed} needed"
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
    one.add_argument("--mixture", type=Path, help="folder that tools/train_moe.py wrote")
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
