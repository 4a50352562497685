"""The commands on finished checkpoints: inspect, verify, report, export, tune, generate. Parse, call, print; no logic."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from nearplane.cli.printing import as_json, quiet, say, shown, table
from nearplane.cli.terminal import bar
from nearplane.recipe.sizes import size_text
from nearplane.system.paths import check_named

Dense = Literal["bfloat16", "float16", "float32"]
Switch = Annotated[bool, Parameter(negative="")]


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


COMMANDS = (inspect, verify, report, export, tune, generate)
