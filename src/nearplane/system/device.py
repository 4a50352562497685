"""The device that a command computes on: its name, its compute dtype and its free memory. Every verb makes one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from nearplane.errors import RecipeError
from nearplane.system.memory import free_memory


@dataclass(frozen=True, slots=True)
class Device:
    """A device of this machine.

    Args:
        place: The device as torch names it, for example `cuda:1`.
    """

    place: torch.device

    @classmethod
    def named(cls, name: str | torch.device) -> Device:
        """Return the device with a name: auto (the GPU if there is one), cpu, cuda, cuda:1.

        Raises:
            RecipeError: The name is not a device of torch, or this machine has no such device.
        """
        refuse_meta()
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            place = torch.device(name)
        except (RuntimeError, TypeError, ValueError):
            place = torch.device("meta")
        if place.type == "meta":
            raise RecipeError(f"device is {str(name)!r}; expected auto, cpu, cuda, or one of several GPUs as cuda:1.")
        try:
            torch.empty(0, device=place)
        except (RuntimeError, AssertionError, ImportError) as error:
            kind = "CUDA device" if place.type == "cuda" else "device"
            raise RecipeError(
                f"--device {name}: this machine has no such {kind} that torch can use. Use --device cpu."
            ) from error
        return cls(place)

    @property
    def on_cpu(self) -> bool:
        """Whether this is the CPU."""
        return self.place.type == "cpu"

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which blocks of a model run: float32 on the CPU, the model's `dtype` elsewhere."""
        return torch.float32 if self.on_cpu else dtype

    def free(self) -> int | None:
        """Return the bytes that this process can still allocate on the device, or None if they are unknown."""
        if self.on_cpu:
            return free_memory()
        runtime = torch.get_device_module(self.place)
        unused = runtime.memory_reserved(self.place) - runtime.memory_allocated(self.place)
        return int(runtime.mem_get_info(self.place)[0] + unused)

    def model(self) -> str:
        """Return the device and the model of its GPU, on which results depend."""
        if self.on_cpu:
            return str(self)
        return f"{self}, {torch.get_device_module(self.place).get_device_name(self.place)}"

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


def refuse_meta() -> None:
    """Refuse to compute while new tensors of torch have no values.

    Raises:
        RecipeError: The default device of torch is meta.
    """
    if torch.get_default_device().type == "meta":
        raise RecipeError(
            "The default device of torch is meta, which holds no values. Call torch.set_default_device('cpu')."
        )
