"""What is asked of `evaluate_chat`, and the checks of it that need no torch."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearplane.errors import RecipeError
from nearplane.system.arguments import whole
from nearplane.system.paths import check_path
from nearplane.system.progress import Progress
from nearplane.system.progress_bar import bar

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
else:
    PreTrainedModel = PreTrainedTokenizerBase = Any  # these need torch


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """Arguments of `evaluate_chat`.

    Args:
        model: Folder, hub id or .gguf file as for `evaluate`, or a model object.
        chat: A .jsonl file with a conversation in each line, {"messages": [..]}, perhaps with "tools". Where a message of the
            assistant stands, and behind the last message, the original answers; what the file has there is not read. Results
            of tools stay where they are, behind the text that the original wrote in place of the call.
        against: The original model, which writes the answers.
        tokenizer: Tokenizer of a model object; that of a folder serves an original given as an object, too.
        samples: Number of conversations, from the beginning of the file. Default: all.
        answer_tokens: Largest number of tokens of an answer.
        device: Device to compute on.
        trust_remote_code: Run model code that comes with the checkpoint.
        progress: Display that wraps the iterator over answers.
    """

    model: str | Path | PreTrainedModel
    chat: str | Path
    _: KW_ONLY
    against: str | Path | PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None = None
    samples: int | None = None
    answer_tokens: int = 128
    device: str = "auto"
    trust_remote_code: bool = False
    progress: Progress = bar

    def check(self) -> None:
        """Refuse what can be refused without torch."""
        whole("samples", self.samples, 1)
        whole("answer_tokens", self.answer_tokens, 1)
        if self.against is None:
            raise RecipeError("--chat measures a model on answers of its original. Pass the original with --against.")
        check_path("--chat", self.chat)
        if not Path(self.chat).expanduser().is_file():
            raise RecipeError(f"--chat {self.chat} is no file; expected a .jsonl file with conversations.")
