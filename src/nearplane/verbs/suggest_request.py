"""What is asked of `suggest`, and the checks of it that need no torch."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from nearplane.calibration.text_files import check_named
from nearplane.recipe.runtimes import Runtime
from nearplane.system.arguments import whole
from nearplane.system.sizes import bytes_in


@dataclass(frozen=True, slots=True)
class SuggestRequest:
    """Arguments of `suggest`.

    Args:
        model: Local folder with config.json, or hub id, of which config.json alone is fetched.
        memory: Memory of the device that shall run the model, for example 8GB.
        context: Number of tokens of the sequence. Default: 8192, or the model's maximum length if that is shorter.
        runtime: Program that shall run the model. Default: any.
        trust_remote_code: Run model code that comes with the config.
    """

    model: str | Path
    memory: str | int
    _: KW_ONLY
    context: int | None = None
    runtime: Runtime | None = None
    trust_remote_code: bool = False

    def check(self) -> int:
        """Refuse what can be refused without torch; return the memory in bytes."""
        whole("context", self.context, 1)
        limit = bytes_in(str(self.memory), "--memory")
        check_named(self.model)
        return limit
