"""generate(): continues a text with a model, piece by piece, for a look at the quality of a quantized model.

A GGUF runs in llama.cpp if llama-cpp-python is installed; all else, and a GGUF without it, in transformers.
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
from nearplane.formats.stored import quantization_of, reader_of
from nearplane.loading.from_pretrained import load
from nearplane.loading.source_folder import source_folder
from nearplane.models.kinds import InputKind, has_head, input_kind
from nearplane.models.model import positions_of
from nearplane.models.pretrained import as_model_error, tokenizer_of
from nearplane.recipe.file_formats import FILE_FORMATS, FileFormat
from nearplane.system.arguments import checked
from nearplane.system.device import Device
from nearplane.system.file_hashes import check_hashes
from nearplane.verbs.early_checks import check_generate

Say = Callable[[str], object]
LLAMA = "llama_cpp"  # the module of llama-cpp-python
UNFINISHED = "\ufffd"  # incomplete bytes of a letter decode to this
MAX_SPECIAL_TOKENS = 16  # that a tokenizer puts before a prompt, whose own tokens are at most its bytes


@checked()
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
    """Continue a text with a model.

    Args:
        source: Folder that `quantize` wrote in any format, a .gguf file, or folder or hub id that transformers loads.
        prompt: Text to continue; the tokenizer adds its special tokens.
        tokens: Largest number of new tokens; fewer if the model ends or has no positions left.
        temperature, seed: Sampling temperature and random seed; temperature 0 takes the most likely token each time.
        say: Callback for every new piece of text. It gets an empty text first, once all checks have passed.
        device: Device to compute on; llama.cpp chooses its own.
        trust_remote_code: Whether to run model code that comes with the checkpoint.

    Returns:
        The new text, without the prompt.

    Raises:
        RecipeError: A number is out of range, or the prompt is empty or too long.
        ModelError, FormatError: The model or its tokenizer cannot be loaded.
    """
    check_generate(tokens, temperature)
    folder = source_folder(source, trust_remote_code=trust_remote_code)
    if runs_in_llama_cpp(folder):
        check_hashes(folder, weights=False)
        reader = reader_of(folder)
        for name in reader.names():
            reader.read([name])  # compares hashes, which llama.cpp does not
        return _by_llama_cpp(folder, prompt, tokens, temperature, seed, say)
    place = Device.named(device, in_float64=False).place
    model = load(folder, device=place, trust_remote_code=trust_remote_code)
    if not has_head(model) or input_kind(model) is not InputKind.TEXT:
        why = "an encoder, which predicts no tokens" if not has_head(model) else f"which continues {input_kind(model)}"
        raise RecipeError(f"{folder} contains a {type(model).__name__}, {why}. Pass a language model.")
    tokenizer = tokenizer_of(folder, trust_remote_code=trust_remote_code)
    with as_model_error(f"{folder} does not generate text"):
        ids = torch.tensor([tokenizer(prompt)["input_ids"]], dtype=torch.int64, device=place)
        tokens = _room(ids.shape[1], positions_of(model.config), tokens)
        pieces = _Pieces(tokenizer, say)
        sampling: dict[str, Any] = {"do_sample": temperature > 0, "num_beams": 1, "repetition_penalty": 1.0}
        if temperature:  # the model's generation_config.json has no effect, as in llama.cpp
            sampling |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        with torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(seed)
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, streamer=pieces, **sampling)
    return pieces.text


def runs_in_llama_cpp(folder: Path) -> bool:
    """Return whether a folder holds a GGUF and llama-cpp-python is installed."""
    installed = sys.modules.get(LLAMA) is not None or (LLAMA not in sys.modules and find_spec(LLAMA) is not None)
    method = (quantization_of(folder) or {}).get("quant_method")
    return isinstance(method, str) and FILE_FORMATS.get(method, FileFormat()).for_llama_cpp and installed


class _Pieces(BaseStreamer):  # type: ignore[misc]
    """Streamer of the text behind a prompt; both are decoded together, as a space between them is part of a token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, say: Say) -> None:
        self.text, self._say, self._tokenizer = "", say, tokenizer
        self._ids: list[int] = []
        self._prompt = 0  # letters of the prompt

    def put(self, value: Tensor) -> None:
        """Receive the prompt at first, then one token after the other."""
        first = not self._ids
        self._ids += value.reshape(-1).tolist()
        if first:
            self._prompt = len(self._decoded())
            self._say("")
        elif not (text := self._decoded()).endswith(UNFINISHED):
            self._tell(text)

    def end(self) -> None:
        """Pass on the remaining text."""
        self._tell(self._decoded())

    def _decoded(self) -> str:
        return str(self._tokenizer.decode(self._ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

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


def _by_llama_cpp(folder: Path, prompt: str, tokens: int, temperature: float, seed: int, say: Say) -> str:
    """Continue the prompt with the GGUF in llama.cpp."""
    import llama_cpp

    with as_model_error(f"llama.cpp does not run {folder / FILE}"):
        context = len(prompt.encode()) + MAX_SPECIAL_TOKENS + tokens  # llama.cpp allocates memory for all of it at once
        model = llama_cpp.Llama(str(folder / FILE), n_ctx=context, seed=seed, verbose=False)
        ids = model.tokenize(prompt.encode(), add_bos=True)
        positions = model.metadata.get(f"{model.metadata.get('general.architecture')}.context_length")
        tokens = _room(len(ids), None if positions is None else int(positions), tokens)
        say("")
        text, sampling = "", dict(top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0, seed=seed, stream=True)
        try:
            for part in model.create_completion(ids, max_tokens=tokens, temperature=temperature, **sampling):
                piece = part["choices"][0]["text"]
                if piece:
                    text += piece
                    say(piece)
        finally:
            model.close()
    return text
