"""Exact products of float32 matrices, whatever the program allows, and on the CPU the library that multiplies them.

TF32, which keeps 10 bits of the inputs of a product on a GPU, is off within a run; see `exact_float32`. On the CPU the
library is chosen once per run, recorded, and used again by `verify`.

torch multiplies with MKL, or with oneDNN if a switch of the process allows inputs to be rounded to bf16. Neither is
always right. On AMD processors MKL uses narrow registers and takes twice as long, and oneDNN still computes in float32.
On processors with matrix units for bf16 (AMX), oneDNN does round, which would change losses by 1e-3. So oneDNN is used
on x86 processors that are not Intel's, if trial products show that it is as exact. The choice does not depend on time
measurements: the same command on the same machine writes the same bytes. Importing this module sets nothing.
"""

from __future__ import annotations

import logging
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nearplane.system.device import Device
from nearplane.system.matmul_choice import Library, Products

logger = logging.getLogger("nearplane")

PRECISIONS: dict[Library, str] = {"default": "ieee", "onednn": "bf16"}  # torch's names for how inputs may be rounded
MAX_ERROR_RATIO = 4.0  # oneDNN error / default error that counts as equally exact; rounding to bf16 gives ten thousand
# multiplications by weights in a forward pass of all tokens, below which a choice gains nothing
MIN_MULTIPLICATIONS = 2e9
TRIAL_ROWS = 96  # rows of X in trial products
SIDE = 3072  # longest side of a matrix in trial products
TRIAL_SHAPES = 2  # number of shapes with a trial product: those that hold the most weights
COMPARED_ROWS = 16  # rows of each product that are compared with float64
SERIAL_ROWS = 16  # MKL multiplies 5 to 7 and 9 to 11 rows of float32 in another order with two threads than with one


@contextmanager
def chosen_library(shapes: Iterable[tuple[int, int]], tokens: int, device: Device) -> Iterator[Products | None]:
    """Choose the library for a run and use it inside the context; the switch is restored afterwards.

    The switch belongs to the process: enter before threads start, and use one context at a time in a process.

    Args:
        shapes: (out, in) shapes of all matrices that are quantized.
        tokens: Number of tokens that pass through them.
        device: Device of the run; only the CPU has a choice.

    Yields:
        The choice and its trial errors; None if there was no choice, because torch has no switch, MKL is fast on this
        processor or the run is short.
    """
    sizes = list(shapes)
    work = tokens * sum(rows * columns for rows, columns in sizes)
    eligible = device.on_cpu and work >= MIN_MULTIPLICATIONS and _switch() is not None and slow_for_mkl()
    products = trial(kinds(sizes)) if eligible else None
    with exact_float32(), _using("default" if products is None else products.library):
        yield products


@contextmanager
def recorded_library(products: Products | None, device: Device) -> Iterator[Products | None]:
    """Use the library that a record names, or with a warning the default if this machine cannot repeat its results.

    Yields:
        The choice in use: `products`, or None for the default in place of the recorded library.
    """
    used = products if device.on_cpu else None
    if used is not None and not repeatable(used):
        logger.warning(
            "The losses of this record were computed with oneDNN, which this machine or this torch cannot use in float32. The "
            "default library is used instead, and losses agree to about two digits. Use --tolerance 0.01."
        )
        used = None
    with exact_float32(), _using("default" if used is None else used.library):
        yield used


def library_in_use() -> Library:
    """Return the library that multiplies at present."""
    switch = _switch()
    return "onednn" if switch is not None and switch.fp32_precision == PRECISIONS["onednn"] else "default"


@contextmanager
def using_library(library: Library) -> Iterator[None]:
    """Use a library that another process of the run chose, on a processor of the same kind."""
    with exact_float32(), _using(library):
        yield


@contextmanager
def repeatable_threads(rows: Tensor) -> Iterator[None]:
    """Multiply (rows, in) few rows by weights on the CPU in one thread, so that the product is the same for any number."""
    before = torch.get_num_threads()
    serial = before > 1 and len(rows) < SERIAL_ROWS and rows.device.type == "cpu"
    if serial:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if serial:
            torch.set_num_threads(before)


