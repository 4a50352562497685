"""What is asked of `evaluate` and `evaluate_tasks`, and the checks of it that need no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from nearplane.calibration.text_files import check_named, is_cropped, is_self_written
from nearplane.errors import INSTALL, CalibrationError, RecipeError
from nearplane.evaluation.protocol_names import PLAIN_WINDOWS, Protocol
from nearplane.recipe.scheme import CacheNumbers
from nearplane.system.arguments import whole
from nearplane.system.paths import check_path, path_in
from nearplane.system.progress import Progress
from nearplane.system.progress_bar import bar

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from nearplane.calibration.given import Encoded
else:
    Tensor = Encoded = PreTrainedModel = PreTrainedTokenizerBase = Any  # these need torch

MIN_LLAMA_CPP_SEQLEN = 3  # tokens of a window whose second half has a token to score


@dataclass(frozen=True, slots=True)
class EvaluateRequest:
    """Arguments of `evaluate`.

    Args:
        model: Folder or hub id of a transformers checkpoint, or of one that nearplane wrote, or a .gguf file. In Python also
            a model object, which runs in its own dtype and on its own device.
        text: A .txt or .jsonl file or a folder of them, tokenized whole and cut into windows that do not overlap, each of
            which begins with the token that the tokenizer sets before a text, if it sets one. Or wikitext2 or c4, a list
            of texts, token ids (windows, seqlen), what a tokenizer returns (input_ids with their attention_mask; masked
            positions are left out, and all other tokens packed into windows as long as the rows), pixel values (images,
            channels, height, width), or sound with transcripts (input_features, token_ids). self: text that the original
            writes, other than the one to calibrate on. Windows of encoders begin and
            end with tokens such as [CLS] and [SEP]. Encoder-decoders predict their own input, or its transcript.
        tokenizer: Tokenizer of a model object; not needed for token ids.
        protocol: Windows and units: nearplane (windows of 2048, per token), papers (the same without the tokenizer's first
            token), llama.cpp (as llama-perplexity: windows of 512, of which the second half is scored), or lm-eval
            (rolling, per word and per byte).
        seqlen: Tokens per window. Default: 2048, or 512 for llama.cpp, or the model's maximum length if that is shorter.
        samples: Number of windows, or for lm-eval of documents (a .txt file is one), from the beginning of the text.
            Default: all.
        against: The original model. Adds the divergence of the predictions. Encoders need it.
        floor: Measure the divergence of the original in its own dtype from itself in float32, too.
        activations: Measure a second time as runtimes compute, which round the inputs of layers if the model was quantized
            with --activations. Without this option, the weights alone are measured.
        kv_cache: Measure a second time with keys and values rounded to fp8, as vLLM keeps them with `--kv-cache-dtype fp8`, by
            the scales of the checkpoint (quantize --kv-cache); without scales they are 1.0. With activations, both at once.
        device: Device to compute on: auto (the GPU if there is one), cpu, cuda, or one of several GPUs as cuda:1.
        trust_remote_code: Run model code that comes with the checkpoint.
        progress: Display that wraps the iterators over windows.
            Default: a bar, on a terminal and in a notebook; False shows nothing.
    """

    model: str | Path | PreTrainedModel
    text: str | Path | Sequence[str] | Tensor | tuple[Tensor, Tensor] | Encoded
    _: KW_ONLY
    tokenizer: PreTrainedTokenizerBase | None = None
    protocol: Protocol = "nearplane"
    seqlen: int | None = None
    samples: int | None = None
    against: str | Path | PreTrainedModel | None = None
    floor: bool = False
    activations: bool = False
    kv_cache: CacheNumbers = "none"
    device: str = "auto"
    trust_remote_code: bool = False
    progress: Progress = bar

    @property
    def texts(self) -> Sequence[Any]:
        """The texts that are measured, each by itself."""
        return [self.text]

    def check(self) -> None:
        """Refuse what can be refused without torch; model objects and texts in memory are checked by the verb."""
        protocol, seqlen = self.protocol, self.seqlen
        whole("samples", self.samples, 1)
        whole("seqlen", seqlen, 2)
        if protocol not in get_args(Protocol):
            raise RecipeError(f"--protocol {protocol} is unknown; expected {' or '.join(get_args(Protocol))}.")
        if protocol == "llama.cpp" and seqlen is not None and seqlen < MIN_LLAMA_CPP_SEQLEN:
            raise RecipeError(
                f"--seqlen {seqlen} is too short for --protocol llama.cpp, which scores only tokens of the second half of a "
                f"window. Use at least {MIN_LLAMA_CPP_SEQLEN}."
            )
        for text in self.texts:
            if protocol not in PLAIN_WINDOWS and is_cropped(text):
                raise RecipeError(
                    f"--protocol {protocol} needs running text, but c4 is read as crops of its documents. Use "
                    f"--protocol nearplane, or pass a file."
                )
            if text is None:
                raise CalibrationError(
                    "text is None; expected a path, a list of texts, or token ids (windows, seqlen)."
                )
            itself = is_self_written(text)
            if itself and (path_in(self.against) is None or protocol != "nearplane"):
                raise RecipeError(
                    "--text self is text that the original writes: pass it with --against as a folder or hub id, and leave out "
                    "--protocol."
                )
            check_named(path_in(self.model), path_in(self.against), text=None if itself else path_in(text))


@dataclass(frozen=True, slots=True)
class TasksRequest:
    """Arguments of `evaluate_tasks`.

    Args:
        model: Folder, hub id or .gguf file as for `evaluate`, or a model object.
        tasks: Names of tasks or groups, or patterns of names, for example --tasks winogrande,truthfulqa_mc1.
        tokenizer: Tokenizer of a model object; that of a folder serves an original given as an object, too.
        against: The original model. It answers the same documents after the model, so that one is in memory at a time.
        task_path: Folder of further tasks, as YAML files of lm-eval. Python files that they name are run.
        fewshot: Number of solved examples in each prompt. Default: as each task says; tasks that fix 0 keep it.
        limit: Number of documents of each task, from its beginning. Default: all.
        batch_size: Number of requests of tasks that pass through the network together.
        device: Device to compute on.
        trust_remote_code: Run model code that comes with the checkpoint.
    """

    model: str | Path | PreTrainedModel
    tasks: Sequence[str]
    _: KW_ONLY
    tokenizer: PreTrainedTokenizerBase | None = None
    against: str | Path | PreTrainedModel | None = None
    task_path: str | Path | None = None
    fewshot: int | None = None
    limit: int | None = None
    batch_size: int = 8
    device: str = "auto"
    trust_remote_code: bool = False

    def check(self) -> None:
        """Refuse what can be refused without torch, and a missing lm-eval; names of tasks are checked by the verb."""
        whole("fewshot", self.fewshot, 0)
        whole("limit", self.limit, 1)
        whole("batch_size", self.batch_size, 1)
        if not self.tasks or not all(self.tasks):
            raise RecipeError(
                "--tasks is empty; expected names of lm-eval's tasks, for example winogrande,truthfulqa_mc1."
            )
        for package in ("lm_eval", "accelerate"):  # lm-eval's module for networks needs the second
            if find_spec(package) is None:
                raise RecipeError(f"--tasks needs the package {package}. Run {INSTALL['eval']}.")
        check_named(path_in(self.model), path_in(self.against))
        if self.task_path is not None:
            check_path("--task-path", self.task_path)
            if not any(Path(self.task_path).expanduser().rglob("*.yaml")):
                raise RecipeError(f"--task-path {self.task_path} is no folder with tasks: it contains no .yaml file.")
