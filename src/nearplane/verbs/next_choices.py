"""What a model would write next at every place of a text that another one wrote, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nearplane.models.kinds import has_two_stacks
from nearplane.models.pretrained import as_model_error
from nearplane.verbs.generate import UNFINISHED, prompt_ids

FORCED = ("forced_bos_token_id", "forced_eos_token_id")  # by the generation config, at the beginning and at the end


class NextChoice(NamedTuple):
    """A token of a text.

    Args:
        piece: What it adds to the text; empty for one that ends it, or that is a part of a letter.
        other: What the model writes there instead, behind the same tokens: a text, empty if it ends there, or U+FFFD for a part
            of a letter; None: the same token.
    """

    piece: str
    other: str | None = None


def next_choices(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, written: Sequence[int]
) -> list[NextChoice]:
    """Return for each token that was written behind a prompt whether a model finds the same one most likely there.

    Args:
        model: The model, in memory.
        tokenizer: Its tokenizer.
        prompt: Text of a user, see `generate`.
        written: Ids of the tokens, by the same tokenizer.
    """
    before, after = prompt_ids(model, tokenizer, prompt), list(written)
    given: dict[str, Any] = {"input_ids": torch.tensor([before + after[:-1]], device=model.device)}
    first = len(before) - 1
    if has_two_stacks(model):
        start = model.generation_config.decoder_start_token_id
        given = {
            "input_ids": torch.tensor([before], device=model.device),
            "decoder_input_ids": torch.tensor([[start, *after[:-1]]], device=model.device),
        }
        first, before = 0, [start]
    with torch.inference_mode(), as_model_error("The model does not read the text of the original"):
        chosen = model(**given).logits[0, first:].argmax(-1).tolist()
    settings = model.generation_config
    forced = {getattr(settings, name, None) for name in FORCED}  # whatever a network finds likely
    ends = end_tokens(model, tokenizer)

    def text(ids: Sequence[int]) -> str:
        decoded = str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
        return decoded.rstrip(UNFINISHED)

    found, so_far = [], text(before)
    for place, (token, choice) in enumerate(zip(after, chosen, strict=True)):
        with_it = text(before + after[: place + 1])
        other = None
        if token not in {choice, *forced}:
            other = text([*before, *after[:place], choice])[len(so_far) :] or ("" if choice in ends else UNFINISHED)
        found.append(NextChoice(with_it[len(so_far) :], other))
        so_far = with_it
    return found


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the tokens that end a text, by the generation config and the tokenizer."""
    found = (model.generation_config.eos_token_id, tokenizer.eos_token_id)
    return {token for each in found for token in (each if isinstance(each, list) else [each]) if token is not None}
