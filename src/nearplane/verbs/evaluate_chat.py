"""evaluate_chat(): how far a model is from its original on the answers that the original writes, turn by turn.

Chat models write other texts than books have. Here the original answers every turn of a conversation, always with the most
likely token, and both networks read prompt and answer. Networks are loaded as `evaluate` loads them: decoded, in float32.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nearplane.errors import CalibrationError, ModelError, RecipeError, first_line
from nearplane.evaluation.predictions import Outline
from nearplane.evaluation.statistics import Estimate, Statistics, TokenScores, score_tokens, summarize
from nearplane.evaluation.tool_calls import calls
from nearplane.loading.loaded_network import only_token_settings
from nearplane.models.kinds import continues_text
from nearplane.models.pretrained import as_model_error, tokenizer_of
from nearplane.models.two_tokenizers import check_same_tokens
from nearplane.system.arguments import takes
from nearplane.system.device import Device
from nearplane.system.matmul_library import exact_float32
from nearplane.system.paths import refuse_tokenizer
from nearplane.system.progress import Tracked, in_steps
from nearplane.system.sizes import counted, size_text
from nearplane.system.time_limit import time_limit
from nearplane.verbs.chat_request import ChatRequest
from nearplane.verbs.evaluate import load_dense
from nearplane.verbs.generate import has_chat_template
from nearplane.verbs.next_choices import end_tokens

EXPECTED = 'expected lines such as {"messages": [{"role": "user", "content": "Hello"}]}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Figures of all answers at one place in their conversations.

    Args:
        number: 1 for the first answer of a conversation.
        answers, tokens: Number of answers, and of their tokens.
        kl: Mean KL(original || model) in nats per token.
        same_top: Share of tokens for which both networks have the same most likely token.
    """

    number: int
    answers: int
    tokens: int
    kl: Estimate
    same_top: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatEvaluation:
    """Result of `evaluate_chat`.

    Args:
        chat: Name of the file.
        conversations, answers, tokens: Numbers of conversations, of answers of the original, and of their tokens.
        statistics: Figures of all tokens; positions count tokens of the answer, so that 1 is the first one. Intervals are from
            a bootstrap over conversations.
        turns: The same answer by answer.
        with_tools: Number of answers in conversations with tools.
        calls: Number of these in which the original calls one, in JSON that parses; see `tool_calls.py`.
        calls_kept: Number of these in whose place the model, by itself, writes a call that parses, too.
        calls_equal: Number of these that are the same calls.
    """

    chat: str
    conversations: int
    answers: int
    tokens: int
    statistics: Statistics
    turns: tuple[Turn, ...]
    with_tools: int = 0
    calls: int = 0
    calls_kept: int = 0
    calls_equal: int = 0

    def __str__(self) -> str:
        """Return the figures as lines."""
        it = self.statistics
        said = (
            counted(self.conversations, "conversation"),
            counted(self.answers, "answer"),
            counted(self.tokens, "token"),
        )
        lines = ["{}: {}, {} of the original, {}".format(self.chat, *said)]
        assert it.kl is not None
        assert it.same_top is not None
        lines.append(
            f"KL(original || model)  {_between(it.kl, '.5f')} nats per token; 99.9 % of single tokens {it.kl_999:.5f}"
        )
        lines.append(f"same next token        {_between(it.same_top, '.2f', 100)} %")
        lines += [
            f"  turn {turn.number}: KL {turn.kl.value:.5f}, same next token {100 * turn.same_top.value:.2f} % "
            f"({counted(turn.answers, 'answer')}, {counted(turn.tokens, 'token')})"
            for turn in self.turns
        ]
        by = (
            f"{each.first}{'' if each.first == each.last else f'-{each.last}'}: {each.kl.value:.5f}"
            for each in it.by_position
        )
        lines.append(f"KL by token of the answer: {', '.join(by)}")
        if self.with_tools:
            kept = f"{self.calls_kept:,} are calls that parse in the model's own answer, {self.calls_equal:,} the same"
            calling = (
                f"calls of tools: {self.calls:,} of {counted(self.with_tools, 'answer')} of the original; of these"
            )
            lines.append(f"{calling} {kept}")
        return "\n".join(lines)


def _between(it: Estimate, form: str, factor: int = 1) -> str:
    if it.low is None or it.high is None:
        return f"{factor * it.value:{form}} (no interval: few conversations)"
    return f"{factor * it.value:{form}} (95 %: {factor * it.low:{form}} to {factor * it.high:{form}})"


class _Answer(NamedTuple):
    """An answer of the original: its tokens, those of the prompt, and whether the conversation has tools."""

    prompt: list[int]
    tokens: list[int]
    tools: bool


