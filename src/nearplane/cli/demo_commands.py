"""The commands that need no model of the user: `nearplane demo` and `nearplane geometry`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from nearplane.cli.flags import Switch
from nearplane.cli.printing import as_json, opening, table
from nearplane.cli.terminal import one_line_a_step
from nearplane.demo.demo_recipes import STEPS, check_folder
from nearplane.system.progress_bar import bar
from nearplane.system.sizes import size_text


def geometry(out: Path, *, json: Switch = False) -> None:
    """Draw pictures of the geometry of quantization with two weights, as SVG and PNG files.

    Args:
        out: Folder for the pictures; older ones in it are replaced, and a folder with other files is refused.
        json: Print the paths of the pictures as JSON.
    """
    from nearplane.theory.pictures import draw_geometry

    paths = [*draw_geometry(out)]
    print(as_json({"pictures": paths}) if json else "\n".join(map(str, paths)))


def demo(out: Path = Path("demo-out"), *, json: Switch = False) -> None:
    """Quantize the small model that ships with nearplane to 4, 3 and 2 bits, and measure the quality of each checkpoint.

    Args:
        out: Folder for the checkpoints; older ones in it are replaced, and a folder with other files is refused.
        json: Print the result as JSON.
    """
    check_folder(out)
    opening("the demo model")
    from nearplane.demo.demonstration import run

    rows = []
    with one_line_a_step() as line:
        for row in run(out, bar):
            rows.append(row)
            line(f"step {len(rows)} of {STEPS}: {row}")
    if json:
        print(as_json([asdict(row) for row in rows]))
        return
    columns = ("grid", "solver", "bits/weight", "weight files", "perplexity", "excess nats", "KL to original", "time")
    table(
        columns,
        (
            (
                row.grid,
                row.solver,
                f"{row.rate:.3f}",
                size_text(row.bytes),
                f"{row.perplexity:.3f}",
                f"{row.excess:.4f}",
                f"{row.kl:.4f}",
                f"{row.seconds:.1f} s",
            )
            for row in rows
        ),
    )
    print(f"The checkpoints are in {out}. To do the same with a model and texts of your own:\n")
    print("  nearplane quantize MODEL OUT --bits 4 --calibration TEXT.txt")
    print("  nearplane evaluate OUT --text OTHER_TEXT.txt --against MODEL")
    print("  vllm serve OUT")
