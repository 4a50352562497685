"""nearplane quantize on the command line: flags become a recipe, the record becomes a summary."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

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
    scheme_from,
)
from nearplane.cli.printing import quiet, say
from nearplane.cli.terminal import bar
from nearplane.recipe.recipe import Calibration, Recipe, Tune
from nearplane.recipe.scheme import Allocation, Format
from nearplane.system.paths import check_named

Flat = Parameter(name="*")


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
            nearplane (entropy-coded; the default with --rate or --size), or gguf (llama.cpp; the default with --grid q4_k_m).
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
