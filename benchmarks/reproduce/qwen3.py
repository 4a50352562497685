"""Tables 1 to 5 and Figure 2 of Chen et al., "The Geometry of LLM Quantization" (arXiv 2507.18553), by one command.

    python benchmarks/reproduce/qwen3.py --keep FOLDER                       # Qwen3 0.6B to 14B; fetches models and texts
    python benchmarks/reproduce/qwen3.py --keep FOLDER --models MODEL --assets $ASSETS --tables 1 5      # no network
    python benchmarks/reproduce/qwen3.py --keep FOLDER --offline [--assets $ASSETS]

FOLDER gets `cells.jsonl`, a line for each finished figure, from which the same command resumes; `tables.md` with the
paper's figures in brackets beside ours and the ratio of the two, `!` where they differ by more than 2 %; `figure2.svg`.
A figure that cannot be measured is marked with the reason, the run goes on, and the exit code is 3.

With --models and --assets, tables 1, 2 and 5 have texts of $ASSETS in the places of those from the hub: calibration on the first
64 windows of 512 tokens of C4, WikiText-2 and the end of C4 held out, 64 windows each; --samples and --windows choose others.

--offline runs the same lines on the models in this repository, and on those of $ASSETS. Their figures are no
reproduction of the paper's. The tasks need lm-eval (pip install "nearplane[eval]").

The tables, and what could not be found out about them:

    1   WikiText-2 and C4 perplexity of Qwen3-8B: every method at 4.125, 3.125 and 2.125 bits
    2   WikiText-2 perplexity of all sizes: GPTQ-Huffman of the paper, and nearplane
    3   WinoGrande (5-shot) and TruthfulQA (0-shot) of Qwen3-8B
    4   the same two tasks for all sizes
    5   orders of columns: tr(D) and WikiText-2 perplexity in natural, activation and min-pivot order
    Figure 2: perplexity against the size of the file, from the cells of Table 2

The contents and figures of the paper's Tables 1 and 2 are known (`published.json`). Of 3 to 5 we know that the paper has
tasks with these numbers of shots, and says that min-pivot lowers tr(D) and accuracy gains little; neither their
figures nor their numbering are at hand, so our cells stand without a figure beside them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kept_cells import Cells, Key
from methods import ORDERS, TRACE, Subject, Task
from paper_tables import TOLERANCE, Table, draw_sizes, markdown, published
from runs import inputs_of, run
from stand_ins import local_subjects, offline_subjects

from nearplane.errors import NearplaneError
from nearplane.recipe.recipe import Calibration
from nearplane.verbs.compare import ORIGINAL_METHOD
from nearplane.verbs.figure_file import check_plot

PAPER_MODELS = tuple(f"Qwen/Qwen3-{size}" for size in ("0.6B", "1.7B", "4B", "8B", "14B"))
MAIN_MODEL = "Qwen/Qwen3-8B"
BITS = (4.125, 3.125, 2.125)
METHODS = ("rtn-mse", "gptq-mse", "rtn-huffman", "gptq-huffman", "min-pivot", "nearplane-grid", "nearplane")
SIZED = ("gptq-huffman", "nearplane")  # methods that run on all sizes
TEXTS = {"wikitext2": "wikitext2", "c4": "c4"}
TASKS = {"winogrande": Task(name="winogrande", shots=5), "truthfulqa": Task(name="truthfulqa_mc1", shots=0)}
NUMBERS = (1, 2, 3, 4, 5)
PERPLEXITIES = (1, 2, 5)  # tables without tasks
SOME_FAILED = 3  # exit code
SETTINGS = f"""\
Marked `!`: the figure differs from the paper's by more than {100 * TOLERANCE:g} %. Settings that differ from the paper's, or
of which the paper's are not known to us:

- Order and damping of GPTQ are its defaults, natural and 1 % of the mean diagonal. Later versions of the paper use
  activation order in their experiments: that is the row act-order of Table 5.
- Which FineWeb-Edu documents and which crop of C4 the paper took is not known. Ours are the first of sample-10BT,
  shuffled with seed 0.
