"""The list of all commands except quantize, and most of them: each parses its flags, calls a verb and prints the result."""

from __future__ import annotations

import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, get_args

from cyclopts import Parameter

from nearplane.calibration.text_files import check_named
from nearplane.cli.evaluate_command import evaluate
from nearplane.cli.flags import DeviceFlag
from nearplane.cli.printing import as_json, comparison, first_difference, log_speed, opening, print_piece, say, table
from nearplane.cli.suggest_command import suggest
from nearplane.cli.terminal import bar, one_line_a_step
from nearplane.demo.demo_recipes import STEPS, check_folder
from nearplane.errors import NearplaneError
from nearplane.recipe.recipe import Calibration, Way
from nearplane.system.arguments import ComputeDtype
from nearplane.system.sizes import size_text
from nearplane.verbs.early_checks import (
    check_compare,
    check_export,
    check_generate,
    check_html,
    check_plot,
    check_tune,
    check_verify,
)

Dense = Literal["bfloat16", "float16", "float32"]
Switch = Annotated[bool, Parameter(negative="")]
Flat = Parameter(name="*")
Several = Parameter(consume_multiple=True, negative="")


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
    html: Path | None = None,
    prompt: str | None = None,
    keep: Path | None = None,
    device: DeviceFlag = "auto",
    trust_remote_code: Switch = False,
    json: Switch = False,
) -> None:
    """Quantize MODELS by several methods to the same bits, and print a table of their quality.

    rtn-mse, gptq-mse: fixed grids of b + 16 / group bits per weight; 4.125 means 4 bits in groups of 128.
    rtn-huffman, gptq-huffman: one step per matrix and a Huffman code.
    nearplane-grid, nearplane: the defaults of nearplane, on the same fixed grids and entropy-coded.

    Args:
        models: Local folders of safetensors, or hub ids.
        bits: Bits per weight to compare, for example --bits 4.125 3.125 2.125.
        text: Text to measure on: a .txt or .jsonl file, a folder of them, wikitext2 or c4.
        methods: Methods to compare. Default: all.
        eval_samples: Number of windows to measure on, from the beginning of the text. Default: all.
        eval_seqlen: Tokens per window to measure on. Default: as in calibration.
        plot: Figure to draw (.svg, .png or .pdf): perplexity against bits, or against file size for several models.
        html: Page to write, with the table, a figure, and the texts of --prompt side by side; it needs no other file.
        prompt: Text that the original and every checkpoint continue on the page of --html, or message that they answer.
        keep: Folder that keeps the checkpoints and rows. The same command resumes a stopped comparison in it.
            Default: each checkpoint is deleted once it is measured.
        device: Device to compute on: auto (the GPU if there is one), cpu, cuda, or one of several GPUs as cuda:1.
        trust_remote_code: Run model code that comes with the checkpoints.
        json: Print the result as JSON.
    """
    check_compare(models, bits, methods or get_args(Way))
    check_named(*models, text=text, calibration=None if tokens is None else tokens.calibration)
    if plot is not None:
        check_plot(plot)
    check_html(html, prompt)
    opening(*models)
    from nearplane.verbs.compare import compare as run
    from nearplane.verbs.compare_figure import draw
    from nearplane.verbs.compare_page import write_page
    from nearplane.verbs.compare_recipes import WAYS

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
            prompt=prompt,
            device=device,
            trust_remote_code=trust_remote_code,
            progress=bar,
        ):
            rows.append(row)
    finally:  # prints the rows so far even after an error
        if rows and json:
            print(as_json([asdict(row) for row in rows]))
        elif rows:
            comparison(rows)
    if html is not None:
        write_page(rows, html, prompt=prompt)
    if plot is not None:
        draw(rows, plot)
    if failed := sum(row.failed for row in rows):
        raise NearplaneError(f"{failed} of {len(rows)} rows could not be measured; their notes say why.")


def geometry(out: Path) -> None:
    """Draw pictures of the geometry of quantization with two weights, as SVG and PNG files.

    Args:
        out: Folder for the pictures; older ones in it are replaced, and a folder with other files is refused.
    """
    from nearplane.theory.pictures import draw_geometry

    for path in draw_geometry(out):
        print(path)


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


