"""The model card in a checkpoint's folder: README.md, whose text `record/model_card.py` makes. Needs no torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from nearplane.formats.beside import fault_of
from nearplane.record.model_card import Origin, front_matter, is_unchanged, model_card
from nearplane.record.record import RunRecord
from nearplane.system.files import read_object, write_whole
from nearplane.system.model_files import CONFIG
from nearplane.system.paths import CARD

MAX_CARD_BYTES = 2**20  # of a card that is read
log = logging.getLogger(__name__)


def write_card(
    folder: Path,
    record: RunRecord,
    source: Path,
    *,
    dense: str | None = None,
    evaluations: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """Write the model card of a checkpoint into its folder, replacing any other, and return its path.

    Args:
        folder: The checkpoint; its record and its other files stay as they are.
        record, dense, evaluations: Arguments of `model_card`.
        source: Folder of the original, or a checkpoint with a card, whose metadata and config.json are read.

    Raises:
        FormatError: The card cannot be written.
    """
    text = model_card(record, origin_of(source), dense=dense, evaluations=evaluations)
    write_whole(folder / CARD, text.encode())
    return folder / CARD


def origin_of(source: Path) -> Origin:
    """Return what the card and config.json in a folder tell of a model. A card that cannot be read is logged, and skipped."""
    path, metadata = source / CARD, {}
    text = _read(path)
    if text is not None and (fault := fault_of(path, source)):
        log.warning("%s is %s, so that no license is taken from it.", path, fault)
        text = None
    if text is not None:
        try:
            metadata = front_matter(text)
        except ValueError as error:
            log.warning("%s: its metadata cannot be read (%s), so that no license is taken from it.", path, error)
    config = source / CONFIG
    base = metadata.get("base_model") if text is not None and is_unchanged(text) else None
    return Origin(
        config=read_object(config, expected="Expected the config of a model") if config.is_file() else {},
        metadata=metadata,
        base=base if isinstance(base, str) else None,
    )


def changed_card(folder: Path) -> bool:
    """Return whether a folder has a card that a user wrote or changed, which nearplane replaces only when asked to."""
    text = _read(folder / CARD)
    return (folder / CARD).exists() and (text is None or not is_unchanged(text))


def _read(path: Path) -> str | None:
    """Return the text of a card; None if there is none, or a file of another kind."""
    with suppress(OSError, UnicodeDecodeError):
        if path.is_file() and path.stat().st_size <= MAX_CARD_BYTES:
            return path.read_bytes().decode()
    return None
