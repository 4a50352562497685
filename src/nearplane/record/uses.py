"""Programs that load a checkpoint, each with its command, from the format and widths in its record. Needs no torch."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from nearplane.errors import FormatError
from nearplane.recipe.readers import loads
from nearplane.recipe.runtimes import Runtime
from nearplane.record.record import RunRecord
from nearplane.record.words import weights_of
from nearplane.system.files import read_object
from nearplane.system.paths import CONFIG

GENERATING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")  # ends of the names of models that predict text
TASKS = {  # ends of the names of architectures: transformers' class that loads them, and the task by the hub's list
    "ForCausalLM": ("AutoModelForCausalLM", "text-generation"),
    "LMHeadModel": ("AutoModelForCausalLM", "text-generation"),
    "ForMaskedLM": ("AutoModelForMaskedLM", "fill-mask"),
    "ForImageClassification": ("AutoModelForImageClassification", "image-classification"),
    "ForSequenceClassification": ("AutoModelForSequenceClassification", "text-classification"),
    "ForTokenClassification": ("AutoModelForTokenClassification", "token-classification"),
    "ForQuestionAnswering": ("AutoModelForQuestionAnswering", "question-answering"),
}
TOKENIZER_CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
SOUND, IMAGES = ("num_mel_bins", "conv_kernel"), ("image_size", "patch_size", "num_channels")  # fields of configs


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One way to use a checkpoint.

    Args:
        program: The program that loads it.
        phrase: The command or call as part of a sentence.
        code: The command or call as one or more lines; `language` is sh or python.
        needs: What has to be installed or newer than usual, as a phrase; empty: nothing.
    """

    program: str
    phrase: str
    code: str
    language: str = "python"
    needs: str = ""


class Named(NamedTuple):
    """A folder as commands name it.

    Args:
        folder: Its name.
        config: Its config.json; empty: as for a language model.
        chat: Whether its tokenizer has a chat template.
    """

    folder: str
    config: Mapping[str, Any]
    chat: bool = False

    @classmethod
    def of(cls, path: Path) -> Named:
        """Return a folder by its path, whose files are looked at."""
        found = path / CONFIG
        config = read_object(found, expected="Expected the config of a model") if found.is_file() else {}
        return cls(str(path), config, has_template(path))


def has_template(folder: Path) -> bool:
    """Return whether the tokenizer of a folder has a chat template; a damaged file has none."""
    path, settings = folder / TOKENIZER_CONFIG, dict[str, Any]()
    with suppress(FormatError):
        settings = read_object(path, expected="Expected the settings of a tokenizer") if path.is_file() else {}
    return bool(settings.get("chat_template")) or (folder / TEMPLATE).is_file()


def uses(record: RunRecord, it: Named) -> list[Use]:
    """Return how a checkpoint is used, the usual way first."""
    ways, weights = list[Use](), set(weights_of(record))
    readers, several = record.recipe.readers, len({layer.format for layer in record.layers}) > 1
    for runtime in readers.runtimes:
        if not (several and runtime in readers.one_grid) and all(
            loads(runtime, readers.format, each) for each in weights
        ):
            ways += USES[runtime](record, it)
    return [*ways, _decoded(it.folder)] if readers.joins and not readers.by_transformers else ways


def uses_of_dense(it: Named) -> list[Use]:
    """Return how a folder of unquantized weights is used, see `uses`."""
    served = [_served(it.folder)] if is_served(it.config) else []
    return [*served, _loaded(_quoted(it.folder), it, "")]


def _quoted(folder: str) -> str:
    return json.dumps(folder, ensure_ascii=False)


def _served(folder: str) -> Use:
    command = f"vllm serve {typed(folder)}"
    return Use(program="vLLM", phrase=command, code=command, language="sh")


def _loaded(arguments: str, it: Named, needed: str) -> Use:
    phrase = f"from_pretrained({arguments}) in transformers{f' (which needs {needed})' if needed else ''}"
    return Use(program="transformers", phrase=phrase, code=_loading(arguments, it), needs=needed)


def _in_vllm(record: RunRecord, it: Named) -> Iterator[Use]:
    if is_served(it.config):
        yield replace(_served(it.folder), needs="nearplane-vllm beside it" if record.recipe.files.entropy_coded else "")


def _in_sglang(_: RunRecord, it: Named) -> Iterator[Use]:
    if is_served(it.config):
        command = f"python3 -m sglang.launch_server --model-path {typed(it.folder)}"
        yield Use(program="SGLang", phrase=command, code=command, language="sh")


def _in_transformers(record: RunRecord, it: Named) -> Iterator[Use]:
    yield _loaded(_quoted(it.folder), it, record.recipe.files.needs)


def _in_gptqmodel(_: RunRecord, it: Named) -> Iterator[Use]:
    call = f"GPTQModel.load({_quoted(it.folder)})"
    yield Use(program="GPTQModel", phrase=call, code=f"from gptqmodel import GPTQModel\n\nmodel = {call}")


