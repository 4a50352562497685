"""What `verify` finds: faults, and what was looked at."""

from __future__ import annotations

from dataclasses import dataclass

from nearplane.errors import printable
from nearplane.record.record import RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that does not hold.

    Args:
        where: a layer, a file or a tensor.
        what: what was found and what was expected.
    """

    where: str
    what: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "where", printable(self.where))  # names in files are anybody's choice
        object.__setattr__(self, "what", printable(self.what))


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What `verify` found.

    Args:
        record: of the checkpoint.
        faults: what does not hold; empty if everything does.
        files, layers: how many were checked.
        asked: whether the losses were to be measured again.
        measured: whether all of them were.
    """

    record: RunRecord
    faults: tuple[Fault, ...]
    files: int
    layers: int
    asked: bool
    measured: bool

    def summary(self) -> str:
        """Return one sentence."""
        checked = f"{self.files} files and {self.layers} layers checked"
        if self.measured:
            measured = "every loss measured again"
        elif self.asked:
            measured = "not every loss could be measured again, as the faults say"
        else:
            measured = "losses not measured: that takes --against and --calibration"
        return f"{checked}, {measured}: {len(self.faults) or 'no'} fault{'' if len(self.faults) == 1 else 's'}"
