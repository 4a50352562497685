"""A verb on several processes: rank 0 runs it, the others follow its walks on their share of the windows."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from nearplane.errors import RankError
from nearplane.models.model import Model
from nearplane.record.record import versions
from nearplane.system.device import Device, without_number
from nearplane.system.launch import launched
from nearplane.system.matmul_library import processor
from nearplane.system.process_group import connected
from nearplane.system.ranks import ONE_PROCESS, Ranks

T = TypeVar("T")
log = logging.getLogger("nearplane")


@contextmanager
def on_all_ranks() -> Iterator[Ranks]:
    """Take part in the run that torchrun, srun or --processes started; a process alone is a run of its own.

    The processes of a group that the program made are used as well.

    Yields:
        The ranks.

    Raises:
        RankError: See `connected`.
    """
    theirs = dist.is_available() and dist.is_initialized()
    launch = None if theirs else launched()
    if (not theirs and launch is None) or (theirs and dist.get_world_size() == 1):
        yield ONE_PROCESS
        return
    with connected(launch) as ranks:
        yield ranks


@dataclass(frozen=True)
class Follower:
    """What a rank serves that follows rank 0: the model, which it opens when the first walk begins, and its device."""

    opened: Callable[[], Model]
    device: Device

    @cached_property
    def model(self) -> Model:
        """The original model, opened by the same recipe as on rank 0."""
        return self.opened()

    def turn_to(self, model: Model) -> None:
        """Serve another model from now on: the same with other layers, as rank 0 has chosen them."""
        self.__dict__["model"] = model


def run_on_rank_0(verb: Callable[[], T], follower: Follower, same: Mapping[str, object]) -> T:
    """Run a verb on rank 0 and return its result on every rank; the others follow. A process alone runs it.

    Args:
        verb: The verb.
        follower: What other ranks need to follow.
        same: What must be the same on all ranks, by its name in messages.

    Raises:
        RankError: The ranks differ, or one of them failed.
    """
    ranks = follower.device.ranks
    if ranks.world == 1:
        return verb()
    agree(ranks, {**same, "processor": processor(), "device": without_number(follower.device.model())})
    if ranks.leads:
        result = verb()
        ranks.release()
        ranks.send(result)
        return result
    with _silent():
        ranks.serve(follower)
    received: T = ranks.receive()
    return received


def agree(ranks: Ranks, facts: Mapping[str, object]) -> None:
    """Refuse to go on if a fact differs between ranks; versions of packages are among the facts.

    Raises:
        RankError: A fact differs; the message names it, and the rank.
    """
    own = {f"version of {name}": value for name, value in versions().items()} | dict(facts)
    every = ranks.gather(own)
    for rank, theirs in enumerate(every):
        for name, value in every[0].items():
            if theirs.get(name) != value:
                raise RankError(
                    f"Rank {rank} has another {name} than rank 0: {theirs.get(name)}, not {value}. All ranks must compute the "
                    f"same: give them the same command, packages, files and kind of processor or GPU."
                )


def files_of(folder: Path) -> str:
    """Return a digest of a model's config and of the names and sizes of its files."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir() if folder.is_dir() else ()):
        if path.is_file() and not path.name.startswith("."):
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
            if path.name == "config.json":
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@contextmanager
def _silent() -> Iterator[None]:
    """Log only errors: rank 0 speaks for all."""
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
