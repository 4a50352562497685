"""Whether readers of a file that holds its tokenizer, as a GGUF does, cut text into the tokens that the model knows."""

from __future__ import annotations

import logging
import tempfile
from itertools import islice
from pathlib import Path

from nearplane.calibration.windows import Windows
from nearplane.errors import ModelError, RecipeError
from nearplane.formats.container import Container
from nearplane.models.model import Model
from nearplane.models.pretrained import tokenizer_of
from nearplane.models.two_tokenizers import cut, decoded
from nearplane.system.output_folder import readable_errors
from nearplane.system.token_lines import DECOMPOSED, LINES, differing_line

CALIBRATION_LINES = 200
log = logging.getLogger("nearplane")


def check_tokens_in_file(container: Container, model: Model, windows: Windows | None = None) -> None:
    """Compare the tokens of `LINES` and of 200 calibration lines by the model and by the tokenizer that the file will have.

    The latter is made again from the header, as for a file without its folder. A difference is only said where `--pre`
    names how text is split, and in text that begins with a space: before it llama.cpp puts another one as SentencePiece
    does, but tokenizers of transformers may not.

    Args:
        container: The container, of which no block is written yet.
        model: The original model.
        windows: The calibration windows; None: there are none.

    Raises:
        RecipeError: A line has other tokens.
        FormatError: The disk is full.
    """
    forced = bool(container.config.get("pre"))
    try:
        files = container.tokenizer_read_again()
    except ModelError as error:
        log.warning("The tokens of the file are not compared with those of the model. %s", error)
        return
    if not files:
        return
    tokenizer, fitted = model.tokenizer(), () if windows is None or windows.fitted is None else windows.fitted
    calibrated = (line for text in decoded(tokenizer, fitted) for line in text.splitlines(keepends=True))
    lines = [*LINES, *islice(filter(str.strip, calibrated), CALIBRATION_LINES)]
    with readable_errors(container.place.out), tempfile.TemporaryDirectory() as place:
        for name, text in files.items():
            (Path(place) / name).write_text(text, encoding="utf-8")
        again = tokenizer_of(Path(place))
    if differing_line(cut(tokenizer), cut(again), [DECOMPOSED]) is not None:
        log.info("llama.cpp does not compose letters and accents that a text has apart, as this tokenizer does (NFC)")
    if (ours := cut(tokenizer, ends=True)("a")) != (theirs := cut(again, ends=True)("a")):
        log.warning(
            "The tokenizer of %s sets special tokens around a text that a GGUF cannot express: 'a' has the ids %s, and %s by "
            "llama.cpp. Add them to the text there, since a model predicts worse where texts begin otherwise than in training.",
            *(model.folder, ours, theirs),
        )
    if (difference := differing_line(cut(tokenizer), cut(again), lines)) is None:
        return
    what = f"The tokenizer of {model.folder} and that of the file, as llama.cpp reads it, differ: {difference}."
    indented = differing_line(cut(tokenizer), cut(again), (line.lstrip(" ") for line in lines)) is None
    if not forced and not indented:
        raise RecipeError(
            f"{what} Use another --format. For a tokenizer over bytes, --pre NAME leaves the choice to you: this is then a warning."
        )
    log.warning("%s %s", what, "Only text that begins with a space does." if indented else "Check --pre.")
