"""Traffic between the CPU and a device, counted by function of the package."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, fields
from os.path import abspath, dirname, join
from types import CodeType, FrameType

import nearplane

PACKAGE = join(abspath(dirname(nearplane.__file__)), "")
ELSEWHERE = "elsewhere"


@dataclass
class Traffic:
    """What was asked of a device.

    Args:
        launches: Operations that compute on the device; views and empty tensors are none.
        synchronizations: Values, or sizes that depend on values, that the CPU waits for.
        to_device, to_device_bytes: Copies from the CPU to the device.
        to_host, to_host_bytes: Copies from the device to the CPU.
        waiting: Copies of both kinds that the CPU waits for: all but `non_blocking` ones of pinned memory.
        pinned, pinned_bytes: CPU tensors made in pinned memory.
    """

    launches: int = 0
    synchronizations: int = 0
    to_device: int = 0
    to_device_bytes: int = 0
    to_host: int = 0
    to_host_bytes: int = 0
    waiting: int = 0
    pinned: int = 0
    pinned_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


class Places:
    """Traffic by the innermost function of the package that is running."""

    def __init__(self) -> None:
        self.traffic: dict[str, Traffic] = {}
        self.names: dict[CodeType, str | None] = {}

    def here(self) -> Traffic:
        """Return the traffic of the function that is running, to be added to."""
        place = self.place()
        found = self.traffic.get(place)
        if found is None:
            found = self.traffic[place] = Traffic()
        return found

    def place(self) -> str:
        """Return the function that is running, as in `lattice/factor.py factorize`, or `elsewhere`."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code not in self.names:
                self.names[code] = name_of(code)
            place = self.names[code]
            if place is not None:
                return place
            frame = frame.f_back
        return ELSEWHERE


def name_of(code: CodeType) -> str | None:
    """Return the name of a function of the package; comprehensions and lambdas count for the function around them."""
    file = abspath(code.co_filename)
    if not file.startswith(PACKAGE):
        return None
    name = re.sub(r"\.<(listcomp|dictcomp|setcomp|genexpr|lambda|locals)>", "", code.co_qualname)
    return f"{file.removeprefix(PACKAGE)} {name}"
