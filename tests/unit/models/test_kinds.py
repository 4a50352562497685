"""Token ids with their sound: a tensor of token ids to all that counts; what is done with whole windows is done with both."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import Tensor

from nearplane.calibration.windows import digest_of, joined_windows
from nearplane.models.spoken import Spoken, cut_windows

IDS = torch.arange(12).view(4, 3)
SOUND = torch.arange(8.0).view(4, 2)
WINDOWS = Spoken.of(IDS, SOUND)


def of(windows: Tensor) -> tuple[list[list[int]], list[list[float]]]:
    assert isinstance(windows, Spoken)
    return windows.tolist(), windows.sound.tolist()


@pytest.mark.parametrize("which", [slice(1, 3), torch.tensor([2, 0]), 2, None])
def test_windows_are_taken_with_their_sound(which: object) -> None:
    assert of(WINDOWS[which]) == (IDS[which].tolist(), SOUND[which].tolist())


def test_windows_are_split_gone_through_joined_and_moved_with_their_sound() -> None:
    parts = WINDOWS.split(3)
    assert [of(part) for part in parts] == [
        (IDS[:3].tolist(), SOUND[:3].tolist()),
        (IDS[3:].tolist(), SOUND[3:].tolist()),
    ]
    assert of(joined_windows(list(parts))) == of(WINDOWS)
    assert [of(window[None]) for window in WINDOWS] == [of(WINDOWS[i : i + 1]) for i in range(4)]
    moved = WINDOWS.to("meta")
    assert isinstance(moved, Spoken)
    assert moved.sound.device == moved.device == torch.device("meta")
    assert of(WINDOWS.to("cpu", torch.int32)) == of(WINDOWS)


def test_what_is_computed_of_token_ids_is_plain() -> None:
    found = (
        WINDOWS[:, 1:],
        WINDOWS[:, :, None],
        WINDOWS + 1,
        torch.cat([WINDOWS, IDS]),
        WINDOWS.flatten(),
        WINDOWS.max(),
    )
    assert [type(each) for each in found] == [Tensor] * len(found)
    assert torch.equal(WINDOWS[:, 1:], IDS[:, 1:])


def test_what_is_said_in_a_sound_is_not_cut() -> None:
    assert cut_windows(WINDOWS, 2) is WINDOWS
    assert cut_windows(IDS, 2).shape == (4, 2)
    assert joined_windows([IDS, IDS]).shape == (8, 3)


def test_the_digest_is_of_token_ids_and_then_of_their_sound() -> None:
    both = IDS.numpy().astype("<i8").tobytes() + SOUND.numpy().astype("<f4").tobytes()
    assert digest_of(WINDOWS) == hashlib.sha256(both).hexdigest()
    assert digest_of(IDS) == hashlib.sha256(both[: 8 * 12]).hexdigest()
