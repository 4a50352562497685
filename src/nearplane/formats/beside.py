"""Files of a model besides weights and config (tokenizer, templates, licence): their list, and copying them.

A checkpoint is passed on, so that only files on the list of `model_files.py` are copied, and only what lies in the model's
folder: regular files, and links to one in that folder or in the blobs of the same cache of the hub. Weights and
config.json are not copied but read, and rewritten as what they mean, so that these may be links to any place.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from nearplane.errors import ModelError, first_few, printable
from nearplane.system.model_files import (
    CODE,
    FOLDERS,
    NEEDED,
    TERMS,
    WEIGHTS,
    is_kept_back,
    matches,
    named_in_code,
)

LINKED_FOLDER = "a link to a folder"
log = logging.getLogger(__name__)


def copy_beside(source: Path, out: Path, *, trust_remote_code: bool) -> None:
    """Copy a model's files besides weights and config: tokenizer, templates, generation_config, licence.

    Raises:
        ModelError: See `check_beside`.
    """
    check_beside(source, trust_remote_code=trust_remote_code)  # again, as hours may have passed
    for name in names_copied(source, trust_remote_code=trust_remote_code):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, out / name)


def names_copied(source: Path, *, trust_remote_code: bool) -> list[str]:
    """Return the names of the files that `copy_beside` copies, relative to the folder."""
    return _sorted_out(source, trust_remote_code).copied


def size_copied(source: Path, *, trust_remote_code: bool) -> int:
    """Return the number of bytes that `copy_beside` copies."""
    return sum((source / name).stat().st_size for name in names_copied(source, trust_remote_code=trust_remote_code))


def check_beside(source: Path, *, trust_remote_code: bool) -> None:
    """Refuse a model of which a file that its tokenizer, processor, templates or trusted code need cannot be copied.

    Raises:
        ModelError: Such a file is a link that leads out of the folder, or no regular file.
    """
    refused = _sorted_out(source, trust_remote_code).refused
    if not refused:
        return
    linked = next((name for name, fault in refused.items() if fault.startswith("a link")), None)
    remedy = "Put regular files in their place, or fetch the model again."
    if linked is not None:
        old, new = shlex.quote(linked), shlex.quote(f"{linked}.copy")
        remedy = f"In that folder, replace links by what they lead to: cp -RL {old} {new} && rm {old} && mv {new} {old}"
    raise ModelError(
        f"{source} has files that tokenizer, processor, chat template or code of the model may need, but that cannot be "
        f"copied: {first_few([f'{name} ({fault})' for name, fault in refused.items()])}. A checkpoint gets only regular "
        f"files of the model's folder, since it may be passed on. {remedy}"
    )


def log_left_out(source: Path, out: Path, *, trust_remote_code: bool) -> None:
    """Log the names of the files of a model that a checkpoint does not get because they are not on the list."""
    if left := _sorted_out(source, trust_remote_code).left:
        log.warning(
            "Not copied from %s to %s, and perhaps not needed: %s.", source, out, printable(first_few(left, most=8))
        )


def fault_of(path: Path, folder: Path) -> str:
    """Return what a file is that is not copied from a folder, for its kind or place; an empty text for others."""
    if path.is_dir():
        return LINKED_FOLDER if path.is_symlink() else "a folder"
    if not path.is_file():
        return "a broken link" if path.is_symlink() and not path.exists() else "no regular file"
    if not os.access(path, os.R_OK):
        return "not readable"
    if path.is_symlink():
        target, root = path.resolve(), folder.resolve()
        repository = root.parent.parent  # of a cache of the hub: models--X/snapshots/REVISION/NAME -> ../../blobs/HASH
        if target.is_relative_to(root):
            hidden = any(part.startswith(".") for part in target.relative_to(root).parts)
            return "a link to a hidden file or to weights" if hidden or WEIGHTS.fullmatch(target.name) else ""
        in_cache = root.parent.name == "snapshots" and repository.name.startswith("models--")
        return "" if in_cache and target.parent == repository / "blobs" else "a link out of the folder"
    return ""


class Sorted(NamedTuple):
    """Names of a model's files beside its weights, relative to its folder.

    Args:
        copied: Those that a checkpoint gets.
        left: Those that are not on the list, or licences of an unknown kind; folders end in a slash.
        refused: Those that are needed but cannot be copied, with what they are.
    """

    copied: list[str]
    left: list[str]
    refused: dict[str, str]


def _sorted_out(source: Path, trust_remote_code: bool) -> Sorted:
    """Return which of a model's files a checkpoint gets, without those that no checkpoint ever gets."""
    found = Sorted([], [], {})
    own = named_in_code(source) if trust_remote_code else []
    for path in _paths(source, trust_remote_code):
        name, fault = path.relative_to(source).as_posix(), fault_of(path, source)
        is_code = path.suffix == ".py"
        if is_kept_back(name) or (is_code and not trust_remote_code):
            continue
        needed = is_code or name in own or matches(name, NEEDED)
        if not fault and (needed or matches(name, TERMS)):
            found.copied.append(name)
        elif fault == "a folder":
            found.left.append(f"{name}/")
        elif needed or matches(name, FOLDERS) or (fault == LINKED_FOLDER and trust_remote_code):  # it may hold code
            found.refused[name] = fault
        else:
            found.left.append(f"{name} ({fault})" if fault else name)
    return found


def _paths(source: Path, trust_remote_code: bool) -> Iterator[Path]:
    """Yield what lies in a model's folder: in place of a folder its files that may be on the list, if there are any."""
    for path in sorted(source.iterdir()):
        inside: set[Path] = set()
        if path.is_dir() and not path.is_symlink() and not is_kept_back(path.name):
            if matches(path.name, FOLDERS):
                inside |= {*path.glob("*")}
            if trust_remote_code:
                inside |= {*path.rglob(CODE)}
        yield from sorted(inside) or [path]