- TruthfulQA is mc1. Which of its measures the paper has is not known.
- Networks are measured in float32, with the decoded weights of the file.
- Bits count every byte of the layers, including the table of each Huffman code."""

LOCAL = """\
Windows of calibration and of both texts are those of `benchmarks/quality/tables.py` on published models. Bits count every byte of
the layers, including the table of each Huffman code."""


def online_subjects(models: Sequence[str], windows: int | None) -> list[Subject]:
    """Return the models with the protocol of the paper: 256 x 2,048 tokens of FineWeb-Edu, windows of 2,048."""
    return [
        Subject(
            name=model, paper=model, source=model, texts=TEXTS,
            calibration=Calibration(samples=256, seqlen=2048, first_token="none"),
            tasks=TASKS, windows=windows,
        )
        for model in models
    ]  # fmt: skip


def tables_of(subjects: Sequence[Subject]) -> dict[int, Table]:
    """Return the tables; the first subject that takes the place of `MAIN_MODEL`, or else the first, has tables 1 and 3."""
    main = next((subject for subject in subjects if subject.paper == MAIN_MODEL), subjects[0])
    texts, tasks = list(TEXTS), list(TASKS)
    at_bits = [f"{bits:g}" for bits in BITS]
    sized_rows: dict[str, list[Key | None]] = {}
    task_rows: dict[str, list[Key | None]] = {}
    order_rows: dict[str, list[Key | None]] = {}
    for subject in subjects:
        original = [Key(subject.name, ORIGINAL_METHOD, None, measure) for measure in (texts[0], *tasks)]
        for method in SIZED:
            keys = [Key(subject.name, method, bits, texts[0]) for bits in BITS]
            sized_rows[f"{subject.name}, {method}"] = [original[0], *keys]
            keys = [Key(subject.name, method, bits, task) for bits in BITS for task in tasks]
            task_rows[f"{subject.name}, {method}"] = [*original[1:], *keys]
        for method in ORDERS:
            keys = [Key(subject.name, method, bits, texts[0]) for bits in BITS]
            order_rows[f"{subject.name}, {method}"] = [Key(subject.name, method, None, TRACE), *keys]
    both = [f"{bits}, {task}" for bits in ("original", *at_bits) for task in tasks]
    return {
        1: _by_method(f"Table 1: perplexity of {main.name}", main, texts),
        2: Table(title=f"Table 2: {texts[0]} perplexity", rows=sized_rows, columns=["original", *at_bits]),
        3: _by_method(f"Table 3: accuracy of {main.name}, %", main, tasks),
        4: Table(title="Table 4: accuracy, %", rows=task_rows, columns=both),
        5: Table(
            title=f"Table 5: tr(D) relative to the natural order, and {texts[0]} perplexity of GPTQ-Huffman by order",
            rows=order_rows, columns=["tr(D)", *at_bits],
        ),
    }  # fmt: skip


def _by_method(title: str, subject: Subject, measures: Sequence[str]) -> Table:
    """Return a table with a row for each method, and a column for each number of bits and measure."""
    columns = [f"{bits:g}, {measure}" for bits in BITS for measure in measures]
    rows: dict[str, list[Key | None]] = {
        method: [Key(subject.name, method, bits, measure) for bits in BITS for measure in measures]
        for method in METHODS
    }
    original = [Key(subject.name, ORIGINAL_METHOD, None, measure) for measure in measures]
    blanks: list[Key | None] = [None] * (len(columns) - len(original))
    return Table(title=title, rows={ORIGINAL_METHOD: [*original, *blanks], **rows}, columns=columns)


def report(tables: Sequence[Table], subjects: Sequence[Subject], cells: Cells, *, offline: bool, settings: str) -> str:
    """Return the page: tables, settings that differ, and notes of methods."""
    papers_model = {subject.name: subject.paper for subject in subjects}
    paper = published("chen")
    parts = ["## Tables of Chen et al. (2507.18553)", "Ours (the paper's, ratio); `-` was not asked for."]
    if offline:
        places = ", ".join(f"{subject.name} for {subject.paper}" for subject in subjects)
        parts.append(f"**Other models take the place of Qwen3: {places}. No ratio to the paper means anything here.**")
    parts += [markdown(table, cells.get, paper, papers_model) for table in tables]
    keys = {key for table in tables for key in table.keys}
    notes = {f"{cell.key.model}, {cell.key.method}: {cell.note}" for cell in cells if cell.key in keys and cell.note}
    return "\n\n".join([*parts, *([] if offline else [settings]), *sorted(notes)]) + "\n"


def main() -> None:
    """Measure what is missing, then write tables and figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, required=True, help="folder for cells, tables and figure")
    parser.add_argument(
        "--models", nargs="+", help="hub ids or folders (not with --offline); default: Qwen3 0.6B to 14B"
    )
    parser.add_argument("--tables", type=int, nargs="+", default=NUMBERS, choices=NUMBERS)
    parser.add_argument("--windows", type=int, help="windows of each text (default: all)")
    parser.add_argument("--samples", type=int, default=64, help="windows of calibration with --models and --assets")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--offline", action="store_true", help="run on the models in this repository")
    parser.add_argument("--assets", type=Path, help="folder of texts, and for --offline of more models")
    arguments = parser.parse_args()
    local = arguments.assets is not None and arguments.models is not None
    if arguments.assets and not arguments.offline and not local:
        parser.error(
            "--assets needs folders of models, --models, or --offline: then its models take the place of Qwen3."
        )
    if local and not set(arguments.tables) <= set(PERPLEXITIES):
        parser.error("Tables 3 and 4 are of tasks, whose data come from the hub. Leave them out: --tables 1 2 5.")
    if arguments.offline and (arguments.models or arguments.windows):
        parser.error(
            "--models and --windows are not for --offline, whose models and texts are those of the repository."
        )
    figure = arguments.keep / "figure2.svg"
    arguments.keep.mkdir(parents=True, exist_ok=True)
    check_plot(figure)
    if arguments.offline:
        subjects = offline_subjects(arguments.keep, arguments.assets, list(TEXTS), TASKS)
    elif local:
        models = [Path(model) for model in arguments.models]
        subjects = local_subjects(
            arguments.keep, models, arguments.assets, list(TEXTS), arguments.samples, arguments.windows
        )
    else:
        subjects = online_subjects(arguments.models or PAPER_MODELS, arguments.windows)
    tables = [table for number, table in tables_of(subjects).items() if number in arguments.tables]
    cells = Cells(arguments.keep, inputs_of(subjects))
    keys = [key for table in tables for key in table.keys]
    run(subjects, keys, cells, arguments.keep, arguments.device)
    page = report(tables, subjects, cells, offline=arguments.offline, settings=LOCAL if local else SETTINGS)
    (arguments.keep / "tables.md").write_text(page)
    print(page)
    if 2 in arguments.tables and any(cell.finished and cell.key.method in SIZED for cell in cells):
        draw_sizes((cell for cell in cells if cell.key.method in (ORIGINAL_METHOD, *SIZED)), next(iter(TEXTS)), figure)
    failed = len(cells.missing(keys))
    if failed:
        print(f"{failed} of {len(set(keys))} figures are missing; the tables say why.", file=sys.stderr)
        raise SystemExit(SOME_FAILED)


if __name__ == "__main__":
    try:
        main()
    except NearplaneError as error:
        raise SystemExit(str(error)) from None
