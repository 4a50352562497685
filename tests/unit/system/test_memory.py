"""Free memory is what the system has or limits leave; where there is none, the error says so in a sentence."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent

import pytest
import torch

import nearplane
from families import config_of, random_model
from nearplane.errors import DeviceMemoryError, NearplaneError
from nearplane.matrix.quantize_matrix import quantize_matrix
from nearplane.models.pretrained import as_model_error
from nearplane.planning import solve_stage as quantize_stage
from nearplane.recipe.schemes import GridScheme
from nearplane.system.arguments import checked
from nearplane.system.memory import PAUSE, _c_library, free_memory, release, release_all, working_on
from pretended import pretended

MEMINFO = "MemTotal:       24000000 kB\nMemFree:         1000000 kB\nMemAvailable:   20000000 kB\n"
CUDA = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 15.77 GiB of which 1.20 GiB is free."
)


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
    release_all()
    blocks = [bytearray(b"x" * 100_000) for _ in range(6000)]
    del blocks[::2]
    before = resident()
    time.sleep(PAUSE)
    release()
    assert resident() < before - 200_000_000
    blocks[::10] = [bytearray(b"x" * 100_000) for _ in blocks[::10]]  # less than may be kept, of what was given back
    before = resident()
    time.sleep(PAUSE)
    release()
    assert resident() > before - 1_000_000


def resident() -> int:
    """Return the bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@checked()
def verb(error: Exception) -> None:
    with working_on("model.layers.3"), working_on("model.layers.3.mlp.down_proj"):
        raise error


def test_a_verb_names_the_innermost_layer_the_bytes_and_what_to_change():
    with pytest.raises(
        DeviceMemoryError,
        match=r"^model\.layers\.3\.mlp\.down_proj: the device has no room for 2\.50 GiB more\. Use fewer --samples",
    ):
        verb(torch.OutOfMemoryError(CUDA))
    assert issubclass(DeviceMemoryError, NearplaneError)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
        torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("MPS backend out of memory (MPS allocated: 9.00 GB, max allowed: 9.07 GB)."),
    ],
    ids=["cublas", "cusolver", "pinned memory", "triton", "mps"],
)
def test_what_libraries_say_of_a_full_device_is_the_same_sentence(error):
    with pytest.raises(
        DeviceMemoryError,
        match=r"^model\.layers\.3\.mlp\.down_proj: the device has no room for more\. Use fewer --samples",
    ):
        verb(error)
    with pytest.raises(type(error)), as_model_error("the folder"):
        raise error


@pytest.mark.parametrize("message", ["something else", "CUDA error: an illegal memory access was encountered"])
def test_other_errors_pass(message):
    with pytest.raises(RuntimeError, match=message) as raised:
        verb(RuntimeError(message))
    assert not hasattr(raised.value, "__notes__")


@pytest.mark.skipif(sys.platform != "linux", reason="sets a limit on addresses as Linux has it")
@pytest.mark.parametrize("work", ["ThreadPoolExecutor(1).submit(len, '').result()", "bytearray(1 << 33)"])
def test_a_limit_of_the_system_is_one_sentence(work):
    """They ended in a RuntimeError of threading and in a MemoryError."""
    program = f"""
    import resource
    from concurrent.futures import ThreadPoolExecutor
    from nearplane.errors import SystemLimitError
    from nearplane.system.arguments import checked

    @checked()
    def verb() -> None:
        {work}

    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 20), resource.RLIM_INFINITY))
    try:
        verb()
    except SystemLimitError as error:
        print(error)
    """
    ended = subprocess.run([sys.executable, "-c", dedent(program)], capture_output=True, text=True, check=True)
    assert re.match(r"The system gives this process no more memory or threads \((can't start new|Mem)", ended.stdout)
    assert "Raise its limits (ulimit -v, ulimit -u" in ended.stdout


def test_a_limit_while_a_folder_is_loaded_is_no_fault_of_the_folder():
    with pytest.raises(OSError, match="allocate"), as_model_error("the folder"):
        raise OSError(12, "Cannot allocate memory")


def test_one_matrix_raises_what_torch_raises():
    with pretended(memory=20_000):
        W, H = torch.randn(32, 32).to("pretend:0"), torch.eye(32, dtype=torch.float64).to("pretend:0")
        with pytest.raises(torch.OutOfMemoryError):
            quantize_matrix(W, H, GridScheme(bits=4, group_size=16))


def test_a_run_for_which_the_device_got_too_small_names_its_layer(tmp_path, monkeypatch):
    """Something else takes memory after the plan was made."""
    random_model(config_of("llama", num_hidden_layers=1)).float().save_pretrained(tmp_path / "model")
    tokens = torch.randint(96, (8, 32), generator=torch.Generator().manual_seed(0))
    with pretended() as gpu:
        solve = quantize_stage.solve_layer

        def later(name, *task):
            if name.endswith("o_proj"):
                gpu.cards[0].memory = gpu.cards[0].live + 100
            return solve(name, *task)

        monkeypatch.setattr(quantize_stage, "solve_layer", later)
        with pytest.raises(DeviceMemoryError, match=r"^model\.layers\.0\.self_attn\.o_proj: the device has no room"):
            nearplane.quantize(
                tmp_path / "model", tmp_path / "out", bits=4, group_size=16, calibration=tokens, device="pretend:0"
            )
        assert gpu.cards[0].live < 10_000  # nothing of the run stays there
    assert not (tmp_path / "out").exists()
