"""The page of tables on the published models: every setting and tool on WikiText-2 and on C4.

    python benchmarks/quality/real_tables.py > docs/results/real-tables.md

It is made from docs/results/real-models.jsonl alone, which `tables.py measure --published` fills. docs/results/real-models.md says
what is measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from textwrap import fill

from rows import Estimate, Row, average, failures, paired, read, table, where

ROWS = Path(__file__).parents[2] / "docs" / "results" / "real-models.jsonl"
SAMPLES = 64  # windows of a calibration in the tables; rows with others are in a table of their own
CONTROLS = {"smollm2": "smollm2-noise"}
TEXTS = {"wikitext2": "WikiText-2", "c4": "C4"}
UNTRAINED = ("GPTQModel", "GPTQModel, mse", "llm-compressor", "llm-compressor, mse", "llama.cpp", "mlx_lm")
ORDER = (
    "4", "4-asymmetric", "3", "2", "3-symmetric", "2-symmetric", "3.125", "2.125", "nvfp4", "mxfp4", "fp8", "q4_k_m", "q3_k_m",
    "mlx4",
)  # fmt: skip
NEAR = {  # settings whose grids are near those of the file from which the weights were decoded
    "smollm2": ("3", "2", "fp8", "q4_k_m", "q3_k_m", "mlx4"), "gemma3": ("fp8", "q4_k_m", "q3_k_m"),
}  # fmt: skip
MARK = " †"
INTRODUCTION = f"""# Tables on published models

Made by `python benchmarks/quality/real_tables.py` from `real-models.jsonl`. What is measured, what is known of the
models, and what a mark means is in [real-models.md](real-models.md). **Both originals are decoded files of 4 bits, not
the weights that were published before.** Settings with{MARK} have grids near those of that file: their figures say
little about other models.

