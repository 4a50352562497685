"""Does `nearplane verify` find every alteration of a checkpoint? A thousand random ones, and what moving any one code shows.

python benchmarks/studies/alterations.py [--model FOLDER --text FILE] [--count 1000] [--first 0] [--every-code]

Half are crude: a byte, a file, a number of the record, the hashes as they were; they are to be found from the files alone. Half
are forged: a code by one, a step by 1 %, a bit of another tensor, a field of a certificate by 1 %, and every hash made
to fit; they are to be found with the original and its text. `tests/support/forgery.py` makes
both. The default model is the one in the package.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import nearplane
from nearplane import NearplaneError, demo
from nearplane.calibration.one_forward import MemorySetting
from nearplane.calibration.walk import walk
from nearplane.calibration.windows import calibration_windows
from nearplane.formats.stored import read_matrices
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.matrix.inputs import LayerInput, corrected
from nearplane.models.model import open_model
from nearplane.planning.plan import moments_of_embeddings
from nearplane.recipe.scheme import Scheme
from nearplane.record.record import row_groups
from nearplane.record.record_file import read_record
from nearplane.system.device import Device
from nearplane.verbs.verify import verify
from nearplane.verbs.verify_files import Fault
from nearplane.verbs.verify_losses import TOLERANCE

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
from forgery import CRUDE, FORGED, move_one

WAYS: Mapping[str, Mapping[str, Any]] = {
    "compressed-tensors, 4 bits": {"bits": 4, "group_size": 32},
    "compressed-tensors, 3.5 bits": {"bits": 3.5, "group_size": 32},
    "gptq, 4 bits": {"bits": 4, "group_size": 32, "format": "gptq"},
    "gptq_v2, 2 bits": {"bits": 2, "group_size": 32, "format": "gptq_v2", "symmetric": False},
    "nearplane, 2.125 bits": {"rate": 2.125},
    "nearplane, 3 bits, ends": {"rate": 3.0, "include_embeddings": True, "include_head": True},
}


def found(folder: Path, against: str | None) -> list[Fault]:
    """Return the faults; a refusal is one that names what its sentence names."""
    try:
        return list(verify(folder, against=against).faults)
    except NearplaneError as error:
        return [Fault(where="", what=str(error))]


def alterations(
    checkpoints: Mapping[str, Path], model: str, seeds: range, scratch: Path
) -> Counter[tuple[str, str, str]]:
    """Make one alteration a seed, each of a fresh copy, and count by (kind, way): tried, caught, named."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for seed in seeds:
        rng, forged = random.Random(seed), seed % 2 == 1
        kinds = FORGED if forged else CRUDE
        kind, way = rng.choice(list(kinds)), rng.choice(list(checkpoints))
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.copytree(checkpoints[way], scratch)
        altered = kinds[kind](scratch, rng)
        faults = found(scratch, model if forged else None)
        named = any(altered.where in f"{fault.where}: {fault.what}" for fault in faults)
        counts.update({(kind, way, "tried"): 1, (kind, way, "caught"): bool(faults), (kind, way, "named"): named})
        if not named:
            print(f"seed {seed}, {way}: {altered}: {faults[:2] or 'not caught'}", flush=True)
    return counts


def table(counts: Counter[tuple[str, str, str]], ways: Mapping[str, Any]) -> None:
    """Print kinds by ways: tried, caught, and those of which a fault named the place."""
    print(f"| alteration | {' | '.join(ways)} | all |\n|{'---|' * (len(ways) + 2)}")
    for kind in (*CRUDE, *FORGED, "all"):
        kinds = (*CRUDE, *FORGED) if kind == "all" else (kind,)
        cells = [
            " / ".join(
                str(sum(counts[k, w, what] for k in kinds for w in some)) for what in ("tried", "caught", "named")
            )
            for some in (*((way,) for way in ways), tuple(ways))
        ]
        print(f"| {kind} | {' | '.join(cells)} |")


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """What moving single codes by one does to the loss of the group of rows they are in, `(s^2 H_jj -+ 2 s (E H)_ij) / sum`.

    Args:
        changes: of every move, relative, in absolute value.
        hidden: (stored name, row, column, step) of those below the tolerance.
        dead: how many more there are of inputs that were always 0, whose weights must be 0.
    """

    changes: Tensor
    hidden: list[tuple[str, int, int, int]]
    dead: int


