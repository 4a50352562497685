"""Files of a model besides weights and config (tokenizer, templates, licence): their list, and copying them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from nearplane.system.paths import RECORD

CONFIG, GPTQ_CONFIG = "config.json", "quantize_config.json"
WEIGHTS = re.compile(
    r".*\.(safetensors|bin|pt|pth|ckpt|h5|msgpack|gguf|onnx|onnx_data|ot|tflite|npz|index\.json)", re.DOTALL
)  # names of weight files
TEMPLATES_FOLDER = "additional_chat_templates"  # the only folder that tokenizers save


def copy_beside(source: Path, out: Path, *, trust_remote_code: bool) -> None:
    """Copy a model's files besides weights and config: tokenizer, templates, generation_config, licence."""
    for name in names_copied(source, trust_remote_code=trust_remote_code):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, out / name)


def names_copied(source: Path, *, trust_remote_code: bool) -> list[str]:
    """Return the names of the files that `copy_beside` copies, relative to the folder."""
    copied = [part for path in _beside(source, trust_remote_code) for part in ([path, *path.rglob("*")])]
    return [path.relative_to(source).as_posix() for path in copied if path.is_file()]


def size_copied(source: Path, *, trust_remote_code: bool) -> int:
    """Return the number of bytes that `copy_beside` copies."""
    return sum((source / name).stat().st_size for name in names_copied(source, trust_remote_code=trust_remote_code))


def _beside(source: Path, trust_remote_code: bool) -> list[Path]:
    """Return the paths of a model's files besides its weights, among them the folder of templates."""
    return [
        path
        for path in sorted(source.iterdir())
        if (path.name == TEMPLATES_FOLDER if path.is_dir() else _copied(path.name, trust_remote_code))
    ]


def _copied(name: str, trust_remote_code: bool) -> bool:
    """Return whether a file is copied; weights, files that nearplane writes and untrusted code are not."""
    return not (
        name.startswith((".", "README"))
        or WEIGHTS.fullmatch(name)
        or name in (CONFIG, GPTQ_CONFIG, RECORD)
        or (name.endswith(".py") and not trust_remote_code)
    )
