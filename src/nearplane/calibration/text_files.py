"""Files of the texts that a user names, looked for early, so that a wrong path is refused at once. Needs no torch."""

from __future__ import annotations

import hashlib
import os
import re
from importlib.util import find_spec
from pathlib import Path

from nearplane.calibration.named_texts import TEST_TEXTS, text_to_calibrate_on, text_to_measure_on
from nearplane.calibration.text_mixes import SUFFIXES, texts_of
from nearplane.errors import INSTALL, CalibrationError, ModelError
from nearplane.system.files import read_object, sha256
from nearplane.system.paths import check_path, folder_named, is_gguf, refuse_unfinished


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


def content_of(text: Path) -> str:
    """Return the SHA-256 of a text file or of all files in a folder; for a data set, its name."""
    if text.is_file():
        return sha256(text)
    if not text.is_dir():
        return str(text)
    return hashlib.sha256("".join(sha256(p) for p in sorted(text.rglob("*")) if p.is_file()).encode()).hexdigest()
