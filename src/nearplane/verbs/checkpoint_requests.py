"""What is asked of `verify`, `export` and `tune`, and the checks of it that need no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from nearplane.calibration.text_files import check_named
from nearplane.errors import ModelError, RecipeError
from nearplane.recipe.file_formats import FILE_FORMATS, Format
from nearplane.recipe.readers import readers_of
from nearplane.recipe.recipe import Recipe
from nearplane.recipe.refusals import MAX_BUDGET
from nearplane.recipe.runtimes import Runtime
from nearplane.record.record import RunRecord
from nearplane.record.record_file import read_record
from nearplane.system.arguments import ComputeDtype, whole, within
from nearplane.system.output_folder import Unfinished
from nearplane.system.paths import check_path, folders_in, path_in
from nearplane.system.progress import Progress
from nearplane.system.progress_bar import bar
from nearplane.system.sizes import Limits, check_room

if TYPE_CHECKING:
    from torch import Tensor

    from nearplane.calibration.given import Encoded
else:
    Tensor = Encoded = Any  # these need torch

DENSE = "safetensors"  # format of decoded weights


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """Arguments of `verify`.

    Args:
        out: Folder of a checkpoint that nearplane wrote.
        against: The original model, as a local folder or hub id. If given, every loss is measured again.
        calibration: The calibration text of the checkpoint, as quantize takes it. Default: the text named in its recipe.
        tolerance: Largest relative deviation of a figure that is measured again; 0 suits the machine that wrote the checkpoint.
            Default: 1e-6, and 0.01 on another device than that of the run, or 0.5 if its blocks ran in 16 bits.
        device: Device to compute on: auto (one like that of the run, if there is one), cpu, cuda, or a GPU as cuda:1.
        trust_remote_code: Run model code that comes with the original model.
        progress: Display that wraps the iterators over files, over layers to check and over layers to measure.
            Default: a bar, on a terminal and in a notebook; False shows nothing.
    """

    out: str | Path
    _: KW_ONLY
    against: str | Path | None = None
    calibration: str | Path | Sequence[str] | Tensor | tuple[Tensor, Tensor] | Encoded | None = None
    tolerance: float | None = None
    device: str = "auto"
    trust_remote_code: bool = False
    progress: Progress = bar

    def check(self) -> RunRecord:
        """Refuse what can be refused without torch; return the run record of the checkpoint."""
        if self.calibration is not None and self.against is None:
            raise RecipeError(
                "--calibration needs --against: losses are measured with both the original model and the text."
            )
        tolerance = self.tolerance
        within("--tolerance", tolerance, tolerance is None or 0 <= tolerance < 1, "a number from 0 to 1")
        check_path("checkpoint", self.out)
        check_named(self.against, calibration=path_in(self.calibration))
        return read_record(Path(self.out))


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """Arguments of `export`.

    Args:
        source: Folder of a checkpoint that nearplane, GPTQModel or llm-compressor wrote.
        out: New or empty folder to write.
        format: safetensors decodes all weights, for any program. Others hold the same integers: compressed-tensors and gptq if
            symmetric, gptq_v2, awq at 4 bits, mlx, gguf at 4, 5 and 8 symmetric bits in groups that are multiples of 32, and
            at 2 and 4 asymmetric and 3 and 6 symmetric bits in multiples of 256. Floats move between mlx and compressed-tensors,
            nvfp4 also to gguf.
        runtime: Program that must load the result, as quantize takes it: with vllm, compressed-tensors holds zero points, too.
            Default: the rules of transformers, GPTQModel (gptq), llama.cpp (gguf) or mlx_lm (mlx).
        dtype: Dtype of all weights, only with safetensors. Default: bfloat16 for decoded weights, and every other tensor keeps
            its own.
        trust_remote_code: Run model code that comes with the checkpoint, and copy it.
        progress: Display that wraps the iterators over layers and tensors.
    """

    source: str | Path
    out: str | Path
    _: KW_ONLY
    format: str = DENSE
    runtime: Runtime | None = None
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    trust_remote_code: bool = False
    progress: Progress = bar

    def check(self) -> None:
        """Refuse what can be refused without torch."""
        known = [DENSE, *(name for name, files in FILE_FORMATS.items() if name is not None and not files.entropy_coded)]
        if self.format not in known:
            raise RecipeError(f"--format is {self.format!r}, which export does not write; expected {', '.join(known)}.")
        if self.runtime is not None and self.format == DENSE:
            raise RecipeError(
                f"--runtime {self.runtime} is for quantized weights, but safetensors decodes them, for any program. Leave it out, "
                f"or add --format."
            )
        if self.format != DENSE:
            readers_of(cast(Format, self.format), self.runtime)  # refused if the runtime does not read it
        if self.dtype is not None and self.format != DENSE:
            raise RecipeError(
                f"--dtype {self.dtype} is for decoded weights, but --format {self.format} keeps their integers. Leave it out."
            )
        check_path("checkpoint", self.source)
        check_path("output", self.out)
        if not Path(self.source).is_dir():
            raise ModelError(f"The folder {self.source} does not exist. Pass a folder that nearplane quantize wrote.")
        if Path(self.out).is_dir() and any(Path(self.out).iterdir()):
            raise RecipeError(f"{self.out} exists and is not empty. Empty it or choose another folder.")
        check_named(self.source)
        Unfinished(Path(self.out), sources=[Path(self.source)])


@dataclass(frozen=True, slots=True)
class TuneRequest:
    """Arguments of `tune`.

    Args:
        source: Folder of a checkpoint that nearplane quantize wrote with --bits, --grid or --rate.
            Checkpoints with --size, --kv-cache, --like, or at a rate with --include-embeddings or --include-head are refused.
        out: Folder to write.
        against: The original model, as a local folder or hub id.
        calibration: The calibration text of the checkpoint, as quantize takes it, of which tuning uses more.
            Default: the text named in its recipe.
        samples: Number of windows of the text. Default: five times the default of quantize, however many the checkpoint had, or
            fewer if the text is shorter.
        seqlen: Tokens per window. Default: as in calibration.
        steps: Number of optimizer steps. Default: each training window is used once, or several times in a short text.
        budget: In place of steps: time of tuning at most, as a multiple of that of the quantization, both counted in
            multiplications. Training ends earlier where twice as many steps gain little.
        device: Device to compute on: auto (the GPU if there is one), cpu, cuda, or one of several GPUs as cuda:1.
        compute_dtype: Dtype in which losses are measured after the training, as in quantize. Training is in float32.
        memory: Memory limit of the run, for example 12GB. Hidden states then lie in a file if they must. Default: no limit.
        device_memory: The same for the memory of a GPU. Default: what is free there.
        overwrite: Replace an existing checkpoint in the folder to write, once the new one is complete.
        trust_remote_code: Run model code that comes with the original model.
        progress: Display that wraps the iterators over steps and layers.
            Default: a bar, on a terminal and in a notebook; False shows nothing.
    """

    source: str | Path
    out: str | Path
    _: KW_ONLY
    against: str | Path
    calibration: str | Path | Sequence[str] | Tensor | Encoded | None = None
    samples: int | None = None
    seqlen: int | None = None
    steps: int | None = None
    budget: float | None = None
    device: str = "auto"
    compute_dtype: ComputeDtype = "auto"
    memory: str | int | None = None
    device_memory: str | int | None = None
    overwrite: bool = False
    trust_remote_code: bool = False
    progress: Progress = bar

    def check(self) -> RunRecord:
        """Refuse what can be refused without torch, and checkpoints that cannot be tuned; return their run record."""
        self.limits()  # refused if one is no size
        whole("samples", self.samples, 2)
        whole("seqlen", self.seqlen, 2)
        whole("steps", self.steps, 1)
        budget, good = self.budget, self.budget is None or 0 < self.budget <= MAX_BUDGET
        within("budget", budget, good, f"a number above 0, as 3, at most {MAX_BUDGET:g}")
        if budget is not None and self.steps is not None:
            raise RecipeError("--budget is in place of --steps. Leave out one of them.")
        check_path("checkpoint", self.source)
        source, out = Path(self.source), Path(self.out)
        record = read_record(source)
        if record.tuning is not None:
            raise RecipeError(f"{source} is tuned already. Tune the checkpoint from which it was made.")
        check_recipe(record.recipe, str(source))
        if record.mix is not None and record.mix.option == "size" and record.mix.cost == "file":
            raise RecipeError(_limited(str(source), "--bits-per-weight"))
        check_named(self.against, calibration=path_in(self.calibration))
        Unfinished(out, overwrite=self.overwrite, sources=(source, *folders_in(self.against)))
        check_room(out, record.folder, joined=0 if record.recipe.files.one_file else record.bytes)
        return record

    def limits(self) -> Limits:
        """Return the limits of memory."""
        return Limits.of(self.memory, self.device_memory)


def _limited(called: str, instead: str) -> str:
    return (
        f"{called} cannot be tuned: it was quantized with --size, and tuning makes the run record longer. Quantize with "
        f"{instead}."
    )


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
    if recipe.kv_cache != "none":
        raise RecipeError(
            f"{called} cannot be tuned: it has scales of keys and values, which tuning does not measure again. Quantize without "
            f"--kv-cache."
        )
    if recipe.like is not None:
        raise RecipeError(f"{called} cannot be tuned: it was written by --like, which tuning does not support yet.")
    if recipe.scheme.limit is not None:
        raise RecipeError(_limited(called, "--rate, or a GGUF with --grid"))