def inspect(out: Path, *, json: Switch = False) -> None:
    """Show layers, grids, losses and sizes of a checkpoint from its run record, without reading weights.

    Args:
        out: Folder of a checkpoint that nearplane wrote, or a .gguf file.
            For a .gguf file of another program, its tensors are shown.
        json: Print the run record as JSON.
    """
    from nearplane.formats.find_record import find_record, foreign_tensors
    from nearplane.record.summary import layer_table

    if (tensors := foreign_tensors(out)) is not None:
        names = ("tensor", "type", "shape", "bytes")
        print(as_json([dict(zip(names, row, strict=True)) for row in tensors])) if json else table(names, tensors)
        return
    record = find_record(out)
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
    tolerance: float | None = None,
    device: DeviceFlag = "auto",
    trust_remote_code: Switch = False,
    json: Switch = False,
) -> None:
    """Check the files of a checkpoint against its run record; with --against, also measure every loss again.

    Prints one line for each fault in a layer or file, and then ends with exit code 3.

    Args:
        out: Folder of a checkpoint that nearplane wrote.
        against: The original model, as a local folder or hub id.
        calibration: The calibration text of the checkpoint. Default: the text named in its recipe.
        tolerance: Largest relative deviation of a figure that is measured again; 0 suits the machine that wrote OUT.
            Default: 1e-6, and 0.01 on another device than that of the run.
        device: Device to compute on: auto (one like that of the run, if there is one), cpu, cuda, or a GPU as cuda:1.
        trust_remote_code: Run model code that comes with the original model.
        json: Print the result as JSON.
    """
    check_verify(out, against=against, calibration=calibration, tolerance=tolerance)
    opening(out)
    from nearplane.verbs.verify import verify as run

    verified = run(
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
                {
                    "faults": [asdict(fault) for fault in verified.faults],
                    "asked": verified.asked,
                    "measured": verified.measured,
                }
            )
        )
    else:
        for fault in verified.faults:
            print(f"{fault.where}: {fault.what}")
        print(verified.summary())
    if verified.faults:
        sys.exit(3)


def report(out: Path, page: Path | None = None, /, *, overwrite: Switch = False) -> None:
    """Write an HTML page with figures and tables from the run record of a checkpoint.

    The page opens from disk and needs no network.

    Args:
        out: Folder of a checkpoint that nearplane wrote.
        page: File to write. Default: OUT-report.html next to the folder; an old report there is replaced.
        overwrite: Replace any existing file.
    """
    from nearplane.verbs.report import write_report

    print(write_report(out, page, overwrite=overwrite))


def card(out: Path, *, evaluation: Annotated[list[Path] | None, Several] = None, overwrite: Switch = False) -> None:
    """Write the model card of the checkpoint in OUT again, with the results of evaluations.

    A card that was changed since nearplane wrote it is not replaced. The license, languages, datasets and tags in its
    metadata are kept.

    Args:
        out: Folder of a checkpoint that nearplane wrote.
        evaluation: Files with what nearplane evaluate OUT --json printed, for tables in the card.
        overwrite: Replace any existing card.
    """
    from nearplane.verbs.card import card as run

    print(run(out, evaluation=evaluation or (), overwrite=overwrite))


def export(
    out: Path,
    folder: Path,
    *,
    format: str = "safetensors",
    dtype: Dense | None = None,
    trust_remote_code: Switch = False,
) -> None:
    """Write the checkpoint in OUT to FOLDER in another format: all weights decoded, or with the same integers.

    Integers and steps are never rounded. If the format cannot hold a layer exactly, the command names the layer and writes
    nothing. What is written is read back and compared.

    Args:
        out: Folder of a checkpoint that nearplane, GPTQModel or llm-compressor wrote.
        folder: New or empty folder to write.
        format: safetensors decodes all weights, for any program. Others hold the same integers: compressed-tensors and gptq if
            symmetric, gptq_v2, awq at 4 bits, gguf at 4, 5 and 8 symmetric bits in groups that are multiples of 32, and at 4
            asymmetric bits in multiples of 256.
        dtype: Dtype of all weights, only with safetensors. Default: bfloat16 for decoded weights, and every other tensor keeps
            its own.
        trust_remote_code: Run model code that comes with the checkpoint, and copy it.
    """
    check_export(out, folder, format, dtype)
    opening(out)
    from nearplane import export as run

    size = run(out, folder, format=format, dtype=dtype, trust_remote_code=trust_remote_code)
    how = f"decoded to {dtype or 'bfloat16'}" if format == "safetensors" else f"moved to {format} unchanged"
    print(f"weights {how}, {size_text(size)}: {folder}")


