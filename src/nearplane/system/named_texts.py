"""Texts with a name: wikitext2 and c4, whose files come from the Hugging Face hub. Needs no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from nearplane.errors import CalibrationError, first_line


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedText:
    """Files of a text on the hub.

    Args:
        repository: Id of the data set.
        test, training: Files to measure on and to calibrate on.
        reader: Reader of these files in the datasets package.
    """

    repository: str
    test: str
    training: str
    reader: str


NAMED_TEXTS = {
    "wikitext2": NamedText(
        repository="Salesforce/wikitext",
        test="wikitext-2-raw-v1/test-00000-of-00001.parquet",
        training="wikitext-2-raw-v1/train-00000-of-00001.parquet",
        reader="parquet",
    ),
    "c4": NamedText(
        repository="allenai/c4",
        test="en/c4-validation.00000-of-00008.json.gz",
        training="en/c4-train.00000-of-01024.json.gz",
        reader="json",
    ),
}


def is_named(source: str | os.PathLike[str]) -> bool:
    """Return whether a source is the name of a text; a file or folder of that name counts instead."""
    return os.fspath(source) in NAMED_TEXTS and not os.path.exists(source)


def fetched(name: str, *, training: bool) -> Path:
    """Return the local copy of a text's file, downloaded from the hub if it is not in the cache yet.

    Args:
        name: A key of `NAMED_TEXTS`.
        training: Whether the text is calibrated on, not measured on.

    Raises:
        CalibrationError: The datasets package is missing, or the file cannot be fetched.
    """
    text, option = NAMED_TEXTS[name], "--calibration" if training else "--text"
    instead = f"Or pass a .txt or .jsonl file with {option}."
    if find_spec("datasets") is None:
        raise CalibrationError(
            f'{option} {name} needs the datasets package. Run pip install "nearplane[datasets]". {instead}'
        )
    from huggingface_hub import hf_hub_download

    file = text.training if training else text.test
    try:
        return Path(hf_hub_download(text.repository, file, repo_type="dataset"))
    except Exception as error:  # the network and the hub raise anything
        raise CalibrationError(
            f"{option} {name}: {file} of {text.repository} cannot be fetched from the Hugging Face hub "
            f"({first_line(error)}). Pass a .txt or .jsonl file with {option} instead."
        ) from error


def documents(name: str, *, training: bool) -> list[str]:
    """Return the rows of a text, in their order.

    Raises:
        CalibrationError: The file cannot be fetched or read.
    """
    file = fetched(name, training=training)
    from datasets import load_dataset

    try:
        rows = load_dataset(NAMED_TEXTS[name].reader, data_files=str(file), split="train")
        return rows["text"]  # type: ignore[no-any-return]  # a column, which is read from disk row by row
    except Exception as error:  # readers of files raise anything
        raise CalibrationError(
            f"{file} cannot be read ({first_line(error)}). Delete it, and repeat the command."
        ) from error
