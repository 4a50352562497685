"""Texts of the Hugging Face hub: files that are known by a name, and data sets. Needs no torch."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nearplane.errors import INSTALL, CalibrationError, first_line

DEFAULT_DATASET = "HuggingFaceFW/fineweb-edu:sample-10BT:train"  # to calibrate on where no text is named
SHUFFLED_ROWS = 10_000  # size of the buffer from which rows of a streamed data set are drawn
TIMEOUT = 10  # seconds in which the hub must answer
OR_SELF = ", or let the network write the text: --calibration self"
log = logging.getLogger(__name__)


def need_datasets(what_needs: str, option: str = "--calibration") -> None:
    """Refuse a text of the hub where the datasets package, which reads it, is not installed.

    Args:
        what_needs: Beginning of the sentence, with its verb.
        option: Option with which a file can be passed instead.

    Raises:
        CalibrationError: The package is missing.
    """
    if find_spec("datasets") is None:
        itself = OR_SELF if option == "--calibration" else ""
        raise CalibrationError(
            f"{what_needs} the datasets package. Run {INSTALL['datasets']}, or pass a .txt or .jsonl file with {option}{itself}."
        )


def need_hub(text: str) -> None:
    """Refuse a data set of the hub, which is read over the network, where that or the datasets package is missing.

    Args:
        text: Beginning of the sentence, which ends with the hub.

    Raises:
        CalibrationError: The package is missing, or the hub does not answer.
    """
    need_datasets(f"{text}, which needs")
    if fault := hub_fault():
        raise CalibrationError(f"{text}, but {fault}. Pass a .txt or .jsonl file with --calibration{OR_SELF}.")


@cache
def hub_fault() -> str:
    """Return why data sets of the hub cannot be read, asked once in a process; empty if they can."""
    if find_spec("datasets") is None:
        return "the datasets package is missing"
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT)
    except Exception as error:  # the network raises anything
        return f"the hub cannot be reached: {first_line(error)}"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedText:
    """A file of a text that is known by its name.

    Args:
        name: Name of the text.
        option: Option that names it.
        repository: Id of the data set on the hub.
        file: Path of the file in it.
        reader: Reader of the file in the datasets package.
    """

    name: str
    option: str
    repository: str
    file: str
    reader: str

    def fetched(self) -> Path:
        """Return the local copy of the file, downloaded from the hub if it is not in the cache yet.

        Raises:
            CalibrationError: The datasets package is missing, or the file cannot be fetched.
        """
        need_datasets(f"{self.option} {self.name} needs", self.option)
        from huggingface_hub import hf_hub_download

        log.info(
            "reading %s from the Hugging Face hub or its cache (HF_HUB_OFFLINE=1: from its cache alone)", self.name
        )
        try:
            return Path(hf_hub_download(self.repository, self.file, repo_type="dataset"))
        except Exception as error:  # the network and the hub raise anything
            raise CalibrationError(
                f"{self.option} {self.name}: {self.file} of {self.repository} cannot be fetched from the Hugging Face hub "
                f"({first_line(error)}). Pass a .txt or .jsonl file with {self.option} instead."
            ) from error

    def rows(self) -> Sequence[str]:
        """Return the rows of the text in their order, each read from disk when it is used.

        Raises:
            CalibrationError: The file cannot be fetched or read.
        """
        file = self.fetched()
        from datasets import load_dataset

        try:
            column: Sequence[str] = load_dataset(self.reader, data_files=str(file), split="train")["text"]
            return column
        except Exception as error:  # readers of files raise anything
            raise CalibrationError(
                f"{file} cannot be read ({first_line(error)}). Delete it, and repeat the command."
            ) from error


CROPPED = "c4"  # its windows are crops of random documents
WIKITEXT = {"name": "wikitext2", "repository": "Salesforce/wikitext", "reader": "parquet"}
C4 = {"name": "c4", "repository": "allenai/c4", "reader": "json"}
TEST_TEXTS = {  # to measure on
    "wikitext2": NamedText(**WIKITEXT, option="--text", file="wikitext-2-raw-v1/test-00000-of-00001.parquet"),
    "c4": NamedText(**C4, option="--text", file="en/c4-validation.00000-of-00008.json.gz"),
}
TRAINING_TEXTS = {  # to calibrate on
    "wikitext2": NamedText(**WIKITEXT, option="--calibration", file="wikitext-2-raw-v1/train-00000-of-00001.parquet"),
    "c4": NamedText(**C4, option="--calibration", file="en/c4-train.00000-of-01024.json.gz"),
}


def rows_of_set(source: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of a data set of the hub, streamed and shuffled."""
    name, config, split = [*source.split(":"), "", ""][:3]
    try:
        from datasets import load_dataset

        rows = load_dataset(name, config or None, split=split or "train", streaming=True)
        yield from rows.shuffle(seed=seed, buffer_size=SHUFFLED_ROWS)
    except Exception as error:  # the network and the readers of many formats raise anything
        raise CalibrationError(
            f"The data set {source} cannot be read ({first_line(error)}). Pass wikitext2, c4, or a .txt or .jsonl file with "
            f"--calibration."
        ) from error
