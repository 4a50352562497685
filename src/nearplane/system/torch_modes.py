"""Modes that a program has set in torch: while a public function runs, they are torch's own. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

AUTOCASTS = ("cpu", "cuda", "mps", "xpu")  # kinds of devices with an autocast each


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