def every_code(folder: Path, source: str) -> Moves:
    """Compute what every move of one code by one within its grid would do to the row_losses of the record."""
    record, place = read_record(folder), Device.named("auto")
    scheme, (embeddings, head) = record.recipe.scheme, record.recipe.scheme.ends
    model = open_model(source, ignore=record.recipe.ignore, embeddings=embeddings, head=head)
    windows = calibration_windows(model, record.recipe, None, Device.named("cpu"))
    assert windows.fitted is not None
    moments = moments_of_embeddings(model, scheme, windows.fitted, place)
    matrices = dict(read_matrices(folder))
    stored = {layer.name: layer.stored for layer in record.layers}
    found: list[Moves] = []

    with walk(model, record.recipe, windows, MemorySetting.usual(windows.seqlen, place), moments=moments) as stages:
        for stage in stages:
            for layer, inputs in zip(stage.layers, stage.inputs, strict=True):
                name = stored[layer.name]
                found.append(moves(name, layer.read(), inputs, matrices[name], scheme))
            stage.write(matrices[stored[layer.name]].decode() for layer in stage.layers)
    return Moves(
        changes=torch.cat([each.changes for each in found]), hidden=[code for each in found for code in each.hidden],
        dead=sum(each.dead for each in found),
    )  # fmt: skip


def moves(name: str, W: Tensor, inputs: LayerInput, matrix: QuantizedMatrix, scheme: Scheme) -> Moves:
    """Compute what every move of one code of one layer would do; `name` is that of its tensors."""
    values, H = matrix.decode(), inputs.moments.H
    E = corrected(W, inputs, scheme).values.to(H.dtype) - values.to(H.dtype)
    EH = E @ H  # (out, in)
    steps = (matrix.grid.decode(matrix.codes + 1) - values).to(H.dtype)  # (out, in)
    groups = (EH * E).sum(1).tensor_split(row_groups(*W.shape))
    totals = torch.cat([group.sum().expand(len(group)) for group in groups])[:, None]
    low, high = (getattr(matrix.grid, limit, None) for limit in ("low", "high"))
    living = ~inputs.factor(scheme.order, scheme.damp).dead
    changes, hidden, dead = [], [], 0
    for step in (-1, 1):
        change = ((steps.square() * H.diagonal() - step * 2 * steps * EH) / totals).abs()
        moved = matrix.codes + step
        inside = (moved >= (moved if low is None else low)) & (moved <= (moved if high is None else high))
        dead += int((inside & ~living).sum())
        inside &= living
        changes.append(change[inside])
        places = (inside & (change < TOLERANCE)).nonzero().tolist()
        hidden += [(name, row, column, step) for row, column in places]
    return Moves(changes=torch.cat(changes), hidden=hidden, dead=dead)


def try_hidden(checkpoints: Mapping[str, Path], model: str, scratch: Path) -> None:
    """Print what moving any one code shows, and whether `verify` finds those that the losses of groups of rows do not."""
    print(
        "| checkpoint | moves of one code by one | least relative change | median | below the tolerance | tried | found |"
    )
    print(f"|{'---|' * 7}")
    for way, folder in checkpoints.items():
        moves = every_code(folder, model)
        tried = moves.hidden[:40]
        caught = 0
        for name, row, column, step in tried:
            shutil.rmtree(scratch, ignore_errors=True)
            shutil.copytree(folder, scratch)
            move_one(scratch, name, row, column, step)
            caught += bool(found(scratch, model))
        least, median = float(moves.changes.min()), float(moves.changes.median())
        print(f"| {way} | {len(moves.changes):,} + {moves.dead:,} of dead inputs | {least:.1e} | {median:.1e} "
              f"| {len(moves.hidden)} | {len(tried)} | {caught} |", flush=True)  # fmt: skip


def main() -> None:
    """Quantize the model in every way, then alter the checkpoints one by one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=demo.MODEL)
    parser.add_argument("--text", type=Path, default=demo.CALIBRATION)
    parser.add_argument("--samples", type=int, default=8, help="windows of 64 tokens")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first alteration")
    parser.add_argument("--every-code", action="store_true", help="also compute what moving any one code would show")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch, checkpoints = Path(name), {}
        (scratch / "text.txt").write_text(words.text.read_text()[:20_000])
        for index, (way, options) in enumerate(WAYS.items()):
            checkpoints[way] = scratch / str(index)
            tokens = {"calibration": str(scratch / "text.txt"), "samples": words.samples, "seqlen": 64}
            nearplane.quantize(words.model, checkpoints[way], **tokens, **options)
            faults = found(checkpoints[way], str(words.model))
            assert not faults, faults
        if words.every_code:
            try_hidden(checkpoints, str(words.model), scratch / "copy")
        if not words.count:
            return
        began, seeds = time.perf_counter(), range(words.first, words.first + words.count)
        counts = alterations(checkpoints, str(words.model), seeds, scratch / "copy")
        seconds = time.perf_counter() - began
        print(f"{words.model.name}: {words.count} alterations in {seconds:.0f} s; tried / caught / place named")
        table(counts, WAYS)


if __name__ == "__main__":
    main()
