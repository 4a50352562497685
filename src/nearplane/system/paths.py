"""Names of files and folders: early checks of those that a user names, and one list of a model's files. Needs no torch.

The list says which files besides the weights are fetched from the hub, and which of them a checkpoint gets.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from nearplane.errors import ModelError, RecipeError

RECORD = "nearplane.json"  # the run record, in the folder of a checkpoint
CARD = "README.md"  # the model card, which users may change; the record does not list it
UNFINISHED = ".unfinished"  # suffix of the folder in which a checkpoint is written until it is complete
INCOMPLETE = "INCOMPLETE"  # name of a file in that folder until the checkpoint is complete
MARK = "This checkpoint is not finished: the run that writes it is under way or died.\n"  # first line of that file
JOURNAL = "journal"  # name of the folder in it from which a stopped run is resumed
ADAPTER_CONFIG = "adapter_config.json"  # by which transformers adds an adapter of peft to the model of the same folder
ADAPTERS = (ADAPTER_CONFIG, "adapter_model.")  # beginnings of the names of the files of an adapter
MAX_FILE = 5 * 10**9  # bytes of tensors in a safetensors file that is written, unless one tensor is larger
WEIGHTS_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG, GPTQ_CONFIG = "config.json", "quantize_config.json"
TIED = "tie_word_embeddings"  # field of config.json that tensors may contradict, see `models/config_checks.py`
WEIGHTS = re.compile(
    r".*\.(safetensors|bin|pt|pth|ckpt|h5|msgpack|gguf|onnx|onnx_data|ot|tflite|npz|index\.json)", re.DOTALL
)  # names of weight files
TOKENIZERS = (  # every name in `vocab_files_names` of a class of transformers, and what all classes read
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab*.json", "*_vocab.json", "*tekken*.json", "byte_maps.json", "emoji.json", "normalizer.json", "word_*.json"),
    *("vocab.txt", "merges.txt", "dict.txt", "vocab.bpe", "bpe.codes", "prophetnet.tokenizer"),
    *("tokenizer.model*", "*.model", "*.spm", "*.tiktoken"),
)
TEMPLATES_FOLDER = "additional_chat_templates"
TEMPLATES = ("*.jinja", f"{TEMPLATES_FOLDER}/*.jinja", "chat_template.json")
FOLDERS = (TEMPLATES_FOLDER, "*_tokenizer")  # the second of processors with several tokenizers
NEEDED = (  # files that change what a loaded checkpoint does
    *TOKENIZERS,
    *(f"*_tokenizer/{name}" for name in TOKENIZERS),
    *TEMPLATES,
    *("*processor_config.json", "audio_tokenizer_config.json", "generation_config.json"),
)
TERMS = ("*LICEN[CS]E*", "*[Ll]icen[cs]e*", "*NOTICE*", "*[Nn]otice*", "*USE_POLICY*", "*[Uu]se_[Pp]olicy*", "COPYING*")
CODE = "*.py"  # in any folder: `auto_map` may name a module in one
FILES = ("*.safetensors", "*.json", "README.md", *NEEDED, *TERMS)
NAMED = re.compile(r"""["']([\w.-]+\.\w+)["']""")  # a file name as Python code has it


def is_gguf(source: str | Path) -> bool:
    """Return whether a source is a GGUF without a folder, by its suffix."""
    check_path("model", source)
    path = Path(source).expanduser()
    return path.suffix == ".gguf" and path.is_file()


def check_path(name: str, path: str | os.PathLike[str]) -> None:
    """Refuse what no file system takes as a path, for example a text that was passed in place of its file.

    Raises:
        RecipeError: The path is empty, has a null character, is too long or is a link that leads back to itself.
    """
    text, fault = os.fspath(path), ""
    try:
        fault = "" if text else "is empty"
        os.stat(text)
    except ValueError:
        fault = "has a null character or a lone surrogate"
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            hint = " (texts are passed as a list: [text])" * (name.lstrip("-") in ("text", "calibration", "dataset"))
            fault = f"has {len(text):,} letters and is too long for a path{hint}"
        elif error.errno == errno.ELOOP:
            fault = "is a link that leads back to itself"
    if fault:
        raise RecipeError(f"{name}: {text[:60]!r} {fault}. Pass the path of a file or folder.")


def path_in(value: Any) -> Any:
    """Return a path; None for None and for an object in place of a file."""
    return value if isinstance(value, str | os.PathLike) else None


def name_of(model: Any) -> str:
    """Return the name of a model, which may be an object, for the run record and for messages."""
    if path_in(model) is not None:
        return str(model)
    return str(getattr(model, "name_or_path", "") or f"{type(model).__name__} given in Python")


def refuse_tokenizer(model: object, tokenizer: object) -> None:
    """Refuse a tokenizer together with the path of a model, whose folder has its own.

    Raises:
        RecipeError: Both are given.
    """
    if tokenizer is not None and path_in(model) is not None:
        raise RecipeError(f"tokenizer= is for model objects; the tokenizer of {model} is read from its folder.")


def folders_in(model: Any) -> list[Path]:
    """Return the folder of a model in a list, which is empty for hub ids and model objects."""
    folder = None if path_in(model) is None else folder_named(model)
    return [] if folder is None else [folder]


def folder_named(source: str | Path) -> Path | None:
    """Return the local folder of a model, or None for a hub id.

    Raises:
        ModelError: The source is neither a folder nor a hub id, or the folder holds an adapter or revisions of a model.
    """
    check_path("model", source)
    folder = Path(source).expanduser()
    if folder.is_dir():
        if not os.access(folder, os.R_OK | os.X_OK):  # where it could only be listed or only be entered
            raise ModelError(f"{folder} cannot be read: Permission denied.")
        if (folder / "snapshots").is_dir() and not (folder / "config.json").exists():
            raise ModelError(
                f"{folder} is a folder of the hub's cache. Pass one of the folders in {folder / 'snapshots'}."
            )
        refuse_adapter(folder)
        return folder
    if folder.exists():
        raise ModelError(f"{source} is a file. Pass the folder of the model.")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", str(source)) or unfinished_run(folder):
        raise ModelError(
            f"The folder {source} does not exist, and it is not a hub id of the form owner/name.{unfinished_run(folder)}"
        )
    return None


def refuse_unfinished(folder: Path) -> None:
    """Raise ModelError if a checkpoint folder is incomplete."""
    if (folder / INCOMPLETE).exists():
        raise ModelError(f"{folder} is incomplete: its run has not finished. Repeat the command of that run.")


def refuse_adapter(folder: Path, name: str = "") -> None:
    """Refuse a folder with files of an adapter: transformers adds it to the weights where peft is installed, and else not.

    Args:
        folder: Folder of a model or of a checkpoint.
        name: The model's name on the hub, if the folder was fetched.

    Raises:
        ModelError: There are such files; the message names them.
    """
    if adapters := sorted(path.name for path in folder.glob("adapter_*") if path.name.startswith(ADAPTERS)):
        copy = f" from a copy of it (hf download {name} --local-dir FOLDER)" if name else ""
        raise ModelError(
            f"{name or folder} holds {' and '.join(adapters)}: transformers would add an adapter to the weights where peft is "
            f"installed, and other programs would not. Merge the adapter first, or remove these files{copy}."
        )


def unfinished_run(folder: Path) -> str:
    """Return a sentence if a stopped run left an unfinished folder for this one, else an empty text."""
    unfinished = folder.with_name(folder.name + UNFINISHED)
    if not folder.name or folder.exists() or not unfinished.is_dir():
        return ""
    return f" A stopped run left {unfinished}. Repeat the command of that run to finish it."


def refuse_overlap(out: Path, source: Path) -> None:
    """Refuse an output folder that is the folder it is made from, contains it or lies in it.

    Raises:
        RecipeError: The two folders overlap.
    """
    output, model = out.resolve(), source.resolve()
    if output == model or output in model.parents or model in output.parents:
        raise RecipeError(f"The output {out} overlaps with {source}, from which it is made. Choose another folder.")


def is_listed(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a name relative to a model's folder matches a pattern, whose stars stand for no slash."""
    return any(name.count("/") == each.count("/") and fnmatchcase(name, each) for each in patterns)


def is_kept_back(name: str) -> bool:
    """Return whether no file of this name is ever copied: weights, adapters, hidden files, and what nearplane writes."""
    return bool(
        any(part.startswith((".", "README", "adapter_")) for part in name.split("/"))
        or WEIGHTS.fullmatch(name)
        or name in (CONFIG, GPTQ_CONFIG, RECORD)
    )


def named_in_code(folder: Path) -> list[str]:
    """Return the names of files in a model's folder that its Python code has as texts, as of a vocabulary that it opens."""
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in folder.rglob(CODE) if path.is_file()]
    return sorted({name for text in texts for name in NAMED.findall(text) if not is_kept_back(name)})
