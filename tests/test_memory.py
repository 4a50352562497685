"""The memory that is free is what the system has, or what the limits of control groups leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from nearplane.memory import free_memory

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