def tune(
    out: Path,
    new: Path,
    *,
    against: str,
    calibration: Path | None = None,
    samples: int | None = None,
    seqlen: int | None = None,
    steps: int | None = None,
    device: DeviceFlag = "auto",
    compute_dtype: ComputeDtype = "auto",
    overwrite: Switch = False,
    trust_remote_code: Switch = False,
    json: Switch = False,
) -> None:
    """Train steps, norms and codes of the checkpoint in OUT against the predictions of the original, and write NEW.

    NEW has the format and the widths of OUT, and entropy-coded layers stay within their requested bytes.
    Codes are trained if they have 2 or 3 bits, are nvfp4 or mxfp4, or are entropy-coded.
    A fifth of the text's windows is held out. The state that is best on them is written, which may be that of OUT.
    The command ends with exit code 4 if a layer exceeds the --max-loss of OUT.

    Args:
        out: Folder of a checkpoint that nearplane quantize wrote with --bits, --grid or --rate.
            Checkpoints with --size, --include-embeddings or --include-head are refused.
        new: Folder to write.
        against: The original model, as a local folder or hub id.
        calibration: The calibration text of OUT, of which tuning uses more. Default: the text named in its recipe.
        samples: Number of windows of the text. Default: five times the default of quantize, however many OUT had.
        seqlen: Tokens per window. Default: as in calibration.
        steps: Number of optimizer steps. Default: each training window is used once, or several times in a short text.
        device: Device to compute on: auto (the GPU if there is one), cpu, cuda, or one of several GPUs as cuda:1.
        compute_dtype: Dtype in which losses are measured after the training, as in quantize. Training is in float32.
        overwrite: Replace an existing checkpoint in NEW, once the new one is complete.
        trust_remote_code: Run model code that comes with the original model.
        json: Print the run record as JSON instead of a summary.
    """
    counts = {"samples": samples, "seqlen": seqlen, "steps": steps}
    check_tune(out, new, against=against, calibration=calibration, overwrite=overwrite, **counts)
    opening(out, against)
    from nearplane import tune as run
    from nearplane.record.summary import tuned

    record = run(
        out,
        new,
        against=against,
        calibration=calibration,
        **counts,
        device=device,
        compute_dtype=compute_dtype,
        overwrite=overwrite,
        trust_remote_code=trust_remote_code,
        progress=bar,
    )
    if json:
        print(record.to_json())
    else:
        say(tuned(record, new))
    if record.exceeding:
        sys.exit(4)


def generate(
    model: str,
    prompt: str,
    *,
    compare: str | None = None,
    tokens: int = 200,
    temperature: float = 0.0,
    seed: int = 0,
    ignore_chat_template: Switch = False,
    head: Literal["int8"] | None = None,
    device: DeviceFlag = "auto",
    trust_remote_code: Switch = False,
) -> None:
    """Continue the text PROMPT with MODEL, or let a chat model answer it, and print the new text piece by piece.

    If the tokenizer of MODEL has a chat template, PROMPT is the message of a user; else it is continued as it is.
    Afterwards the error stream says the time to the first token, the tokens per second, and the memory of the weights.
    A GGUF runs in llama.cpp if llama-cpp-python is installed, else in transformers, as all other models do.

    Args:
        model: Folder that nearplane wrote, in any format, a .gguf file, or folder or hub id that transformers loads.
        prompt: Text to continue, or message to answer.
        compare: Another model, for example the original, whose text is printed below, and where the two first differ.
            It is loaded once MODEL has left the memory.
        tokens: Largest number of new tokens.
        temperature: Sampling temperature; 0 takes the most likely token each time.
        seed: Random seed of the sampling.
        ignore_chat_template: Continue PROMPT as it is, for base models whose tokenizer has a chat template.
        head: int8 rounds the layer that predicts tokens to 8 bits on the CPU, which makes large vocabularies faster.
        device: Device to compute on: auto (the GPU if there is one), cpu, cuda, or one of several GPUs as cuda:1.
        trust_remote_code: Run model code that comes with the checkpoint.
    """
    check_generate(tokens, temperature, seed)
    check_named(model, compare)
    opening(model)
    from nearplane import generate as run
    from nearplane.verbs.generate import say_other_tokens

    if compare is not None:
        say_other_tokens(model, compare, prompt, trust_remote_code=trust_remote_code)
    texts = []
    for name in [model] if compare is None else [model, compare]:
        before = prompt if compare is None else f"── {name}\n{prompt}"
        text = run(
            name,
            prompt,
            tokens=tokens,
            temperature=temperature,
            seed=seed,
            ignore_chat_template=ignore_chat_template,
            head=head if name == model else None,
            say=partial(print_piece, iter([before])),
            device=device,
            trust_remote_code=trust_remote_code,
        )
        print(flush=True)
        log_speed(text)
        texts.append(text)
    if compare is not None:
        print(first_difference(*texts))


COMMANDS = (evaluate, compare, geometry, demo, inspect, verify, report, card, export, tune, generate, suggest)
