"""What is asked of `compare`, and the checks of it that need no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import get_args

from nearplane.errors import RecipeError
from nearplane.recipe.recipe import Calibration, Way
from nearplane.system.arguments import check_type
from nearplane.system.progress import Progress
from nearplane.system.progress_bar import bar

WAYS: tuple[Way, ...] = get_args(Way)


@dataclass(frozen=True, slots=True)
class CompareRequest:
    """Arguments of `compare`.

    Args:
        models: Local folders of safetensors, or hub ids.
        bits: Bits per weight to compare, for example --bits 4.125 3.125 2.125.
        text: Text to measure on: a .txt or .jsonl file, a folder of them, wikitext2 or c4.
        calibration: Calibration tokens.
        methods: Methods to compare. Default: all.
        samples: Number of windows to measure on, from the beginning of the text. Default: all.
        seqlen: Tokens per window to measure on. Default: as in calibration.
        keep: Folder that keeps the checkpoints and rows. The same command resumes a stopped comparison in it.
            Default: each checkpoint is deleted once it is measured.
        prompt: Text that the original and every checkpoint continue on the page of --html, or message that they answer.
        device: Device to compute on: auto (the GPU if there is one), cpu, cuda, or one of several GPUs as cuda:1.
        trust_remote_code: Run model code that comes with the checkpoints.
        progress: Display that wraps iterators over layers and windows: (items, label, total) -> items. Default: a bar,
            on a terminal and in a notebook; False shows nothing.
    """

    models: str | Path | Sequence[str | Path]
    bits: Sequence[float]
    _: KW_ONLY
    text: str | Path
    calibration: Calibration | None = None
    methods: Sequence[Way] = WAYS
    samples: int | None = None
    seqlen: int | None = None
    keep: str | Path | None = None
    prompt: str | None = None
    device: str = "auto"
    trust_remote_code: bool = False
    progress: Progress = bar

    @property
    def several(self) -> list[str | Path]:
        """The models as a list."""
        return [self.models] if isinstance(self.models, str | Path) else list(self.models)

    def check(self) -> None:
        """Refuse a comparison of nothing, and bits that are no numbers."""
        check_type("bits", self.bits, Sequence[float])
        if not self.models or not self.bits or not self.methods:
            raise RecipeError("Nothing to compare: give at least one model, one number of bits and one method.")
