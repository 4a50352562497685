"""What of a tuned checkpoint can be checked: its norms from the files, its held-out KL with the original and the text.

Part of `verify`. The losses of its layers are measured as those of every checkpoint, along the network that the files hold; those
before tuning are not, as no file holds what they were of.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from nearplane.calibration.windows import digest_of
from nearplane.errors import CalibrationError, FormatError, ModelError
from nearplane.formats.container import written
from nearplane.formats.stored import Stored
from nearplane.models.model import Model
from nearplane.record.record import RunRecord
from nearplane.record.tuning_record import Tuning, odd
from nearplane.system.paths import RECORD
from nearplane.tuning.checkpoint import Checkpoint, norms_stored
from nearplane.tuning.loop import mean_kl
from nearplane.tuning.network import TunedNetwork
from nearplane.tuning.settings import Split, split
from nearplane.verbs.verify_faults import Fault


def of_the_files(stored: Stored, record: RunRecord) -> Iterator[Fault]:
    """Compare what tuning says of itself, and of norms, with the files."""
    tuning = record.tuning
    if tuning is None:
        return
    yield from (Fault(where=f"{RECORD}, tuning", what=what) for what in odd(tuning))
    if [each.name for each in tuning.solved] != [layer.name for layer in record.layers]:
        yield Fault(where=f"{RECORD}, tuning", what="its losses before tuning are not those of the layers")
    kept = next((point.bytes for point in tuning.curve if point.step == tuning.kept), None)
    if kept is not None and kept != sum(layer.bytes for layer in record.layers):
        yield Fault(
            where=f"{RECORD}, tuning", what=f"the state that was kept took {kept:,} bytes, its layers take others"
        )
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
    if tuning is None:
        return {}
    there = tuning.norms.keys() & set(stored.rest())
    return {name: stored.reader.read([file])[file] for name, file in norms_stored(model).items() if file in there}


def held_out_again(there: Checkpoint, tolerance: float) -> Iterator[Fault]:
    """Measure KL on the held-out windows from the files, and compare."""
    record, model, tuning = there.record, there.model, there.record.tuning
    if tuning is None:
        return
    where, model.tuned = f"{RECORD}, tuning", {}  # the walk is over: blocks are the original's again
    try:
        steps = max(tuning.steps, tuning.windows // tuning.batch)  # as asked for, as far as that matters here
        cut = split(there.windows, record, samples=tuning.samples, seqlen=tuning.seqlen, steps=steps)
        if (digest_of(cut.windows), cut.training, cut.held) != (tuning.text, tuning.windows, tuning.held_windows):
            yield Fault(where=where, what="the text does not give the windows that it was tuned on")
            return
        found = _kl(there, replace(cut, windows=cut.windows[cut.training :], training=0))
    except (CalibrationError, FormatError, ModelError) as error:
        yield Fault(where=where, what=str(error))
        return
    if not math.isclose(found, tuning.held_out, rel_tol=tolerance, abs_tol=1e-12):
        yield Fault(
            where=where, what=f"KL on its held-out windows is {found:.9g}, the record says {tuning.held_out:.9g}"
        )


def _kl(there: Checkpoint, cut: Split) -> float:
    """Return the mean KL per token of the network that the files hold, with all of its norms."""
    matrices = there.matrices()
    network = TunedNetwork(there.model, matrices, there.vectors(matrices), cut, ends=there.ends())
    with network.ready():
        return mean_kl(network, cut.batches()[1])
