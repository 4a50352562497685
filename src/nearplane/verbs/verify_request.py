"""What is asked of `verify`, and the checks of it that need no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearplane.calibration.text_files import check_named
from nearplane.errors import RecipeError
from nearplane.record.record import RunRecord
from nearplane.record.record_file import read_record
from nearplane.system.arguments import within
from nearplane.system.paths import check_path, path_in
from nearplane.system.progress import Progress, silent

if TYPE_CHECKING:
    from torch import Tensor

    from nearplane.calibration.given import Encoded
else:
    Tensor = Encoded = Any  # these need torch


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
    """

    out: str | Path
    _: KW_ONLY
    against: str | Path | None = None
    calibration: str | Path | Sequence[str] | Tensor | tuple[Tensor, Tensor] | Encoded | None = None
    tolerance: float | None = None
    device: str = "auto"
    trust_remote_code: bool = False
    progress: Progress = silent

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
