"""generate(): continues a text with a model, or lets it answer, piece by piece, for a look at its quality.

A GGUF runs in llama.cpp if llama-cpp-python is installed; all else, and a GGUF without it, in transformers.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from nearplane.errors import RecipeError, of_caller
from nearplane.formats.gguf.gguf_header import FILE, read_header
from nearplane.formats.stored import quantization_of, reader_of
from nearplane.loading.from_pretrained import load
from nearplane.loading.loaded_network import only_token_settings
from nearplane.loading.source_folder import source_folder
from nearplane.models.chat_prompts import say_other_prompts
from nearplane.models.kinds import InputKind, has_head, has_two_stacks, input_kind
from nearplane.models.model import Model, positions_of
from nearplane.models.pretrained import as_model_error, tokenizer_of
from nearplane.models.two_tokenizers import other_tokens
from nearplane.recipe.file_formats import FILE_FORMATS, FileFormat
from nearplane.system.arguments import takes
from nearplane.system.device import Device
from nearplane.system.recorded_hashes import check_hashes
from nearplane.system.time_limit import time_limit
from nearplane.verbs.generate_request import GenerateRequest, Say

LLAMA = "llama_cpp"  # the module of llama-cpp-python
UNFINISHED = "\ufffd"  # incomplete bytes of a letter decode to this
MAX_SPECIAL_TOKENS = 16  # that a tokenizer puts before a prompt, whose own tokens are at most its bytes
ANSWERS = "\n\n"  # between a prompt and a text that answers it
log = logging.getLogger(__name__)


class Continuation(str):
    """Text that a model generated, without the prompt.

    Attributes:
        first_token_seconds: Time to the first new token; loading is not part of it.
        tokens_per_second: New tokens per second after the first one; None if it was the only one.
        weight_bytes: Memory that the weights take, also packed ones.
        token_ids: Ids of its tokens; none of those that llama.cpp wrote.
    """

    first_token_seconds: float
    tokens_per_second: float | None
    weight_bytes: int
    token_ids: tuple[int, ...]

    @classmethod
    def timed(
        cls, text: str, times: Sequence[float], *, tokens: int, weight_bytes: int, token_ids: Sequence[int] = ()
    ) -> Self:
        """Return a text with its speed, from the times of its begin, its first token, ..., and its end in seconds."""
        made, (begin, first, *_) = cls(text), times
        made.first_token_seconds = first - begin
        made.tokens_per_second = (tokens - 1) / max(times[-1] - first, 1e-9) if tokens > 1 else None
        made.weight_bytes, made.token_ids = weight_bytes, tuple(token_ids)
        return made


@takes(GenerateRequest)
def generate(request: GenerateRequest) -> Continuation:
    """Continue a text with a model, or let a chat model answer it.

    Returns:
        The new text, without the prompt.

    Raises:
        RecipeError: A number is out of range, or the prompt is empty or too long.
        ModelError, FormatError: The model, its tokenizer or its chat template cannot be used.
    """
    request.check()
    trust_remote_code = request.trust_remote_code
    folder = source_folder(request.source, trust_remote_code=trust_remote_code)
    if (in_llama_cpp := runs_in_llama_cpp(folder)) and request.head is not None:
        raise RecipeError(f"{folder} runs in llama.cpp, which reads the head of the file. Leave --head out.")
    if in_llama_cpp:
        check_hashes(folder, weights=False)
        reader = reader_of(folder)
        for name in reader.names():
            reader.read([name])  # compares hashes, which llama.cpp does not
    else:
        place = Device.named(request.device, in_float64=False).place
        model = load(folder, device=place, head=request.head, trust_remote_code=trust_remote_code)
        _refuse_other_kinds(model, folder)
    tokenizer = tokenizer_of(folder, trust_remote_code=trust_remote_code)
    chat = not request.ignore_chat_template and has_chat_template(tokenizer)
    text = _chat(folder, tokenizer, request.prompt) if chat else request.prompt
    ask = _Prompt(replace(request, say=of_caller()(request.say)), text, chat)
    if in_llama_cpp:
        return _by_llama_cpp(folder, ask)
    with as_model_error(f"{folder} does not generate text"):
        return _by_transformers(model, tokenizer, ask)


def say_other_tokens(first: str, second: str, prompt: str, *, trust_remote_code: bool = False) -> None:
    """Log a warning if two models that are to continue a prompt cut text into other tokens or render other conversations.

    Raises:
        ModelError: A model or its tokenizer cannot be found or read.
    """
    folders = {name: source_folder(name, trust_remote_code=trust_remote_code) for name in (first, second)}
    if difference := other_tokens(folders, [prompt], trust_remote_code=trust_remote_code):
        log.warning("%s Each reads the prompt in its own tokens.", difference)
    say_other_prompts(folders, trust_remote_code=trust_remote_code)


def has_chat_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether prompts are messages of a user to a tokenizer."""
    return getattr(tokenizer, "chat_template", None) is not None


