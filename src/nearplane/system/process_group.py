"""Connects the processes of a run through torch.distributed, and passes values, requests and failures between them.

Failures travel apart from values, through the store that connects the processes: `heartbeat.py` looks for them in a thread
of its own. So an error on one rank is one sentence on all, wherever the others are.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from itertools import count
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from nearplane.errors import NearplaneError, RankError, first_line
from nearplane.system.heartbeat import LOST, Heartbeat, Peer
from nearplane.system.launch import Launch
from nearplane.system.processes import ended_children
from nearplane.system.ranks import Ranks

T = TypeVar("T")
ARRIVAL = 300.0  # seconds until all processes must have arrived: nodes of a cluster do not start together
WEEK = timedelta(days=7)  # no collective ends by a timeout of torch: the heartbeat knows better who is gone
LONGEST_PAUSE = 0.002  # seconds between two looks whether a collective is done
STOPPED = "was stopped by a signal."
GONE = 5.0  # seconds that rank 0 waits for the others at the end, as they are connected through it
NCCL = "cuda"  # type of the devices whose tensors nccl passes on, without a copy on the CPU
_runs = count()  # a process may take part in several runs


class _Message(NamedTuple):
    """What rank 0 sends to ranks that serve: a request, and the rank that answers it. No request: they leave."""

    request: Callable[[Any], Any] | None
    answers: int | None = None


class ProcessGroup(Ranks):
    """A run of several processes.

    Args:
        rank, world: Number of this process, and of all.
        store: Store through which groups of torch.distributed are made: one for values on the CPU (gloo), and one for GPUs
            (nccl) if there are such values. They are not torch's default group, with which libraries do as they like.
        heartbeat: Thread that looks whether the others live.
        address: Address of this machine at which the others reach it; None: that of its name, or of GLOO_SOCKET_IFNAME.
    """

    def __init__(self, rank: int, world: int, store: Any, heartbeat: Heartbeat, address: str | None = None) -> None:
        self.rank, self.world = rank, world
        self._store, self._heartbeat = store, heartbeat
        options = dist.ProcessGroupGloo._Options()
        gloo = dist.ProcessGroupGloo
        device = gloo.create_device(hostname=address) if address else gloo.create_default_device()
        options._devices, options._timeout = [device], WEEK
        self._group = dist.ProcessGroupGloo(dist.PrefixStore("group", store), rank, world, options)
        self._of_gpus: Any = None
        hosts = [peer.host for peer in heartbeat.peers]
        self.local, self.local_world = hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])

    def send(self, value: Any) -> None:
        self._broadcast_bytes(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))

    def receive(self) -> Any:
        return pickle.loads(self._broadcast_bytes(b""))

    def _broadcast_bytes(self, content: bytes, root: int = 0) -> bytes:
        options = dist.BroadcastOptions()
        options.rootRank = root
        length = torch.tensor([len(content)])
        self._exchange(self._group.broadcast, [length], options)
        own = self.rank == root
        payload = torch.frombuffer(bytearray(content), dtype=torch.uint8) if own else None
        payload = torch.empty(int(length), dtype=torch.uint8) if payload is None else payload
        self._exchange(self._group.broadcast, [payload], options)
        return content if own else payload.numpy().tobytes()

    def broadcast(self, tensor: Tensor | None) -> Tensor | None:
        if self.leads:
            self.send(None if tensor is None else (tensor.shape, tensor.dtype, tensor.device.type))
            if tensor is None:
                return None
            sent = (tensor if tensor.device.type == NCCL else tensor.cpu()).contiguous()
        else:
            if (form := self.receive()) is None:
                return None
            shape, dtype, kind = form
            sent = torch.empty(shape, dtype=dtype, device=f"{NCCL}:{self.gpu}" if kind == NCCL else "cpu")
        if sent.numel():
            self._exchange(self._group_of(sent).broadcast, [_bytes(sent)])
        return tensor if self.leads else sent

    def gather(self, value: T) -> list[T]:
        content = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        length = torch.tensor([len(content)])
        self._exchange(self._group.allgather, [lengths], [length])
        longest = int(torch.cat(lengths).max())
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world)]
        own = torch.frombuffer(bytearray(content.ljust(longest, b"\0")), dtype=torch.uint8)
        self._exchange(self._group.allgather, [parts], [own])
        return [pickle.loads(part[: int(size)].numpy().tobytes()) for part, size in zip(parts, lengths, strict=True)]

    def sum(self, integers: Tensor) -> Tensor:
        reduced = integers if integers.device.type == NCCL else integers.cpu()
        self._exchange(self._group_of(reduced).allreduce, [reduced])
        return integers if reduced is integers else integers.copy_(reduced)

    def _group_of(self, tensor: Tensor) -> Any:
        """Return the group that passes a tensor on where it lies."""
        if tensor.device.type != NCCL:
            return self._group
        if self._of_gpus is None:  # at the same exchange on all ranks
            self._of_gpus = _nccl(dist.PrefixStore("gpus", self._store), self)
        return self._of_gpus

    def start(self, request: Callable[[Any], None]) -> None:
        if self.leads:
            self.send(_Message(request))

    def ask(self, rank: int, request: Callable[[Any], T]) -> T:
        self.send(_Message(request, answers=rank))
        return cast(T, pickle.loads(self._broadcast_bytes(b"", rank)))

    def release(self) -> None:
        if self.leads:
            self.send(_Message(None))

    def serve(self, subject: Any) -> None:
        while (message := self.receive()).request is not None:
            answer = message.request(subject) if message.answers in (None, self.rank) else None
            if message.answers is not None:
                # all get the answer: whether a message between two ranks has come cannot be asked without waiting for it
                self._broadcast_bytes(pickle.dumps(answer, pickle.HIGHEST_PROTOCOL), message.answers)
            del message, answer

    def _exchange(self, collective: Callable[..., Any], *tensors: Any) -> None:
        """Run a collective and wait for it.

        Raises:
            RankError: Another rank failed or is gone.
        """
        pause, work = 1e-5, collective(*tensors)
        while not work.is_completed():
            self._heartbeat.check()
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        try:
            work.wait()
        except RuntimeError as error:
            raise self._broken(error) from error

    def abandon(self) -> None:
        """Keep the group until the process ends: its destructor waits for an exchange that a lost rank never completes."""
        for group in (self._group, self._of_gpus):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    def _broken(self, error: RuntimeError) -> RankError:
        """Return the error of a broken connection, once the heartbeat knows whose it was."""
        for _ in range(int(10 * (LOST + 5))):
            self._heartbeat.check()
            time.sleep(0.1)
        return RankError(f"The connection to another rank broke ({first_line(error)}). Repeat the command.")


def _nccl(store: Any, ranks: Ranks) -> Any:
    """Return a group of the ranks for tensors on GPUs."""
    return dist.ProcessGroupNCCL(store, ranks.rank, ranks.world, dist.ProcessGroupNCCL.Options())


def _bytes(tensor: Tensor) -> Tensor:
    """Return a view of a contiguous tensor as bytes: gloo does not know all dtypes."""
    return tensor.reshape(-1).view(torch.uint8)


@contextmanager
def connected(launch: Launch | None) -> Iterator[Ranks]:
    """Connect the processes of a run, or those of the group that the program made; the group itself is not used.

    If the body raises an error, it is told to the other ranks, which raise it as well.

    Args:
        launch: How this process was started among others; None: the program made a group.

    Yields:
        The ranks.

    Raises:
        RankError: The processes cannot be connected, some do not arrive, or one of them fails or is gone.
    """
    if launch is None:
        store, rank, world = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    else:
        store, rank, world = _store(launch), launch.rank, launch.world
    store = dist.PrefixStore(f"nearplane/{next(_runs)}", store)
    peers = _wait_for_all(store, rank, world)
    heartbeat = Heartbeat(store, rank, peers)
    with heartbeat, _without_default_group():
        try:
            ranks = ProcessGroup(rank, world, store, heartbeat, None if launch is None else _own_address(launch))
        except RuntimeError as error:
            heartbeat.fail(f"cannot be connected: {first_line(error)}")
            raise RankError(f"Rank {rank} cannot be connected to the others: {first_line(error)}.") from error
        threads = torch.get_num_threads()
        torch.set_num_threads(threads_of(ranks))
        try:
            yield ranks
        except BaseException as error:
            ranks.abandon()
            if (first := _tell_others(error, heartbeat)) is error:
                raise
            raise first from error
        finally:
            torch.set_num_threads(threads)
            heartbeat.leave(GONE if rank == 0 else 0.0)


@contextmanager
def _without_default_group() -> Iterator[None]:
    """Hide the default group of torch, which the program may have made, from libraries that rank 0 alone calls.

    compressed-tensors, for one, would wait in them for the other ranks.
    """
    member: Any = dist.GroupMember
    before, member.WORLD = member.WORLD, None
    try:
        yield
    finally:
        member.WORLD = before


def _tell_others(error: BaseException, heartbeat: Heartbeat) -> BaseException:
    """Tell the others that this rank failed; return the error to raise, which is that of another rank if it came first."""
    if isinstance(error, RankError):
        return error
    if isinstance(error, KeyboardInterrupt):
        other = heartbeat.look()
        if other is not None and not other.endswith(STOPPED):  # torchrun ends all processes once one of them is gone
            return RankError(other)
        heartbeat.fail(STOPPED)
    elif isinstance(error, NearplaneError):
        heartbeat.fail(f"failed: {error}")
    elif isinstance(error, Exception):
        heartbeat.fail(f"failed with an unexpected {type(error).__name__}: {first_line(error)}")
    elif isinstance(error, SystemExit) and error.code:
        heartbeat.fail("ended early.")
    return error


def threads_of(ranks: Ranks) -> int:
    """Return the threads of a rank: its part of the cores, rounded down to a power of two.

    Other numbers change the last bit of some activation functions, whose rows torch divides among threads.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 1 << max(0, (cores // ranks.local_world).bit_length() - 1)


@cache
def _store(launch: Launch) -> Any:
    """Connect to the store of a program, which rank 0 or torchrun's agent holds. It lasts as long as the process.

    Raises:
        RankError: Its port is in use, or it cannot be reached.
    """
    where = f"{launch.address}:{launch.port}"
    holds = launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        return dist.TCPStore(
            launch.address,
            launch.port,
            None if not holds else launch.world,
            is_master=holds,
            wait_for_workers=False,
            timeout=timedelta(seconds=ARRIVAL),
        )
    except (RuntimeError, ValueError) as error:
        if holds:
            raise RankError(
                f"Rank 0 cannot listen at {where} ({_reason(error)}). Choose a free port: torchrun --master-port, or MASTER_PORT."
            ) from error
        raise RankError(
            f"Rank {launch.rank} cannot reach rank 0 at {where} within {ARRIVAL:.0f} seconds ({_reason(error)}). Check "
            f"that rank 0 was started, and that the address and port can be reached from {socket.gethostname()}."
        ) from error


def _own_address(launch: Launch) -> str | None:
    """Return the address of this machine from which it reaches rank 0: its name may be that of another interface."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return None
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asked.connect((launch.address, launch.port))  # sends nothing
        return str(asked.getsockname()[0])
    return None


def _reason(error: Exception) -> str:
    """Return the reason among what torch says about a connection."""
    text = str(error)
    return "the address is already in use" if "EADDRINUSE" in text or "in use" in text else first_line(error)


def _missing(store: Any, names: list[str]) -> list[int]:
    """Return the ranks that are not here yet.

    Raises:
        RankError: Rank 0 is gone.
    """
    try:
        return [each for each, name in enumerate(names) if not store.check([name])]
    except RuntimeError as error:
        raise RankError(f"Rank 0 ended before all ranks had arrived ({first_line(error)}).") from error


def _wait_for_all(store: Any, rank: int, world: int) -> list[Peer]:
    """Say that this rank is here, and return all ranks once they are.

    Raises:
        RankError: Some are not here in time; the message names them.
    """
    store.set(f"here/{rank}", pickle.dumps(Peer.here(rank)))
    names = [f"here/{each}" for each in range(world)]
    until = time.monotonic() + ARRIVAL + (rank == 0) * GONE  # the others hear of it through rank 0
    while missing := _missing(store, names):
        if ended := ended_children():
            raise RankError(f"Rank {ended[0]} of {world} ended before it had arrived. Its message is above.")
        if time.monotonic() > until:
            several = ", ".join(map(str, missing))
            raise RankError(
                f"Rank {several} of {world} did not arrive within {ARRIVAL:.0f} seconds. Start {world} processes with the same "
                f"address and port, with ranks 0 to {world - 1}."
            )
        time.sleep(0.05)
    return [pickle.loads(store.get(name)) for name in names]
