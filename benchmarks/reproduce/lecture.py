"""The table of a lecture on quantization: absmax and zero point at 8 bits, round to nearest and GPTQ at 4, 3 and 2 bits.

    python benchmarks/reproduce/lecture.py --keep FOLDER              # GPT-2 on WikiText-2; fetches model and texts
    python benchmarks/reproduce/lecture.py --keep FOLDER --offline    # the demo

The figures of the lecture's own table are not at hand, and neither is its model. Its formulas for absmax and zero point are
those of M. Labonne, "Introduction to Weight Quantization" (2023), who prints the perplexities 15.53, 17.92 and 17.97 of
GPT-2. They stand beside ours, but each was measured on a text that the model itself had sampled: only the order of
magnitude can be compared. Rows of GPTQ have no figure beside them.

Cells, marks, resuming and the exit code are those of `qwen3.py`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kept_cells import Cells, Key
from methods import Subject
from paper_tables import Table, markdown, published
from qwen3 import SOME_FAILED
from runs import inputs_of, run
from stand_ins import offline_subjects

from nearplane.errors import NearplaneError
from nearplane.recipe.recipe import Calibration
from nearplane.verbs.compare import ORIGINAL_METHOD

MEASURE = "perplexity"
GPT2 = "openai-community/gpt2"
EIGHT_BITS = ("absmax", "zero-point")
FEW_BITS = ("rtn-rows", "gptq-rows")


def table_of(model: str) -> Table:
    """Return the table of a model: rows of 8 bits have one column, the others three."""
    rows: dict[str, list[Key | None]] = {
        ORIGINAL_METHOD: [Key(model, ORIGINAL_METHOD, None, MEASURE), None, None, None]
    }
    for method in EIGHT_BITS:
        rows[method] = [Key(model, method, 8, MEASURE), None, None, None]
    for method in FEW_BITS:
        rows[method] = [None, *(Key(model, method, bits, MEASURE) for bits in (4, 3, 2))]
    return Table(title=f"Perplexity of {model}", rows=rows, columns=["8 bits or original", "4", "3", "2"])


def main() -> None:
    """Measure what is missing, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, required=True, help="folder for cells and table")
    parser.add_argument("--model", default=GPT2, help="hub id or folder (not with --offline)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--offline", action="store_true", help="run on the demo")
    arguments = parser.parse_args()
    arguments.keep.mkdir(parents=True, exist_ok=True)
    if arguments.offline:
        subject = offline_subjects(arguments.keep, None, [MEASURE], {})[0]
    else:
        calibration = Calibration(samples=128, seqlen=1024, first_token="none")
        subject = Subject(
            name=arguments.model, paper=GPT2, source=arguments.model, calibration=calibration,
            texts={MEASURE: "wikitext2"}, tasks={},
        )  # fmt: skip
    table = table_of(subject.name)
    cells = Cells(arguments.keep, inputs_of([subject]))
    run([subject], table.keys, cells, arguments.keep, arguments.device)
    page = markdown(table, cells.get, published("labonne"), {subject.name: GPT2}) + "\n"
    (arguments.keep / "table.md").write_text(page)
    print(page)
    if failed := len(cells.missing(table.keys)):
        print(f"{failed} of {len(table.keys)} figures are missing; the table says why.", file=sys.stderr)
        raise SystemExit(SOME_FAILED)


if __name__ == "__main__":
    try:
        main()
    except NearplaneError as error:
        raise SystemExit(str(error)) from None