def continued(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, tokens: int) -> Continuation:
    """Continue a text with a network in memory as `generate` does with its folder, at temperature 0.

    Raises:
        RecipeError: The prompt is empty or too long.
        ModelError: The network or the chat template cannot be used.
    """
    name = Path(str(model.config.name_or_path))
    with as_model_error(f"{name} does not generate text"):
        return _by_transformers(model, tokenizer, _prompt(name, tokenizer, prompt, tokens))


def prompt_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Return the tokens that `continued` passes to a network.

    Raises:
        ModelError: The chat template cannot be used.
    """
    return _encoded(tokenizer, _prompt(Path(str(model.config.name_or_path)), tokenizer, prompt, 1))


def _prompt(name: Path, tokenizer: PreTrainedTokenizerBase, prompt: str, tokens: int) -> _Prompt:
    chat = has_chat_template(tokenizer)
    text = _chat(name, tokenizer, prompt) if chat else prompt
    return _Prompt(GenerateRequest(name, prompt, tokens=tokens), text, chat)


def _encoded(tokenizer: PreTrainedTokenizerBase, ask: _Prompt) -> list[int]:
    return list(tokenizer(ask.text, add_special_tokens=not ask.chat)["input_ids"])


def check_prompt(model: Model, prompt: str) -> None:
    """Refuse a prompt that a model cannot continue, before its weights are read.

    Raises:
        RecipeError: The model writes no text behind text, or the prompt is empty or too long.
    """
    _refuse_other_kinds(model.network, model.folder)
    tokenizer = model.tokenizer()
    text = _chat(model.folder, tokenizer, prompt) if has_chat_template(tokenizer) else prompt
    count = len(tokenizer(text, add_special_tokens=text == prompt)["input_ids"])
    _room(count, model.positions, 1)


def runs_in_llama_cpp(folder: Path) -> bool:
    """Return whether a folder holds a GGUF and llama-cpp-python is installed."""
    installed = sys.modules.get(LLAMA) is not None or (LLAMA not in sys.modules and find_spec(LLAMA) is not None)
    method = (quantization_of(folder) or {}).get("quant_method")
    return isinstance(method, str) and FILE_FORMATS.get(method, FileFormat()).one_file and installed


@dataclass(frozen=True, slots=True)
class _Prompt:
    """What a model is asked for: the arguments of `generate`, the text that it reads, and whether that is a chat."""

    request: GenerateRequest
    text: str
    chat: bool


def _refuse_other_kinds(model: PreTrainedModel, folder: Path) -> None:
    """Refuse a model that does not write text behind text."""
    if not has_head(model) or input_kind(model) is not InputKind.TEXT:
        why = "an encoder, which predicts no tokens" if not has_head(model) else f"which continues {input_kind(model)}"
        raise RecipeError(f"{folder} contains a {type(model).__name__}, {why}. Pass a language model.")


def _chat(folder: Path, tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
    """Return the prompt as a user's message in the chat template of a tokenizer, up to where the answer begins."""
    with as_model_error(f"{folder} has a chat template that cannot be applied to a prompt; try --ignore-chat-template"):
        messages = [{"role": "user", "content": prompt}]
        with time_limit():
            return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def _by_transformers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ask: _Prompt) -> Continuation:
    """Let a loaded model go on; keys and values of earlier tokens are kept even if its files say `use_cache: false`."""
    request = ask.request
    ids = torch.tensor([_encoded(tokenizer, ask)], dtype=torch.int64, device=model.device)  # (1, tokens)
    two_stacks, positions = has_two_stacks(model), positions_of(model.config)
    tokens = _room(ids.shape[1], positions, request.tokens)
    if two_stacks:  # the decoder has positions of its own
        tokens = min(request.tokens, positions or request.tokens)
    pieces = _Pieces(tokenizer, request.say, ANSWERS if ask.chat or two_stacks else "")
    sampling: dict[str, Any] = {"do_sample": request.temperature > 0}
    if request.temperature:
        sampling |= {"temperature": request.temperature, "top_k": 0, "top_p": 1.0}
    with torch.random.fork_rng(), torch.inference_mode(), only_token_settings(model):
        torch.manual_seed(request.seed)
        mask = torch.ones_like(ids)
        model.generate(ids, attention_mask=mask, max_new_tokens=tokens, streamer=pieces, use_cache=True, **sampling)
    storages = [x.untyped_storage() for x in chain(model.parameters(), model.buffers())]
    size = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    count = len(pieces.times) - 1
    return Continuation.timed(pieces.text, pieces.times, tokens=count, weight_bytes=size, token_ids=pieces.ids[-count:])


