"""card(): the model card of a checkpoint, written again, with tables of evaluations. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nearplane.errors import RecipeError
from nearplane.formats.beside import changed_card, origin_of
from nearplane.record.evaluation_table import read_evaluation
from nearplane.record.model_card import model_card
from nearplane.record.record_file import read_record
from nearplane.system.arguments import checked
from nearplane.system.files import write_whole
from nearplane.system.paths import CARD
from nearplane.system.recorded_hashes import check_digest


@checked()
def card(out: str | Path, *, evaluation: str | Path | Sequence[str | Path] = (), overwrite: bool = False) -> Path:
    """Write the model card of a checkpoint again, from its run record, and return the path of the card.

    License, languages, datasets, tags and base model are taken from the card that is there, which `quantize` has written
    from that of the original.

    Args:
        out: Folder of a checkpoint that nearplane wrote. Only the card is written.
        evaluation: Files with what `nearplane evaluate --json` printed, for tables in the card.
        overwrite: Whether a card that a user wrote or changed may be replaced.

    Raises:
        FormatError: The folder has no run record, a file holds no evaluation, or the card cannot be written.
        RecipeError: The card was changed since nearplane wrote it.
    """
    out = Path(out).expanduser()
    record = read_record(out)
    check_digest(out, record.digest)
    files = [evaluation] if isinstance(evaluation, str | Path) else evaluation
    evaluations = [read_evaluation(Path(file).expanduser()) for file in files]
    if not overwrite and changed_card(out):
        raise RecipeError(
            f"{out / CARD} was changed since nearplane wrote it, or is by someone else. Replace it with --overwrite, which "
            f"keeps its license, languages, datasets and tags."
        )
    text = model_card(record, origin_of(out), evaluations=evaluations)
    write_whole(out / CARD, text.encode())
    return out / CARD
