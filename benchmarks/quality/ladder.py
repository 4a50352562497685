"""The page and the figure of SmolLM2 at every width: KL against bytes, of all tools.

    python benchmarks/quality/ladder.py > docs/results/ladder.md     # also draws docs/results/ladder.svg

Both are made from docs/results/real-models.jsonl alone, which `tables.py measure --published` fills. The figure needs matplotlib
(the extra "figures").
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from real_tables import ORDER, ROWS, SAMPLES, TEXTS, of_text, title
from rows import Row, average, read, table, where

MODEL = "smollm2"
TRAINED = "auto-round"
FIGURE = ROWS.with_name("ladder.svg")
JOINED = (("4", "3", "2"), ("3.125", "2.125"))  # settings that a line joins; others are points with their names
COLOURS = {
    "nearplane": "#0072B2", "nearest": "#999999", "GPTQModel": "#D55E00", "GPTQModel, mse": "#E69F00",
    "llm-compressor": "#009E73", "llm-compressor, mse": "#56B4E9", "auto-round": "#CC79A7", "llama.cpp": "#000000",
    "mlx_lm": "#8C564B",
}  # fmt: skip
INTRODUCTION = f"""# Ladder of sizes

SmolLM2-135M-Instruct at every width and with every tool: KL divergence from the original against bytes. Made, with the
figure, by `python benchmarks/quality/ladder.py` from `real-models.jsonl`; [real-models.md](real-models.md) says what is
measured, with which command, and what a mark means. **The original is a decoded file of 4 bits.**

Bytes are those of the quantized layers as the tool wrote them, and two for each other weight: the tied embeddings alone
are 56.6 MB. So files of the same bits have the same bytes, whatever else they hold. The original has 269.1 MB. KL is in
nats per token, means over the calibrations of {SAMPLES} windows that there are. The 99.9 % quantile is that of tokens:
one in a thousand differs by more.

![KL of SmolLM2 against megabytes of the model, a mark for each tool and setting](ladder.svg)
"""


def points(rows: list[Row]) -> list[Row]:
    """Return a row for each setting and tool, with means over calibrations, the smallest first."""
    found = []
    for setting in ORDER:
        for tool in dict.fromkeys(row["tool"] for row in rows):
            some = where(rows, setting=setting, tool=tool)
            if not some:
                continue
            figures = {"setting": setting, "tool": tool, "count": len(some)}
            figures["bytes"] = average([row["bytes"] for row in some]).value
            for text in TEXTS:
                for name in ("kl", "kl_999", "perplexity"):
                    figures[text, name] = average([row[name] for row in of_text(some, text)]).value
            found.append(figures)
    return sorted(found, key=lambda each: (each["bytes"], each["wikitext2", "kl"]))


def lines(found: list[Row]) -> Iterator[str]:
    """Yield the table."""
    body = []
    for each in found:
        figures = [f"{each[text, name]:.4g}" for text in TEXTS for name in ("kl", "kl_999", "perplexity")]
        said = title(MODEL, each["setting"])
        body.append((f"{each['bytes'] / 1e6:.1f}", said, each["tool"], *figures, str(each["count"])))
    heads = [f"{text}: {name}" for text in TEXTS.values() for name in ("KL", "99.9 %", "perplexity")]
    return table(("MB", "setting", "tool", *heads, "calibrations"), body)


def draw(found: list[Row], path: Path) -> None:
    """Draw KL, mean and quantile, against megabytes, a column of panels for each text."""
    import matplotlib

    matplotlib.use("svg")
    as_text, same_bytes = {"svg.fonttype": "none"}, {"svg.hashsalt": "ladder"}
    with matplotlib.rc_context(as_text | same_bytes):
        _draw(found, path)


def _draw(found: list[Row], path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(TEXTS), figsize=(10.4, 8.4), sharex=True, sharey="row", squeeze=False)
    for column, (text, words) in enumerate(TEXTS.items()):
        for axis, name in zip(axes[:, column], ("kl", "kl_999"), strict=True):
            for tool in COLOURS:
                for settings in (*JOINED, *((each,) for each in ORDER if not any(each in some for some in JOINED))):
                    some = [each for each in where_tool(found, tool) if each["setting"] in settings]
                    place = [each["bytes"] / 1e6 for each in some], [each[text, name] for each in some]
                    style = ("o-" if settings == JOINED[0] else "s--") if len(settings) > 1 else "^"
                    axis.plot(*place, style, color=COLOURS[tool], markersize=4, linewidth=1)
                    for x, y in zip(*place, strict=True) if len(settings) == 1 else ():
                        axis.annotate(settings[0], (x, y), (3, 3), textcoords="offset points", fontsize=6)
            axis.set(yscale="log", title=f"{words}, {'mean' if name == 'kl' else '99.9 % of tokens'}")
            axis.grid(alpha=0.3, which="both")
            axis.yaxis.set_major_formatter("{x:g}")
        axes[-1][column].set_xlabel("MB of the model")
    for row in axes:
        row[0].set_ylabel("KL divergence, nats per token")
    there = [tool for tool in COLOURS if where_tool(found, tool)]
    handles = [pyplot.Line2D([], [], color=COLOURS[tool], marker="o", markersize=4, label=tool) for tool in there]
    handles.append(pyplot.Line2D([], [], color="#0072B2", marker="s", linestyle="--", label="nearplane --rate"))
    axes[0][0].legend(handles=handles, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def where_tool(found: list[Row], tool: str) -> list[Row]:
    """Return the points of a tool, the smallest first; auto-round with any number of iterations is one tool."""
    return [each for each in found if (each["tool"].split(", ")[0] if tool == TRAINED else each["tool"]) == tool]


def main() -> None:
    """Print the page, and draw the figure."""
    found = points([row for row in where(read(ROWS), model=MODEL, samples=SAMPLES) if "kl" in row])
    print(INTRODUCTION)
    print("\n".join(lines(found)))
    draw(found, FIGURE)


if __name__ == "__main__":
    main()
