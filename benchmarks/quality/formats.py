"""The page of formats that people download: solved, tuned and nearest beside llm-compressor, mlx_lm and auto-round.

    python benchmarks/quality/formats.py > docs/results/formats.md

It is made from docs/results/tables.jsonl alone, which `tables.py measure` fills. Rounding to nearest and mlx_lm's conversion
use no calibration, so their only row stands beside those of all calibrations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rows import Estimate, Row, average, failures, paired, read, table, where

ROWS = Path(__file__).parents[2] / "docs" / "results" / "tables.jsonl"
MODELS = ("study", "demo", "babyllama105")
FOUR_BITS, EIGHT_BITS = ("nvfp4", "mxfp4"), ("fp8", "fp8-block", "mxfp8", "int8")
MLX = ("mlx2", "mlx3", "mlx4", "mlx5", "mlx6", "mlx8")
TUNED = (*FOUR_BITS, "mlx3", "mlx4")
OBSERVERS = ("llm-compressor", "llm-compressor, mse")
UNCALIBRATED = ("nearest", "mlx_lm")
JOINED = "nearplane, two_sided=True"  # rows of four-bit floats that compensated for each other, which was an option
ACTIVATIONS = {
    "nvfp4": "fp4",
    "mxfp4": "fp4",
    "fp8": "fp8",
    "fp8-block": "fp8",
    "int8": "int8",
}  # that runtimes round to
INTRODUCTION = """# Formats that people download

Made by `python benchmarks/quality/formats.py` from `tables.jsonl`. What is measured is in [index.md](index.md).
Figures are KL to the original on held-out windows, means over calibrations, whose number is in parentheses, with the
standard error of the mean. Ratios of KL are over pairs with the same calibration, so a ratio may differ from the
quotient of two means over different calibrations. Only the weights are rounded; where inputs are rounded too, a table
of its own says so. `-` means not measured.

- *nearest* is nearplane with `--solver round-to-nearest`, *solved* is nearplane by its defaults, *tuned* is `tune` on
  the calibration's own tokens after that. Where *tuned / solved* is 1.000, no trained state was better on the windows
  that tuning holds out, and the solved one was kept. 8-bit floats are not tuned here.
- *llm-compressor* is its GPTQ in the same format with the better of two observers, `memoryless_minmax` and one that
  searches (`nvfp4_expanded_mse` for NVFP4, else `memoryless_mse`). It runs on the CPU.
- *mlx_lm* is `mlx_lm.convert`, *mlx_lm, gptq* its GPTQ, which has 2, 4 and 8 bits. mlx2 to mlx8 are 2 to 8 bits in
  groups of 64 (babyllama105: 32, since 64 does not divide its layers). The same layers are quantized by all: those of
  the blocks, and neither embeddings nor head.
- *auto-round* trains its roundings, 200 iterations a block, here of weights alone.

At 8 bits the differences are small: a KL of 0.001 is a tenth of that of 4 bits. FP8 in blocks of 128 x 128 does not fit
the layers of babyllama105, and nearplane refuses it there."""
TOGETHER = """
## Rows that compensated for each other

