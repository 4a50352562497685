"""How dataclasses become flags, and how words of the command line become values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

from cyclopts import Parameter, convert

from nearplane.system.arguments import unknown_device

Flat = Parameter(name="*", negative="")  # of a dataclass whose fields are flags
Hidden = Parameter(parse=False)  # of a field that is only for Python
Switch = Annotated[bool, Parameter(negative="")]
Several = Parameter(consume_multiple=True, negative="")
DEVICES = ("cpu", "cuda", "mps", "xpu", "hpu", "npu", "mtia", "xla")  # kinds of devices that torch or its plug-ins know
DeviceFlag = Annotated[str, Parameter(validator=lambda _, name: check_device(name))]  # refused before torch is loaded


def check_device(name: str) -> None:
    """Refuse a device that torch does not have on any machine; `Device.named` refuses those that this machine lacks.

    Raises:
        RecipeError: The name is not that of a kind of device, with a number or without.
    """
    kind, numbered, number = name.partition(":")
    if name != "auto" and not (kind in DEVICES and (number.isdecimal() or not numbered)):
        raise unknown_device(name)


def exactly(kind: Any, words: Sequence[Any]) -> Any:
    """Convert the words of an option as cyclopts does, but refuse what it would round or take for the current folder."""
    for text in (word.value for word in words):
        if {int, float} & {kind, *get_args(kind)} == {int} and "." in text and not float(text).is_integer():
            raise ValueError(f"{text} is not a whole number")
        if Path in (kind, *get_args(kind)) and not text:
            raise ValueError("the path is empty")
    return convert(kind, words)
