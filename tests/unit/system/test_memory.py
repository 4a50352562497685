"""The memory that is free is what the system has, or what the limits of control groups leave."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from nearplane.system.memory import PAUSE, _c_library, free_memory, release

MEMINFO = "MemTotal:       24000000 kB\nMemFree:         1000000 kB\nMemAvailable:   20000000 kB\n"


def files(root: Path, contents: dict[str, str]) -> Path:
    for name, text in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_without_limits_it_is_what_is_available(tmp_path: Path) -> None:
    limits = {"proc/self/cgroup": "0::/user\n", "sys/fs/cgroup/user/memory.max": "max\n"}
    used = {"sys/fs/cgroup/user/memory.current": "5\n"}
    assert free_memory(files(tmp_path, {"proc/meminfo": MEMINFO} | limits | used)) == 20_000_000 * 1024


def test_a_limit_leaves_what_is_not_used_and_what_only_caches_files(tmp_path: Path) -> None:
    """Also where it is a limit of a group outside the one that the process is in."""
    group = {
        "proc/self/cgroup": "0::/pod/it\n",
        "sys/fs/cgroup/pod/it/memory.max": "max\n",
        "sys/fs/cgroup/pod/it/memory.current": "500\n",
        "sys/fs/cgroup/pod/memory.max": "1000\n",
        "sys/fs/cgroup/pod/memory.current": "700\n",
        "sys/fs/cgroup/pod/memory.stat": "anon 600\ninactive_file 40\nactive_file 60\n",
    }
    assert free_memory(files(tmp_path, {"proc/meminfo": MEMINFO} | group)) == 1000 - 700 + 40


@pytest.mark.parametrize("used", [600, 1100])
def test_so_does_a_limit_of_version_1(used: int, tmp_path: Path) -> None:
    group = {
        "proc/self/cgroup": "5:devices:/\n4:cpu,memory:/box\n",
        "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "1000\n",
        "sys/fs/cgroup/memory/box/memory.usage_in_bytes": f"{used}\n",
        "sys/fs/cgroup/memory/box/memory.stat": "inactive_file 1\ntotal_inactive_file 50\n",
    }
    assert free_memory(files(tmp_path, {"proc/meminfo": MEMINFO} | group)) == max(0, 1050 - used)


def test_this_machine_tells() -> None:
    free = free_memory()
    assert free is not None
    assert free > 1 << 20


@pytest.mark.skipif(
    not (Path("/proc/self/statm").exists() and hasattr(_c_library(), "malloc_trim")),
    reason="the system does not say what a process holds, or keeps nothing",
)
def test_what_was_freed_in_pieces_is_given_back() -> None:
    """Of blocks too small for pages of their own every second is freed: nothing of it is at the end of the heap."""
    blocks = [bytearray(b"x" * 100_000) for _ in range(4000)]
    del blocks[::2]
    before = resident()
    time.sleep(PAUSE)
    release()
    assert resident() < before - 100_000_000


def resident() -> int:
    """Return the bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
