"""How far a download from the hub is, as log lines: a large model takes long, and the hub's own bars would mix with ours."""

from __future__ import annotations

import io
import logging
from time import monotonic
from typing import Any

from tqdm.std import tqdm

from nearplane.system.sizes import size_text

INTERVAL = 15.0  # seconds between two lines, and before the first
log = logging.getLogger(__name__)


class DownloadLog(tqdm):  # type: ignore[misc]
    """Stand-in for the bars of `snapshot_download`, which counts their bytes and shows nothing but log lines.

    The hub has bars of bytes, for what comes in and perhaps for what is written, and one of files. Of all together a line
    comes every `INTERVAL` seconds, from the one that moves.
    """

    told = 0.0  # when the last line came, or the first bar began

    def __init__(self, *args: Any, **options: Any) -> None:
        options |= {"disable": False, "file": io.StringIO()}  # a disabled bar counts nothing
        options.pop("name", None)  # of the hub's own class
        DownloadLog.told = max(DownloadLog.told, monotonic())
        super().__init__(*args, **options)

    def update(self, n: float | None = 1) -> bool | None:
        """Count what came, and log a line every `INTERVAL` seconds."""
        updated: bool | None = super().update(n)
        if self.unit == "B" and self.n and monotonic() - DownloadLog.told >= INTERVAL:
            DownloadLog.told = monotonic()
            log.info(
                "downloading: %s of at least %s", size_text(int(self.n)), size_text(int(max(self.total or 0, self.n)))
            )
        return updated
