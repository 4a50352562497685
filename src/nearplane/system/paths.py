"""Early checks of the models and folders that a user names, so that a wrong path is refused at once. Needs no torch."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

from nearplane.errors import ModelError, RecipeError

RECORD = "nearplane.json"  # the run record, in the folder of a checkpoint
CARD = "README.md"  # the model card, which users may change; the record does not list it
UNFINISHED = ".unfinished"  # suffix of the folder in which a checkpoint is written until it is complete
INCOMPLETE = "INCOMPLETE"  # name of a file in that folder until the checkpoint is complete
MARK = "This checkpoint is not finished: the run that writes it is under way or died.\n"  # first line of that file
JOURNAL = "journal"  # name of the folder in it from which a stopped run is resumed
ADAPTER_CONFIG = "adapter_config.json"  # by which transformers adds an adapter of peft to the model of the same folder
ADAPTERS = (ADAPTER_CONFIG, "adapter_model.")  # beginnings of the names of the files of an adapter
MAX_FILE = 5 * 10**9  # bytes of tensors in a safetensors file that is written, unless one tensor is larger


def is_gguf(source: str | Path) -> bool:
    """Return whether a source is a GGUF without a folder, by its suffix."""
    check_path("model", source)
    path = Path(source).expanduser()
    return path.suffix == ".gguf" and path.is_file()


def check_path(name: str, path: str | os.PathLike[str]) -> None:
    """Refuse what no file system takes as a path, for example a text that was passed in place of its file.

    Raises:
        RecipeError: The path is empty, has a null character, is too long or is a link that leads back to itself.
    """
    text, fault = os.fspath(path), ""
    try:
        fault = "" if text else "is empty"
        os.stat(text)
    except ValueError:
        fault = "has a null character or a lone surrogate"
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            hint = " (texts are passed as a list: [text])" * (name.lstrip("-") in ("text", "calibration", "dataset"))
            fault = f"has {len(text):,} letters and is too long for a path{hint}"
        elif error.errno == errno.ELOOP:
            fault = "is a link that leads back to itself"
    if fault:
        raise RecipeError(f"{name}: {text[:60]!r} {fault}. Pass the path of a file or folder.")


def path_in(value: Any) -> Any:
    """Return a path; None for None and for an object in place of a file."""
    return value if isinstance(value, str | os.PathLike) else None


def folders_in(model: Any) -> list[Path]:
    """Return the folder of a model in a list, which is empty for hub ids and model objects."""
    folder = None if path_in(model) is None else folder_named(model)
    return [] if folder is None else [folder]


def folder_named(source: str | Path) -> Path | None:
    """Return the local folder of a model, or None for a hub id.

    Raises:
        ModelError: The source is neither a folder nor a hub id, or the folder holds an adapter or revisions of a model.
    """
    check_path("model", source)
    folder = Path(source).expanduser()
    if folder.is_dir():
        if not os.access(folder, os.R_OK | os.X_OK):  # where it could only be listed or only be entered
            raise ModelError(f"{folder} cannot be read: Permission denied.")
        if (folder / "snapshots").is_dir() and not (folder / "config.json").exists():
            raise ModelError(
                f"{folder} is a folder of the hub's cache. Pass one of the folders in {folder / 'snapshots'}."
            )
        refuse_adapter(folder)
        return folder
    if folder.exists():
        raise ModelError(f"{source} is a file. Pass the folder of the model.")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", str(source)) or unfinished_run(folder):
        raise ModelError(
            f"The folder {source} does not exist, and it is not a hub id of the form owner/name.{unfinished_run(folder)}"
        )
    return None


def refuse_unfinished(folder: Path) -> None:
    """Raise ModelError if a checkpoint folder is incomplete."""
    if (folder / INCOMPLETE).exists():
        raise ModelError(f"{folder} is incomplete: its run has not finished. Repeat the command of that run.")


def refuse_adapter(folder: Path, name: str = "") -> None:
    """Refuse a folder with files of an adapter: transformers adds it to the weights where peft is installed, and else not.

    Args:
        folder: Folder of a model or of a checkpoint.
        name: The model's name on the hub, if the folder was fetched.

    Raises:
        ModelError: There are such files; the message names them.
    """
    if adapters := sorted(path.name for path in folder.glob("adapter_*") if path.name.startswith(ADAPTERS)):
        copy = f" from a copy of it (hf download {name} --local-dir FOLDER)" if name else ""
        raise ModelError(
            f"{name or folder} holds {' and '.join(adapters)}: transformers would add an adapter to the weights where peft is "
            f"installed, and other programs would not. Merge the adapter first, or remove these files{copy}."
        )


def unfinished_run(folder: Path) -> str:
    """Return a sentence if a stopped run left an unfinished folder for this one, else an empty text."""
    unfinished = folder.with_name(folder.name + UNFINISHED)
    if not folder.name or folder.exists() or not unfinished.is_dir():
        return ""
    return f" A stopped run left {unfinished}. Repeat the command of that run to finish it."


def refuse_overlap(out: Path, source: Path) -> None:
    """Refuse an output folder that is the folder it is made from, contains it or lies in it.

    Raises:
        RecipeError: The two folders overlap.
    """
    output, model = out.resolve(), source.resolve()
    if output == model or output in model.parents or model in output.parents:
        raise RecipeError(f"The output {out} overlaps with {source}, from which it is made. Choose another folder.")
