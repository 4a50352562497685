"""Which library multiplies float32 matrices on the CPU: chosen once per run, written into the record, repeated by `verify`.

torch multiplies with MKL, or with oneDNN where a switch of the process permits inputs to be rounded to bf16. Neither is
always right. On AMD processors MKL keeps to narrow registers and takes twice as long, and oneDNN computes in float32
all the same. On processors with matrix units for bf16 (AMX) the permission is used, and losses would be off by 1e-3. So
oneDNN is taken on x86 processors that are not Intel's, where its products prove as exact. No clock decides: the same
command on the same machine multiplies the same way, and writes the same bytes. Importing this sets nothing.
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

PRECISION: dict[Library, str] = {"default": "ieee", "onednn": "bf16"}  # how inputs may be rounded, as torch calls it
ERROR = 4.0  # times the error of the default that is as exact; rounding to bf16 is ten thousand times
WORTH = 2e9  # multiplications by weights in a forward of all tokens below which there is nothing to gain
ROWS = 96  # of the products that are tried
SIDE = 3072  # at most, of their matrices
KINDS = 2  # shapes of matrices that are tried, those with the most weights
EXACT = 16  # rows of each product whose error is measured


@contextmanager
def fastest(shapes: Iterable[tuple[int, int]], tokens: int, device: Device) -> Iterator[Products | None]:
    """Choose the library for a run, and use it inside; outside the switch is as it was.

    The switch is one of the process: enter before threads start, and do not run two at a time in one process.

    Args:
        shapes: (out, in) of every matrix that is quantized.
        tokens: that pass through them.
        device: on which the run computes; products on a GPU are not tried.

    Yields:
        The choice and what was measured; None where there was none: torch has no switch, MKL knows the processor, or the run is
        short.
    """
    sizes = list(shapes)
    work = tokens * sum(rows * columns for rows, columns in sizes)
    open_ = device.on_cpu and work >= WORTH and _switch() is not None and slow_for_mkl()
    products = trial(kinds(sizes)) if open_ else None
    with _using("default" if products is None else products.library):
        yield products


@contextmanager
def repeated(products: Products | None, device: Device) -> Iterator[Products | None]:
    """Use the library that a record names; the default, with a warning, where this machine cannot compute the same by it.

    Yields:
        What is used: `products`, or None where that is the default in place of what the record names.
    """
    used = products if device.on_cpu else None
    if used is not None and not repeatable(used):
        logger.warning(
            "The losses of this record were computed with products by oneDNN, which this machine or torch does not have in "
            "float32. Now the default library computes them, so that they agree to about two digits: use --tolerance 0.01."
        )
        used = None
    with _using("default" if used is None else used.library):
        yield used


def repeatable(products: Products) -> bool:
    """Return whether this machine can compute products as a record says, as exactly."""
    return products.library != "onednn" or (_switch() is not None and as_exact(trial([(SIDE // 8, SIDE // 8)])))


def kinds(shapes: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the shapes that hold the most weights, at most `KINDS`, no side longer than `SIDE`."""
    weights: Counter[tuple[int, int]] = Counter()
    for rows, columns in shapes:
        weights[min(rows, SIDE), min(columns, SIDE)] += rows * columns
    return [shape for shape, _ in weights.most_common(KINDS)]


def slow_for_mkl() -> bool:
    """Whether this is an x86 processor that is not Intel's, on which MKL keeps to narrow registers."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    with suppress(OSError):
        return "GenuineIntel" not in Path("/proc/cpuinfo").read_text()
    return "Intel" not in platform.processor()


def trial(shapes: Iterable[tuple[int, int]]) -> Products:
    """Take two products for each shape by each library: a forward `X W^T` and moments `X^T X`; compare with float64.

    Returns:
        The errors, and the library that they speak for: oneDNN where it is as exact.
    """
    made = torch.Generator().manual_seed(0)
    errors: dict[Library, float] = dict.fromkeys(PRECISION, 0.0)
    for multiply, truth in (product for shape in shapes for product in _products(*shape, made)):
        for library in PRECISION:
            with _using(library):
                apart = multiply()[:EXACT].double().sub_(truth).norm() / truth.norm()
            errors[library] = max(errors[library], float(apart))
    measured = Products(errors=errors)
    return replace(measured, library="onednn" if as_exact(measured) else "default")


def as_exact(measured: Products) -> bool:
    """Whether oneDNN computed in float32 all the same."""
    return measured.errors["onednn"] <= ERROR * measured.errors["default"]


def _products(rows: int, columns: int, made: torch.Generator) -> list[tuple[Callable[[], Tensor], Tensor]]:
    """Return two products of a matrix (rows, columns), and the first rows of each in float64."""
    X, W = (torch.randn(size, columns, generator=made) for size in (ROWS, rows))
    forward = X[:EXACT].double() @ W.double().T
    moments = X[:, :EXACT].double().T @ X.double()
    return [(lambda: torch.nn.functional.linear(X, W), forward), (lambda: X.T @ X, moments)]


def _switch() -> Any:
    """Return the object whose attribute `fp32_precision` is the switch; None: this torch has none, or no oneDNN."""
    mkldnn = torch.backends.mkldnn
    matmul = getattr(mkldnn, "matmul", None)
    return matmul if mkldnn.is_available() and hasattr(matmul, "fp32_precision") else None


@contextmanager
def _using(library: Library) -> Iterator[None]:
    """Set the switch of the process, and put it back."""
    switch, wanted = _switch(), PRECISION[library]
    before = None if switch is None else switch.fp32_precision
    if before in (None, wanted) or (before, wanted) == ("none", "ieee"):  # which mean the same; "none" may be inherited
        yield
        return
    switch.fp32_precision = wanted
    try:
        yield
    finally:
        switch.fp32_precision = before
