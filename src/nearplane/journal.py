"""What a run has done so far, kept on disk while it goes on: the same command, given again after a crash, goes on from there.

    OUT.unfinished/journal/
      state.json          what the run was told, how many blocks are behind it, the record of their layers, the plan, the shards
      plan.pt             what was measured for the plan before the first block
      behind-00007.pt     hidden states of both networks behind block 7

A block counts once its shard, these hidden states and then the state are on disk, in this order; until then the block before
counts. What goes on continues to the last bit as the run would have that was stopped.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nearplane.budget.ledger import Ledger
from nearplane.budget.plan import Plan
from nearplane.errors import FormatError, ModelError, RecipeError
from nearplane.formats.container import Container
from nearplane.formats.unfinished import JOURNAL, STATE
from nearplane.jsonfile import read_object
from nearplane.models.activations import Stream
from nearplane.models.model import Model
from nearplane.progress import duration
from nearplane.recipe import Recipe
from nearplane.record import RunRecord, read_record
from nearplane.shards import flush, sha256
from nearplane.walk import unquantized

VERSION = 1
READ = {".safetensors", ".json", ".model", ".txt", ".jinja", ".py"}  # files of a model that count
SHARE = 0.05  # of a run's time that may go into keeping hidden states: where blocks are quick, not every one is kept
NAMED = 3  # differences that a refusal spells out
EXPECTED = "Delete the folder, or begin anew with --overwrite"

log = logging.getLogger(__name__)


def told(model: Model, recipe: Recipe, text: str, versions: Mapping[str, str], device: torch.device) -> dict[str, Any]:
    """Return all that a run's result depends on, as flat JSON: two runs that are told the same write the same.

    Args:
        model: whose files are hashed.
        recipe: as it was asked for.
        text: digest of the tokens.
        versions: of the packages that compute.
        device: that computes.
    """
    files = {f"the model's {path.name}": sha256(path) for path in sorted(model.folder.iterdir()) if path.suffix in READ}
    asked = json.loads(json.dumps({"recipe": asdict(recipe)}))
    beside = {"calibration text": text, "device": str(device)}
    return dict(_flat(asked)) | files | beside | {f"version of {name}": number for name, number in versions.items()}


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _flat(part, f"{name}.{key}".removeprefix("."))
    else:
        yield name.removeprefix("recipe.").removeprefix("scheme."), value


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """What a run that was stopped had done.

    Args:
        blocks: that are behind it.
        record: with their layers, and what was there before the first.
        plan: as it was then.
        seconds: that it took.
    """

    blocks: int
    record: RunRecord
    plan: Plan
    seconds: float


class Journal:
    """The journal of one run.

    Args:
        container: that the run writes, just entered.
        told: what the run is told, see `told`.

    Attributes:
        before: what a run that was told the same had done; None: nothing that was kept, or all, see `Container.whole`.

    Raises:
        RecipeError: a run that was told something else left the folder, and it may not be replaced; names the difference.
        FormatError: what is there cannot be read, or a shard is not what was written, and it may not be replaced.
    """

    def __init__(self, container: Container, told: Mapping[str, Any]) -> None:
        self._container, self._told = container, dict(told)
        self._folder = container.folder / JOURNAL
        self._ledger: Ledger | None = None
        self._began = time.perf_counter()
        self._kept, self._cost = self._began, 0.0  # when it was written last, and how long that took
        self._room = True
        self.before = self._found() if container.found else None

    def _found(self) -> Before | None:
        """Return what is there; with --overwrite what cannot be gone on with is deleted, and that is said."""
        try:
            return self._read()
        except (FormatError, ModelError) as error:  # of a GGUF the second
            if not self._container.place.overwrite:
                raise
            log.warning("%s", error)
            self._container.begin_anew()
            return None

    def _read(self) -> Before | None:
        state = read_object(self._folder / STATE, expected=EXPECTED)
        if differing := _differing(state, self._told):
            if not self._container.place.overwrite:
                raise RecipeError(
                    f"{self._container.folder} is of a run that was stopped and was told something else: {differing}. Give the "
                    f"same command again to go on with it, or --overwrite to begin anew; or choose another folder."
                )
            log.warning("The run that was stopped was told something else: %s.", differing)
            self._container.begin_anew()
            return None
        if self._container.whole:
            _check_whole(self._container.folder)
            log.info("a run was stopped when all was written: %s", self._container.folder)
            return None
        try:
            self._container.go_on(state["container"])
            record = RunRecord.from_json(state["record"])
            plan = Plan.restored(state["plan"], self._load("plan.pt"), record.tokens)
            before = Before(blocks=int(state["blocks"]), record=record, plan=plan, seconds=float(state["seconds"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FormatError(f"{self._folder / STATE} is not what was written ({error!r}). {EXPECTED}.") from error
        self._began -= before.seconds
        log.info(
            "going on behind block %d, where a run was stopped that had taken %s: %s",
            before.blocks,
            duration(before.seconds),
            self._container.folder,
        )
        return before

    def _load(self, name: str) -> dict[str, Tensor]:
        path = self._folder / name
        try:
            found: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, ValueError, EOFError) as error:
            raise FormatError(f"{path} cannot be read ({error}). {EXPECTED}.") from error
        return found

    @property
    def seconds(self) -> float:
        """Seconds that the run has taken, those before it was stopped included."""
        return time.perf_counter() - self._began

    @property
    def blocks(self) -> int:
        """How many blocks were walked through before."""
        return 0 if self.before is None else self.before.blocks

    def restore(self, stream: Stream) -> None:
        """Put the hidden states behind these blocks into a stream that stands before the first.

        Raises:
            FormatError: they cannot be read, or are of another shape.
        """
        states = self._load(_behind(self.blocks))
        for name, now in (("quantized", stream.quantized), ("original", stream.original)):
            for batch, old in enumerate(now or ()):
                new = states.get(f"{name}.{batch}")
                if now is None or new is None or (new.shape, new.dtype) != (old.shape, old.dtype):
                    raise FormatError(f"{self._folder / _behind(self.blocks)} is not of this run. {EXPECTED}.")
                now[batch] = new.to(old.device)
        for name in list(stream.calls)[: self.blocks]:
            del stream.calls[name]

    def begin(self, ledger: Ledger, model: Model, record: RunRecord) -> None:
        """Keep what was planned; from now on `passed` keeps what the ledger has.

        Args:
            ledger: of the run; takes over the layers that were solved before.
            model: whose layers they are.
            record: without layers.
        """
        self._ledger, self._record = ledger, record
        if self.before is not None:
            blocks = (model.block_names(index) for index in range(self.blocks))
            ledger.restore(self.before.record, [name for names in blocks for name in unquantized(model, names)])
            return
        if self._container.state() is None:
            return
        with self._as_room_is():
            self._folder.mkdir(exist_ok=True)
            self._save("plan.pt", ledger.planned.tensors())
            if ledger.planned.rates or ledger.planned.widths:  # which took forwards to measure
                self._write(0)

    def passed(self, blocks: int, stream: Stream | None) -> None:
        """Keep that so many blocks are behind the stream, unless that would take too much of the time, or of the disk."""
        began = time.perf_counter()
        if not self._room or self._ledger is None or SHARE * (began - self._kept) < self._cost:
            return
        states = {} if stream is None else _states(stream)
        size = sum(tensor.nbytes for tensor in states.values())
        with self._as_room_is():
            if self._container.state() is None or not self._has_room(size):
                return
            self._save(_behind(blocks), states)
            self._write(blocks)
            for path in self._folder.glob(_behind("*")):
                if path.name != _behind(blocks):
                    path.unlink()
        self._kept = time.perf_counter()
        self._cost = self._kept - began

    def _has_room(self, size: int) -> bool:
        """Return whether hidden states of so many bytes leave room for the checkpoint; if not, this is said once."""
        free = shutil.disk_usage(self._folder).free
        if size <= free / 2:
            return True
        self._give_up(
            f"{size / 1e9:.1f} GB of hidden states would leave too little of {free / 1e9:.1f} GB for the checkpoint"
        )
        return False

    @contextmanager
    def _as_room_is(self) -> Iterator[None]:
        """Keep no more where the disk does not take it: the run itself may do with what is left."""
        try:
            yield
        except OSError as error:
            self._give_up(str(error))
            for path in self._folder.glob("*.part"):
                with suppress(OSError):
                    path.unlink()

    def _give_up(self, why: str) -> None:
        log.warning("If this run is stopped, what follows is lost: %s.", why)
        self._room = False

    def _save(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        path = self._folder / f"{name}.part"
        try:
            torch.save(dict(tensors), path)
            _put(path, self._folder / name)
        except BaseException:
            path.unlink(missing_ok=True)  # of a full disk the run itself needs what is left
            raise

    def _write(self, blocks: int) -> None:
        ledger = self._ledger
        assert ledger is not None, "begun"
        record = replace(
            self._record,
            layers=tuple(ledger.layers),
            profiles=tuple(ledger.profiles),
            repeated=tuple(ledger.repeated),
        )
        state = {
            "version": VERSION,
            "told": self._told,
            "blocks": blocks,
            "seconds": self.seconds,
            "plan": ledger.planned.state(),
            "container": self._container.state(),
            "record": record.to_json(),
        }
        path = self._folder / f"{STATE}.part"
        path.write_text(json.dumps(state))
        _put(path, self._folder / STATE)


def _states(stream: Stream) -> dict[str, Tensor]:
    """Return the hidden states of both networks by name, each with its own bytes and no others."""
    found = {f"quantized.{batch}": states for batch, states in enumerate(stream.quantized)}
    found |= {f"original.{batch}": states for batch, states in enumerate(stream.original or ())}
    return {name: _alone(states) for name, states in found.items()}


def _alone(tensor: Tensor) -> Tensor:
    """Return a tensor that shares its memory with nothing more, as all of that memory is written."""
    return tensor if len(tensor.untyped_storage()) == tensor.nbytes else tensor.clone()


def _check_whole(folder: Path) -> None:
    """Refuse a folder that a run marked as whole and whose files did not all reach the disk."""
    for name, wanted in read_record(folder).files.items():
        if not (folder / name).is_file() or sha256(folder / name) != wanted:
            raise FormatError(f"{folder / name} is not what was written. {EXPECTED}.")


def _differing(state: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return what a run was told and this one is not, in words; empty if all is the same."""
    then = state.get("told")
    if state.get("version") != VERSION or not isinstance(then, dict):
        return f"the journal has version {state.get('version')}, this program {VERSION}"
    names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    said = [f"{name} was {_short(then.get(name))}, is {_short(now.get(name))}" for name in names[:NAMED]]
    return ", ".join(said) + (f", and {len(names) - NAMED} more" if len(names) > NAMED else "")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:16]}.."


def _behind(blocks: int | str) -> str:
    return f"behind-{blocks:05d}.pt" if isinstance(blocks, int) else f"behind-{blocks}.pt"


def _put(part: Path, path: Path) -> None:
    """Put a file in its place when it is on disk."""
    flush(part)
    os.replace(part, path)
    flush(path.parent)