Figures are means over calibrations of {SAMPLES} windows of 512 tokens of C4, whose number is in parentheses, with the
standard error of the mean. KL is in nats per token, mean and, after the semicolon, its 99.9 % quantile over tokens.
`-` means not measured. *nearest* is nearplane with `--solver round-to-nearest`, *mse* the search for steps that the
tool offers. CPU seconds in a row are of different days and machines: divide them nowhere, [speed](speed.md) has pairs."""


def title(model: str, setting: str) -> str:
    """Return a setting in words, with a mark if its grid is near that of the file."""
    words = f"rate {setting}" if "." in setting else f"{setting} bits" if setting.isdigit() else setting
    return words + (MARK if setting in NEAR.get(model, ()) else "")


def of_text(rows: list[Row], text: str) -> list[Row]:
    """Return rows with the figures of one text in place of those of both."""
    return [row | row["texts"][text] for row in rows]


def shown(rows: list[Row]) -> str:
    """Return KL, mean and quantile; "-" if it was not measured."""
    if not rows:
        return "-"
    mean = average([row["kl"] for row in rows])
    return f"{mean} ({mean.count}); {average([row['kl_999'] for row in rows]).value:.2f}"


def ratio(rows: list[Row], setting: str, text: str) -> tuple[str, Estimate] | None:
    """Return the best tool that does not train beside nearplane, and KL of nearplane relative to it, over pairs."""
    cells = {tool: of_text(where(rows, setting=setting, tool=tool), text) for tool in UNTRAINED}
    cells = {tool: some for tool, some in cells.items() if some}
    if not cells:
        return None
    best = min(cells, key=lambda tool: average([row["kl"] for row in cells[tool]]).value)
    found = paired(cells[best], of_text(where(rows, setting=setting, tool="nearplane"), text))
    return (best, next(iter(found.values()))) if found else None


def ratios(rows: list[Row], control: list[Row], model: str) -> Iterator[str]:
    """Yield the table of ratios, with those of the control, and which rankings turn there."""
    lines = []
    for setting in (each for each in ORDER if where(rows, setting=each)):
        entries: list[str] = []
        claimed = []
        for text in TEXTS:
            found, other = ratio(rows, setting, text), ratio(control, setting, text)
            for it in (found, other) if control else (found,):
                said = "-" if it is None else f"**{it[1].value:.3f}**"
                error = "" if it is None or it[1].error is None else f" ± {it[1].error:.3f}"
                entries.append(said + error + (f" ({it[0]})" if it is not None else ""))
            if found is not None and control:
                turned = other is not None and (other[1].value < 1) != (found[1].value < 1)
                claimed.append("not measured" if other is None else "turns" if turned else "stays")
        verdict = [" / ".join(dict.fromkeys(claimed)) or "-"] if control else []
        if any(entry != "-" for entry in entries):
            lines.append((title(model, setting), *entries, *verdict))
    heads = [f"{name}{part}" for name in TEXTS.values() for part in (("", ", control") if control else ("",))]
    return table(("setting", *heads, *(["ranking in the control"] if control else [])), lines)


def by_tool(rows: list[Row], model: str, entry: str) -> Iterator[str]:
    """Yield a table of one figure: a line for each setting, a column for each tool."""
    tools = list(dict.fromkeys(row["tool"] for row in rows))
    lines = []
    for setting in (each for each in ORDER if where(rows, setting=each)):
        cells = [where(rows, setting=setting, tool=tool) for tool in tools]
        lines.append((title(model, setting), *(_figure(some, entry) for some in cells)))
    return table(("setting", *tools), lines)


def _figure(rows: list[Row], entry: str) -> str:
    rows = [row for row in rows if entry in row or entry in TEXTS]
    if not rows:
        return "-"
    if entry == "types":
        return ", ".join(f"{name} {100 * share:.0f} %" for name, share in rows[0]["types"].items())
    if entry in TEXTS:
        return shown(of_text(rows, entry))
    mean = average([row[entry] for row in rows]).value
    return {"cpu": f"{mean:.0f}", "peak": f"{mean / 1e9:.2f}", "bits": f"{mean:.3f}"}.get(entry, f"{mean / 1e6:.1f}")


def perplexities(rows: list[Row], model: str) -> Iterator[str]:
    """Yield the table of perplexities on both texts."""
    tools = list(dict.fromkeys(row["tool"] for row in rows))
    lines = []
    for setting in (each for each in ORDER if where(rows, setting=each)):
        cells = [where(rows, setting=setting, tool=tool) for tool in tools]
        entries = [
            ", ".join(f"{average([row['perplexity'] for row in of_text(some, text)]).value:.2f}" for text in TEXTS)
            if some
            else "-"
            for some in cells
        ]
        lines.append((title(model, setting), *entries))
    return table(("setting", *tools), lines)


def of_model(rows: list[Row], control: list[Row], model: str) -> Iterator[str]:
    """Yield the part of the page on one model."""
    first = rows[0]
    original = " and ".join(f"{first['texts'][text]['original']:.2f} on {name}" for text, name in TEXTS.items())
    versions = sorted({row["version"] for row in rows if not row["version"].startswith("nearplane")})
    commits = sorted({row["commit"] for row in rows})
    yield f"\n## {model}\n\nSHA-256 of the weights: {first['sha']}... Perplexity of the original: {original}."
    yield fill(f"Measured at {', '.join(commits)}, beside {', '.join(versions) or 'nothing yet'}.", 120)
    for text, name in TEXTS.items():
        yield f"\nKL on {name}:\n"
        yield from by_tool(rows, model, text)
    yield "\nKL of nearplane relative to that of the best tool that does not train, which is named:\n"
    yield from ratios(rows, control, model)
    yield f"\nPerplexity on {' and '.join(TEXTS.values())}:\n"
    yield from perplexities(rows, model)
    for entry, name in (
        ("cpu", "CPU seconds to load, quantize and write"),
        ("peak", "Peak memory in GB"),
        ("bits", "Bits per quantized weight, every byte counted"),
        ("bytes", "Megabytes of the model, with all other weights in 16 bits"),
        ("written", "Megabytes of the files as written"),
        ("types", "Types in the GGUF files, by share of the quantized weights"),
    ):
        if any(entry in row for row in rows):
            yield f"\n{name}:\n"
            measured = [row for row in rows if entry in row]
            yield from by_tool(measured, model, entry)


def main() -> None:
    """Print the page."""
    everything = [row for row in read(ROWS) if "=" not in row["tool"]]  # with --set, which texts name, not tables
    rows = [row for row in everything if "kl" in row]
    print(INTRODUCTION)
    for model in dict.fromkeys(row["model"] for row in rows):
        same = where(rows, model=model, samples=SAMPLES)
        if same:
            print("\n".join(of_model(same, where(rows, model=CONTROLS.get(model), samples=SAMPLES), model)))
        for samples in sorted({row["samples"] for row in where(rows, model=model)} - {SAMPLES}):
            print(f"\n### {model} with {samples} windows")
            others = where(rows, model=model, samples=samples)
            for entry, name in (*((text, f"KL on {name}") for text, name in TEXTS.items()), ("cpu", "CPU seconds")):
                print(f"\n{name}:\n")
                print("\n".join(by_tool(others, model, entry)))
    print(failures(everything), end="")


if __name__ == "__main__":
    main()
