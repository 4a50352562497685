"""What is asked of `rotate`, and the checks of it that need no torch."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from nearplane.calibration.text_files import check_named
from nearplane.errors import RecipeError
from nearplane.system.output_folder import Unfinished
from nearplane.system.paths import check_path


@dataclass(frozen=True, slots=True)
class RotateRequest:
    """Arguments of `rotate`.

    Args:
        model: Local folder of safetensors, or hub id, whose head is no copy of its embeddings.
        out: New or empty folder to write.
        trust_remote_code: Run model code that comes with the model, and copy it.
    """

    model: str | Path
    out: str | Path
    _: KW_ONLY
    trust_remote_code: bool = False

    def check(self) -> None:
        """Refuse what can be refused without torch."""
        check_path("output", self.out)
        out = Path(self.out)
        if out.is_dir() and any(out.iterdir()):
            raise RecipeError(f"{out} exists and is not empty. Empty it or choose another folder.")
        check_named(self.model)
        Unfinished(out, sources=[Path(self.model)] if Path(self.model).exists() else [])
