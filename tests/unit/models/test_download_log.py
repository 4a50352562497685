"""A download from a hub is seen in log lines, and none of the hub's own bars mixes with them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from hub import served
from nearplane.models import download_log
from nearplane.models.pretrained import find_folder

SIZE = 25_000_000  # bytes, of which the hub's client takes ten million at a time


@pytest.mark.parametrize(("interval", "lines"), [(0.0, 3), (60.0, 0)])
def test_a_long_download_says_how_far_it_is(
    interval: float,
    lines: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "config.json").write_text("{}")
    (tmp_path / "hub" / "model.safetensors").write_bytes(bytes(SIZE))
    monkeypatch.setattr(download_log, "INTERVAL", interval)
    caplog.set_level(logging.INFO, "nearplane")
    with served(tmp_path / "hub", tmp_path / "cache") as name:
        folder = find_folder(name)
    assert (folder / "model.safetensors").stat().st_size == SIZE
    said = [message for message in caplog.messages if message.startswith("downloading: ")]
    assert len(said) >= lines if lines else not said
    if lines:
        assert said[-1] == "downloading: 25.0 MB of at least 25.0 MB"
    assert "Fetching" not in capfd.readouterr().err
