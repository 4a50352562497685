"""The local folder of a model that a user names: a folder, a hub id or a GGUF without a folder."""

from __future__ import annotations

from pathlib import Path

from nearplane.formats.gguf.lone_file import folder_of_file
from nearplane.models.pretrained import find_folder
from nearplane.system.paths import is_gguf


def source_folder(source: str | Path, *, trust_remote_code: bool = False) -> Path:
    """Return the folder of a model, which is downloaded if `source` is a hub id, and temporary if it is a GGUF.

    Raises:
        ModelError: There is no such model, or the GGUF is damaged or of a kind that nearplane does not write.
    """
    if is_gguf(source):
        return folder_of_file(Path(source).expanduser())
    return find_folder(str(source), trust_remote_code=trust_remote_code)