class _Pieces(BaseStreamer):  # type: ignore[misc]
    """Streamer of the text behind a prompt; both are decoded together, as a space between them is part of a token.

    Attributes:
        text: The text so far.
        times: When the prompt and every token came, in seconds.
        ids: All tokens, those of the prompt first.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, say: Say, separator: str) -> None:
        self.text, self._say, self._tokenizer, self._separator = "", say, tokenizer, separator
        self.times: list[float] = []
        self.ids: list[int] = []
        self._prompt = 0  # letters of the prompt

    def put(self, value: Tensor) -> None:
        """Receive the prompt at first, then one token after the other."""
        self.times.append(perf_counter())
        first = not self.ids
        self.ids += value.reshape(-1).tolist()
        if first:
            self._prompt = len(self._decoded())
            self._say(self._separator)
        elif not (text := self._decoded()).endswith(UNFINISHED):
            self._tell(text)

    def end(self) -> None:
        """Pass on the remaining text."""
        self._tell(self._decoded())

    def _decoded(self) -> str:
        return str(self._tokenizer.decode(self.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _tell(self, text: str) -> None:
        if piece := text[self._prompt + len(self.text) :]:
            self.text += piece
            self._say(piece)


def _room(prompt: int, positions: int | None, tokens: int) -> int:
    """Return the number of tokens that fit behind the prompt, at most `tokens`.

    Raises:
        RecipeError: The prompt has no tokens, or fills all positions.
    """
    if prompt == 0:
        raise RecipeError("The prompt has no tokens. Pass a text to continue.")
    if positions is not None and prompt >= positions:
        raise RecipeError(
            f"The prompt has {prompt} tokens, but the model's maximum length is {positions}. Pass a shorter prompt."
        )
    return tokens if positions is None else min(tokens, positions - prompt)


def _by_llama_cpp(folder: Path, ask: _Prompt) -> Continuation:
    """Let the GGUF go on in llama.cpp."""
    import llama_cpp

    file, read, request = folder / FILE, ask.text.encode(), ask.request
    with as_model_error(f"llama.cpp does not run {file}"):
        context = len(read) + MAX_SPECIAL_TOKENS + request.tokens  # llama.cpp allocates memory for all of it at once
        model = llama_cpp.Llama(str(file), n_ctx=context, seed=request.seed, verbose=False)
        ids = model.tokenize(read, add_bos=not ask.chat, special=ask.chat)  # a template writes special tokens as text
        positions = model.metadata.get(f"{model.metadata.get('general.architecture')}.context_length")
        tokens = _room(len(ids), None if positions is None else int(positions), request.tokens)
        request.say(ANSWERS if ask.chat else "")
        sampling = dict(top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0, seed=request.seed, stream=True)
        text, times = "", [perf_counter()]
        try:
            for part in model.create_completion(ids, max_tokens=tokens, temperature=request.temperature, **sampling):
                times.append(perf_counter())
                if piece := part["choices"][0]["text"]:
                    text += piece
                    request.say(piece)
            times.append(perf_counter())
            made = model.n_tokens - len(ids) + 1  # the last token is sampled, but not read
        finally:
            model.close()
    size = sum(info.size for info in read_header(file).tensors)
    return Continuation.timed(text, times, tokens=made, weight_bytes=size)