@contextmanager
def exact_float32() -> Iterator[None]:
    """Compute products, convolutions and recurrent layers in float32 on a GPU without rounding inputs to TF32.

    The switches belong to the process and are restored afterwards. Convolutions round by default; products round after
    `torch.set_float32_matmul_precision("high")`.
    """
    backends: Any = torch.backends
    pinned, asked = [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn], "highest"
    before = [(switch, switch.fp32_precision) for switch in [*pinned, backends.mkldnn.matmul]]
    with suppress(RuntimeError):  # raised if the program has used only the switches
        asked = torch.get_float32_matmul_precision()
    try:
        if asked != "highest":
            torch.set_float32_matmul_precision("highest")
        for switch in pinned:
            switch.fp32_precision = "ieee"
        yield
    finally:
        if asked != "highest":
            torch.set_float32_matmul_precision(asked)
        for switch, precision in before:
            switch.fp32_precision = precision


def repeatable(products: Products) -> bool:
    """Return whether this machine has the library that a record names, with equally exact products."""
    return products.library != "onednn" or (_switch() is not None and as_exact(trial([(SIDE // 8, SIDE // 8)])))


def kinds(shapes: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the shapes, at most `TRIAL_SHAPES`, that hold the most weights, with sides cut to `SIDE`."""
    weights: Counter[tuple[int, int]] = Counter()
    for rows, columns in shapes:
        weights[min(rows, SIDE), min(columns, SIDE)] += rows * columns
    return [shape for shape, _ in weights.most_common(TRIAL_SHAPES)]


def slow_for_mkl() -> bool:
    """Return whether this is an x86 processor that is not Intel's, on which MKL uses narrow registers."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    with suppress(OSError):
        return "GenuineIntel" not in Path("/proc/cpuinfo").read_text()
    return "Intel" not in platform.processor()


def processor() -> str:
    """Return what determines the last digits of products: architecture, maker, and torch's widest registers."""
    maker = "not by Intel" if slow_for_mkl() else "by Intel or ARM"
    return f"{platform.machine()} {maker}, {torch.backends.cpu.get_cpu_capability()}"


def trial(shapes: Iterable[tuple[int, int]]) -> Products:
    """Compute `X W^T` and `X^T X` for each shape with each library, and compare them with float64.

    Returns:
        The errors, and the library to use: oneDNN if it is as exact as the default.
    """
    generator = torch.Generator().manual_seed(0)
    errors: dict[Library, float] = dict.fromkeys(PRECISIONS, 0.0)
    for multiply, truth in (product for shape in shapes for product in _products(*shape, generator)):
        for library in PRECISIONS:
            with _using(library):
                error = multiply()[:COMPARED_ROWS].double().sub_(truth).norm() / truth.norm()
            errors[library] = max(errors[library], float(error))
    measured = Products(errors=errors)
    return replace(measured, library="onednn" if as_exact(measured) else "default")


def as_exact(measured: Products) -> bool:
    """Return whether oneDNN computed in float32 although it may round."""
    return measured.errors["onednn"] <= MAX_ERROR_RATIO * measured.errors["default"]


def _products(rows: int, columns: int, generator: torch.Generator) -> list[tuple[Callable[[], Tensor], Tensor]]:
    """Return two products of a (rows, columns) matrix, each with its first rows in float64."""
    X, W = (torch.randn(size, columns, generator=generator) for size in (TRIAL_ROWS, rows))
    forward = X[:COMPARED_ROWS].double() @ W.double().T
    moments = X[:, :COMPARED_ROWS].double().T @ X.double()
    return [(lambda: torch.nn.functional.linear(X, W), forward), (lambda: X.T @ X, moments)]


def _switch() -> Any:
    """Return the object whose attribute `fp32_precision` is the switch, or None if this torch has none or no oneDNN."""
    mkldnn = torch.backends.mkldnn
    matmul = getattr(mkldnn, "matmul", None)
    return matmul if mkldnn.is_available() and hasattr(matmul, "fp32_precision") else None


@contextmanager
def _using(library: Library) -> Iterator[None]:
    """Set the switch of the process, and restore it afterwards."""
    switch, precision = _switch(), PRECISIONS[library]
    before = None if switch is None else switch.fp32_precision
    if before in (None, precision) or (before, precision) == ("none", "ieee"):  # the same; "none" may be inherited
        yield
        return
    switch.fp32_precision = precision
    try:
        yield
    finally:
        switch.fp32_precision = before
