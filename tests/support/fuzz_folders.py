"""Folders of weights that the fuzz reads: checkpoints with our record, files that nobody signed, source models, a GGUF alone."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

import nearplane
import plain_formats
from families import MOE
from fuzz_subjects import (
    AS_BYTES_SAY,
    NAMED,
    RIGHT,
    UNSURE,
    WINDOWS,
    Subject,
    Weights,
    bytes_of,
    faulty,
    inspected,
    named,
    same,
    unchanged,
)
from mutations import Mutation
from nearplane.demo import CALIBRATION
from nearplane.formats.gguf.gguf_header import FILE, read_header
from nearplane.formats.stored import read_dense, reader_of
from nearplane.loading.dense_network import dense_network
from nearplane.loading.source_folder import source_folder
from nearplane.models.model import open_model
from nearplane.system.source_storage import method_of

ALONE = "alone.gguf"
NETWORKS = (
    "dense_network",
    "evaluate",
    "evaluate a text",
    "open_model",
    "load",
    "load packed",
)  # slow: a mutation is given to one of them
ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}  # llama.cpp's names
PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{letter}_proj": f"attn_{letter}" for letter in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{word}_proj": f"ffn_{word}" for word in ("gate", "up", "down")},
}
ROUNDED = 1e-3  # largest relative difference of logits by other sums; some weights are wild
TOKENS = torch.arange(8).reshape(1, 8)


def _dense(folder: Path) -> Weights:
    return dict(read_dense(folder))


def _source(folder: Path) -> Weights:
    reader = reader_of(folder)
    return reader.read(reader.names())


def _network(folder: Path) -> Weights:
    return dict(dense_network(folder).state_dict())


def _blocks(folder: Path) -> Weights:
    """Return the weights of the blocks as `quantize` reads them."""
    values = {}
    for block in open_model(str(folder)).blocks:
        with block.on("cpu", torch.float32, original=False) as loaded:
            assert loaded.quantized is not None
            values |= {f"{block.name}.{name}": value.clone() for name, value in loaded.quantized.state_dict().items()}
    return values


def _logits(folder: Path) -> Tensor:
    with torch.no_grad():
        return nearplane.load(folder, dtype=torch.float32, device="cpu", packed=False)(TOKENS).logits


def _packed(folder: Path) -> Tensor:
    """Return what a network computes whose layers stay packed where they can."""
    with torch.no_grad():
        return nearplane.load(folder, dtype=torch.float32, device="cpu")(TOKENS).logits


def _scores(model: Path, text: Tensor | Path) -> dict[str, Any]:
    """Return what `evaluate` measures, without remarks, which name the folder."""
    scores = nearplane.evaluate(model, text, samples=2, seqlen=16, device="cpu")
    return {name: value for name, value in asdict(scores).items() if name != "remarks"}


class Folder(Subject):
    """A model's folder.

    Args:
        signed: whether our record lies in it.
        source: whether it is a model that is not quantized by us, as `quantize` reads it.
        loads: whether transformers loads it.
    """

    def __init__(
        self, name: str, folder: Path, *, signed: bool = False, source: bool = False, loads: bool = True
    ) -> None:
        super().__init__(name, folder)
        self.signed, self.source, self.loads = signed, source, loads

    def readers(self) -> dict[str, Callable[[Path], Any]]:
        found: dict[str, Callable[[Path], Any]] = {
            "read": _source if self.source else _dense, "dense_network": _network,
            "evaluate": lambda folder: _scores(folder, WINDOWS),
        }  # fmt: skip
        if self.source:
            found["open_model"] = _blocks
        if self.loads:
            found |= {"load": _logits, "load packed": _packed}
        if self.signed:
            found |= {"verify": faulty, "inspect": inspected}
        if (self.folder / FILE).exists():
            found["header"] = lambda folder: asdict(read_header(folder / FILE))
            found["inspect alone"] = lambda folder: inspected(folder / FILE)
        return found

    def drawn(self, rng: random.Random) -> list[str]:
        names = list(self.readers())
        network = rng.choice([name for name in names if name in NETWORKS])
        return [name for name in names if name not in NETWORKS or name == network]

    def counts(self, reader: str) -> bool:
        return reader in NETWORKS or (reader == "read" and not self.signed)

    def judge(self, reader: str, result: Any, folder: Path, mutation: Mutation) -> str:
        expected = self.expected[reader]
        if reader == "header":
            return RIGHT
        if reader == "verify":
            return RIGHT if result or unchanged(self.folder, folder) else "verify finds nothing"
        if same(result, expected):
            return RIGHT
        text = mutation.file.endswith(".json")
        if self.signed and reader == "read" and not self.name.startswith(("gguf", "nearplane")):
            return _as_bytes_say(result, folder, whole=True)  # the other readers compare hashes before
        if self.signed:
            return NAMED if text and named(folder) else "other weights" if self.counts(reader) else "another result"
        if reader in ("evaluate", "inspect", "inspect alone"):
            return UNSURE
        if reader in ("load", "load packed"):
            return self._loaded(result, folder, packed=reader == "load packed")
        return _as_bytes_say(result, folder, whole=reader == "read")

    def _loaded(self, logits: Tensor, folder: Path, *, packed: bool) -> str:
        """Compare what a loaded network computes with a network of decoded weights; packed weights round differently."""
        try:
            weights = dense_network(folder)
        except nearplane.NearplaneError:
            return UNSURE
        with torch.no_grad():
            expected = weights(TOKENS).logits
        if packed and not (torch.isfinite(logits).all() and torch.isfinite(expected).all()):
            return UNSURE
        near = packed and bool((logits - expected).norm() <= ROUNDED * expected.norm())
        return AS_BYTES_SAY if near or same(logits, expected) else "the network computes something else"


def _as_bytes_say(weights: Weights, folder: Path, *, whole: bool) -> str:
    """Compare weights with what the files decode to; a network has them as float32, and may lack some or tie them.

    A network of 8-bit floats without our record is an original, whose weights are widened to bfloat16.
    """
    expected = plain_formats.decoded(folder)
    widened = not whole and method_of(folder, json.loads((folder / "config.json").read_bytes())) == "fp8"
    if whole and weights.keys() != expected.keys():
        return f"other tensors: {sorted(weights.keys() ^ expected.keys())[:3]}"
    for name, tensor in weights.items():
        tied = name == "lm_head.weight" and name not in expected
        raw = expected.get("model.embed_tokens.weight" if tied else name) or _of_experts(expected, name)
        if raw is None:
            return f"{name} is made up"
        values = torch.from_numpy(np.array(raw.values if whole else raw.floats()))
        values = values if whole else values.float()
        values = values.bfloat16().float() if widened and ".layers." in name and values.ndim == 2 else values
        there = tensor.detach()
        if whole and raw.dtype == "BF16":
            there, values = there.float(), torch.from_numpy(raw.floats().copy())
        elif whole and there.dtype != values.dtype and there.numel():
            there = bytes_of(there).view(values.dtype).reshape(there.shape)
        if not same(there, values):
            return f"{name} is not what its bytes say"
    return AS_BYTES_SAY


def _of_experts(expected: Mapping[str, plain_formats.Raw], name: str) -> plain_formats.Raw | None:
    """Return a parameter of a Qwen3 that holds a matrix of every expert, or two one above the other; None for another name."""
    head, _, last = name.rpartition(".")
    words = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(last, ())
    names = [[f"{head}.{number}.{word}.weight" for word in words] for number in range(MOE["num_experts"])]
    if not words or not all(each in expected for matrices in names for each in matrices):
        return None
    experts = [np.concatenate([expected[each].floats() for each in matrices]) for matrices in names]
    return plain_formats.Raw("F32", np.stack(experts))


class LoneGGUF(Folder):
    """A GGUF without its folder; the hashes of one of ours are inside, one of another program has none."""

    def __init__(self, name: str, folder: Path, *, signed: bool) -> None:
        super().__init__(name, folder, signed=signed)

    def readers(self) -> dict[str, Callable[[Path], Any]]:
        def file(folder: Path) -> Path:
            return folder / ALONE

        found: dict[str, Callable[[Path], Any]] = {
            "dense_network": lambda folder: _network(source_folder(file(folder))), "load": lambda folder: _logits(file(folder)),
            "evaluate": lambda folder: _scores(file(folder), WINDOWS),
            "evaluate a text": lambda folder: _scores(file(folder), CALIBRATION),
        }  # fmt: skip
        return found | ({"inspect": lambda folder: inspected(file(folder))} if self.signed else {})

    def judge(self, reader: str, result: Any, folder: Path, mutation: Mutation) -> str:
        if same(result, self.expected[reader]):
            return RIGHT
        if self.signed:
            return "other weights"
        return _as_gguf_says(result, folder / ALONE) if reader == "dense_network" else UNSURE


def _as_gguf_says(weights: Weights, path: Path) -> str:
    """Compare weights with what the gguf package makes of a file of the architecture llama, of whose heads rows alternate."""
    reader = gguf.GGUFReader(path)
    fields = {
        name: field.contents() for name, field in reader.fields.items() if name.startswith(("general.", "llama."))
    }
    if fields["general.architecture"] != "llama":
        return UNSURE
    stored = {tensor.name: tensor for tensor in reader.tensors}
    for name, values in weights.items():
        tensor = stored.get(_llama_name(name)) or stored["token_embd.weight"]  # a tied head
        there = np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
        if tensor.name.split(".")[-2] in ("attn_q", "attn_k"):
            heads = fields["llama.attention.head_count" + ("_kv" if ".attn_k." in tensor.name else "")]
            there = there.reshape(heads, -1, 2, *there.shape[1:]).swapaxes(1, 2).reshape(there.shape)
        if not same(values.detach(), torch.from_numpy(np.ascontiguousarray(there)).reshape(values.shape)):
            return f"{name} is not what its bytes say"
    return AS_BYTES_SAY


def _llama_name(name: str) -> str:
    """Return llama.cpp's name of a tensor of a Llama."""
    stem, _, end = name.rpartition(".")
    if stem in ENDS:
        return f"{ENDS[stem]}.{end}"
    _, _, block, part = stem.split(".", 3)
    return f"blk.{block}.{PARTS[part]}.{end}"
