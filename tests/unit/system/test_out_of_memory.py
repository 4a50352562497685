"""A device that is full is said in one sentence by the verb, and left alone below it."""

import re
import subprocess
import sys
from textwrap import dedent

import pytest
import torch

import nearplane
from families import config_of, random_model
from nearplane.errors import DeviceMemoryError, NearplaneError
from nearplane.matrix.on_grid import quantize_matrix
from nearplane.models.pretrained import as_model_error
from nearplane.planning import solve_stage as quantize_stage
from nearplane.recipe.schemes import GridScheme
from nearplane.system.arguments import checked
from nearplane.system.out_of_memory import working_on
from pretended import pretended

CUDA = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 15.77 GiB of which 1.20 GiB is free."
)


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
