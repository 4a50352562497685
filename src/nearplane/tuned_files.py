"""What of a tuned checkpoint can be checked: its norms from the files, its held-out KL with the original and the text.

Part of `verify`. The losses of its layers are measured as those of every checkpoint, along the network that the files hold; those
before tuning are not, as no file holds what they were of.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from nearplane.errors import CalibrationError, FormatError, ModelError
from nearplane.faults import Fault
from nearplane.formats.container import written
from nearplane.formats.stored import Stored
from nearplane.models.given import Given
from nearplane.models.model import Model
from nearplane.recipe import Recipe
from nearplane.record import NAME, RunRecord
from nearplane.tokens import digest_of
from nearplane.tune import norms_stored, windows_of
from nearplane.tuned import Tuning, odd
from nearplane.tuning.loop import mean_kl
from nearplane.tuning.network import TunedNetwork
from nearplane.tuning.parameters import TunedMatrix, TunedVector
from nearplane.tuning.settings import split


def of_the_files(stored: Stored, record: RunRecord) -> Iterator[Fault]:
    """Compare what tuning says of itself, and of norms, with the files."""
    tuning = record.tuning
    if tuning is None:
        return
    yield from (Fault(where=f"{NAME}, tuning", what=what) for what in odd(tuning))
    if [each.name for each in tuning.solved] != [layer.name for layer in record.layers]:
        yield Fault(where=f"{NAME}, tuning", what="its losses before tuning are not those of the layers")
    there = set(stored.rest())
    for name, wanted in tuning.norms.items():
        if name not in there:
            yield Fault(where=name, what="the record says that this norm was tuned; it is missing")
        elif (has := written(stored.reader.read([name])).checksum) != wanted:
            yield Fault(
                where=name, what=f"it has the SHA-256 {has[:16]}.., the record says {wanted[:16]}.. of the tuned norm"
            )


def tuned_norms(stored: Stored, model: Model, tuning: Tuning | None) -> dict[str, Tensor]:
    """Return the norms of the files that are not the original's, by name of the parameter."""
    named = {} if tuning is None else {name: file for name, file in norms_stored(model).items() if file in tuning.norms}
    return {name: stored.reader.read([file])[file] for name, file in named.items() if file in stored.rest()}


def held_out_again(
    stored: Stored,
    model: Model,
    record: RunRecord,
    recipe: Recipe,
    given: Given | None,
    device: torch.device,
    tolerance: float,
) -> Iterator[Fault]:
    """Measure KL on the held-out windows from the files, and compare."""
    tuning = record.tuning
    if tuning is None:
        return
    where, model.tuned = f"{NAME}, tuning", {}  # the walk is over: blocks are the original's again
    try:
        cut = split(
            lambda count, length: windows_of(model, recipe, given, count, length),
            record,
            samples=tuning.samples,
            seqlen=tuning.seqlen,
            steps=tuning.steps,
        )
        if (digest_of(cut.windows), cut.training, cut.held) != (tuning.text, tuning.windows, tuning.held_windows):
            yield Fault(where=where, what="the text does not give the windows that it was tuned on")
            return
        held = cut.windows[cut.training :]
        found = _kl(stored, model, record, held, cut.batch, device)
    except (CalibrationError, FormatError, ModelError) as error:
        yield Fault(where=where, what=str(error))
        return
    if not math.isclose(found, tuning.held_out, rel_tol=tolerance, abs_tol=1e-12):
        yield Fault(
            where=where, what=f"KL on its held-out windows is {found:.9g}, the record says {tuning.held_out:.9g}"
        )


def _kl(stored: Stored, model: Model, record: RunRecord, windows: Tensor, batch: int, device: torch.device) -> float:
    """Return the mean KL per token of the network that the files hold, with all of its norms."""
    storage = stored.layers.scale_dtype(model.dtype)
    matrices: Mapping[str, TunedMatrix] = {
        layer.name: TunedMatrix(
            layer.name, stored.matrix(layer.stored, stored.tensors(layer.stored)).to(device), storage
        )
        for layer in record.layers
    }
    files = {name: file for name, file in norms_stored(model).items() if file in stored.rest()}
    vectors = {name: TunedVector(stored.reader.read([file])[file], device, 1.0) for name, file in files.items()}
    network = TunedNetwork(model, matrices, vectors, windows, batch=batch, device=device)
    with network.ready():
        return mean_kl(network, range(network.batches))
