"""One window through one block of each kind, before anything is solved: networks that cannot be calibrated are found out here.

Knows blocks and tokens; a trial costs little, for it takes neither all blocks nor all windows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nearplane.calibration.activations import Stream, skeleton
from nearplane.calibration.stages import FirstLook, first_look
from nearplane.calibration.watch import Hooks
from nearplane.errors import CalibrationError, ModelError, NearplaneError, first_few, first_line
from nearplane.models.ignored import pattern_of
from nearplane.models.model import Block, Model
from nearplane.system.device import Device


def try_blocks(model: Model, tokens: Tensor, device: Device) -> dict[str, FirstLook]:
    """Run the first window through one block of each kind, as calibration will; return what was seen, by name of the block.

    Where the window does not reach every expert, nothing is returned of that kind.

    Args:
        model: to be calibrated.
        tokens: (windows, seqlen).
        device: where to compute.

    Raises:
        ModelError: the network does not run block by block, or not on windows of this length.
        CalibrationError: a layer never runs, whatever the text.
    """
    dtype = device.compute_dtype(model.dtype)
    found: dict[str, FirstLook] = {}
    try:
        stream = skeleton(model, tokens[:1], device=device.place, dtype=dtype, two_streams=False)
        for block in one_of_each(model):
            with block.on(device.place, dtype, original=False):
                try:
                    found[block.name] = first_look(block, stream)
                except CalibrationError:  # it did not run all layers
                    if never := never_run(block, stream):
                        raise CalibrationError(_said(model, block, never)) from None
        return found
    except NearplaneError:
        raise
    except Exception as error:  # models are programs of their makers and raise what they like
        raise ModelError(
            f"{type(model.network).__name__} does not run on a window of {tokens.shape[1]} tokens ({first_line(error)}). Try "
            f"another --seqlen, or --solver round-to-nearest, which does not run it."
        ) from error


def one_of_each(model: Model) -> list[Block]:
    """Return the first block of each kind that has layers."""
    return [blocks[0] for blocks in kinds(model) if blocks[0].layers]


def kinds(model: Model) -> list[list[Block]]:
    """Return the blocks by kind; of one kind are those whose modules have the same names and types."""
    found: dict[frozenset[tuple[str, type]], list[Block]] = {}
    for block in model.blocks:
        found.setdefault(frozenset((name, type(part)) for name, part in block.empty.named_modules()), []).append(block)
    return list(found.values())


@torch.no_grad()
def never_run(block: Block, stream: Stream) -> list[str]:
    """Return the layers of a block that one window does not run, nor any that differs from them by a number (an expert)."""
    reached: set[str] = set()
    layers = block.quantized_layers()
    with Hooks() as hooks:
        for layer in layers:
            hooks.before(layer, lambda layer, x: reached.add(pattern_of(block.name, layer.name)))
        stream.forward(block, block.quantized, 0, stream.quantized[0])
    return [layer.name for layer in layers if pattern_of(block.name, layer.name) not in reached]


def _said(model: Model, block: Block, names: list[str]) -> str:
    """Return what is to be done about layers that never run."""
    patterns = " ".join(f"'{pattern}'" for pattern in dict.fromkeys(pattern_of(block.name, name) for name in names))
    kind = type(model.network).__name__
    return (
        f"{kind} is not supported as it is: it never runs {first_few(names)} as layers of their own, so "
        f"nothing shows their inputs. Leave them as they are with --ignore {patterns}."
    )
