"""The command line: parse, call, print. No logic; every command imports what it needs when it runs."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from nearplane.cli.commands import COMMANDS, Switch
from nearplane.cli.flags import (
    EVERYDAY,
    LAYERS,
    LLAMA,
    RUNNING,
    SOLVING,
    BlockFlags,
    CalibrationFlags,
    GridFlags,
    RateFlags,
    layer_schemes,
    refuse_mixed,
    scheme_from,
)
from nearplane.cli.printing import as_json, quiet, say, table
from nearplane.cli.terminal import attended, bar, say_stopped
from nearplane.errors import NearplaneError
from nearplane.recipe.recipe import Calibration, Recipe, Tune, Way
from nearplane.recipe.scheme import Allocation, Format
from nearplane.recipe.sizes import size_text, three_places
from nearplane.system.paths import check_named

app = App(
    name="nearplane",
    version=version("nearplane"),
    help="Shrink language models: GPTQ as a closest-vector problem on a lattice.",
    help_format="plaintext",
    suppress_keyboard_interrupt=False,  # main() says what a command that is stopped leaves on disk
)
Flat = Parameter(name="*")
Several = Parameter(consume_multiple=True, negative="")
app.register_install_completion_command(help="Let the shell complete commands and options with Tab.")


@app.command
def quantize(
    model: str,
    out: Path,
    *,
    scheme: Annotated[GridFlags | BlockFlags | RateFlags | None, Flat] = None,  # type: ignore[valid-type]
    tokens: Annotated[CalibrationFlags | None, Flat] = None,  # type: ignore[valid-type]
    format: Annotated[Format | None, Parameter(group=EVERYDAY)] = None,
    allocate: Annotated[Allocation | None, Parameter(group=LAYERS)] = None,
    layer: Annotated[tuple[str, ...], Parameter(group=LAYERS, negative="")] = (),
    ignore: Annotated[tuple[str, ...], Parameter(group=LAYERS, consume_multiple=True, negative="")] = (),
    max_loss: Annotated[float | None, Parameter(group=LAYERS)] = None,
    tune: Annotated[Tune, Parameter(group=SOLVING)] = "none",
    pre: Annotated[str | None, Parameter(group=LLAMA)] = None,
    device: Annotated[str, Parameter(group=RUNNING)] = "auto",
    overwrite: Annotated[bool, Parameter(group=RUNNING, negative="")] = False,
    memory: Annotated[str | None, Parameter(group=RUNNING)] = None,
    trust_remote_code: Annotated[bool, Parameter(group=RUNNING, negative="")] = False,
    json: Annotated[bool, Parameter(group=RUNNING, negative="")] = False,
) -> None:
    """Quantize MODEL into the folder OUT.

    Args:
        model: A local folder of safetensors, or a hub id.
        out: Folder to write.
        format: Of the checkpoint: compressed-tensors (vLLM, transformers; the default), gptq or gptq_v2 (most GPTQ readers), or
            nearplane (entropy-coded; the default with --rate or --size), or gguf (llama.cpp; the default with --grid).
        layer: Other options for some layers, as 'down_proj=bits:4' or 'down_proj=grid:int8-g32': behind the regular
            expression what differs there. May be repeated; the first that matches counts. A --rate is then that of the
            other layers.
        allocate: The same bits for every layer (uniform), or more where the network needs them (slope). Default: slope with --rate,
            --size or a fraction of bits, else uniform.
        max_loss: Relative loss that no layer may exceed. Entropy-coded layers get more bits; layers that exceed it all the same,
            or on fixed grids, are named and the command ends with code 2.
        tune: Train steps, norms and codes (at 2 and 3 bits, and entropy-coded) on the divergence of the network's predictions
            from the original's, once all is solved (network); takes five to ten times as long. See nearplane tune.
        pre: Of a GGUF: name of the tokenizer's pre-tokenizer in llama.cpp, where its structure is not known.
        ignore: Regular expressions, one or several; layers whose full name one of them is found in stay as they are.
        device: Where to compute: auto (the GPU where there is one), cpu, cuda, or one of several GPUs as cuda:1.
        overwrite: Replace what is in OUT, once the new checkpoint is whole; until then both need room on disk.
        memory: The most that the run may take, as 12GB: forwards are then repeated instead of paused, hidden states lie in a file,
            and fewer windows pass at a time, in this order; or it is refused before work begins, with a limit that works.
            Not together with --tune network. Default: as is fastest.
        trust_remote_code: Run model code that comes with the checkpoint.
        json: Print the record as JSON instead of a summary.
    """
    check_named(model, texts=(None if tokens is None else tokens.calibration,))
    from nearplane import quantize as run

    quiet()
    recipe = Recipe(
        scheme=scheme_from(scheme, format=format, allocate=allocate),
        layers=layer_schemes(layer, scheme, format=format),
        format=format,
        allocate=allocate,
        ignore=ignore,
        calibration=Calibration(**({} if tokens is None else asdict(tokens))),
        max_loss=max_loss,
        tune=tune,
        pre=pre,
    )
    record = run(
        model,
        out,
        recipe,
        device=device,
        overwrite=overwrite,
        trust_remote_code=trust_remote_code,
        progress=bar,
        memory=memory,
    )
    from nearplane.record.summary import summary

    if json:
        print(record.to_json())
    else:
        say(summary(record, out))
    if record.exceeding:
        sys.exit(2)


@app.command
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


@app.command
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


@app.command
def geometry(out: Path) -> None:
    """Draw the geometry of quantizing two weights, as SVG and PNG, computed as it is drawn.

    Args:
        out: Folder for the pictures.
    """
    from nearplane.theory.pictures import draw_geometry

    for path in draw_geometry(out):
        print(path)


@app.command
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


for _command in COMMANDS:
    app.command(_command)


def main() -> None:
    """Run the command line; an error that nearplane raises on purpose, or a signal, is one sentence, never a traceback."""
    # before torch: threads that spin while they wait crawl on a busy machine; oneDNN keeps memory for every shape it has multiplied
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    try:
        with attended():
            if sys.argv[1:2] == ["quantize"]:
                refuse_mixed(sys.argv[2:])
            app()
    except NearplaneError as error:
        print(f"nearplane: {error}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:  # `nearplane inspect out | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except KeyboardInterrupt as stopped:
        sys.exit(say_stopped(stopped))
