"""Which parts of a model stay as they are beside the matrices in its blocks that are not handled.

Parts of the checkpoint that transformers does not build (multi-token prediction), and parts of the network outside the stack
of blocks (the vision tower of a multimodal model). Both are copied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from torch import nn
from transformers.pytorch_utils import Conv1D

MATRICES = (nn.Linear, Conv1D, nn.Conv2d)
NOT_BUILT = "transformers does not build it"


def unbuilt_parts(unused: Iterable[str], used: Iterable[str]) -> Counter[str]:
    """Return the parts of a checkpoint that the network has no place for, and how many tensors each holds.

    Args:
        unused: names of tensors of two or more dimensions without a place.
        used: names of all others. A part is as large as it can be without one of them: "model.layers.61", not its modules.
    """
    taken = {name[:end] for name in used for end in _dots(name)}
    parts: Counter[str] = Counter()
    for name in unused:
        ends = [end for end in _dots(name) if name[:end] not in taken]
        parts[name[: ends[0]] if ends else name] += 1
    return parts


def outside_parts(network: nn.Module, stacks: Collection[str], apart: Collection[str]) -> Counter[str]:
    """Return the parts of a network outside its stack of blocks that hold matrices, and how many each holds.

    Args:
        network: the whole of it.
        stacks: names of the lists of blocks.
        apart: names of modules that are no part: input embeddings and head.
    """
    names = [name for name, module in network.named_modules() if isinstance(module, MATRICES)]
    blocks = tuple(f"{stack}." for stack in stacks)
    outside = [name for name in names if not name.startswith(blocks) and name not in apart]
    known = [*blocks, *(f"{name}." for name in apart)]
    return unbuilt_parts((f"{name}." for name in outside), known)


def kept_parts(unbuilt: Counter[str], outside: Counter[str]) -> list[tuple[str, str]]:
    """Return (part, why it stays as it is)."""
    return [
        *(
            (part, f"outside the stack of blocks, {_many(count, 'matrix', 'matrices')}")
            for part, count in outside.items()
        ),
        *((part, f"{NOT_BUILT}, {_many(count, 'matrix', 'matrices')}") for part, count in unbuilt.items()),
    ]


def _many(count: int, one: str, more: str) -> str:
    return f"{count:,} {one if count == 1 else more}"


def _dots(name: str) -> list[int]:
    """Return where the dots of a name are."""
    return [place for place, letter in enumerate(name) if letter == "."]
