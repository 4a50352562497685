"""Early checks of the models, texts and folders that a user names, so that a wrong path is refused at once. Needs no torch."""

from __future__ import annotations

import errno
import os
import re
from importlib.util import find_spec
from pathlib import Path

from nearplane.errors import INSTALL, CalibrationError, ModelError, RecipeError
from nearplane.system.files import read_object
from nearplane.system.named_texts import TEST_TEXTS, text_to_calibrate_on, text_to_measure_on
from nearplane.system.text_mixes import SUFFIXES, texts_of

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


def text_files(source: str | Path, option: str = "--calibration") -> list[Path] | None:
    """Return the files of a text in their order; None for a named text or, with --calibration, the name of a data set.

    Raises:
        CalibrationError: There is no such file, or one that is no regular .txt or .jsonl file. The message names `option`.
    """
    check_path(option, source)
    path, suffixes = Path(source).expanduser(), " or ".join(SUFFIXES)
    if text_to_measure_on(source) is not None:
        return None
    if not path.exists():
        set_name = option == "--calibration" and Path(str(source).partition(":")[0]).suffix not in SUFFIXES
        if set_name and re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?(:[\w.-]*){0,2}", str(source)):
            if find_spec("datasets") is None:
                raise CalibrationError(
                    f"There is no file or folder {source}, and reading a data set of this name needs the datasets package. Run "
                    f"{INSTALL['datasets']}, or pass a {suffixes} file with --calibration."
                )
            return None
        others = (
            " or a folder of them"
            if option != "--calibration"
            else ", a folder of them, a data set as name:config:split"
        )
        raise CalibrationError(
            f"{option} {source} does not exist. Pass a {suffixes} file{others}, or a text by its name: {' or '.join(TEST_TEXTS)}."
        )
    files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES) if path.is_dir() else [path]
    if not files:
        raise CalibrationError(f"The folder {source} contains no {suffixes} file for {option}.")
    for file in files:
        if not file.is_file():
            raise CalibrationError(
                f"{option}: {file} is not a regular file, but a pipe, a device, a folder or a broken link. Pass a {suffixes} file."
            )
        if file.suffix not in SUFFIXES:
            raise CalibrationError(f"{file} is not a {suffixes} file. Rename plain text to .txt.")
    return files


def check_text(text: str | Path, option: str = "--calibration") -> None:
    """Refuse a text, or with --calibration a mix, that does not exist; a named text is fetched now.

    Raises:
        CalibrationError: The text, or one of the mix, cannot be read, or is twice in the mix.
    """
    mix = texts_of(text) if option == "--calibration" else ()
    seen = set[Path | str]()
    for name in [each.name for each in mix] or [os.fspath(text)]:
        files = text_files(name, option)
        if (named := text_to_calibrate_on(name) if option == "--calibration" else text_to_measure_on(name)) is not None:
            named.fetched()
        places = {name} if files is None else {file.resolve() for file in files}
        if seen & places:
            raise CalibrationError(f"--calibration {text} contains {name} twice. Name it once, with a larger weight.")
        seen |= places


def check_named(*models: str | Path | None, **texts: str | Path | None) -> None:
    """Refuse models and texts that do not exist; None stands for an option that was not given.

    Args:
        models: Folders or hub ids; a local folder needs a config.json.
        texts: Texts by the name of their option.
    """
    for model in models:
        if model is not None and not is_gguf(model) and (folder := folder_named(model)) is not None:
            refuse_unfinished(folder)
            read_object(folder / "config.json", expected="Pass what save_pretrained wrote", error=ModelError)
    for option, text in texts.items():
        if text is not None:
            check_text(text, f"--{option}")


def refuse_overlap(out: Path, source: Path) -> None:
    """Refuse an output folder that is the folder it is made from, contains it or lies in it.

    Raises:
        RecipeError: The two folders overlap.
    """
    output, model = out.resolve(), source.resolve()
    if output == model or output in model.parents or model in output.parents:
        raise RecipeError(f"The output {out} overlaps with {source}, from which it is made. Choose another folder.")
