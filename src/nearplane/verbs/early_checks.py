"""Checks of a verb's arguments that need no torch, so that the command line makes them before it loads torch.

Each verb makes the same checks first, for calls from Python. What depends on the network is checked by the verb.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

from nearplane.calibration.mix import check_shares
from nearplane.calibration.text_files import check_named, is_cropped, texts_of
from nearplane.errors import INSTALL, CalibrationError, ModelError, RecipeError
from nearplane.evaluation.evaluate_request import PLAIN_WINDOWS, Protocol
from nearplane.number_formats import integers
from nearplane.recipe.file_formats import FILE_FORMATS
from nearplane.recipe.recipe import Recipe, Way
from nearplane.recipe.scheme import DEFAULT_GROUP_SIZES
from nearplane.record.record import RunRecord, read_record
from nearplane.system.arguments import MAX_SEED, check_type, whole, within
from nearplane.system.files import check_writable
from nearplane.system.output_folder import Unfinished
from nearplane.system.paths import check_path, folder_named
from nearplane.system.sizes import Limits, bytes_in, check_room

DENSE = "safetensors"  # format of `export` for decoded weights
COMPARISON_TAG = b'<meta name="generator" content="nearplane compare">'  # marks a page of a comparison
MIN_LLAMA_CPP_SEQLEN = 3  # tokens of a window whose second half has a token to score


def check_evaluate(
    model: Any,
    texts: Sequence[Any],
    *,
    against: Any,
    seqlen: int | None,
    samples: int | None,
    protocol: str = "nearplane",
) -> None:
    """Refuse arguments of `evaluate`; model objects and texts in memory are checked by the verb."""
    whole("samples", samples, 1)
    whole("seqlen", seqlen, 2)
    if protocol not in get_args(Protocol):
        raise RecipeError(f"--protocol {protocol} is unknown; expected {' or '.join(get_args(Protocol))}.")
    if protocol == "llama.cpp" and seqlen is not None and seqlen < MIN_LLAMA_CPP_SEQLEN:
        raise RecipeError(
            f"--seqlen {seqlen} is too short for --protocol llama.cpp, which scores only tokens of the second half of a window. "
            f"Use at least {MIN_LLAMA_CPP_SEQLEN}."
        )
    for text in texts:
        if protocol not in PLAIN_WINDOWS and is_cropped(text):
            raise RecipeError(
                f"--protocol {protocol} needs running text, but c4 is read as crops of its documents. Use --protocol nearplane, "
                f"or pass a file."
            )
        if text is None:
            raise CalibrationError("text is None; expected a path, a list of texts, or token ids (windows, seqlen).")
        check_named(_path(model), _path(against), text=_path(text))


def check_evaluate_tasks(
    model: Any, tasks: Sequence[str], *, against: Any, task_path: Any, fewshot: int | None, **counts: int | None
) -> None:
    """Refuse arguments of `evaluate_tasks`, and a missing lm-eval; names of tasks are checked by the verb."""
    whole("fewshot", fewshot, 0)
    for name, count in counts.items():
        whole(name, count, 1)
    if not tasks or not all(tasks):
        raise RecipeError("--tasks is empty; expected names of lm-eval's tasks, for example winogrande,truthfulqa_mc1.")
    for package in ("lm_eval", "accelerate"):  # lm-eval's module for networks needs the second
        if find_spec(package) is None:
            raise RecipeError(f"--tasks needs the package {package}. Run {INSTALL['eval']}.")
    check_named(_path(model), _path(against))
    if task_path is not None:
        check_path("--task-path", task_path)
        if not any(Path(task_path).expanduser().rglob("*.yaml")):
            raise RecipeError(f"--task-path {task_path} is no folder with tasks: it contains no .yaml file.")


def check_quantize(
    model: Any,
    out: str | Path,
    recipe: Recipe,
    *,
    overwrite: bool,
    memory: str | int | None,
    device_memory: str | int | None = None,
) -> Limits:
    """Refuse arguments of `quantize`, except its text, of which only the shares of a mix; return the limits of memory."""
    limits = Limits.of(memory, device_memory)
    if limits.host is not None and recipe.tune != "none":
        raise RecipeError(
            "--memory does not limit tuning. Leave out --tune, and tune the checkpoint with nearplane tune."
        )
    check_named(_path(model))
    _check_number_formats(recipe)
    if recipe.like is not None:
        check_path("--like", recipe.like)
        if not Path(recipe.like).is_file():
            raise RecipeError(f"--like {recipe.like} is not a file. Pass a GGUF by llama.cpp's convert_hf_to_gguf.py.")
    if (samples := recipe.calibration.samples) is not None and (texts := texts_of(recipe.calibration.calibration)):
        check_shares(texts, samples)  # else the model decides
    Unfinished(Path(out), overwrite=overwrite, sources=_folders(model))
    return limits


def _check_number_formats(recipe: Recipe) -> None:
    """Refuse schemes whose weights no layer of a file of this format can hold.

    Raises:
        RecipeError: The format does not hold them; the message says which it holds.
    """
    schemes = [("all layers", recipe.scheme), *((f"layers {each.pattern!r}", each.scheme) for each in recipe.layers)]
    for name, scheme in schemes:
        schemes_of = [scheme.grouped([size]) for size in DEFAULT_GROUP_SIZES]  # equal unless layers decide the size
        if recipe.allocate != "uniform":
            integer_formats = [integers(bits, None) for bits in recipe.files.bits]
            schemes_of = [each.stored_in(other) for other in integer_formats for each in schemes_of] or schemes_of
        formats = [each.number_format for each in schemes_of]
        if all(map(recipe.files.fault, formats)):
            recipe.files.check(name, formats[0])


def check_compare(models: Sequence[str | Path], bits: Sequence[float], methods: Sequence[Way]) -> None:
    """Refuse a comparison of nothing, and bits that are no numbers."""
    check_type("bits", bits, Sequence[float])
    if not models or not bits or not methods:
        raise RecipeError("Nothing to compare: give at least one model, one number of bits and one method.")


def check_tune(
    source: str | Path, out: str | Path, *, against: Any, calibration: Any, overwrite: bool, **counts: int | None
) -> RunRecord:
    """Refuse arguments of `tune`, and checkpoints that cannot be tuned; return the run record of the checkpoint."""
    for name, count in counts.items():
        whole(name, count, 1 if name == "steps" else 2)
    check_path("checkpoint", source)
    record = read_record(Path(source))
    if record.tuning is not None:
        raise RecipeError(f"{source} is tuned already. Tune the checkpoint from which it was made.")
    check_recipe(record.recipe, str(source))
    check_named(against, calibration=_path(calibration))
    Unfinished(Path(out), overwrite=overwrite, sources=(Path(source), *_folders(against)))
    check_room(Path(out), record.folder, joined=0 if record.recipe.files.one_file else record.bytes)
    return record


def check_recipe(recipe: Recipe, called: str) -> None:
    """Refuse a recipe whose checkpoints cannot be tuned; `called` names the checkpoint in errors.

    Raises:
        RecipeError: The recipe cannot be tuned; the message gives the reason.
    """
    if any(recipe.scheme.ends) and recipe.scheme.entropy_coded:
        raise RecipeError(
            f"{called} cannot be tuned: its embeddings or head are entropy-coded, which is not supported yet. Quantize without "
            f"--include-embeddings and --include-head."
        )
    if recipe.activations != "none":
        raise RecipeError(
            f"{called} cannot be tuned: runtimes round its activations to {recipe.activations}, which tuning does not. Quantize "
            f"with --activations none."
        )
    for scheme in recipe.schemes:
        if not scheme.tunable:
            raise RecipeError(
                f"{called} cannot be tuned: it has weights in {scheme.number_format.name}, and 8-bit floats are not trained. "
                f"Quantize with --bits, --rate, or --grid nvfp4 or mxfp4."
            )
    if recipe.like is not None:
        raise RecipeError(f"{called} cannot be tuned: it was written by --like, which tuning does not support yet.")
    if recipe.scheme.limit is not None:
        raise RecipeError(
            f"{called} cannot be tuned: it was quantized with --size, and tuning makes the run record longer. Quantize with "
            f"--rate, or a GGUF with --grid."
        )


def check_generate(tokens: int, temperature: float, seed: int) -> None:
    """Refuse numbers of `generate` that are out of range."""
    whole("seed", seed, 0, MAX_SEED)
    if tokens < 1 or not 0 <= temperature < 100:
        raise RecipeError(
            f"tokens is {tokens} and temperature {temperature}; expected at least 1 token, and a temperature from 0 to 100."
        )


def check_suggest(model: str | Path, memory: str | int, context: int | None) -> int:
    """Refuse arguments of `suggest`; return the memory in bytes."""
    whole("context", context, 1)
    limit = bytes_in(str(memory), "--memory")
    check_named(model)
    return limit


def check_verify(out: str | Path, *, against: Any, calibration: Any, tolerance: float | None) -> RunRecord:
    """Refuse arguments of `verify`; return the run record of the checkpoint."""
    if calibration is not None and against is None:
        raise RecipeError(
            "--calibration needs --against: losses are measured with both the original model and the text."
        )
    within("--tolerance", tolerance, tolerance is None or 0 <= tolerance < 1, "a number from 0 to 1")
    check_path("checkpoint", out)
    check_named(against, calibration=_path(calibration))
    return read_record(Path(out))


def check_export(source: str | Path, out: str | Path, format: str, dtype: str | None) -> None:
    """Refuse arguments of `export`."""
    known = [DENSE, *(name for name, files in FILE_FORMATS.items() if name is not None and not files.entropy_coded)]
    if format not in known:
        raise RecipeError(f"--format is {format!r}, which export does not write; expected {', '.join(known)}.")
    if dtype is not None and format != DENSE:
        raise RecipeError(
            f"--dtype {dtype} is for decoded weights, but --format {format} keeps their integers. Leave it out."
        )
    check_path("checkpoint", source)
    check_path("output", out)
    if not Path(source).is_dir():
        raise ModelError(f"The folder {source} does not exist. Pass a folder that nearplane quantize wrote.")
    if Path(out).is_dir() and any(Path(out).iterdir()):
        raise RecipeError(f"{out} exists and is not empty. Empty it or choose another folder.")
    check_named(source)
    Unfinished(Path(out), sources=[Path(source)])


def check_plot(out: str | Path) -> None:
    """Refuse a figure that cannot be written, before any work is done.

    Raises:
        RecipeError: matplotlib is not installed, or the file has another suffix or cannot be written.
    """
    check_path("--plot", out)
    if Path(out).suffix not in (".svg", ".png", ".pdf"):
        raise RecipeError(f"{out} cannot be written as a figure; expected a name that ends in .svg, .png or .pdf.")
    try:
        import matplotlib  # noqa: F401  only drawing needs it
    except ImportError as error:
        raise RecipeError(f"Figures need matplotlib, which is not installed. Run {INSTALL['figures']}.") from error
    if Path(out).is_dir():
        raise RecipeError(f"{out} is a folder; expected the name of a figure file. Choose another name.")
    check_writable(Path(out).parent)


def check_html(page: str | Path | None, prompt: str | None) -> None:
    """Refuse a page that cannot be written, and a prompt without a page; see `check_page`."""
    if page is not None:
        check_page(page)
    elif prompt is not None:
        raise RecipeError("--prompt is for the page of --html. Add --html PAGE.html, or leave it out.")


def check_page(out: str | Path) -> None:
    """Refuse a page of `compare` that cannot be written, before any work is done.

    Raises:
        RecipeError: The file has another suffix, cannot be written, or exists and is no page of a comparison.
    """
    check_path("--html", out)
    page = Path(out)
    if page.suffix not in (".html", ".htm") or page.is_dir():
        raise RecipeError(f"{out} cannot be written as a page; expected the name of a file that ends in .html.")
    check_writable(page.parent)
    if page.is_file() and COMPARISON_TAG not in page.read_bytes()[:1000]:
        raise RecipeError(f"{out} exists and is not a page of nearplane compare. Name another file.")


def _path(value: Any) -> Any:
    """Return a path; None for None and for an object in place of a file."""
    return value if isinstance(value, str | os.PathLike) else None


def _folders(model: Any) -> list[Path]:
    """Return the folder of a model in a list, which is empty for hub ids and model objects."""
    folder = None if _path(model) is None else folder_named(model)
    return [] if folder is None else [folder]