@takes(ChatRequest, tokenizer=PreTrainedTokenizerBase | None)
def evaluate_chat(request: ChatRequest) -> ChatEvaluation:
    """Measure a model on the answers that its original writes in conversations.

    Raises:
        CalibrationError: The file has no conversations, or the chat template does not take them.
        ModelError, FormatError: A model cannot be read, writes no text or has no chat template.
        RecipeError: Both networks do not fit in memory.
    """
    return prepare_chat(request).measured()


def prepare_chat(request: ChatRequest) -> Chat:
    """Check models and conversations, before any weight is read; see `evaluate_chat`."""
    request.check()
    model, against, trust = request.model, request.against, request.trust_remote_code
    refuse_tokenizer(model, request.tokenizer)
    rows = _rows(Path(request.chat).expanduser())[: request.samples]
    outlines = [Outline.of(each, trust_remote_code=trust) for each in (model, against)]
    for outline in outlines:
        if not continues_text(outline.network):
            raise ModelError(
                f"{outline.name} contains a {type(outline.network).__name__}, which does not continue text."
            )
    device = Device.named(request.device)
    needed = sum(outline.size for outline in outlines if outline.folder is not None)
    if (free := device.free()) is not None and needed > free:
        raise RecipeError(
            f"--chat holds both networks in float32 in memory, {size_text(needed)} on {device}, where {size_text(free)} are free. "
            f"Use --text, for which one block is in memory at a time."
        )
    folders = {outline.name: outline.folder for outline in outlines if outline.folder is not None}
    check_same_tokens(folders, trust_remote_code=trust)
    tokenizer, folder = request.tokenizer, outlines[1].folder or outlines[0].folder
    if tokenizer is None and folder is not None:
        tokenizer = tokenizer_of(folder, trust_remote_code=trust)
    if tokenizer is None:
        raise RecipeError("A model object has no tokenizer: pass tokenizer=.")
    if not has_chat_template(tokenizer):
        raise ModelError(f"{outlines[1].name} has no chat template, by which conversations become prompts. Use --text.")
    positions = min(outline.positions or sys.maxsize for outline in outlines)
    return Chat(request=request, rows=rows, tokenizer=tokenizer, positions=positions, device=device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """Conversations that are checked, and the models that are to be measured on them.

    Args:
        request: What is asked.
        rows: The conversations.
        tokenizer: The tokenizer of the original.
        positions: Largest number of tokens that both networks take.
        device: Device of the computation.
    """

    request: ChatRequest
    rows: Sequence[dict[str, Any]]
    tokenizer: PreTrainedTokenizerBase
    positions: int
    device: Device

    def measured(self) -> ChatEvaluation:
        """Read the models, let the original answer, and compare both networks on each answer."""
        request = self.request
        networks = [
            load_dense(each, self.device.place, trust_remote_code=request.trust_remote_code)[0]
            if isinstance(each, str | Path)
            else each
            for each in (request.model, request.against)
        ]
        training = [network.training for network in networks]
        try:
            return _Chatting(self, *(network.eval() for network in networks)).measured(self.rows)
        finally:
            for network, before in zip(networks, training, strict=True):
                network.train(before)


@dataclass(frozen=True, slots=True)
class _Chatting:
    """Both networks in conversations."""

    chat: Chat
    network: PreTrainedModel
    original: PreTrainedModel

    @property
    def request(self) -> ChatRequest:
        """What is asked."""
        return self.chat.request

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the original."""
        return self.chat.tokenizer

    def measured(self, rows: Sequence[dict[str, Any]]) -> ChatEvaluation:
        """Let the original answer, and compare both networks on each answer."""
        parts: list[TokenScores] = []
        of_turn: dict[int, list[TokenScores]] = {}
        totals = {"with_tools": 0, "calls": 0, "calls_kept": 0, "calls_equal": 0}
        total = sum(map(_answers, rows))
        with (
            as_model_error("The models do not run on these conversations"),
            exact_float32(),
            torch.inference_mode(),
            in_steps(self.request.progress, Tracked(range(total), "chatting", total)) as done,
        ):
            for number, row in enumerate(rows):
                for turn, answer in enumerate(self._answered(row, number), 1):
                    scores = self._scores(answer, number)
                    parts.append(scores)
                    of_turn.setdefault(turn, []).append(scores)
                    totals["with_tools"] += answer.tools
                    if answer.tools and (wanted := calls(self._text(answer.tokens))):
                        own = calls(self._text(self._written(self.network, answer.prompt)))
                        totals["calls"] += 1
                        totals["calls_kept"] += bool(own)
                        totals["calls_equal"] += own == wanted
                    done(1)
        turns = []
        for turn, some in sorted(of_turn.items()):
            figures, tokens = summarize(TokenScores.joined(some)), sum(len(each.nll) for each in some)
            assert figures.kl is not None
            assert figures.same_top is not None
            turns.append(Turn(number=turn, answers=len(some), tokens=tokens, kl=figures.kl, same_top=figures.same_top))
        scores = TokenScores.joined(parts)
        return ChatEvaluation(
            chat=str(self.request.chat),
            conversations=len(rows),
            answers=total,
            tokens=len(scores.nll),
            statistics=summarize(scores),
            turns=tuple(turns),
            **totals,
        )

    def _answered(self, row: dict[str, Any], number: int) -> Iterator[_Answer]:
        """Yield the answers of the original in one conversation, which later prompts contain."""
        history: list[dict[str, Any]] = []
        beside = {"tools": row["tools"]} if row.get("tools") else {}
        for message in [*row["messages"], None]:
            if message is not None and message.get("role") != "assistant":
                history.append(message)
                continue
            if not history or history[-1].get("role") == "assistant":
                continue
            try:
                with time_limit():
                    text = self.tokenizer.apply_chat_template(
                        history, tokenize=False, add_generation_prompt=True, **beside
                    )
            except Exception as error:  # templates are programs, which raise anything
                raise CalibrationError(
                    f"{self.request.chat}, conversation {number + 1}: the chat template cannot be applied ({first_line(error)})."
                ) from error
            prompt = list(self.tokenizer(str(text), add_special_tokens=False)["input_ids"])
            if len(prompt) >= self.chat.positions:
                raise CalibrationError(
                    f"{self.request.chat}, conversation {number + 1} has {len(prompt):,} tokens before an answer; the models take "
                    f"{self.chat.positions:,}. Leave it out, or shorten it."
                )
            tokens = self._written(self.original, prompt)
            yield _Answer(prompt, tokens, bool(beside))
            history.append({"role": "assistant", "content": self._text(tokens)})

    def _written(self, network: PreTrainedModel, prompt: Sequence[int]) -> list[int]:
        """Return the tokens that a network writes behind a prompt, always the most likely one."""
        ids = torch.tensor([prompt], device=network.device)
        with only_token_settings(network):
            generate: Any = network.generate
            made = generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=min(self.request.answer_tokens, self.chat.positions - len(prompt)),
                do_sample=False,
                use_cache=True,
            )
        return [int(token) for token in made[0, len(prompt) :]]

    def _text(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer, without the token that ends it; markup of calls may be special tokens."""
        ends = end_tokens(self.original, self.tokenizer)
        kept = tokens[:-1] if tokens and tokens[-1] in ends else tokens
        return str(self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _scores(self, answer: _Answer, conversation: int) -> TokenScores:
        """Return the figures of every token of an answer."""
        logits = [self._logits(network, answer) for network in (self.network, self.original)]
        found, expected = (each.shape[-1] for each in logits)
        if found != expected:
            raise ModelError(f"The model predicts {found:,} tokens, but its original {expected:,}. Pass the original.")
        if not all(bool(each.isfinite().any(-1).all()) and not bool(each.isnan().any()) for each in logits):
            raise ModelError("The model or its original predicts NaN or Inf. Check the files.")
        count = len(answer.tokens)
        window = torch.full((count,), conversation)
        return score_tokens(
            logits, torch.tensor(answer.tokens).to(logits[0].device), window=window, position=torch.arange(count) + 1
        )[0]

    def _logits(self, network: PreTrainedModel, answer: _Answer) -> Tensor:
        """Return (tokens, vocabulary) logits from which each token of an answer is predicted."""
        ids, count = torch.tensor([answer.prompt + answer.tokens[:-1]], device=network.device), len(answer.tokens)
        fewer = {"logits_to_keep": count} if "logits_to_keep" in signature(network.forward).parameters else {}
        logits: Tensor = network(input_ids=ids, **fewer).logits[0, -count:]
        return logits


def _answers(row: dict[str, Any]) -> int:
    """Return how often the assistant answers in a conversation: behind messages of others."""
    roles = [message.get("role") for message in row["messages"]] + ["assistant"]
    return sum(role == "assistant" and before != "assistant" for before, role in pairwise(roles))


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return the conversations of a file.

    Raises:
        CalibrationError: The file cannot be read, or a line is no conversation.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"{path} cannot be read ({first_line(error)}); {EXPECTED}.") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CalibrationError(f"{path}, line {number} is no JSON ({first_line(error)}); {EXPECTED}.") from error
        messages = row.get("messages") if isinstance(row, dict) else None
        if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
            raise CalibrationError(f"{path}, line {number} has no list of messages; {EXPECTED}.")
        if not _answers(row):
            raise CalibrationError(f"{path}, line {number} has no message to answer; {EXPECTED}.")
        rows.append(row)
    if not rows:
        raise CalibrationError(f"{path} is empty; {EXPECTED}.")
    return rows
