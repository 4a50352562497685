"""KL divergence against CPU time, by number of calibration tokens: nearplane beside its peers on one core.

    python benchmarks/speed/time_to_quality.py measure [--models study demo babyllama105] [--rounds 3] [--setting 4]
    python benchmarks/speed/time_to_quality.py show [--setting 4]    # prints the tables, and draws the figure of 4 bits
    python benchmarks/speed/time_to_quality.py rules [--setting 4]   # compares rules for the number of tokens

Each tool quantizes to a setting of the tables of quality, 4 bits unless said, by its defaults, with 8, 16, 32, ... windows of
the same text. One process does all of these; in a round the tools take turns, and the next round takes other windows. CPU
seconds are those of loading, quantizing and writing; imports and a first run on one block, which compiles what is compiled,
come before and stand beside. AutoRound trains for the same number of steps with any number of windows; it gets
`AUTOROUND_WINDOWS` in one round. KL is measured on the held-out windows of the tables of quality. Rows are appended to
time_to_quality.jsonl; `measure` skips what is there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from safetensors.torch import save_file
from transformers import AutoConfig

from nearplane.calibration.windows import samples_of
from nearplane.models.model import open_model
from nearplane.recipe.recipe import Calibration

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks" / "quality"))
from cells import TOOLS, asked, commit, one_block, scores  # noqa: E402
from rows import Row, append, average, table, where  # noqa: E402
from run import ITERATIONS, run_tasks  # noqa: E402
from subjects import Subject, subjects  # noqa: E402

ROWS = ROOT / "docs" / "results" / "time_to_quality.jsonl"
FIGURE = ROWS.with_name("time-to-quality.svg")
PEERS = ("GPTQModel", "llm-compressor", "auto-round")
WINDOWS = (8, 16, 32, 64, 128, 256)
AUTOROUND_WINDOWS = (16, 128)


def tasks_of(subject: Subject, setting: str, number: int, counts: list[int], place: Path) -> list[dict[str, Any]]:
    """Return what a worker is told: a task for each number of windows; the first begins with a run on one block."""
    place.mkdir(parents=True, exist_ok=True)
    warm: str | None = str(one_block(subject.folder, place / "warm"))
    tasks = []
    for count in counts:
        tokens = place / f"{count}.safetensors"
        windows = [subject.calibration(number * len(WINDOWS) + part) for part in range(-(-count // subject.samples))]
        save_file({"windows": joined(windows)[:count].contiguous()}, tokens)
        task = {"model": str(subject.folder), "warm": warm, "tokens": str(tokens), "out": str(place / f"out-{count}")}
        tasks.append(task | {"iterations": ITERATIONS, "search": 0.0} | asked(subject, setting, {}))
        warm = None
    return tasks


def usual(subject: Subject) -> int:
    """Return the default number of windows for a model."""
    return samples_of(open_model(str(subject.folder)), Calibration(seqlen=subject.seqlen))


def joined(parts: list[Any]) -> Any:
    """Return windows of several calibrations one after the other."""
    import torch

    return torch.cat(parts)


def measure(told: argparse.Namespace, models: dict[str, Subject]) -> None:
    """Append a row for each model, tool, number of windows and round that is not there yet."""
    done, peers = read(told.rows), told.peers.resolve()
    for number in range(told.rounds):
        for name, subject in models.items():
            for tool in told.tools:
                if tool == "auto-round" and number:
                    continue
                tried = AUTOROUND_WINDOWS if tool == "auto-round" else WINDOWS
                tried += (usual(subject),) if tool == "nearplane" else ()
                key = {"model": name, "sha": subject.sha, "tool": tool, "calibration": number}
                key |= {"setting": told.setting}
                counts = [count for count in sorted({*tried}) if not where(done, windows=count, **key)]
                if not counts:
                    continue
                function, environment, _ = TOOLS[tool]
                python = Path(sys.executable) if environment is None else peers / environment / "bin" / "python"
                with tempfile.TemporaryDirectory() as scratch:
                    tasks = tasks_of(subject, told.setting, number, counts, Path(scratch))
                    for count, task, spent in zip(
                        counts, tasks, run_tasks(function, tasks, Path(scratch), python, told.core), strict=True
                    ):
                        if "error" in spent:
                            sys.exit(f"{name}, {tool}, {count} windows: {spent['error']}: {spent['printed']}")
                        found = scores(subject, Path(task["out"]), round(spent["cpu"], 2), False)
                        figures = {each: found[each] for each in ("kl", "bits", "cpu")}
                        figures |= {each: round(spent[each], 2) for each in ("imports", "first", "wall")}
                        row = key | {"windows": count, "seqlen": subject.seqlen} | figures | {"commit": commit()}
                        append(told.rows, row)
                        print(json.dumps(row), file=sys.stderr, flush=True)


def read(path: Path) -> list[Row]:
    """Return the rows of a file; none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def curves(rows: list[Row], model: str) -> dict[str, list[tuple[int, float, float, float | None]]]:
    """Return for each tool (windows, CPU s, KL, error of KL), means over the rounds, by number of windows."""
    found: dict[str, list[tuple[int, float, float, float | None]]] = {}
    for tool in dict.fromkeys(row["tool"] for row in where(rows, model=model)):
        for count in sorted({row["windows"] for row in where(rows, model=model, tool=tool)}):
            same = where(rows, model=model, tool=tool, windows=count)
            kl = average([row["kl"] for row in same])
            found.setdefault(tool, []).append((count, average([row["cpu"] for row in same]).value, kl.value, kl.error))
    return found


