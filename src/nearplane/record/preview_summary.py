"""What a run of `quantize` would write and take, as text. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from nearplane.record.mix_summary import kind_lines
from nearplane.system.progress import duration
from nearplane.system.sizes import counted, size_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """What a run of `quantize` would write and take.

    Args:
        formats: Number format of every layer by name, in the order of the network.
        measured: Whether bits, rates or types of layers are still chosen by measuring, by their mean.
        weights: Number of weights of these layers.
        bits: Bits per weight of them with steps and zero points; None where the size of the folder is given.
        folder: Bytes of the folder, at most.
        original: Bytes of the tensors of the model.
        tokens: Number of calibration tokens; 0: none are used.
        memory: Bytes where the run computes, at most; None: it is not known.
        seconds: Seconds of the run, at least, for its multiplications alone; None: not known, as on a GPU.
        writing: Seconds about in which the network writes its calibration text before; None: it does not, or the time is not
            known, as on a GPU.
    """

    formats: dict[str, str]
    measured: bool
    weights: int
    bits: float | None
    folder: int
    original: int
    tokens: int
    memory: int | None
    seconds: float | None
    writing: float | None = None

    def fields(self) -> dict[str, Any]:
        """Return all values for JSON."""
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """Yield what `nearplane quantize --dry-run` prints; the run itself says memory and time."""
        names = set(self.formats.values())
        only = "" if self.measured or len(names) > 1 else f": {names.pop()}"
        bits = "" if self.bits is None else f", {self.bits:.3f} bits per weight, steps and zero points included"
        yield f"{counted(len(self.formats), 'layer')} of {self.weights:,} weights{only}{bits}"
        if self.measured:
            yield "how many bits each layer gets is chosen by measuring, once the run has begun"
        elif not only:
            yield from kind_lines(self.formats)
        share = self.original / self.folder
        yield (
            f"the folder takes at most {size_text(self.folder)} (original {size_text(self.original)}, {share:.2f} times as much)"
        )
        if self.writing is not None:
            yield f"before, the network writes its calibration text, which takes about {duration(self.writing)}"
        yield "nothing was written; without --dry-run the run begins"
