"""generate(): a model goes on with a text, piece by piece; to see with one's own eyes what quantization left of it.

Any folder of ours, or of transformers, runs through transformers; a GGUF through llama.cpp where llama-cpp-python is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from nearplane.errors import RecipeError
from nearplane.formats.gguf.gguf_header import FILE
from nearplane.formats.stored import quantization_of
from nearplane.loading.from_pretrained import load
from nearplane.models.kinds import Taken, has_head, taken_by
from nearplane.models.model import positions_of
from nearplane.models.pretrained import find_folder, in_a_sentence, tokenizer_of
from nearplane.recipe.scheme import FILE_FORMATS, FileFormat
from nearplane.system.device import Device

Say = Callable[[str], object]
LLAMA = "llama_cpp"  # module of llama-cpp-python
UNFINISHED = "\ufffd"  # what bytes decode to that are the beginning of a letter
AROUND = 16  # tokens more than a prompt has bytes, at most: what a tokenizer puts before it


def generate(
    source: str | Path,
    prompt: str,
    *,
    tokens: int = 200,
    temperature: float = 0.0,
    seed: int = 0,
    say: Say = lambda piece: None,
    device: str = "auto",
    trust_remote_code: bool = False,
) -> str:
    """Let a model go on with a text.

    Args:
        source: a folder that `quantize` wrote in any format, or any folder or hub id that transformers loads.
        prompt: to go on from; special tokens are put before it as the tokenizer does.
        tokens: to add at most; fewer where the model ends or has no positions left.
        temperature, seed: of the draws; temperature 0 takes the likeliest token each time.
        say: is called with every piece of text when it is there.
        device: where to compute; llama.cpp chooses itself.
        trust_remote_code: run model code that comes with the checkpoint.

    Returns:
        What was added.

    Raises:
        RecipeError: a number is out of range, or the prompt is empty or too long.
        ModelError, FormatError: the model or its tokenizer cannot be loaded.
    """
    if tokens < 1 or not 0 <= temperature < 100:
        raise RecipeError(
            f"tokens is {tokens}, temperature {temperature}; expected at least 1, and a number from 0 to 100."
        )
    folder = find_folder(str(source), trust_remote_code=trust_remote_code)
    if runs_in_llama_cpp(folder):
        return _by_llama_cpp(folder, prompt, tokens, temperature, seed, say)
    place = Device.named(device).place
    model = load(folder, device=place, trust_remote_code=trust_remote_code)
    if not has_head(model) or taken_by(model) is not Taken.TEXT:
        why = "an encoder, which predicts no tokens" if not has_head(model) else f"which goes on from {taken_by(model)}"
        raise RecipeError(f"{folder} holds a {type(model).__name__}, {why}. Pass a language model.")
    tokenizer = tokenizer_of(folder, trust_remote_code=trust_remote_code)
    with in_a_sentence(f"{folder} does not generate text"):
        ids = torch.tensor([tokenizer(prompt)["input_ids"]], dtype=torch.int64, device=place)
        tokens = _room(ids.shape[1], positions_of(model.config), tokens)
        pieces = _Pieces(tokenizer, say)
        drawn: dict[str, Any] = {"do_sample": temperature > 0, "num_beams": 1, "repetition_penalty": 1.0}
        if temperature:  # what the model's generation_config.json says counts neither here nor in llama.cpp
            drawn |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        with torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(seed)
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, streamer=pieces, **drawn)
    return pieces.text


def runs_in_llama_cpp(folder: Path) -> bool:
    """Return whether a folder is a GGUF and llama-cpp-python is there to run it."""
    known = sys.modules.get(LLAMA) is not None or (LLAMA not in sys.modules and find_spec(LLAMA) is not None)
    method = (quantization_of(folder) or {}).get("quant_method")
    return isinstance(method, str) and FILE_FORMATS.get(method, FileFormat()).for_llama_cpp and known


class _Pieces(BaseStreamer):  # type: ignore[misc]
    """Text as it comes, without the prompt; decoded together with it, as a space between the two belongs to the first token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, say: Say) -> None:
        self.text, self._say, self._tokenizer = "", say, tokenizer
        self._ids: list[int] = []
        self._prompt = 0  # letters of it

    def put(self, value: Tensor) -> None:
        """Take the prompt, then token after token."""
        first = not self._ids
        self._ids += value.reshape(-1).tolist()
        if first:
            self._prompt = len(self._decoded())
        elif not (text := self._decoded()).endswith(UNFINISHED):
            self._tell(text)

    def end(self) -> None:
        """Take what is left."""
        self._tell(self._decoded())

    def _decoded(self) -> str:
        return str(self._tokenizer.decode(self._ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _tell(self, text: str) -> None:
        if piece := text[self._prompt + len(self.text) :]:
            self.text += piece
            self._say(piece)


def _room(prompt: int, positions: int | None, tokens: int) -> int:
    """Return how many tokens there is room for behind the prompt.

    Raises:
        RecipeError: the prompt has no tokens, or takes all positions.
    """
    if prompt == 0:
        raise RecipeError("The prompt has no tokens: give the model some text to go on from.")
    if positions is not None and prompt >= positions:
        raise RecipeError(
            f"The prompt has {prompt} tokens, the model {positions} positions. Give it less to go on from."
        )
    return tokens if positions is None else min(tokens, positions - prompt)


def _by_llama_cpp(folder: Path, prompt: str, tokens: int, temperature: float, seed: int, say: Say) -> str:
    """Run the file itself."""
    import llama_cpp

    with in_a_sentence(f"llama.cpp does not run {folder / FILE}"):
        most = len(prompt.encode()) + AROUND + tokens  # of all that it was built for, memory would be taken at once
        model = llama_cpp.Llama(str(folder / FILE), n_ctx=most, seed=seed, verbose=False)
        ids = model.tokenize(prompt.encode(), add_bos=True)
        built = model.metadata.get(f"{model.metadata.get('general.architecture')}.context_length")
        tokens = _room(len(ids), None if built is None else int(built), tokens)
        text, plain = "", dict(top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0, seed=seed, stream=True)
        try:
            for part in model.create_completion(ids, max_tokens=tokens, temperature=temperature, **plain):
                piece = part["choices"][0]["text"]
                text += piece
                say(piece)
        finally:
            model.close()
    return text
