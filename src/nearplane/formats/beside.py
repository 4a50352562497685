"""Files beside weights and config: those that a checkpoint gets from its model (tokenizer, templates, licence), and its model card.

A checkpoint is passed on, so that only files on the list of `paths.py` are copied, and only what lies in the model's
folder: regular files, and links to one in that folder or in the blobs of the same cache of the hub. Weights and
config.json are not copied but read, and rewritten as what they mean, so that these may be links to any place. The text
of the card, README.md, is made by `record/model_card.py`.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from nearplane.errors import ModelError, first_few, printable
from nearplane.record.model_card import Origin, front_matter, is_unchanged
from nearplane.record.uses import has_template
from nearplane.system.files import read_object
from nearplane.system.paths import (
    CARD,
    CODE,
    CONFIG,
    FOLDERS,
    NEEDED,
    TERMS,
    WEIGHTS,
    is_kept_back,
    is_listed,
    named_in_code,
)

LINKED_FOLDER = "a link to a folder"
log = logging.getLogger(__name__)
MAX_CARD_BYTES = 2**20  # of a card that is read


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """The files of a model besides weights and config that a checkpoint gets: tokenizer, templates, licence.

    Args:
        source: The model's folder.
        trust_remote_code: Whether its Python files are among them, and the files that these name.
        vocabulary: Names of the files that the class of its tokenizer reads, see `Model.vocabulary`.
        known: Names of the files of which these may be, as at the start of a run; None: all.
    """

    source: Path
    trust_remote_code: bool = False
    vocabulary: Sequence[str] = ()
    known: Collection[str] | None = None

    def names(self) -> list[str]:
        """Return the names of the files, relative to the folder."""
        return [name for name in self._sorted_out().copied if self.known is None or name in self.known]

    def size(self) -> int:
        """Return the number of bytes of the files."""
        return sum((self.source / name).stat().st_size for name in self.names())

    def copy(self, out: Path) -> None:
        """Copy the files into a folder.

        Raises:
            ModelError: See `check`.
        """
        self.check()  # again, as hours may have passed
        for name in self.names():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.source / name, out / name)

    def check(self) -> None:
        """Refuse a model of which a file that its tokenizer, processor, templates or trusted code need cannot be copied.

        Raises:
            ModelError: Such a file is a link that leads out of the folder, or no regular file.
        """
        refused = self._sorted_out().refused
        if not refused:
            return
        linked = next((name for name, fault in refused.items() if fault.startswith("a link")), None)
        remedy = "Put regular files in their place, or fetch the model again."
        if linked is not None:
            old, new = shlex.quote(linked), shlex.quote(f"{linked}.copy")
            remedy = (
                f"In that folder, replace links by what they lead to: cp -RL {old} {new} && rm {old} && mv {new} {old}"
            )
        raise ModelError(
            f"{self.source} has files that tokenizer, processor, chat template or code of the model may need, but that cannot "
            f"be copied: {first_few([f'{name} ({fault})' for name, fault in refused.items()])}. A checkpoint gets only "
            f"regular files of the model's folder, since it may be passed on. {remedy}"
        )

    def log_left_out(self, out: Path) -> None:
        """Log the names of the files of the model that a checkpoint in `out` does not get because they are not on the list."""
        if left := self._sorted_out().left:
            names = printable(first_few(left, most=8))
            log.warning("Not copied from %s to %s, and perhaps not needed: %s.", self.source, out, names)

    def _sorted_out(self) -> Sorted:
        """Return which of the model's files a checkpoint gets, without those that no checkpoint ever gets."""
        found = Sorted([], [], {})
        own = {*self.vocabulary, *(named_in_code(self.source) if self.trust_remote_code else [])}
        for path in self._paths():
            name, fault = path.relative_to(self.source).as_posix(), fault_of(path, self.source)
            is_code = path.suffix == ".py"
            if is_kept_back(name) or (is_code and not self.trust_remote_code):
                continue
            needed = is_code or name in own or is_listed(name, NEEDED)
            if not fault and (needed or is_listed(name, TERMS)):
                found.copied.append(name)
            elif fault == "a folder" and not needed:
                found.left.append(f"{name}/")
            elif needed or is_listed(name, FOLDERS) or (fault == LINKED_FOLDER and self.trust_remote_code):
                found.refused[name] = fault
            else:
                found.left.append(f"{name} ({fault})" if fault else name)
        return found

    def _paths(self) -> Iterator[Path]:
        """Yield what lies in the model's folder: in place of a folder its files that may be on the list, if it has any."""
        for path in sorted(self.source.iterdir()):
            inside: set[Path] = set()
            if path.is_dir() and not path.is_symlink() and not is_kept_back(path.name):
                if is_listed(path.name, FOLDERS):
                    inside |= {*path.glob("*")}
                if self.trust_remote_code:
                    inside |= {*path.rglob(CODE)}
            yield from sorted(inside) or [path]


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
        chat=has_template(source),
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
