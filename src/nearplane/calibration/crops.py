"""Windows of c4, cropped at random from random documents, as in the papers."""

from __future__ import annotations

import random
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from nearplane.errors import CalibrationError
from nearplane.models.pretrained import as_model_error

CROPS = 256  # windows of it where no number is given, as in the papers
MAX_DRAWS = 10_000  # documents that are drawn for one window before it is given up


def crops(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[str], count: int, seqlen: int, generator: random.Random
) -> list[list[int]]:
    """Return `count` windows of `seqlen` ids, each cropped at random from a random document that is longer than a window.

    Same draws as `get_c4` in the code of GPTQ (Frantar et al., 2022), for tokenizers that add no special tokens.

    Raises:
        CalibrationError: The documents are too short.
    """
    windows: list[list[int]] = []
    while len(windows) < count:
        for _ in range(MAX_DRAWS):
            text = rows[generator.randint(0, len(rows) - 1)]
            with as_model_error("The model's tokenizer cannot tokenize the text (fetch the model again)"):
                ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            if len(ids) > seqlen:
                break
        else:
            raise CalibrationError(
                f"None of {MAX_DRAWS:,} documents drawn from c4 has more than {seqlen} tokens. Use shorter windows with --seqlen."
            )
        start = generator.randint(0, len(ids) - seqlen - 1)
        windows.append(ids[start : start + seqlen])
    return windows
