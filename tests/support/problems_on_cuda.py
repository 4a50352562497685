"""The random problems of Triton's kernels on a CUDA device instead of the interpreter: `python problems_on_cuda.py COUNT`.

It prints a line of JSON for each of COUNT problems of each kind, as `interpreted_problems.py` does. Matrices are larger
here, so that programs have several strips and tiles of their own sizes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "0"

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import pretended
import pretended_triton
from nearplane.lattice import (
    beam_triton,
    kernels,
    kernels_triton,
    superblocks_triton,
    superfit_triton,
)


class Devices(dict[str, Any]):
    """A table by device in which the pretended GPU is CUDA."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__("cuda" if key == "pretend" else key, value)


@contextmanager
def real() -> Iterator[None]:
    """Take the place of `pretended`."""
    yield None


@contextmanager
def uncounted() -> Iterator[pretended_triton.Count]:
    """Take the place of `pretended_triton.interpreted`."""
    yield pretended_triton.Count()


def on_cuda(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel that takes tensors of the CPU, copies them to the device, and copies back what it changed."""

    def launched(*args: Any) -> Any:
        pairs: list[tuple[Tensor, Tensor]] = []

        def sent(tensor: Tensor) -> Tensor:
            pairs.append((tensor, tensor.cuda()))
            return pairs[-1][1]

        made = kernel(*tree_map_only(Tensor, sent, args))
        for here, there in pairs:
            here.copy_(there.cpu())
        return tree_map_only(Tensor, lambda tensor: tensor.cpu(), made)

    return launched


def main() -> None:
    """Solve the problems; modules of problems take what is replaced here as they are imported."""
    for module, name in (
        (beam_triton, "beam_paths"), (superblocks_triton, "search"), (superfit_triton, "fit_columns"),
        (kernels_triton, "sweep_block"), (kernels_triton, "best_candidate"), (kernels_triton, "add_exactly"),
    ):  # fmt: skip
        setattr(module, name, on_cuda(getattr(module, name)))
    kernels.KERNELS = Devices(kernels.KERNELS)
    Tensor.held = property(lambda tensor: tensor.cpu())  # type: ignore[attr-defined]
    pretended.Pretend = lambda tensor, index: tensor.cuda()  # type: ignore[assignment,misc]
    pretended.pretended, pretended_triton.interpreted = real, uncounted  # type: ignore[assignment]

    import beam_problems
    import passes_problems
    import superblock_problems
    import superfit_problems
    import triton_problems

    def of_a_block(asked: dict[str, Any]) -> dict[str, Any]:
        return triton_problems.swept(asked) | triton_problems.searched(asked) | triton_problems.added(asked)

    others = (beam_problems, superblock_problems, superfit_problems, passes_problems)
    kinds = {triton_problems: of_a_block} | {module: module.solved for module in others}
    for seed in range(int(sys.argv[1])):
        for module, solved in kinds.items():
            draw = torch.Generator().manual_seed(seed)
            larger = {"rows": 1 + int(torch.randint(70, (), generator=draw)), "dtype": "float32", "shared": False}
            if module is passes_problems:
                larger |= {"columns": 1 + int(torch.randint(150, (), generator=draw))}
                larger |= {"rows": (larger["rows"], 4500, 9000)[seed // 7 % 3]}  # three sizes of programs
            asked = module.problem(seed) | larger
            with mock.patch.object(passes_problems, "small_tiles", nullcontext):
                print(json.dumps({"module": module.__name__} | asked | solved(asked)), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
