"""What is asked of `export`, and the checks of it that need no torch."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Literal

from nearplane.calibration.text_files import check_named
from nearplane.errors import ModelError, RecipeError
from nearplane.recipe.file_formats import FILE_FORMATS
from nearplane.system.output_folder import Unfinished
from nearplane.system.paths import check_path

DENSE = "safetensors"  # format of decoded weights


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """Arguments of `export`.

    Args:
        source: Folder of a checkpoint that nearplane, GPTQModel or llm-compressor wrote.
        out: New or empty folder to write.
        format: safetensors decodes all weights, for any program. Others hold the same integers: compressed-tensors and gptq if
            symmetric, gptq_v2, awq at 4 bits, mlx, gguf at 4, 5 and 8 symmetric bits in groups that are multiples of 32, and at
            4 asymmetric bits in multiples of 256.
        dtype: Dtype of all weights, only with safetensors. Default: bfloat16 for decoded weights, and every other tensor keeps
            its own.
        trust_remote_code: Run model code that comes with the checkpoint, and copy it.
    """

    source: str | Path
    out: str | Path
    _: KW_ONLY
    format: str = DENSE
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    trust_remote_code: bool = False

    def check(self) -> None:
        """Refuse what can be refused without torch."""
        known = [DENSE, *(name for name, files in FILE_FORMATS.items() if name is not None and not files.entropy_coded)]
        if self.format not in known:
            raise RecipeError(f"--format is {self.format!r}, which export does not write; expected {', '.join(known)}.")
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
