"""All commands but quantize. Parse, call, print; no logic: every command imports what it needs when it runs."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from nearplane.cli.printing import as_json, quiet, say, shown, table
from nearplane.cli.terminal import bar
from nearplane.recipe.recipe import Calibration, Way
from nearplane.recipe.sizes import size_text, three_places
from nearplane.system.paths import check_named

Dense = Literal["bfloat16", "float16", "float32"]
Switch = Annotated[bool, Parameter(negative="")]
Flat = Parameter(name="*")
Several = Parameter(consume_multiple=True, negative="")


def evaluate(
    model: str,
    *,
    text: Path,
    seqlen: int | None = None,
    samples: int | None = None,
    against: str | None = None,
    device: str = "auto",
    trust_remote_code: Switch = False,
    json: Switch = False,
) -> None:
    """Measure the perplexity of MODEL on a text; of an encoder, how alike its embeddings are to the original's.

    The text is tokenized whole without special tokens and cut into windows that do not overlap; the first token of a window
    is not scored.

    Args:
        model: A folder or hub id: any transformers checkpoint, or what nearplane wrote.
        text: A .txt or .jsonl file or a folder of them.
        seqlen: Tokens of a window. Default: 2048, or the model's positions if fewer.
        samples: Windows, the first ones of the text. Default: all.
        against: The original: adds KL(original || model) and how often both predict the same token.
        device: Where to compute: auto (the GPU where there is one), cpu, cuda, or one of several GPUs as cuda:1.
        trust_remote_code: Run model code that comes with the checkpoint.
        json: Print JSON.
    """
    check_named(model, against, texts=(text,))
    from nearplane import evaluate as run

    quiet()
    result = run(
        model,
        text,
        seqlen=seqlen,
        samples=samples,
        against=against,
        device=device,
        trust_remote_code=trust_remote_code,
        progress=bar,
    )
    if json:
        print(as_json(asdict(result)))
        return
    if result.cosine is not None:
        print(
            f"cosine of mean-pooled embeddings to the original's: mean {result.cosine:.5f}, least {result.worst_cosine:.5f} "
            f"({result.windows} windows of {result.seqlen}); no vocabulary head, so no perplexity"
        )
        return
    print(
        f"perplexity {result.perplexity:.4f} ({result.tokens:,} tokens scored in {result.windows} windows of {result.seqlen})"
    )
    if result.kl is not None and result.agreement is not None and result.original is not None:
        print(
            f"the original's perplexity {result.original:.4f}, KL to it {result.kl:.5f} nats per token, same top token "
            f"{100 * result.agreement:.2f} %"
        )


def compare(
    models: list[str],
    /,
    *,
    bits: Annotated[list[float], Several],
    text: Path,
    tokens: Annotated[Calibration | None, Flat] = None,
    methods: Annotated[list[Way] | None, Several] = None,
    eval_samples: int | None = None,
    eval_seqlen: int | None = None,
    plot: Path | None = None,
    keep: Path | None = None,
    device: str = "auto",
    trust_remote_code: Switch = False,
    json: Switch = False,
) -> None:
    """Quantize MODELS by several methods to the same bits and measure what is left of each: a table, and a figure.

    rtn-mse, gptq-mse: fixed grids of b + 16 / group bits, so that 4.125 is 4 bits in groups of 128. rtn-huffman, gptq-huffman: one
    step a matrix and a Huffman code. nearplane-grid, nearplane: this package's defaults on the same grids, and at a rate.

    Args:
        models: Local folders of safetensors, or hub ids.
        bits: Per weight, for instance --bits 4.125 3.125 2.125.
        text: To measure on: a .txt or .jsonl file or a folder of them.
        methods: Those to compare. Default: all.
        eval_samples: Windows of the text, its first ones. Default: all.
        eval_seqlen: Tokens of a window of the text. Default: as in calibration.
        plot: Figure to draw, .svg, .png or .pdf: perplexity against bits, or against gigabytes where there are several models.
        keep: Folder for the checkpoints and the rows; the same command goes on in it where it was stopped. Default: each is deleted
            once it is measured.
        device: Where to compute: auto (the GPU where there is one), cpu, cuda, or one of several GPUs as cuda:1.
        trust_remote_code: Run model code that comes with the checkpoints.
        json: Print JSON.
    """
    check_named(*models, texts=(text, None if tokens is None else tokens.calibration))
    from nearplane.verbs.compare import WAYS
    from nearplane.verbs.compare import compare as run
    from nearplane.verbs.compare_figure import check_plot, draw

    quiet()
    if plot is not None:
        check_plot(plot)
    rows = []
    try:
        for row in run(
            models,
            bits,
            text=text,
            calibration=tokens,
            methods=methods or WAYS,
            samples=eval_samples,
            seqlen=eval_seqlen,
            keep=keep,
            device=device,
            trust_remote_code=trust_remote_code,
            progress=bar,
        ):
            rows.append(row)
    finally:  # what is known by now, whatever ended it
        if rows and not json:
            columns = (
                "model",
                "method",
                "asked",
                "bits/weight",
                "weight files",
                "perplexity",
                "KL to original",
                "time",
                "note",
            )
            table(
                columns,
                (
                    (
                        Path(row.model).name,
                        row.method,
                        "-" if row.asked is None else f"{row.asked:g}",
                        three_places(row.rate),
                        "-" if row.bytes is None else size_text(row.bytes),
                        "-" if row.perplexity is None else f"{row.perplexity:#.4g}",
                        three_places(row.kl),
                        f"{row.seconds:.1f} s",
                        row.note,
                    )
                    for row in rows
                ),
            )
    if json:
        print(as_json([asdict(row) for row in rows]))
    if plot is not None:
        draw(rows, plot)


def geometry(out: Path) -> None:
    """Draw the geometry of quantizing two weights, as SVG and PNG, computed as it is drawn.

    Args:
        out: Folder for the pictures.
    """
    from nearplane.theory.pictures import draw_geometry

    for path in draw_geometry(out):
        print(path)


def demo(out: Path = Path("demo-out"), *, json: Switch = False) -> None:
    """Quantize the small model that ships with nearplane to 4, 3 and 2 bits, on grids and entropy-coded, and measure what is left.

    Args:
        out: Folder for the checkpoints; replaced if it is there.
        json: Print JSON.
    """
    from nearplane.demo.demonstration import run

    quiet()
    rows = list(run(out, bar))
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
    first = next(row for row in rows if row.folder and row.solver != "round-to-nearest")
    print(f"checkpoints: {out}. Serve one on a machine with vLLM: vllm serve {first.folder}")


def inspect(out: Path, *, json: Switch = False) -> None:
    """Show layers, grids, losses and sizes of a checkpoint that nearplane wrote, as its record says; weights are not read.

    Args:
        out: Its folder.
        json: Print the record as JSON.
    """
    from nearplane.formats.find_record import found_record
    from nearplane.record.summary import layer_table

    record = found_record(out)
    if json:
        print(record.to_json())
        return
    before, columns, rows, after = layer_table(record)
    say(before)
    table(columns, rows)
    say(after)


def verify(
    out: Path,
    *,
    against: str | None = None,
    calibration: Path | None = None,
    tolerance: float = 1e-6,
    device: str = "auto",
    trust_remote_code: Switch = False,
    json: Switch = False,
) -> None:
    """Check a checkpoint against its record: hashes, sizes, ranges; with the original and the text every loss is measured again.

    Prints one line for each layer or file that does not hold, and then ends with code 1.

    Args:
        out: Folder of a checkpoint that nearplane wrote.
        against: The original: a local folder, or a hub id.
        calibration: The text that it was calibrated on. Default: where the recipe says.
        tolerance: Relative, of figures measured again; the machine that wrote them repeats them exactly.
        device: Where to compute: auto (the GPU where there is one), cpu, cuda, or one of several GPUs as cuda:1.
        trust_remote_code: Run model code that comes with the original.
        json: Print JSON.
    """
    check_named(against, texts=(calibration,))
    from nearplane.verbs.verify import verify as run

    if against is not None:
        quiet()
    found = run(
        out,
        against=against,
        calibration=calibration,
        tolerance=tolerance,
        device=device,
        trust_remote_code=trust_remote_code,
        progress=bar,
    )
    if json:
        print(
            as_json(
                {"faults": [asdict(fault) for fault in found.faults], "asked": found.asked, "measured": found.measured}
            )
        )
    else:
        for fault in found.faults:
            print(f"{fault.where}: {fault.what}")
        print(found.summary())
    if found.faults:
        sys.exit(1)


def report(out: Path, page: Path | None = None, /, *, overwrite: Switch = False) -> None:
    """Write an HTML page of figures and tables from the record of a checkpoint; it needs no network and opens from disk.

    Args:
        out: Folder of a checkpoint that nearplane wrote.
        page: File to write. Default: beside the folder, named after it; a report that is there is replaced.
        overwrite: Replace a file that is there, whatever it is.
    """
    from nearplane.verbs.report import write_report

    print(write_report(out, page, overwrite=overwrite))


def export(
    out: Path,
    folder: Path,
    *,
    format: str = "safetensors",
    dtype: Dense = "bfloat16",
    trust_remote_code: Switch = False,
) -> None:
    """Write the checkpoint in OUT with every weight decoded into FOLDER, for any program that reads safetensors.

    Args:
        out: Folder of a checkpoint that nearplane wrote.
        folder: New or empty folder.
        format: Of the files: safetensors. Other formats are written by quantize.
        dtype: Of the weights.
        trust_remote_code: Run model code that comes with the checkpoint, and copy it.
    """
    from nearplane import export as run

    quiet()
    size = run(out, folder, format=format, dtype=dtype, trust_remote_code=trust_remote_code)
    print(f"weights decoded to {dtype}, {size_text(size)}: {folder}")


def tune(
    out: Path,
    new: Path,
    *,
    against: str,
    calibration: Path | None = None,
    samples: int | None = None,
    seqlen: int | None = None,
    steps: int | None = None,
    device: str = "auto",
    overwrite: Switch = False,
    trust_remote_code: Switch = False,
    json: Switch = False,
) -> None:
    """Train steps, norms and codes of the checkpoint in OUT on its divergence from the original; write NEW.

    Same format, same widths, and entropy-coded layers take no more bytes than were asked for: nothing changes for programs that
    load it. Codes are trained at 2 and 3 bits and where they are entropy-coded. A fifth of the text's windows is held out: the
    state that is best on them is written, or OUT as it is if none is better. Layers that then lose more than the --max-loss that
    OUT was quantized with are named, and the command ends with code 2.

    Args:
        out: Folder of a checkpoint that nearplane quantize wrote with --bits, --grid or --rate; not with --size,
            --include-embeddings or --include-head.
        new: Folder to write.
        against: The original: a local folder, or a hub id.
        calibration: The text that OUT was calibrated on; tuning looks at more of it. Default: where the recipe says.
        samples: Windows of the text to take. Default: five times those that OUT was calibrated on.
        seqlen: Tokens of a window. Default: as OUT was calibrated on.
        steps: Of the optimizer. Default: every window is trained on once; those of a text with fewer are seen several times.
        device: Where to compute: auto (the GPU where there is one), cpu, cuda, or one of several GPUs as cuda:1.
        overwrite: Replace what is in NEW, once the new checkpoint is whole.
        trust_remote_code: Run model code that comes with the original.
        json: Print the record as JSON instead of a summary.
    """
    check_named(against, texts=(calibration,))
    from nearplane import tune as run
    from nearplane.record.summary import tuned

    quiet()
    record = run(
        out,
        new,
        against=against,
        calibration=calibration,
        samples=samples,
        seqlen=seqlen,
        steps=steps,
        device=device,
        overwrite=overwrite,
        trust_remote_code=trust_remote_code,
        progress=bar,
    )
    if json:
        print(record.to_json())
    else:
        say(tuned(record, new))
    if record.exceeding:
        sys.exit(2)


def generate(
    model: str,
    prompt: str,
    *,
    compare: str | None = None,
    tokens: int = 200,
    temperature: float = 0.0,
    seed: int = 0,
    device: str = "auto",
    trust_remote_code: Switch = False,
) -> None:
    """Let MODEL go on with PROMPT, and print what it says as it comes.

    A GGUF runs in llama.cpp where llama-cpp-python is installed; everything else, and a GGUF without it, in transformers.

    Args:
        model: A folder that nearplane wrote, in any format, or a folder or hub id that transformers loads.
        prompt: Text to go on from.
        compare: The original: what it says is printed below.
        tokens: To add at most.
        temperature: Of the draws; 0 takes the likeliest token each time.
        seed: Of the draws.
        device: Where to compute: auto (the GPU where there is one), cpu, cuda, or one of several GPUs as cuda:1.
        trust_remote_code: Run model code that comes with the checkpoint.
    """
    from nearplane import generate as run

    quiet()
    for name in [model] if compare is None else [model, compare]:
        if compare is not None:
            print(f"── {name}")
        print(prompt, end="", flush=True)
        run(
            name,
            prompt,
            tokens=tokens,
            temperature=temperature,
            seed=seed,
            say=lambda piece: print("".join(map(shown, piece)), end="", flush=True),
            device=device,
            trust_remote_code=trust_remote_code,
        )
        print()


COMMANDS = (evaluate, compare, geometry, demo, inspect, verify, report, export, tune, generate)