def lines(rows: list[Row]) -> Iterator[str]:
    """Yield the tables: a row for each tool and number of windows, and how soon ours is as good as the fastest peer."""
    for model in dict.fromkeys(row["model"] for row in rows):
        yield f"\n**{model}**, windows of {where(rows, model=model)[0]['seqlen']} tokens\n"
        body = []
        for tool, points in curves(rows, model).items():
            start = average([row["imports"] for row in where(rows, model=model, tool=tool)]).value
            first = max(row["first"] for row in where(rows, model=model, tool=tool))
            for count, cpu, kl, error in points:
                shown = f"{kl:.5f}" + ("" if error is None else f" ± {error:.5f}")
                body.append((tool, f"{count}", f"{cpu:.1f}", shown, f"{start:.1f} + {first:.1f}"))
        yield from table(("tool", "windows", "CPU s", "KL", "imports + first run, CPU s"), body)
        yield from verdict(curves(rows, model))


def verdict(found: dict[str, list[tuple[int, float, float, float | None]]]) -> Iterator[str]:
    """Yield a table: CPU time of each peer at its best KL, and that of nearplane, measured and between measured points."""
    ours, body = found.get("nearplane", []), []
    for tool, points in found.items():
        if tool == "nearplane" or not ours:
            continue
        count, cpu, kl, _ = min(points, key=lambda point: point[2])
        place = next((place for place, point in enumerate(ours) if point[2] <= kl), None)
        if place is None:
            body.append((tool, f"{count}", f"{kl:.5f}", f"{cpu:.1f}", "not reached", "", ""))
            continue
        windows, mine, reached, _ = ours[place]
        crossing = mine
        if place:  # the logarithm of KL is interpolated along CPU time
            _, before, above, _ = ours[place - 1]
            crossing = before + (mine - before) * math.log(above / kl) / math.log(above / reached)
        shown = f"{reached:.5f} ({windows} windows)"
        body.append(
            (
                tool,
                f"{count}",
                f"{kl:.5f}",
                f"{cpu:.1f}",
                shown,
                f"{mine:.1f}",
                f"{crossing / cpu:.2f} to {mine / cpu:.2f}",
            )
        )
    heads = (
        "peer",
        "windows of its best KL",
        "KL",
        "its CPU s",
        "nearplane's KL there or below",
        "CPU s",
        "time / its time",
    )
    yield ""
    yield from table(heads, body)


