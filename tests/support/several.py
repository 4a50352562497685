"""Runs on several processes of this machine, forked from the test as torchrun would start them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from children import Child

Ended = tuple[int, str, str]


def free_port() -> int:
    """Return a port on which nobody listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def begun(world: int, run: Callable[[int], object], port: int | None = None) -> list[Child]:
    """Start `run(rank)` on so many ranks."""
    port = port or free_port()

    def of(rank: int) -> Callable[[], object]:
        def ran() -> None:
            found = {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ |= {name: str(value) for name, value in found.items()}
            run(rank)

        return ran

    return [Child(of(rank)) for rank in range(world)]


def on_ranks(world: int, run: Callable[[int], object]) -> list[Ended]:
    """Run on so many ranks; return the code of each, what it printed, and what it said beside."""
    return [child.ended() for child in begun(world, run)]


def all_well(ended: list[Ended]) -> None:
    """Fail with what a rank said that did not end well."""
    assert all(code == 0 for code, _, _ in ended), "\n".join(said for _, _, said in ended)
