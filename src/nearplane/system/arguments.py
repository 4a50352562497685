"""Checks of the arguments of public functions by their annotations, of numbers and of words; modes of torch. Needs no torch."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from functools import cache, wraps
from inspect import Parameter, Signature, cleandoc, signature
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Any,
    Literal,
    ParamSpec,
    Protocol,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from nearplane.errors import RecipeError
from nearplane.system.memory import device_full, is_out_of_memory, is_refused, system_limit
from nearplane.system.paths import check_path
from nearplane.system.progress_bar import display
from nearplane.system.repeatable import repeatable_products

P = ParamSpec("P")
R = TypeVar("R")
Asked = TypeVar("Asked", contravariant=True)
Result = TypeVar("Result", covariant=True)
ComputeDtype = Literal["auto", "float32", "bfloat16", "float16"]  # see `Device.compute_dtype`
MAX_SEED = 2**64 - 1  # of torch
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
OPEN: Any = ...  # default of an option whose default is decided elsewhere, where it is checked as well
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
            with _attended(verb=verb):
                return function(*args, **kwargs)

        return call

    return decorate


class Verb(Protocol[P, Asked, Result]):
    """A function that takes a request, or the arguments from which one is made."""

    @overload
    def __call__(self, request: Asked, /) -> Result: ...
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Result: ...


def takes(request: Callable[P, Asked], **kinds: Any) -> Callable[[Callable[[Asked], Result]], Verb[P, Asked, Result]]:
    """Return a decorator of a verb whose arguments a dataclass describes: their names, types, defaults and meaning.

    The verb is called with a request or with its fields. Both are checked as `checked` does, except options that are `OPEN`.

    Args:
        request: The dataclass. If it has a field `spellings`, unknown keywords are collected there.
        kinds: Types of fields whose annotations name classes that need torch, which the dataclass does not import.
    """
    kind, parameters = cast(type, request), signature(request).parameters
    closed = {name for name, parameter in parameters.items() if parameter.default is not OPEN}

    def made(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the request that was passed, or is made of the arguments of the verb with this name."""
        asked: Any = args[0] if args and isinstance(args[0], kind) else None
        if asked is not None:
            given = {each.name: getattr(asked, each.name) for each in fields(asked)}
        else:
            if "progress" in parameters:
                kwargs = kwargs | {"progress": display(kwargs.get("progress"))}
            if "spellings" in parameters:
                known = {word: value for word, value in kwargs.items() if word in parameters}
                others = {word: value for word, value in kwargs.items() if word not in parameters}
                kwargs = known | ({"spellings": others} if others else {})
            given = dict(zip(parameters, args, strict=False)) | kwargs
        for word, value in given.items():
            if word in closed:
                check_type(word, value, (hints_of(request) | kinds)[word])
        try:
            asked = kind(*args, **kwargs) if asked is None else asked
        except TypeError as error:  # an argument is missing or unknown
            raise TypeError(str(error).replace(f"{kind.__name__}.__init__", name)) from None
        return asked

    def decorate(function: Callable[[Asked], Result]) -> Verb[P, Asked, Result]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Result:
            asked = made(function.__name__, args, kwargs)
            with _attended(verb=True):
                return function(asked)

        several = {"spellings": Parameter("spellings", Parameter.VAR_KEYWORD, annotation="Any")}
        shown = parameters | several if "spellings" in parameters else parameters
        call.__signature__ = Signature(  # type: ignore[attr-defined]
            [*shown.values()], return_annotation=signature(function).return_annotation
        )
        call.__doc__ = _with_arguments(function.__doc__ or "", kind)
        return cast(Verb[P, Asked, Result], call)

    return decorate


def _with_arguments(text: str, request: type) -> str:
    """Return the docstring of a verb, with the arguments of its request before what it returns and raises."""
    text = cleandoc(text)
    described = (cleandoc(each.__doc__ or "").partition("\n\nArgs:\n")[2] for each in request.__mro__[:-1])
    arguments = "\n".join(filter(None, described))
    end = min((place for word in ("Returns", "Raises") if (place := text.find(f"\n\n{word}:")) >= 0), default=len(text))
    return f"{text[:end]}\n\nArgs:\n{arguments}{text[end:]}"


@contextmanager
def _attended(*, verb: bool) -> Iterator[None]:
    """A context with torch's default modes; of a verb, what a full device raises becomes an error of nearplane."""
    repeatable_products()
    try:
        with torch_defaults():
            yield
    except Exception as error:
        if verb and is_out_of_memory(error):
            raise device_full(error) from error
        if verb and is_refused(error):
            raise system_limit(error) from error
        raise


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
    limits = f", at least {least}" if most is None else f" from {least} to {most}"
    within(name, value, good, f"a whole number{limits}")


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
