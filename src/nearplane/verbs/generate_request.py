"""What is asked of `generate`, and the checks of it that need no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from nearplane.errors import RecipeError
from nearplane.system.arguments import MAX_SEED, whole

Say = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Arguments of `generate`.

    Args:
        source: Folder that nearplane wrote, in any format, a .gguf file, or folder or hub id that transformers loads.
        prompt: Message to answer, if the tokenizer has a chat template; else a text to continue, to which the tokenizer adds its
            special tokens. An encoder with a decoder reads it in the encoder.
        tokens: Largest number of new tokens; fewer if the model ends or has no positions left.
        temperature: Sampling temperature; 0 takes the most likely token each time.
        seed: Random seed of the sampling.
        ignore_chat_template: Continue the prompt as it is, for base models whose tokenizer has a chat template.
        head: int8 rounds the layer that predicts tokens to 8 bits on the CPU, which makes large vocabularies faster.
        say: Function that gets every new piece of text. Once all checks have passed, it first gets what stands between the
            prompt and the text: nothing, or an empty line if the model answers.
        device: Device to compute on: auto (the GPU if there is one), cpu, cuda, or one of several GPUs as cuda:1.
        trust_remote_code: Run model code that comes with the checkpoint.
    """

    source: str | Path
    prompt: str
    _: KW_ONLY
    tokens: int = 200
    temperature: float = 0.0
    seed: int = 0
    ignore_chat_template: bool = False
    head: str | None = None
    say: Say = lambda piece: None
    device: str = "auto"
    trust_remote_code: bool = False

    def check(self) -> None:
        """Refuse numbers that are out of range."""
        whole("seed", self.seed, 0, MAX_SEED)
        if self.tokens < 1 or not 0 <= self.temperature < 100:
            raise RecipeError(
                f"tokens is {self.tokens} and temperature {self.temperature}; expected at least 1 token, and a temperature from 0 "
                f"to 100."
            )
