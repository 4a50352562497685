"""Tiny models in every format, a record, stopped runs, texts and coded matrices, as the fuzz mutates them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

import nearplane
from checkpoints import random_matrix
from coded_matrices import contents_of, gaussian
from families import LLAMA, MOE, config_of, random_model
from fuzz_folders import ALONE, Folder, LoneGGUF
from fuzz_subjects import WINDOWS, Blob, Journal, Record, Subject, Texts
from killing import stopped_behind
from mutated_gguf import GGUF
from nearplane.coding.blob import encode
from nearplane.coding.packed_words import pack
from nearplane.demo import CALIBRATION
from nearplane.formats.gguf.gguf_header import FILE
from nearplane.system.paths import RECORD
from tokenizers_of_kinds import over_bytes

ONE_BLOCK = LLAMA | dict(num_hidden_layers=1, tie_word_embeddings=False)
WIDE = ONE_BLOCK | dict(hidden_size=256, intermediate_size=256, head_dim=64)
EXPERTS = ONE_BLOCK | MOE | dict(moe_intermediate_size=32, norm_topk_prob=True)
GPT_OSS = ONE_BLOCK | dict(
    hidden_size=64, intermediate_size=32, head_dim=16, num_local_experts=2, num_experts_per_tok=2
)


MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("llama", ONE_BLOCK | dict(attention_bias=False)),
    "wide": ("llama", WIDE),
    "experts": ("qwen3_moe", EXPERTS),
    "two blocks": ("llama", ONE_BLOCK | dict(num_hidden_layers=2)),
    "gpt_oss": ("gpt_oss", GPT_OSS),
}
SIGNED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "compressed-tensors": ("llama", dict(bits=4, group_size=16)),
    "compressed-tensors, mixed": ("llama", dict(bits=3.5, group_size=16)),
    "mxfp4": ("llama", dict(grid="mxfp4")),
    "mxfp8": ("llama", dict(grid="mxfp8")),
    "fp8-block": ("wide", dict(grid="fp8-block")),
    "gptq": ("llama", dict(bits=4, group_size=16, format="gptq")),
    "gptq_v2": ("llama", dict(bits=2, group_size=16, symmetric=False, format="gptq_v2")),
    "mlx": ("llama", dict(bits=3, group_size=32, format="mlx", include_embeddings=True)),
    "mlx, experts": ("experts", dict(bits=4, group_size=32, format="mlx")),
    "nearplane": ("llama", dict(rate=3.0, include_embeddings=True, include_head=True)),
    "nearplane, experts": ("experts", dict(rate=3.0)),
    "gguf, q4_0": ("llama", dict(grid="q4_0")),
    "gguf, q8_0": ("llama", dict(grid="q8_0", embeddings="q8_0")),
    "gguf, k-quants": ("wide", dict(grid="q4_k_m")),
    "gguf, experts": ("experts", dict(grid="q4_0")),
}
STOPPED: Mapping[str, Mapping[str, Any]] = {
    "stopped run": dict(bits=4, group_size=16),
    "stopped run, gguf": dict(grid="q4_0"),
    "stopped run, rate": dict(rate=3.0),
}
DTYPES = {
    "bfloat16": 96,
    "float16": 96,
    "float32": 2**15,
}  # rows of embeddings; 8 MB, of which twice is more than what is spare
CODES = {
    "blob": gaussian(24, 40, 2.0, rows=0.5)[0],
    "blob, escapes": gaussian(8, 24, 8.5)[0],
    "blob, zeros": contents_of(np.zeros((2, 3), np.int64)),
}


def subjects(place: Path, only: str = "") -> list[Subject]:
    """Write tiny models in every format, and all else that is read, where a pattern is found in their names."""
    models = _Models(place)
    written: dict[str, Callable[[str], Subject]] = {
        **{name: lambda name: Folder(name, models.signed(name), signed=True) for name in SIGNED},
        **{
            f"{name}, unsigned": models.unsigned
            for name in ("compressed-tensors", "mxfp4", "mxfp8", "fp8-block", "gptq", "gptq_v2", "mlx", "mlx, experts")
        },
        **{
            f"gguf alone, {name}": models.alone for name in ("q4_0", "k-quants", "q4_0, unsigned", "k-quants, unsigned")
        },
        "compressed-tensors, asymmetric, unsigned": lambda name: Folder(name, models.asymmetric(), loads=False),
        **{f"source, {dtype}": models.source for dtype in DTYPES},
        "source, 8 bits": lambda name: Folder(name, models.in_eight_bits(), source=True, loads=False),
        "source, 4 bits": lambda name: Folder(name, models.in_four_bits(), source=True, loads=False),
        "run record": lambda name: Record(name, models.signed("nearplane")),
        **{name: models.stopped for name in STOPPED},
        **{name: models.text for name in ("text.txt", "text.jsonl")},
        **{name: models.blob for name in CODES},
    }
    return [write(name) for name, write in written.items() if re.search(only, name)]


class _Models:
    """Writes models in a folder, each when it is first asked for."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def plain(self, name: str) -> Path:
        """Return a random model; those that become a GGUF alone have a tokenizer, which the file then holds."""
        folder, (kind, sizes) = self.place / "models" / name, MODELS[name]
        if not folder.exists():
            if name in ("llama", "wide"):
                tokenizer = over_bytes("gpt-2", 300)
                sizes = {**sizes, "vocab_size": tokenizer.get_vocab_size()}
                PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)
            random_model(config_of(kind, **sizes)).float().save_pretrained(folder)
        return folder

    def signed(self, name: str) -> Path:
        """Return a checkpoint of ours."""
        folder, (model, options) = self.place / "signed" / name, SIGNED[name]
        if not folder.exists():
            words = dict(calibration=WINDOWS, solver="round-to-nearest", device="cpu")
            nearplane.quantize(self.plain(model), folder, **words, **options)
        return folder

    def unsigned(self, name: str) -> Subject:
        """Return one without its record."""
        folder = Path(shutil.copytree(self.signed(name.removesuffix(", unsigned")), self.place / "unsigned" / name))
        (folder / RECORD).unlink()
        return Folder(name, folder)

    def alone(self, name: str) -> Subject:
        """Return a GGUF of ours without its folder, or what another program might have written."""
        quantization, _, unsigned = name.removeprefix("gguf alone, ").partition(", ")
        content = (self.signed(f"gguf, {quantization}") / FILE).read_bytes()
        if unsigned:
            parts = GGUF.of(content)
            parts.keys = [key for key in parts.keys if not key[0].startswith(b"nearplane.")]
            content = parts.joined()
        folder = self.place / name
        folder.mkdir()
        (folder / ALONE).write_bytes(content)
        return LoneGGUF(name, folder, signed=not unsigned)

    def source(self, name: str) -> Subject:
        """Return a model that is not quantized."""
        folder, dtype = self.place / name, name.removeprefix("source, ")
        model = random_model(config_of("llama", **(ONE_BLOCK | dict(vocab_size=DTYPES[dtype]))))
        model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=f"{DTYPES[dtype] // 4}KB")
        return Folder(name, folder, source=True)

    def asymmetric(self) -> Path:
        """Write what other programs write: zero points, and groups of columns that are no neighbours."""
        folder = Path(shutil.copytree(self.plain("llama"), self.place / "asymmetric"))
        tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            out, columns = tensors.pop(name).shape
            matrix = random_matrix(out, columns, bits=4, group_size=16, symmetric=False)
            stem = name.removesuffix(".weight")
            group = torch.randperm(columns, generator=generator) // 16
            tensors |= {
                f"{stem}.weight_packed": pack(matrix.codes, 4),
                f"{stem}.weight_scale": matrix.grid.scale.half(),
                f"{stem}.weight_zero_point": pack(matrix.grid.zero.T.contiguous().int(), 4).T.contiguous(),
                f"{stem}.weight_shape": torch.tensor([out, columns]),
                f"{stem}.weight_g_idx": group.int(),
            }
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        weights = {
            "num_bits": 4,
            "type": "int",
            "symmetric": False,
            "strategy": "group",
            "group_size": 16,
            "actorder": "group",
        }
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        format = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed"}
        _configure(folder, format | {"ignore": ["lm_head"], "config_groups": {"group_0": group}})
        return folder

    def in_eight_bits(self) -> Path:
        folder = Path(shutil.copytree(self.plain("llama"), self.place / "fp8"))
        tensors = {}
        for name, tensor in load_file(folder / "model.safetensors").items():
            tensors[name] = tensor.bfloat16()
            if name.endswith("_proj.weight"):
                tensors[name] = tensor.to(torch.float8_e4m3fn)
                factors = [-(-side // 24) for side in tensor.shape]
                tensors[f"{name}_scale_inv"] = 0.5 + torch.rand(factors, generator=torch.Generator().manual_seed(0))
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        _configure(
            folder,
            {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [24, 24]},
        )
        return folder

    def in_four_bits(self) -> Path:
        folder = Path(shutil.copytree(self.plain("gpt_oss"), self.place / "mxfp4"))
        tensors, generator = {}, torch.Generator().manual_seed(0)
        for name, tensor in load_file(folder / "model.safetensors").items():
            tensors[name] = tensor.bfloat16()
            if name.endswith(("gate_up_proj", "down_proj")):
                del tensors[name]
                experts, columns, out = tensor.shape
                tensors[f"{name}_blocks"] = torch.randint(
                    256, (experts, out, columns // 32, 16), generator=generator, dtype=torch.uint8
                )
                tensors[f"{name}_scales"] = torch.randint(
                    118, 126, (experts, out, columns // 32), generator=generator, dtype=torch.uint8
                )
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        _configure(folder, {"quant_method": "mxfp4"})
        return folder

    def stopped(self, name: str) -> Subject:
        """Return a run that was stopped behind its first block."""
        journal = Journal(name, self.place / name, self.plain("two blocks"), STOPPED[name])
        journal.folder.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("nearplane.formats.journal_pages.MAX_JOURNAL_SHARE", float("inf"))
            stopped_behind(1, journal.model, journal.folder / "out", patch, **journal.options)
        return journal

    def text(self, name: str) -> Subject:
        """Return a text, or its paragraphs as lines of JSON."""
        folder = self.place / name.replace(".", "-")
        folder.mkdir()
        text = CALIBRATION.read_text()[:3000]
        lines = [json.dumps({"text": part, "id": number}) for number, part in enumerate(text.split("\n\n")) if part]
        (folder / name).write_text(text if name.endswith(".txt") else "\n".join(lines) + "\n")
        return Texts(name, folder)

    def blob(self, name: str) -> Subject:
        """Return a coded matrix."""
        folder = self.place / name
        folder.mkdir()
        encode(CODES[name]).tofile(folder / "blob")
        return Blob(name, folder)


def _configure(folder: Path, quantization: Mapping[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}, indent=2))
