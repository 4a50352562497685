"""Names of a model's files besides its weights: one list for what is fetched from the hub and what a checkpoint gets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from nearplane.system.paths import RECORD

CONFIG, GPTQ_CONFIG = "config.json", "quantize_config.json"
TIED = "tie_word_embeddings"  # field of config.json that tensors may contradict, see `models/tied.py`
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
FOLDERS = (TEMPLATES_FOLDER, "*_tokenizer")  # the second of processors with several tokenizers
NEEDED = (  # files that change what a loaded checkpoint does
    *TOKENIZERS,
    *(f"*_tokenizer/{name}" for name in TOKENIZERS),
    *("*.jinja", f"{TEMPLATES_FOLDER}/*.jinja", "chat_template.json"),
    *("*processor_config.json", "audio_tokenizer_config.json", "generation_config.json"),
)
TERMS = ("*LICEN[CS]E*", "*[Ll]icen[cs]e*", "*NOTICE*", "*[Nn]otice*", "*USE_POLICY*", "*[Uu]se_[Pp]olicy*", "COPYING*")
CODE = "*.py"  # in any folder: `auto_map` may name a module in one
FILES = ("*.safetensors", "*.json", "README.md", *NEEDED, *TERMS)
NAMED = re.compile(r"""["']([\w.-]+\.\w+)["']""")  # a file name as Python code has it


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
