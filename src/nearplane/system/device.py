"""Where a verb computes: the device, the dtype of what is computed there, and the memory that is free. Made once per verb."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nearplane.errors import RecipeError
from nearplane.system.memory import free_memory


@dataclass(frozen=True, slots=True)
class Device:
    """A device of this machine.

    Args:
        place: the device as torch names it, for example `cuda:1`.
    """

    place: torch.device

    @classmethod
    def named(cls, name: str | torch.device) -> Device:
        """Return the device of a name: auto (the GPU where there is one), cpu, cuda, cuda:1.

        Raises:
            RecipeError: torch does not know the name, or this machine has no such device.
        """
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            place = torch.device(name)
        except (RuntimeError, TypeError):
            place = torch.device("meta")
        if place.type == "meta":
            raise RecipeError(f"device is {str(name)!r}; expected auto, cpu, cuda, or one of several GPUs as cuda:1.")
        try:
            torch.empty(0, device=place)
        except (RuntimeError, AssertionError, ImportError) as error:
            kind = "CUDA device" if place.type == "cuda" else "device"
            raise RecipeError(
                f"--device {name}: this machine has no such {kind} that torch can use; pass --device cpu."
            ) from error
        return cls(place)

    @property
    def on_cpu(self) -> bool:
        """Whether it is the CPU, whose memory is that of the process."""
        return self.place.type == "cpu"

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which the blocks of a model of `dtype` run: float32 on the CPU, elsewhere the model's own."""
        return torch.float32 if self.on_cpu else dtype

    def free(self) -> int | None:
        """Return how many bytes this process can still take there; None where the system does not say."""
        if self.place.type == "cuda":
            unused = torch.cuda.memory_reserved(self.place) - torch.cuda.memory_allocated(self.place)
            return torch.cuda.mem_get_info(self.place)[0] + unused
        return free_memory() if self.on_cpu else None

    def model(self) -> str:
        """Return the device with the model of the GPU: results depend on it."""
        return f"{self}, {torch.cuda.get_device_name(self.place)}" if self.place.type == "cuda" else str(self)

    def __str__(self) -> str:
        return str(self.place)
