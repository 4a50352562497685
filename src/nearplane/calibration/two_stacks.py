"""Networks with two stacks of blocks: an encoder, and a decoder with cross-attention to the encoder's output.

The hidden states of both stacks are kept as one tensor, the encoder's first: (windows, positions of both, hidden). So
every decoder block has the output of the encoder in the same network, and gradients flow back to it. Each block works on
its own positions only.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from nearplane.calibration.rows import same
from nearplane.errors import ModelError


class FinalNorm:
    """Last norm of an encoder, if it has one after its last block; hooks find it while the encoder runs.

    Attributes:
        output: Output of the encoder's last run.
    """

    def __init__(self, encoder: nn.Module) -> None:
        self.output: Tensor | None = None
        self._block_output: Tensor | None = None
        self._candidates: list[tuple[nn.Module, Tensor]] = []
        self._module: nn.Module | None = None
        for module in encoder.modules():
            module.register_forward_hook(self._encoder_ran if module is encoder else self._module_ran)

    def begin(self, block_output: Tensor) -> None:
        """Note the output of the encoder's last block."""
        self._block_output, self._candidates = block_output, []

    def _module_ran(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._block_output is not None and args and isinstance(output, Tensor) and args[0] is self._block_output:
            self._candidates.append((module, output))

    def _encoder_ran(self, encoder: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        encoded = self.output = output[0]
        if self._block_output is None or same(encoded, self._block_output):
            return
        last_modules = [module for module, candidate in self._candidates if same(candidate, encoded)]
        if not last_modules:
            raise ModelError(
                f"{type(encoder).__name__} runs several modules after its last block, so it cannot be run block by block."
            )
        self._module = self._module or deepcopy(last_modules[0])  # small; the network itself is freed

    def __call__(self, states: Tensor) -> Any:
        """Return the decoder's view of the encoder, from the output of the encoder's last block."""
        return states if self._module is None else self._module(states)


def joined_stacks(encoder: Tensor, decoder: Tensor, name: str) -> Tensor:
    """Return the inputs of both stacks as one tensor.

    Args:
        encoder: (windows, positions, hidden) inputs of the first block of the encoder.
        decoder: (windows, positions, hidden) inputs of the first block of the decoder.
        name: Name of the first block of the decoder.

    Raises:
        ModelError: The two have different widths.
    """
    if encoder.shape[2] != decoder.shape[2]:
        raise ModelError(
            f"The hidden states of {name} have width {decoder.shape[2]}, those of the encoder {encoder.shape[2]}. "
            f"nearplane needs encoders and decoders of one width."
        )
    return torch.cat([encoder, decoder], 1)