def _in_llama_cpp(record: RunRecord, it: Named) -> Iterator[Use]:
    command = f"llama-cli -m {typed(Path(it.folder) / 'model.gguf')}"
    yield Use(program="llama.cpp", phrase=command, code=command, language="sh")
    scaled = any(layer.number_format.global_scale for layer in record.layers)  # which transformers leaves out
    if record.recipe.like is None and not scaled:  # with --like transformers may not know the names in the file
        yield _loaded(f'{_quoted(it.folder)}, gguf_file="model.gguf"', it, "accelerate and gguf")


def _in_mlx(_: RunRecord, it: Named) -> Iterator[Use]:
    command = f"mlx_lm.generate --model {typed(it.folder)} --prompt TEXT"
    yield Use(program="mlx_lm", phrase=command, code=command, language="sh")
    yield _decoded(it.folder)


def _decoded(folder: str) -> Use:
    call = f"nearplane.load({_quoted(folder)})"
    return Use(program="nearplane", phrase=call, code=f"import nearplane\n\nmodel = {call}")


def _in_nearplane(record: RunRecord, it: Named) -> Iterator[Use]:
    yield _decoded(it.folder)
    if record.recipe.files.entropy_coded:
        yield _registered(it)
    command = f"nearplane export {typed(it.folder)} DENSE"
    yield Use(
        program="other programs",
        phrase=f"{command} for other programs",
        code=command,
        language="sh",
        needs="the weights decoded first",
    )


def _registered(it: Named) -> Use:
    return Use(
        program="transformers",
        phrase="transformers after nearplane.register() (without that call transformers stops with an error)",
        code=f"import nearplane\n\nnearplane.register()\n{_loading(_quoted(it.folder), it)}",
        needs="nearplane",
    )


USES: dict[Runtime, Callable[[RunRecord, Named], Iterator[Use]]] = {
    "vllm": _in_vllm,
    "sglang": _in_sglang,
    "transformers": _in_transformers,
    "gptqmodel": _in_gptqmodel,
    "llama.cpp": _in_llama_cpp,
    "mlx": _in_mlx,
    "nearplane": _in_nearplane,
}


def _loading(arguments: str, it: Named) -> str:
    name = _task(it.config)[0]
    if name == "AutoModelForCausalLM":
        folder = arguments.partition(", gguf_file")[0]
        asked = 'tokens = tokenizer("Once upon a time", return_tensors="pt")\n'
        if it.chat:
            asked = (
                'messages = [{"role": "user", "content": "What is a lattice?"}]\n'
                "tokens = tokenizer.apply_chat_template(\n"
                '    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"\n)\n'
            )
        return (
            f"from transformers import {name}, AutoTokenizer\n\ntokenizer = AutoTokenizer.from_pretrained({folder})\n"
            f"model = {name}.from_pretrained({arguments})\n{asked}"
            "print(tokenizer.decode(model.generate(**tokens, max_new_tokens=60)[0]))"
        )
    return f"from transformers import {name}\n\nmodel = {name}.from_pretrained({arguments})"


def pipeline_tag(config: Mapping[str, Any]) -> str | None:
    """Return the task of a network by the hub's list of tasks; None if its architecture does not tell."""
    return _task(config)[1]


def _task(config: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return transformers' class that loads a network, and its task."""
    names = architectures(config)
    sounds, sees = (any(field in config for field in fields) for fields in (SOUND, IMAGES))
    if any(name.endswith("ForConditionalGeneration") for name in names):
        speech = ("AutoModelForSpeechSeq2Seq", "automatic-speech-recognition")
        images = ("AutoModelForImageTextToText", "image-text-to-text")
        if config.get("is_encoder_decoder"):
            return speech if sounds else ("AutoModelForSeq2SeqLM", None)
        return images if "vision_config" in config else ("AutoModel", None)
    for end, found in TASKS.items():
        if any(name.endswith(end) for name in names):
            return found
    whole = any(name.endswith("Model") for name in names)
    return "AutoModel", ("image-feature-extraction" if sees else "feature-extraction") if whole else None


def architectures(config: Mapping[str, Any]) -> list[str]:
    """Return the classes that a config names; a config without any is that of a language model."""
    return [str(name) for name in config.get("architectures") or ["ForCausalLM"]]


def is_served(config: Mapping[str, Any]) -> bool:
    """Return whether vLLM generates text with a network: false for encoders, and for encoders with a decoder."""
    return not config.get("is_encoder_decoder") and any(name.endswith(GENERATING) for name in architectures(config))


def typed(path: str | Path) -> str:
    """Return a path as it is typed in a shell, where a leading dash would begin an option."""
    return shlex.quote(f"./{path}" if str(path).startswith("-") else str(path))
