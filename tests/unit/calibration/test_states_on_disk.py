"""Hidden states in a file are a list of tensors: bit for bit, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import textwrap
from contextlib import closing
from pathlib import Path

import pytest
import torch

from children import Child
from nearplane.calibration.states_on_disk import StatesOnDisk
from nearplane.errors import FormatError

KINDS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool]


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", KINDS)
def test_what_is_put_in_comes_out_bit_for_bit(dtype, tmp_path, generator):
    random = torch.randint(0, 2 if dtype == torch.bool else 256, (96,), generator=generator, dtype=torch.uint8)
    if dtype == torch.bool:
        random = random.view(torch.bool)
    flat = random.view(dtype)  # of floats any bits, NaN among them
    states = [flat.reshape(2, -1, 2), flat.reshape(-1, 4).T, flat[0], flat[:0].reshape(0, 3), flat[1::2]]
    with closing(StatesOnDisk(tmp_path, states)) as kept:
        assert len(kept) == len(states)
        for found, expected in zip(kept, states, strict=True):
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
            assert found.is_contiguous()
            assert torch.equal(bits(found), bits(expected))


def test_it_changes_as_a_list_does(tmp_path, generator):
    """The same random changes to both, with sizes that repeat, so that rooms in the file are used again."""
    listed: list[torch.Tensor] = []
    with closing(StatesOnDisk(tmp_path)) as kept:
        for step in range(300):
            drawn = [int(x) for x in torch.randint(0, 1000, (4,), generator=generator)]
            state = torch.randn(drawn[0] % 3 + 1, 5, generator=generator)
            index = drawn[1] % max(1, len(listed)) - (drawn[2] % 2) * len(listed)
            for each in (listed, kept):
                match drawn[3] % 5:
                    case 0 if listed and step % 2:
                        each.pop(index)
                    case 1 if listed:
                        each[index] = state
                    case 2:
                        each.insert(index, state)
                    case _:
                        each.append(state)
            assert len(kept) == len(listed)
            assert all(torch.equal(a, b) for a, b in zip(kept, listed, strict=True))
        with pytest.raises(IndexError):
            kept[len(listed)]


def test_what_comes_out_is_memory_of_its_own(tmp_path):
    state = torch.zeros(3)
    with closing(StatesOnDisk(tmp_path, [state])) as kept:
        state += 1
        kept[0].add_(2)
        assert torch.equal(kept[0], torch.zeros(3))
        assert not kept[0].requires_grad


def test_replacing_items_does_not_lengthen_the_file(tmp_path):
    with closing(StatesOnDisk(tmp_path, [torch.zeros(1000) for _ in range(3)])) as kept:
        size = os.fstat(kept._file.fileno()).st_size
        for index in (0, 1, 2, 1):
            kept[index] = kept[index] + 1
        kept.append(kept.pop())
        assert os.fstat(kept._file.fileno()).st_size == size == 3 * 4000


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FormatError, match=r"could not be written to .*missing .*Free some space"):
        StatesOnDisk(tmp_path / "missing")


def test_a_full_disk_is_said_with_the_folder(tmp_path):
    """As a limit on the size of files, which the system reports as any other failing write."""
    code, printed, said = in_process(
        f"""
        import resource, signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        with closing(StatesOnDisk(Path({str(tmp_path)!r}), [torch.ones(2000)])) as kept:
            try:
                kept.append(torch.zeros(2000))
            except FormatError as error:
                print(error, len(kept), bool((kept[0] == 1).all()))
        """
    )
    assert code == 0, said
    assert printed.startswith(f"Hidden states could not be written to {tmp_path} (")
    assert printed.endswith("1 True\n")
    assert not list(tmp_path.iterdir())


def test_nothing_is_left_when_the_program_is_killed(tmp_path):
    code, *_ = in_process(
        f"""
        import os, signal
        kept = StatesOnDisk(Path({str(tmp_path)!r}), [torch.ones(2000)])
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    assert code == -signal.SIGKILL
    assert not list(tmp_path.iterdir())


def test_a_closed_list_gives_nothing(tmp_path):
    with closing(StatesOnDisk(tmp_path, [torch.zeros(2)])) as kept:
        pass
    with pytest.raises(ValueError, match="closed"):
        kept[0]


def in_process(code: str) -> tuple[int, str, str]:
    """Run code in a process of its own; return how it ended, what it printed, and what it said beside."""
    names = {"torch": torch, "closing": closing, "Path": Path, "FormatError": FormatError, "StatesOnDisk": StatesOnDisk}
    return Child(lambda: exec(textwrap.dedent(code), names)).ended()
