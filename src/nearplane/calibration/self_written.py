"""Calibration text that the original network writes itself (`--calibration self`), for machines without another text.

The whole network is in memory while it writes, with the keys and values of `BATCH` texts, all of which get one token at
a time. Part of the texts begin with the first token alone, part with short openings of several kinds, and where the
tokenizer has a chat template, part are conversations: the network also writes the user's turns, as after the template's
words before them (Magpie, arXiv 2406.08464). Tokens are drawn at temperature 1 from the network's own predictions
(LLM-QAT, arXiv 2305.17888). A text that ends is followed by another of its kind.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from nearplane.calibration.kept_texts import keep_text, kept_text, name_of_text
from nearplane.errors import CalibrationError
from nearplane.models.kinds import continues_text
from nearplane.models.model import Model
from nearplane.models.pretrained import tokens_before
from nearplane.recipe.recipe import FirstToken
from nearplane.system.device import Device
from nearplane.system.progress import Progress, Tracked, in_steps
from nearplane.system.sizes import size_text

BATCH = 32  # texts that are written together; always all of them, so that more windows begin with the same ones
SPREAD = 1_000_003  # distance of the batches' seeds of two seeds
LENGTH = 512  # most tokens of a text: later ones cost more, as they attend to all before
MAX_TURN = 128  # most tokens of a user's turn
MARK = "USER_TURN"  # stands for the user's turn in a chat template
OPENINGS = (
    *("The ", "In the ", "It was ", "She ", "How to ", "What is ", "1. ", "- ", "Abstract\n\n", "Chapter 1\n\n", "Dear "),
    *("def ", "import ", "#include <", "<html>\n", "{\n  \"", "SELECT ", "public class ", "# ", "$ ", "\\begin{", "| "),
    *("Question: ", "Review: ", "Recipe: ", "Die ", "Le ", "El ", "Il ", "O ", "在", "この"),
)  # fmt: skip
log = logging.getLogger("nearplane")


@dataclass(slots=True)
class Text:
    """One text while it is written.

    Args:
        openings: Tokens with which it and those after it begin, as long as it is.
        reply: Tokens between the user's turn and the answer of a conversation; empty for other texts.
        ends: Tokens that end a text or a turn.
        forced: Next tokens that are not drawn.
        turn: Number of tokens of the user's turn so far; None outside of one.
    """

    openings: Iterator[Sequence[int]]
    reply: Sequence[int]
    ends: frozenset[int]
    forced: deque[int] = field(default_factory=deque)
    turn: int | None = None

    def begin(self) -> None:
        """Put the tokens of the next opening before what is drawn."""
        self.forced.extend(next(self.openings))
        self.turn = 0 if self.reply else None

    def next(self, drawn: int) -> int:
        """Return the next token: a forced one, or the one that was drawn unless a user's turn ends here."""
        if self.forced:
            return self.forced.popleft()
        if self.turn is None:
            if drawn in self.ends:
                self.begin()
            return drawn
        self.turn += 1
        if drawn not in self.ends and self.turn < MAX_TURN:
            return drawn
        self.turn = None
        self.forced.extend(self.reply)
        return self.forced.popleft()


def self_written(
    model: Model,
    samples: int,
    seqlen: int,
    seed: int,
    device: Device,
    progress: Progress,
    first_token: FirstToken = "auto",
    unwritten: list[int] | None = None,
) -> Tensor:
    """Return windows of text that the original network writes, or those that it has written for the same call before.

    Args:
        model: The original model, which continues text.
        samples, seqlen: Number of windows, and tokens per window; fewer samples are the first of more.
        seed: Seed of the draws.
        device: Device to compute on; another device draws other tokens.
        progress: Display that wraps the iterator over tokens.
        first_token: How each window begins: as the tokenizer begins a text, or without that; texts always begin so.
        unwritten: For a rehearsal: the number of tokens to write is added here, and random tokens stand for them.

    Returns:
        (samples, seqlen) int64.

    Raises:
        CalibrationError: The model does not continue text, or does not fit in the memory of the device.
    """
    network, tokenizer = model.network, model.tokenizer()
    if not continues_text(network):
        raise CalibrationError(
            f"--calibration self needs a network that continues text, which {type(network).__name__} does not. Pass a .txt or "
            f".jsonl file."
        )
    name = name_of_text(model.folder, (samples, seqlen, seed, first_token, device.run_input()))
    if (kept := kept_text(name)) is not None:
        log.info("taking the text that the network wrote before, kept as %s", name)
        return kept
    before = tokens_before(tokenizer)
    length = min(seqlen, LENGTH)
    if length <= len(before) + 1:
        raise CalibrationError(f"--calibration self needs windows of more tokens than {seqlen}. Use a larger --seqlen.")
    beginning = before if first_token == "auto" else ()
    separator = [tokenizer.eos_token_id] if isinstance(tokenizer.eos_token_id, int) else []
    each = length - len(before) + len(separator)
    batches = batches_of_texts(samples * (seqlen - len(beginning)), each)
    dtype = device.compute_dtype(model.dtype)
    _check_room(model, dtype, device)
    if unwritten is not None:
        unwritten.append(batches * BATCH * length)
        known = min(len(tokenizer), len(network.get_input_embeddings().weight))
        drawn = torch.randint(known, (samples, seqlen), generator=torch.Generator().manual_seed(seed))
        drawn[:, : len(beginning)] = torch.tensor(beginning, dtype=torch.int64)
        return drawn
    log.info(f"the network writes {batches * BATCH * length:,} tokens of text (self)")
    ids: list[int] = []
    tracked = Tracked(range(batches * length), "writing text", batches * length)
    with _whole(model, device, dtype) as whole, in_steps(progress, tracked) as done:
        for batch in range(batches):
            generator = torch.Generator().manual_seed((seed * SPREAD + batch) % 2**32)  # torch takes no more bits
            texts = _texts(model, tokenizer, before, generator)
            for text in written(whole, texts, length, len(tokenizer), generator, done):
                ids += text[len(before) :] + separator
    windows = torch.tensor(ids[: samples * (seqlen - len(beginning))]).view(samples, -1)
    windows = torch.cat([torch.tensor(beginning, dtype=torch.int64).expand(samples, -1), windows], 1)
    keep_text(name, windows)
    return windows


