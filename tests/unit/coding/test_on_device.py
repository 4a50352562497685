"""Which device decodes; what is decoded there is in `test_decode_triton.py`."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from coded_matrices import contents_of
from nearplane.coding import on_device
from nearplane.coding.blob import encode, streams_of
from nearplane.errors import FormatError


def test_without_triton_and_on_other_devices_the_cpu_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    on_device._triton.cache_clear()
    assert on_device.decoder_of(torch.device("cuda")) is None
    on_device._triton.cache_clear()
    assert on_device.decoder_of(torch.device("cpu")) is on_device.decoder_of(torch.device("mps")) is None


def test_a_device_without_a_decoder_is_refused() -> None:
    blob = on_device.Blob(torch.from_numpy(encode(contents_of(np.ones((2, 3), np.int64)))), "matrix")
    with pytest.raises(ValueError, match="cpu has no decoder"):
        on_device.decode_all([blob], torch.device("cpu"))


@pytest.mark.parametrize("escaped", [0, 2])
def test_another_number_of_escapes_than_the_list_has_is_refused(escaped: int) -> None:
    coded = streams_of(encode(contents_of(np.full((1, 1), 1000))), "matrix")
    assert len(coded.streams.heads.values) == 1
    none = np.zeros(1, np.int32)
    with pytest.raises(FormatError, match=r"matrix, chunk 0 of 1: its symbols do not have the escapes of its list\."):
        on_device._patches(coded, "matrix", none, none + escaped, none)
