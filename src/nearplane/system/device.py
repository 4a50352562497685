"""The device that a command computes on: its name, its compute dtype and its free memory. Every verb makes one.

On several processes (ranks) each has a device of its own, which names the others: whoever computes there knows them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from nearplane.errors import RecipeError
from nearplane.system.arguments import ComputeDtype, unknown_device
from nearplane.system.memory import free_memory
from nearplane.system.progress import peak_memory
from nearplane.system.ranks import ONE_PROCESS, Ranks

log = logging.getLogger("nearplane")
WITHOUT_FLOAT64 = ("mps", "xpu")  # devices of Apple and Intel


@dataclass(frozen=True, slots=True)
class Device:
    """A device of this machine.

    Args:
        place: The device as torch names it, for example `cuda:1`.
        dtype: Dtype in which blocks of every model run; None: see `compute_dtype`.
        ranks: Processes of the run; those on this machine share its memory.
    """

    place: torch.device
    dtype: torch.dtype | None = None
    ranks: Ranks = ONE_PROCESS

    @classmethod
    def named(
        cls,
        name: str | torch.device,
        compute_dtype: ComputeDtype = "auto",
        *,
        in_float64: bool = True,
        ranks: Ranks = ONE_PROCESS,
    ) -> Device:
        """Return the device with a name: auto (the GPU if there is one), cpu, cuda, cuda:1.

        Args:
            name: The name, or the device of torch.
            compute_dtype: Dtype in which blocks run; auto: see the method `compute_dtype`.
            in_float64: Whether the verb computes in float64 there.
            ranks: Processes of the run, of which each takes a GPU of its own.

        Raises:
            RecipeError: The name is not a device of torch, this machine has no such device, or it lacks float64.
        """
        dtype = None if compute_dtype == "auto" else getattr(torch, compute_dtype)
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        if ranks.world > 1 and str(name).startswith("cuda"):
            if name != "cuda":
                raise RecipeError(f"--device {name}: several processes take a GPU each. Use --device cuda.")
            name = f"cuda:{ranks.gpu}"
        try:
            place = torch.device(name)
        except (RuntimeError, TypeError, ValueError):
            place = torch.device("meta")
        if place.type == "meta":
            raise unknown_device(str(name))
        if in_float64 and place.type in WITHOUT_FLOAT64:
            raise RecipeError(
                f"--device {name}: second moments, factorizations and measurements need float64, which this device does not "
                f"have. Only load and generate run there. Use --device cpu."
            )
        try:
            torch.empty(0, device=place)
        except (RuntimeError, AssertionError, ImportError) as error:
            kind = "CUDA device" if place.type == "cuda" else "device"
            raise RecipeError(
                f"--device {name}: this machine has no such {kind} that torch can use. Use --device cpu."
            ) from error
        return cls(place, dtype, ranks)

    @property
    def on_cpu(self) -> bool:
        """Whether this is the CPU."""
        return self.place.type == "cpu"

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which blocks of a model in `dtype` run: `self.dtype`, or the default.

        The default is float32, but bfloat16 for models in bfloat16 that do not run on the CPU. Models in float16 run in
        float32, as activations of many of them overflow in float16.
        """
        fast = dtype == torch.bfloat16 and not self.on_cpu
        return self.dtype or (torch.bfloat16 if fast else torch.float32)

    @property
    def asked_dtype(self) -> ComputeDtype:
        """The dtype that was asked for by `named`."""
        return "auto" if self.dtype is None else dtype_name(self.dtype)

    def recorded_dtype(self, dtype: torch.dtype) -> ComputeDtype:
        """Return `compute_dtype` as the run record holds it: auto for float32 on the CPU."""
        computed = self.compute_dtype(dtype)
        return "auto" if self.on_cpu and computed == torch.float32 else dtype_name(computed)

    def say_dtype(self, dtype: torch.dtype) -> None:
        """Log that float16 is avoided for a model in `dtype`, or that a dtype that was asked for rounds its weights."""
        if self.dtype is None and dtype == torch.float16 and not self.on_cpu:
            log.info("blocks run in float32, as they may overflow in float16; --compute-dtype float16 is faster")
        if self.dtype is not None and torch.promote_types(self.dtype, dtype) != self.dtype:
            stored = dtype_name(dtype)
            log.warning("--compute-dtype %s rounds the model's weights, which are in %s", self.asked_dtype, stored)

    def check_limit(self, device_memory: str | int | None) -> None:
        """Refuse --device-memory where no GPU computes.

        Raises:
            RecipeError: It is given, and the CPU computes.
        """
        if self.on_cpu and device_memory is not None:
            raise RecipeError(
                f"--device-memory limits the memory on a GPU, but this run computes on {self}. Use --memory."
            )

    def free(self) -> int | None:
        """Return the bytes that this process can still allocate on the device, or None if they are unknown."""
        if self.on_cpu:
            return self.free_on_host()
        runtime = torch.get_device_module(self.place)
        unused = runtime.memory_reserved(self.place) - runtime.memory_allocated(self.place)
        return int(runtime.mem_get_info(self.place)[0] + unused)

    def free_on_host(self) -> int | None:
        """Return this process's part of the free bytes of its machine, or None if they are unknown."""
        free = free_memory()
        return None if free is None else free // self.ranks.local_world

    def peak(self) -> int:
        """Return the most bytes that tensors took on the device at a time; on the CPU, that this process took."""
        if self.on_cpu:
            return peak_memory()
        return int(torch.get_device_module(self.place).max_memory_allocated(self.place))

    def model(self) -> str:
        """Return the device and the model of its GPU, on which results depend, as the run record holds them."""
        if self.on_cpu:
            return str(self)
        return f"{self}, {torch.get_device_module(self.place).get_device_name(self.place)}"

    def run_input(self) -> str:
        """Return what results depend on: `model` without the number of the GPU, and the dtype if it was asked for."""
        dtype = "" if self.dtype is None else f", {dtype_name(self.dtype)}"
        return without_number(self.model()) + dtype

    def __str__(self) -> str:
        return str(self.place)


@contextmanager
def repeatable_backward(place: torch.device) -> Iterator[None]:
    """Let backward passes on a GPU give the same bits every time: attention and convolutions by kernels that do.

    Attention then takes memory for its (tokens, tokens) weights. On the CPU nothing changes.
    """
    if place.type == "cpu":
        yield
        return
    cudnn = torch.backends.cudnn
    before, cudnn.deterministic = cudnn.deterministic, True
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        cudnn.deterministic = before


def without_number(model: str) -> str:
    """Return what `Device.model` returned without the number of the GPU."""
    return re.sub(r"^(\w+):\d+", r"\1", model)


def dtype_name(dtype: torch.dtype) -> ComputeDtype:
    """Return the name of a dtype in which blocks run."""
    return cast(ComputeDtype, str(dtype).removeprefix("torch."))