def compared(rows: list[Row], models: dict[str, Subject]) -> Iterator[str]:
    """Yield a table of rules for the number of tokens: mean time relative to 64 windows, and geometric mean of KL.

    "Best within 5 %" knows the whole curve of each model: it takes the fewest tokens whose KL is at most 5 % above the least.
    Between two measured points the logarithm of KL is interpolated along that of tokens, and time along tokens.
    """
    found = {
        name: [
            (count * subject.seqlen, cpu, kl)
            for count, cpu, kl, _ in curves(rows, name)["nearplane"]
            if count in WINDOWS
        ]
        for name, subject in models.items()
        if where(rows, model=name, tool="nearplane")
    }
    configs = {name: AutoConfig.from_pretrained(models[name].folder) for name in found}
    widest = {name: max(config.hidden_size, config.intermediate_size) for name, config in configs.items()}

    def at(name: str, tokens: float) -> tuple[float, float]:
        """Return CPU s and log KL of a model with so many tokens."""
        points = found[name]
        low, high = next(
            (pair for pair in pairwise(points) if tokens <= pair[1][0]), (points[-2], points[-1])
        )  # beyond the last point: along the last two
        part = math.log(tokens / low[0]) / math.log(high[0] / low[0])
        seconds = low[1] + (tokens - low[0]) / (high[0] - low[0]) * (high[1] - low[1])
        return seconds, math.log(low[2]) + part * math.log(high[2] / low[2])

    def enough(name: str) -> int:
        least, points = math.log(1.05 * min(kl for _, _, kl in found[name])), found[name]
        return next(t for t in range(points[0][0], points[-1][0] + 1, 64) if at(name, t)[1] <= least)

    rules: dict[str, dict[str, float]] = {"best within 5 %": {name: enough(name) for name in found}}
    for each in (10, 20, 30, 40, 50, 60, 80):
        rules[f"{each} tokens an input"] = {name: each * widest[name] for name in found}
    for each in (16, 32, 64, 128):
        rules[f"{each} windows"] = {name: each * models[name].seqlen for name in found}
    body = []
    for rule, tokens in rules.items():
        time = [at(name, t)[0] / at(name, 64 * models[name].seqlen)[0] for name, t in tokens.items()]
        kl = math.exp(fmean(at(name, t)[1] for name, t in tokens.items()))
        per_input = ", ".join(f"{t / widest[name]:.0f}" for name, t in tokens.items())
        body.append((rule, per_input, f"{fmean(time):.2f}", f"{kl:.5f}"))
    yield from table(("rule", f"tokens an input ({', '.join(found)})", "time", "KL"), body)


def draw(rows: list[Row], subjects: dict[str, Subject], path: Path) -> None:
    """Draw KL against CPU seconds, a panel for each model, with a star at the default number of tokens."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "time"}  # text as text; the same bytes again
    from matplotlib import pyplot
    from matplotlib.ticker import NullLocator

    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = pyplot.subplots(1, len(models), figsize=(4.2 * len(models), 3.6), squeeze=False)
    for axis, model in zip(axes[0], models, strict=True):
        for tool, points in curves(rows, model).items():
            cpu, kl = [point[1] for point in points], [point[2] for point in points]
            axis.plot(cpu, kl, "o-", label=tool, markersize=4)
            for count, seconds, loss, _ in points if tool == "nearplane" else ():
                if count == usual(subjects[model]):
                    axis.plot([seconds], [loss], "*", label="nearplane, default tokens", markersize=14, color="C0")
        axis.set(xscale="log", yscale="log", title=model, xlabel="CPU seconds", ylabel="KL divergence, nats per token")
        shown = axis.get_xlim()
        axis.set_xticks([each for each in (3, 5, 10, 20, 50, 100, 200, 500, 1000) if shown[0] <= each <= shown[1]])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Measure, or show or compare what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "show", "rules"))
    parser.add_argument("--models", nargs="*", default=["study", "demo", "babyllama105"])
    parser.add_argument("--tools", nargs="*", default=["nearplane", *PEERS])
    parser.add_argument("--setting", default="4")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--peers", type=Path, default=Path("build/peers"), help="folder of the environments of peers")
    parser.add_argument("--assets", type=Path, default=Path(os.environ.get("ASSETS", "../shared/assets")))
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    told = parser.parse_args()
    models = subjects(told.assets, ROOT / "benchmarks" / "models" / "study", None)
    if told.what == "show":
        rows = where(read(told.rows), setting=told.setting)
        if told.setting == "4":
            draw(rows, models, FIGURE)
        print("\n".join(lines(rows)))
        return
    if told.what == "rules":
        print("\n".join(compared(where(read(told.rows), setting=told.setting), models)))
        return
    measure(told, {name: models[name] for name in told.models})


if __name__ == "__main__":
    main()
