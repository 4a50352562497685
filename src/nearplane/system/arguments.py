"""Checks of the arguments of public functions by their annotations, of numbers and of words; modes of torch. Needs no torch."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from nearplane.errors import RecipeError
from nearplane.system.memory import device_full, is_out_of_memory, is_refused, system_limit
from nearplane.system.paths import check_path

P = ParamSpec("P")
R = TypeVar("R")
ComputeDtype = Literal["auto", "float32", "bfloat16", "float16"]  # see `Device.compute_dtype`
MAX_SEED = 2**64 - 1  # of torch
DEVICES = ("cpu", "cuda", "mps", "xpu", "hpu", "npu", "mtia", "xla")  # kinds of devices that torch or its plug-ins know
DESCRIPTIONS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "text",
    Path: "a path",
    NoneType: "None",
    Sequence: "a list",
    tuple: "a tuple",
    Callable: "a function",
}
MAX_SHOWN_LETTERS = 60  # letters of a value that a message quotes
hints_of: Callable[[Any], dict[str, Any]] = cache(get_type_hints)
AUTOCASTS = ("cpu", "cuda", "mps", "xpu")  # kinds of devices with an autocast each


def checked(*excepted: str, verb: bool = True) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that refuses arguments which do not fit their annotations, and leaves torch's modes outside.

    Args:
        excepted: Names of the arguments that the function checks itself.
        verb: Whether the function is a verb, which raises `DeviceMemoryError` or `SystemLimitError` where a device is
            full, or the system gives no more memory or threads.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            kinds = hints_of(function)
            for name, value in (*zip(kinds, args, strict=False), *kwargs.items()):
                if name not in excepted:
                    check_type(name, value, kinds.get(name, Any))
            try:
                with torch_defaults():
                    return function(*args, **kwargs)
            except Exception as error:
                if verb and is_out_of_memory(error):
                    raise device_full(error) from error
                if verb and is_refused(error):
                    raise system_limit(error) from error
                raise

        return call

    return decorate


def check_type(name: str, value: object, kind: Any) -> None:
    """Refuse a value that does not fit an annotation; numbers must be finite, and paths must be possible.

    Raises:
        RecipeError: The message names the value and what was expected.
    """
    parts = _parts(kind)
    if not _fits(kind, value):
        several = next((part for part in parts if get_origin(part) in (Sequence, tuple)), None)
        if several is not None and isinstance(value, get_origin(several)) and not isinstance(value, str | bytes):
            for index, item in enumerate(value):
                check_type(f"{name}[{index}]", item, get_args(several)[0])
        expected = dict.fromkeys(_expected(part) for part in parts if part is not str or Path not in parts)
        raise RecipeError(f"{name} is {described(value)}; expected {' or '.join(expected)}.")
    if Path in parts and isinstance(value, str | os.PathLike):
        check_path(name, value)


def check_fields(part: object, *names: str) -> None:
    """Refuse fields of a dataclass that do not fit their annotations."""
    for name in names:
        check_type(name, getattr(part, name), hints_of(type(part))[name])


def described(value: object) -> str:
    """Return a number or the beginning of a text as Python writes it, and the type of any other value."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        text = repr(value[:MAX_SHOWN_LETTERS] if isinstance(value, str | bytes) else value)
        return text if len(text) <= 2 * MAX_SHOWN_LETTERS else f"{text[:MAX_SHOWN_LETTERS]}.."
    return f"the type {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def within(name: str, value: object, good: bool, expected: str) -> None:
    """Refuse a bool, and a value that is not `good`; the message says what is `expected`."""
    if isinstance(value, bool) or not good:
        raise RecipeError(f"{name} is {described(value)}; expected {expected}.")


def whole(name: str, value: object, least: int, most: int | None = None) -> None:
    """Refuse a value that is neither None nor a whole number from `least` to `most`."""
    good = value is None or (isinstance(value, Integral) and least <= int(value) <= (most or int(value)))
    within(
        name,
        value,
        good,
        f"a whole number, at least {least}" if most is None else f"a whole number from {least} to {most}",
    )


def check_device(name: str) -> None:
    """Refuse a device that torch does not have on any machine; `Device.named` refuses those that this machine lacks.

    Raises:
        RecipeError: The name is not that of a kind of device, with a number or without.
    """
    kind, numbered, number = name.partition(":")
    if name != "auto" and not (kind in DEVICES and (number.isdecimal() or not numbered)):
        raise unknown_device(name)


def unknown_device(name: str) -> RecipeError:
    """Return the error for a name of a device that torch does not know."""
    return RecipeError(f"device is {described(name)}; expected auto, cpu, cuda, or one of several GPUs as cuda:1.")


def _parts(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the annotation itself."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _fits(kind: Any, value: Any) -> bool:
    """Return whether a value has the type of an annotation."""
    origin, parts = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, UnionType):
        return any(_fits(part, value) for part in parts)
    if origin is Literal:
        return isinstance(value, str) and value in parts
    if origin is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if origin is float:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if origin is Path:
        return isinstance(value, os.PathLike) and isinstance(os.fspath(value), str)
    if origin in (Sequence, tuple):
        several = isinstance(value, origin) and not isinstance(value, str | bytes)
        return several and all(_fits(parts[0], item) for item in value)
    return origin is Any or not isinstance(origin, type) or isinstance(value, origin)


def _expected(kind: Any) -> str:
    """Return the description of an annotation."""
    origin = get_origin(kind) or kind
    if origin is Literal:
        return f"one of {', '.join(get_args(kind))}"
    return DESCRIPTIONS.get(origin, f"a {getattr(origin, '__name__', origin)}")


@contextmanager
def torch_defaults() -> Iterator[None]:
    """A context with the modes of a new process, in which the results of a call do not depend on where it stands.

    Within it torch records gradients, is not in inference mode, casts nothing by itself, makes float32 tensors on the CPU,
    and takes any algorithm (nearplane chooses repeatable ones itself). The modes of the program come back afterwards.
    """
    if (torch := sys.modules.get("torch")) is None:  # what is not imported has no modes
        yield
        return
    with ExitStack() as modes:
        if torch.is_inference_mode_enabled():
            modes.enter_context(torch.inference_mode(mode=False))  # records gradients, too
        elif not torch.is_grad_enabled():
            modes.enter_context(torch.enable_grad())
        for device in AUTOCASTS:
            if torch.is_autocast_enabled(device):
                modes.enter_context(torch.autocast(device, enabled=False))
        if (dtype := torch.get_default_dtype()) != torch.float32:
            modes.callback(torch.set_default_dtype, dtype)
            torch.set_default_dtype(torch.float32)
        if torch.get_default_device().type != "cpu":
            modes.enter_context(torch.device("cpu"))
        if torch.are_deterministic_algorithms_enabled():
            warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
            modes.callback(torch.use_deterministic_algorithms, True, warn_only=warn_only)
            torch.use_deterministic_algorithms(False)
        yield
