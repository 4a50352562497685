"""What is asked of `tune`, and the checks of it that need no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearplane.calibration.text_files import check_named
from nearplane.errors import RecipeError
from nearplane.recipe.recipe import Recipe
from nearplane.record.record import RunRecord
from nearplane.record.record_file import read_record
from nearplane.system.arguments import ComputeDtype, whole
from nearplane.system.output_folder import Unfinished
from nearplane.system.paths import check_path, folders_in, path_in
from nearplane.system.progress import Progress, silent
from nearplane.system.sizes import check_room

if TYPE_CHECKING:
    from torch import Tensor

    from nearplane.calibration.given import Encoded
else:
    Tensor = Encoded = Any  # these need torch


@dataclass(frozen=True, slots=True)
class TuneRequest:
    """Arguments of `tune`.

    Args:
        source: Folder of a checkpoint that nearplane quantize wrote with --bits, --grid or --rate.
            Checkpoints with --size, --include-embeddings or --include-head are refused.
        out: Folder to write.
        against: The original model, as a local folder or hub id.
        calibration: The calibration text of the checkpoint, as quantize takes it, of which tuning uses more.
            Default: the text named in its recipe.
        samples: Number of windows of the text. Default: five times the default of quantize, however many the checkpoint had, or
            fewer if the text is shorter.
        seqlen: Tokens per window. Default: as in calibration.
        steps: Number of optimizer steps. Default: each training window is used once, or several times in a short text.
        device: Device to compute on: auto (the GPU if there is one), cpu, cuda, or one of several GPUs as cuda:1.
        compute_dtype: Dtype in which losses are measured after the training, as in quantize. Training is in float32.
        overwrite: Replace an existing checkpoint in the folder to write, once the new one is complete.
        trust_remote_code: Run model code that comes with the original model.
        progress: Display that wraps the iterators over steps and layers.
    """

    source: str | Path
    out: str | Path
    _: KW_ONLY
    against: str | Path
    calibration: str | Path | Sequence[str] | Tensor | Encoded | None = None
    samples: int | None = None
    seqlen: int | None = None
    steps: int | None = None
    device: str = "auto"
    compute_dtype: ComputeDtype = "auto"
    overwrite: bool = False
    trust_remote_code: bool = False
    progress: Progress = silent

    def check(self) -> RunRecord:
        """Refuse what can be refused without torch, and checkpoints that cannot be tuned; return their run record."""
        whole("samples", self.samples, 2)
        whole("seqlen", self.seqlen, 2)
        whole("steps", self.steps, 1)
        check_path("checkpoint", self.source)
        source, out = Path(self.source), Path(self.out)
        record = read_record(source)
        if record.tuning is not None:
            raise RecipeError(f"{source} is tuned already. Tune the checkpoint from which it was made.")
        check_recipe(record.recipe, str(source))
        check_named(self.against, calibration=path_in(self.calibration))
        Unfinished(out, overwrite=self.overwrite, sources=(source, *folders_in(self.against)))
        check_room(out, record.folder, joined=0 if record.recipe.files.one_file else record.bytes)
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
