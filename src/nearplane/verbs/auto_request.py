"""What is asked of `auto`, and the checks of it that need no torch."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from nearplane.calibration.text_files import check_named
from nearplane.errors import RecipeError
from nearplane.recipe.runtimes import Runtime
from nearplane.system.arguments import whole
from nearplane.system.progress import Progress
from nearplane.system.progress_bar import bar
from nearplane.system.sizes import bytes_in


@dataclass(frozen=True, slots=True)
class AutoRequest:
    """Arguments of `auto`.

    Args:
        model: Local folder of safetensors, or hub id.
        out: Folder to write. Default: ./NAME-FORMAT.
        memory: Memory of the device that shall run the model, for example 8GB; of what fits, the way that loses least is taken:
            with a runtime, if none of its formats fills the memory, a mix of them for each layer.
        context: Number of tokens of the sequence that shall fit into the memory beside the weights. Default: 8192.
        size: Maximum size of the whole folder, for example 4GB.
        bits: Bits per weight, 2 to 8. Without memory, size and bits: the usual way of the runtime, which has about 4 bits.
        runtime: Program that shall run the model. Default: any for --memory and --size; else vllm where there is a GPU, mlx on
            Apple silicon, and llama.cpp elsewhere.
        calibration: Calibration text, as quantize takes it. Default: FineWeb-Edu where the datasets package is installed and the
            hub answers, else text that the network writes itself.
        samples: Number of calibration windows. Default: as in quantize.
        seqlen: Tokens per window. Default: as in quantize.
        text: Held-out text to measure the result on. Default: wikitext2 where calibration has FineWeb-Edu, else text that the
            network writes itself, other than that to calibrate on.
        run_memory: Most memory that the run may take, for example 12GB. Default: what is free.
        device: Device to compute on: auto (the GPU if there is one), cpu, cuda, or one of several GPUs as cuda:1.
        trust_remote_code: Run model code that comes with the model.
        progress: Display that wraps the iterators over layers and windows.
            Default: a bar, on a terminal and in a notebook; False shows nothing.
    """

    model: str | Path
    out: str | Path | None = None
    _: KW_ONLY
    memory: str | int | None = None
    context: int | None = None
    size: str | None = None
    bits: int | None = None
    runtime: Runtime | None = None
    calibration: str | Path | None = None
    samples: int | None = None
    seqlen: int | None = None
    text: str | Path | None = None
    run_memory: str | int | None = None
    device: str = "auto"
    trust_remote_code: bool = False
    progress: Progress = bar

    def check(self) -> None:
        """Refuse what can be refused without torch."""
        whole("context", self.context, 1)
        whole("bits", self.bits, 2, 8)
        given = [name for name in ("memory", "size", "bits") if getattr(self, name) is not None]
        if len(given) > 1:
            both = " and ".join(f"--{name}" for name in given)
            raise RecipeError(f"{both} are given, each of which decides the number of bits. Keep one of them.")
        if self.context is not None and self.memory is None:
            raise RecipeError(
                "--context counts in --memory, which is not given. Pass --memory, or leave out --context."
            )
        for name in ("memory", "size", "run_memory"):
            if (value := getattr(self, name)) is not None:
                bytes_in(str(value), f"--{name.replace('_', '-')}")
        if self.text is not None and str(self.text) == str(self.calibration) and str(self.text) != "self":
            raise RecipeError(
                f"--text and --calibration are both {self.text}. Pass another --text: on text that it was calibrated on, a model "
                f"looks better than it is."
            )
        text = None if self.text is None or str(self.text) == "self" else self.text
        check_named(self.model, calibration=self.calibration, text=text)
