"""Texts that a user names: files, folders, data sets, texts known by name, and mixes of them (`a.jsonl:2,b.txt:1`).

They are looked for early, so that a wrong path is refused at once. Needs no torch.
"""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from nearplane.calibration.hub_texts import CROPPED, TEST_TEXTS, TRAINING_TEXTS, NamedText, need_hub
from nearplane.errors import CalibrationError, ModelError
from nearplane.system.files import read_object
from nearplane.system.paths import check_path, folder_named, is_gguf, refuse_unfinished

SUFFIXES = (".txt", ".jsonl")  # of text files
SELF = "self"  # the text that the original network writes itself
NUMBER = re.compile(r"[-+]?(\d{1,9}(\.\d{0,9})?|\.\d{1,9})")
TEXTS, TOKENS = "texts given in Python", "tokens given in Python"  # names in the run record, in place of a path
IMAGES, SOUND = "images given in Python", "sound given in Python"
# advice on passing data again that the run record does not hold
PASS_AGAIN: dict[object, str] = dict.fromkeys((IMAGES, SOUND), "the same data again from Python:")
PASS_AGAIN |= {TEXTS: "a .jsonl file of them with --calibration, or", TOKENS: "them from Python with --calibration, or"}


def text_to_measure_on(source: object) -> NamedText | None:
    """Return the text to measure on that a source names, or None; a file or folder of that name counts instead."""
    return TEST_TEXTS[str(source)] if _is_named(source) else None


def text_to_calibrate_on(source: object) -> NamedText | None:
    """Return the text to calibrate on that a source names, or None; a file or folder of that name counts instead."""
    return TRAINING_TEXTS[str(source)] if _is_named(source) else None


def is_self_written(source: object) -> bool:
    """Return whether a source names the text that the network writes itself; a file or folder of that name counts instead."""
    return isinstance(source, str | Path) and str(source) == SELF and not Path(source).exists()


def is_cropped(source: object) -> bool:
    """Return whether a source names the text whose windows are crops of random documents."""
    return str(source) == CROPPED and _is_named(source)


def _is_named(source: object) -> bool:
    return isinstance(source, str | Path) and str(source) in TEST_TEXTS and not Path(source).exists()


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedText:
    """A text of a mix.

    Args:
        name: File, folder, data set or named text, as the user wrote it.
        weight: Weight of its windows, relative to the other weights.
    """

    name: str
    weight: Fraction


def texts_of(calibration: str | os.PathLike[str] | None) -> tuple[WeightedText, ...]:
    """Return the texts of a mix with their weights; an empty tuple for a single text.

    A mix is a list with commas that is not itself the path of a file or folder. A `:NUMBER` at the end of a part is its
    weight, and 1 is the weight of a part without one.

    Raises:
        CalibrationError: A weight is no positive number, a part is empty, or a single text has a weight.
    """
    text = "" if calibration is None else os.fspath(calibration)
    parts = [part.strip() for part in text.split(",")]
    if _exists(text) or (_is_too_long(text) and not _exists(_split(parts[0])[0])):
        return ()
    if len(parts) == 1:
        name, weight = _split(text)
        if weight is not None and (_is_file_name(name) or text_to_calibrate_on(name)):
            raise CalibrationError(
                f"--calibration {text} gives a weight to a single text. Leave out :{weight}, or name more texts after a "
                f"comma: {text},OTHER.txt:1."
            )
        return ()
    texts = []
    for part in parts:
        name, weight = _split(part)
        if not name:
            raise CalibrationError(f"--calibration {text} has an empty text. Expected a list as a.jsonl:2,b.txt:1.")
        if weight is not None and (NUMBER.fullmatch(weight) is None or Fraction(weight) <= 0):
            raise CalibrationError(
                f"--calibration: the weight of {name} is {weight!r}; expected a positive number, as in {name}:2."
            )
        texts.append(WeightedText(name=name, weight=Fraction(weight or 1)))
    return tuple(texts)


def _split(part: str) -> tuple[str, str | None]:
    """Return a text's name and its weight as it was written; None if there is none."""
    name, _, weight = part.rpartition(":")
    if name and (NUMBER.fullmatch(weight) or _is_file_name(name)):
        return name.strip(), weight.strip()
    return part, None


def _is_file_name(name: str) -> bool:
    """Return whether a name is that of a text file, whether it exists or not, or of an existing folder."""
    return name.endswith(SUFFIXES) or _exists(name)


def _exists(path: str) -> bool:
    return os.path.exists(os.path.expanduser(path))


def _is_too_long(path: str) -> bool:
    """Return whether a text is too long for a path, so that it may be a text in place of its file."""
    try:
        os.stat(path)
    except OSError as error:
        return error.errno == errno.ENAMETOOLONG
    except ValueError:  # null characters
        return True
    return False


def text_files(source: str | Path, option: str = "--calibration") -> list[Path] | None:
    """Return the files of a text in their order; None for a named text or, with --calibration, the name of a data set.

    Raises:
        CalibrationError: There is no such file, or one that is no regular .txt or .jsonl file. The message names `option`.
    """
    check_path(option, source)
    path, suffixes = Path(source).expanduser(), " or ".join(SUFFIXES)
    if text_to_measure_on(source) is not None or (option == "--calibration" and is_self_written(source)):
        return None
    if not path.exists():
        set_name = option == "--calibration" and Path(str(source).partition(":")[0]).suffix not in SUFFIXES
        if set_name and re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?(:[\w.-]*){0,2}", str(source)):
            need_hub(
                f"There is no file or folder {source}, and a data set of this name would be read from the Hugging Face hub"
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
        CalibrationError: The text, or one of the mix, cannot be read, is empty, or is twice in the mix.
    """
    mix = texts_of(text) if option == "--calibration" else ()
    seen = set[Path | str]()
    for name in [each.name for each in mix] or [os.fspath(text)]:
        files = text_files(name, option)
        if (named := text_to_calibrate_on(name) if option == "--calibration" else text_to_measure_on(name)) is not None:
            named.fetched()
        if hollow := [file for file in files or () if not file.stat().st_size]:
            raise CalibrationError(f"{hollow[0]} is empty. Pass a file with text.")
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


def refuse_unrecorded(calibration: object) -> None:
    """Refuse the name of data that was passed from Python and is not in the run record.

    Raises:
        CalibrationError: The data must be passed again; the message says how.
    """
    if calibration in PASS_AGAIN:
        raise CalibrationError(
            f"The calibration was {calibration}; the run record contains only their SHA-256. Pass {PASS_AGAIN[calibration]} "
            f"nearplane.verify(..., calibration=...)."
        )
