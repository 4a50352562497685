"""The command `nearplane quantize`: flags become a recipe, and the run record is printed as a summary."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from nearplane.calibration.text_files import check_named
from nearplane.cli.flags import (
    EVERYDAY_GROUP,
    GGUF_GROUP,
    LAYER_GROUP,
    RUN_GROUP,
    SOLVER_GROUP,
    BlockFlags,
    CalibrationFlags,
    DeviceFlag,
    GridFlags,
    RateFlags,
    layer_schemes,
    scheme_from,
)
from nearplane.cli.printing import opening, say
from nearplane.cli.terminal import bar
from nearplane.recipe.file_formats import Format
from nearplane.recipe.recipe import Calibration, Recipe, Tune
from nearplane.recipe.scheme import Activations, Allocation
from nearplane.system.arguments import ComputeDtype
from nearplane.system.launch import check_processes, started
from nearplane.verbs.early_checks import check_quantize

Flat = Parameter(name="*")


def quantize(
    model: str,
    out: Path,
    *,
    scheme: Annotated[GridFlags | BlockFlags | RateFlags | None, Flat] = None,  # type: ignore[valid-type]
    tokens: Annotated[CalibrationFlags | None, Flat] = None,  # type: ignore[valid-type]
    format: Annotated[Format | None, Parameter(group=EVERYDAY_GROUP)] = None,
    activations: Annotated[Activations, Parameter(group=EVERYDAY_GROUP)] = "none",
    allocate: Annotated[Allocation | None, Parameter(group=LAYER_GROUP)] = None,
    layer: Annotated[tuple[str, ...], Parameter(group=LAYER_GROUP, negative="")] = (),
    ignore: Annotated[tuple[str, ...], Parameter(group=LAYER_GROUP, consume_multiple=True, negative="")] = (),
    max_loss: Annotated[float | None, Parameter(group=LAYER_GROUP)] = None,
    tune: Annotated[Tune, Parameter(group=SOLVER_GROUP)] = "none",
    pre: Annotated[str | None, Parameter(group=GGUF_GROUP)] = None,
    like: Annotated[str | None, Parameter(group=GGUF_GROUP)] = None,
    device: Annotated[DeviceFlag, Parameter(group=RUN_GROUP)] = "auto",
    compute_dtype: Annotated[ComputeDtype, Parameter(group=RUN_GROUP)] = "auto",
    overwrite: Annotated[bool, Parameter(group=RUN_GROUP, negative="")] = False,
    memory: Annotated[str | None, Parameter(group=RUN_GROUP)] = None,
    device_memory: Annotated[str | None, Parameter(group=RUN_GROUP)] = None,
    processes: Annotated[int, Parameter(group=RUN_GROUP)] = 1,
    trust_remote_code: Annotated[bool, Parameter(group=RUN_GROUP, negative="")] = False,
    json: Annotated[bool, Parameter(group=RUN_GROUP, negative="")] = False,
) -> None:
    """Quantize MODEL into the folder OUT.

    Example: nearplane quantize Qwen/Qwen3-0.6B out --bits 4 --calibration text.txt

    Args:
        model: Local folder of safetensors, or hub id.
        out: Folder to write.
        format: File format of the checkpoint.
            compressed-tensors (the default) is for vLLM and transformers; gptq, gptq_v2, awq and mlx are for readers of these.
            nearplane is entropy-coded (default with --rate or --size), gguf is for llama.cpp (default with --grid q4_k_m).
        activations: Numbers to which runtimes round the inputs of quantized layers: int8 (with --grid int8), fp8 (with
            --grid fp8) or fp4 (with --grid nvfp4 or mxfp4). The solve then takes this rounding into account.
        layer: Options for some layers: REGEX=NAME:VALUE[,...], for example 'down_proj=bits:4,group_size:32'.
            May be repeated; the first matching pattern counts. A --rate then applies to the other layers.
        allocate: Use the same bits for every layer (uniform), or measure where more bits help most (slope).
            Default: slope with --rate, --size or a fraction of bits, else uniform.
        max_loss: Largest relative loss of a layer, for example 0.01. Entropy-coded layers get more bits to keep to it.
            Layers that exceed it are listed, and the command ends with exit code 4.
        tune: After the solve, train steps, norms and codes against the original's predictions (network).
            Takes five to eleven times as long. See nearplane tune.
        pre: Name of the tokenizer's pre-tokenizer in llama.cpp, if nearplane does not recognize it.
        like: Unquantized GGUF of the same model by llama.cpp's converter, of any architecture.
            The new file takes its header, tokenizer, names and unquantized tensors. See Serving in the documentation.
        ignore: Regular expressions; layers are not quantized if one of them is found in their full name.
        device: Device to compute on: auto (the GPU if there is one), cpu, cuda, or one of several GPUs as cuda:1.
        compute_dtype: Dtype in which blocks run. Default: float32, but bfloat16 for models in bfloat16 on a GPU.
            A dtype that is narrower than the model's also rounds its weights.
        overwrite: Replace an existing checkpoint in OUT, once the new one is complete. Both need room on disk.
        memory: Memory limit of the run, for example 12GB. Default: no limit. Cannot be used with --tune network.
            The run then repeats passes and keeps states on disk. A limit that is too small is refused at once.
        device_memory: The same for the memory of a GPU. Default: what is free there. States then lie in main memory.
        processes: Number of processes on this machine that share the calibration windows. The files are the same with any
            number. On several machines, start nearplane by torchrun or srun.
        trust_remote_code: Run model code that comes with the checkpoint, and copy it.
        json: Print the run record as JSON instead of a summary.
    """
    check_named(model, calibration=None if tokens is None else tokens.calibration)
    recipe = Recipe(
        scheme=scheme_from(scheme, format=format, allocate=allocate),
        layers=layer_schemes(layer, scheme, format=format),
        format=format,
        activations=activations,
        allocate=allocate,
        ignore=ignore,
        calibration=Calibration(**({} if tokens is None else asdict(tokens))),
        max_loss=max_loss,
        tune=tune,
        pre=pre,
        like=like,
    )
    check_quantize(model, out, recipe, overwrite=overwrite, memory=memory, device_memory=device_memory)
    check_processes(processes)
    opening(model)
    from nearplane import quantize as run

    with started(processes):
        record = run(
            model,
            out,
            recipe,
            device=device,
            compute_dtype=compute_dtype,
            overwrite=overwrite,
            trust_remote_code=trust_remote_code,
            progress=bar,
            memory=memory,
            device_memory=device_memory,
        )
    from nearplane.record.summary import summary

    if json:
        print(record.to_json())
    else:
        say(summary(record, out))
    if record.exceeding:
        sys.exit(4)