def batches_of_texts(tokens: int, each: int) -> int:
    """Return the number of batches of texts of `each` tokens that have so many tokens together."""
    return -(-tokens // (each * BATCH))


def written(
    network: PreTrainedModel, texts: Sequence[Text], length: int, vocabulary: int, generator: torch.Generator, done: Any
) -> list[list[int]]:
    """Return texts of `length` tokens that a network writes together.

    Args:
        network: The network, with all its weights.
        texts: The texts, not begun.
        length: Number of tokens, at least 2.
        vocabulary: Number of tokens of the tokenizer; later rows of the head belong to none.
        generator: Generator of the draws, on the CPU.
        done: Function that is told of each token.
    """
    for text in texts:
        text.begin()
    first = torch.tensor([[text.next(0)] for text in texts], device=network.device)
    done(1)

    def chosen(_: Tensor, scores: Tensor) -> Tensor:
        """Return scores of which the greatest is that of the next token, as `generate` is greedy."""
        chances = scores[:, :vocabulary].float().softmax(-1).cpu()
        drawn = torch.multinomial(chances, 1, generator=generator).flatten().tolist()
        following = torch.tensor([[text.next(token)] for text, token in zip(texts, drawn, strict=True)])
        done(1)
        return torch.full_like(scores, -math.inf).scatter_(1, following.to(scores.device), 0.0)

    network.generation_config = GenerationConfig(max_new_tokens=length - 1, use_cache=True, pad_token_id=0)  # no end
    mask = torch.ones_like(first)
    generate: Any = network.generate
    return [list(row) for row in generate(first, attention_mask=mask, logits_processor=[chosen]).tolist()]


def _texts(
    model: Model, tokenizer: PreTrainedTokenizerBase, before: tuple[int, ...], generator: torch.Generator
) -> list[Text]:
    """Return the texts of a batch: by turns from the first token, from openings, and conversations if there is a template."""
    ordinary = sorted({*range(len(tokenizer))} - {*tokenizer.all_special_ids})

    def first() -> Iterator[Sequence[int]]:
        while True:  # a tokenizer that sets no token before a text leaves any token to begin with
            yield before or [ordinary[int(torch.randint(len(ordinary), (), generator=generator))]]

    def opened() -> Iterator[Sequence[int]]:
        for number in iter(lambda: int(torch.randint(len(OPENINGS), (), generator=generator)), -1):
            yield [*before, *tokenizer(OPENINGS[number], add_special_tokens=False)["input_ids"]]

    ends = _ends(model, tokenizer)
    kinds: list[tuple[Any, Sequence[int]]] = [(first, ()), (opened, ())]
    if (template := conversation(tokenizer)) is not None:
        kinds.append((lambda: cycle([template[0]]), template[1]))
    return [Text(kind(), reply, ends) for kind, reply in islice(cycle(kinds), BATCH)]


def conversation(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]] | None:
    """Return the tokens before a user's first turn and those between it and the answer; None without a chat template."""
    if not tokenizer.chat_template:
        return None
    turn = [{"role": "user", "content": MARK}]
    try:
        rendered = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates are programs, which raise anything
        log.warning("the chat template cannot be rendered (%s), so that no conversations are written", error)
        return None
    parts = str(rendered).split(MARK)
    if len(parts) != 2:
        return None
    before, reply = (list(tokenizer(part, add_special_tokens=False)["input_ids"]) for part in parts)
    return (before, reply) if before and reply else None


def _ends(model: Model, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens that end a text or a turn, by the tokenizer, the config and the generation config."""
    found = [tokenizer.eos_token_id, getattr(model.config.get_text_config(), "eos_token_id", None)]
    if (model.folder / "generation_config.json").is_file():
        found.append(GenerationConfig.from_pretrained(model.folder).eos_token_id)
    return frozenset(
        token for each in found for token in (each if isinstance(each, list) else [each]) if token is not None
    )


def _check_room(model: Model, dtype: torch.dtype, device: Device) -> None:
    """Refuse a network that does not fit in memory as a whole.

    Raises:
        CalibrationError: It does not fit.
    """
    weights = sum(parameter.numel() for parameter in model.network.parameters()) * dtype.itemsize
    if (free := device.free()) is not None and weights > free:
        raise CalibrationError(
            f"--calibration self holds the whole network in memory, {size_text(weights)} on {device}, where {size_text(free)} are "
            f"free. Pass a .txt or .jsonl file, with which one block at a time is in memory."
        )


@contextmanager
def _whole(model: Model, device: Device, dtype: torch.dtype) -> Iterator[PreTrainedModel]:
    """The original network with all its weights in memory."""
    with ExitStack() as blocks:
        for block in model.blocks:
            blocks.enter_context(block.on(device.place, dtype, original=False))
        modules = [block.quantized for block in model.blocks if block.quantized is not None]
        with model.around(modules, device.place, dtype, head=True) as network:
            yield network