*Rows together* were the default with NVFP4 and MXFP4 until 2026-11-30. What that gained here it did not on
[published networks](quality-on-grids.md#rows-that-compensated-for-each-other-until-2026-11-30), so it is gone. They
were measured at older commits, with rows tuned from them below; a busy machine measured the CPU seconds.
"""
ON_MORE = """
## Tuned on five times the tokens

`nearplane tune` takes 250 tokens per input of the widest layer by default. Here the solve has the tokens of the
calibration, and tuning five times as many, of which the calibration's are the first. llm-compressor has all of them.
"""
ROUNDED = """
## Rounded inputs

KL of files made with `--activations`, as runtimes compute that round the inputs of layers, and of their weights alone,
both by `nearplane evaluate --activations`. A file that was made without this option names no rounding: a runtime
multiplies its weights with unrounded inputs, and the tables above hold for it. Inputs get a step for every token in
INT8 and FP8, for 16 inputs in NVFP4 and for 32 in MXFP4.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A figure that was set before the measurement.

    Args:
        settings: Formats that it is set for.
        tool: Tool of ours.
        peer: Name of the peer's column.
        most: Largest ratio of KL.
    """

    settings: tuple[str, ...]
    tool: str
    peer: str
    most: float


TARGETS = (
    Target(settings=FOUR_BITS, tool="nearplane", peer="llm-compressor", most=0.70),
    Target(settings=FOUR_BITS, tool="nearplane tuned", peer="llm-compressor", most=0.55),
    Target(settings=MLX[1:5], tool="nearplane", peer="mlx_lm", most=0.35),
)
COLUMNS = {
    "nearest": "nearest", "nearplane": "solved", "nearplane tuned": "tuned", "llm-compressor": "llm-compressor",
    "mlx_lm": "mlx_lm", "mlx_lm, gptq": "mlx_lm, gptq", "auto-round": "auto-round",
}  # fmt: skip
PEERS = ("llm-compressor", "mlx_lm", "mlx_lm, gptq", "auto-round")


def cells(rows: list[Row], setting: str) -> dict[str, list[Row]]:
    """Return the rows of every column in one format; of llm-compressor those of the observer with the lower mean."""
    found = {tool: where(rows, setting=setting, tool=tool) for tool in COLUMNS}
    observed = [some for tool in OBSERVERS if (some := where(rows, setting=setting, tool=tool))]
    found["llm-compressor"] = min(observed, key=lambda some: average([row["kl"] for row in some]).value, default=[])
    return found


def ratio(peer: str, of: dict[str, list[Row]], tool: str) -> Estimate | None:
    """Return KL of a tool of ours over that of a peer; None if one of them was not measured."""
    old, new = of[peer], of[tool]
    if peer in UNCALIBRATED and old:  # the same whatever the calibration
        old = [old[0] | {name: row[name] for name in ("text", "calibration")} for row in new]
    return next(iter(paired(old, new).values()), None)


def shown(it: Estimate | None) -> str:
    """Return a ratio with its error."""
    return "-" if it is None else f"**{it.value:.3f}**" + ("" if it.error is None else f" ± {it.error:.3f}")


def figure(rows: list[Row], name: str) -> str:
    """Return the mean of a figure; of KL with its error and the number of calibrations."""
    if not rows:
        return "-"
    mean = average([row[name] for row in rows])
    return f"{mean} ({mean.count})" if name == "kl" else f"{mean.value:.3f}"


def of_model(rows: list[Row], settings: list[str]) -> Iterator[str]:
    """Yield the tables of a model: KL with ratios, and perplexity with CPU seconds."""
    by_setting = {setting: cells(rows, setting) for setting in settings}
    used = [tool for tool in COLUMNS if any(of[tool] for of in by_setting.values())]
    peers = [peer for peer in PEERS if peer in used]
    heads = (
        "format",
        "bits",
        *(COLUMNS[tool] for tool in used),
        *(f"solved / {peer}" for peer in peers),
        "tuned / solved",
    )
    lines = []
    for setting, of in by_setting.items():
        bits = next((f"{row['bits']:.3f}" for row in of["nearplane"]), "-")
        ratios = [shown(ratio(peer, of, "nearplane")) for peer in peers]
        trained = shown(ratio("nearplane", of, "nearplane tuned"))
        lines.append((setting, bits, *(figure(of[tool], "kl") for tool in used), *ratios, trained))
    yield from table(heads, lines)
    yield f"\nPerplexity (the original has {rows[0]['original']}):\n"
    lines = [(setting, *(figure(of[tool], "perplexity") for tool in used)) for setting, of in by_setting.items()]
    yield from table(("format", *(COLUMNS[tool] for tool in used)), lines)


def targets(rows: list[Row], models: list[str]) -> Iterator[str]:
    """Yield the table of targets: the ratio that was asked for, that of each model, and which is missed."""
    lines = []
    for target in TARGETS:
        for setting in target.settings:
            found = {name: ratio(target.peer, cells(where(rows, model=name), setting), target.tool) for name in models}
            missed = [name for name, it in found.items() if it is not None and it.value > target.most]
            verdict = (
                f"**missed** on {', '.join(missed)}" if missed else "reached" if any(found.values()) else "not measured"
            )
            said = f"{COLUMNS[target.tool]} / {target.peer}"
            lines.append((setting, said, f"{target.most:.2f}", *(shown(it) for it in found.values()), verdict))
    return table(("format", "ratio of KL", "target, at most", *models, "result"), lines)


def joined(rows: list[Row], models: list[str]) -> Iterator[str]:
    """Yield the table of KL and CPU time where rows are solved apart and where they compensate each other, over pairs."""
    lines = []
    for model in models:
        for setting in FOUR_BITS:
            apart = where(rows, model=model, setting=setting, tool="nearplane")
            together = where(rows, model=model, setting=setting, tool=JOINED)
            if together:
                both = next(iter(paired(apart, together).values()))
                spent = [f"{average([row['cpu'] for row in some]).value:.0f} s" for some in (apart, together)]
                figures = figure(apart, "kl"), figure(together, "kl"), shown(both)
                lines.append((model, setting, *figures, ", ".join(spent)))
    return table(("model", "format", "rows apart", "rows together", "ratio", "CPU seconds of the run"), lines)


def on_more(rows: list[Row], models: list[str]) -> Iterator[str]:
    """Yield the table of KL as tuned on more tokens, beside that of llm-compressor on as many, over pairs."""
    lines = []
    for model in models:
        for setting in FOUR_BITS:
            here = where(rows, model=model, setting=setting)
            observed = [some for tool in OBSERVERS if (some := where(here, tool=f"{tool}, 5 x tokens"))]
            theirs = min(observed, key=lambda some: average([row["kl"] for row in some]).value, default=[])
            tuned = where(here, tool="nearplane tuned, 5 x tokens")
            solved = where(here, tool=JOINED) or where(here, tool="nearplane")  # what was tuned
            if tuned:
                ratios = [shown(next(iter(paired(old, tuned).values()), None)) for old in (theirs, solved)]
                lines.append((model, setting, *(figure(each, "kl") for each in (theirs, solved, tuned)), *ratios))
    heads = "model", "format", "llm-compressor", "solved", "tuned", "tuned / llm-compressor", "tuned / solved"
    return table(heads, lines)


def activations(rows: list[Row], models: list[str]) -> Iterator[str]:
    """Yield the table of KL where runtimes round inputs too, beside that of the weights alone."""
    lines = []
    for model in models:
        for setting, kind in ACTIVATIONS.items():
            there = where(rows, model=model, setting=setting, tool=f"nearplane, activations={kind}")
            there = [row for row in there if "computed" in row]
            alone = cells(where(rows, model=model), setting)["nearplane"]
            same = [row for row in alone if row["text"] in {each["text"] for each in there}]
            computed = f"{average([row['computed'] for row in there])} ({len(there)})" if there else ""
            if there:
                lines.append((model, setting, kind, computed, figure(there, "kl"), figure(same, "kl")))
    heads = "model", "format", "inputs", "as computed", "weights alone", "weights alone, without --activations"
    return table(heads, lines)


def main() -> None:
    """Print the page."""
    known = (*FOUR_BITS, *EIGHT_BITS, *MLX)
    everything = [row for row in read(ROWS) if row["setting"] in known and row["model"] in MODELS]
    rows = [row for row in everything if "kl" in row]
    models = [name for name in MODELS if where(rows, model=name)]
    versions = sorted({row["version"] for row in rows if not row["version"].startswith("nearplane")})
    commits = sorted({row["commit"] for row in rows if row["tool"].startswith("nearplane")})
    print(INTRODUCTION)
    print(f"\nnearplane at {', '.join(commits)};\n{', '.join(versions)}.")
    print("\n## Targets\n\nThe largest ratios that we set ourselves before measuring.\n")
    print("\n".join(targets(rows, models)))
    for name in models:
        of_it = where(rows, model=name)
        print(f"\n## {name}\n")
        print("\n".join(of_model(of_it, [setting for setting in known if where(of_it, setting=setting)])))
    print(TOGETHER)
    print("\n".join(joined(rows, models)))
    print(ON_MORE)
    print("\n".join(on_more(rows, models)))
    print(ROUNDED)
    print("\n".join(activations(rows, models)))
    print(failures(everything), end="")


if __name__ == "__main__":
    main()
