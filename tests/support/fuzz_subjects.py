"""What the fuzz reads: tiny models in every format, a record, a stopped run, texts, coded matrices; and what may come of each.

A checkpoint with our record gives a sentence or exactly the right weights. A file that nobody signed has no checksum: it gives a
sentence, or what its bytes decode to by `plain_formats.py`, which is written from the formats alone.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import mutations
import nearplane
import plain_formats
import plain_reader
from checkpoints import random_matrix
from coded_matrices import contents_of, gaussian, mended
from families import LLAMA, MOE, config_of, random_model
from mutations import Mutation
from nearplane.calibration.texts import read_windows
from nearplane.cli.app import app
from nearplane.coding.blob import decode, encode
from nearplane.coding.packed_words import pack
from nearplane.demo import CALIBRATION, MODEL
from nearplane.formats.gguf.gguf_header import FILE, read_header
from nearplane.formats.layer_format import read_config
from nearplane.formats.stored import read_dense
from nearplane.loading.dense_network import dense_network
from nearplane.loading.source_folder import source_folder
from nearplane.models.model import open_model
from nearplane.record.record import read_record
from nearplane.system.fp8_mxfp4 import source_reader
from nearplane.system.paths import RECORD
from plain_formats import UnsureError
from tokenizers_of_kinds import over_bytes

REFUSED, RIGHT, AS_BYTES_SAY, NAMED, UNSURE = "refused", "right", "as the bytes say", "named by verify", "not compared"
GOOD = (REFUSED, RIGHT, AS_BYTES_SAY, NAMED, UNSURE)
ALONE = "alone.gguf"
NETWORKS = (
    "dense_network",
    "evaluate",
    "evaluate a text",
    "open_model",
    "load",
)  # slow readers, of which a mutation is given to one
TOKENS = torch.arange(8).reshape(1, 8)
WINDOWS = torch.arange(64).reshape(4, 16)
ONE_BLOCK = LLAMA | dict(num_hidden_layers=1, tie_word_embeddings=False)
WIDE = ONE_BLOCK | dict(hidden_size=256, intermediate_size=256, head_dim=64)
EXPERTS = ONE_BLOCK | MOE | dict(moe_intermediate_size=32, norm_topk_prob=True)
GPT_OSS = ONE_BLOCK | dict(
    hidden_size=64, intermediate_size=32, head_dim=16, num_local_experts=2, num_experts_per_tok=2
)

Weights = dict[str, Tensor]


def same(one: Any, other: Any) -> bool:
    """Return whether two results are the same; NaN is NaN, and bytes of truth values count as they are understood."""
    if isinstance(one, Tensor):
        if not isinstance(other, Tensor) or (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        if one.dtype == torch.bool:
            one, other = one.view(torch.uint8) != 0, other.view(torch.uint8) != 0
        if one.is_floating_point() and one.element_size() > 1:
            return bool(((one == other) | (one.isnan() & other.isnan())).all())
        return torch.equal(_bytes(one), _bytes(other))
    if isinstance(one, dict):
        return (
            isinstance(other, dict) and one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
        )
    return bool(one == other)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0)


class Subject(ABC):
    """Something that nearplane reads.

    Args:
        name: format, a row of the table.
        folder: the files as they were written; they are copied before each mutation.
    """

    BYTES = 2  # of memory that each byte of the files may take

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.expected: dict[str, Any] = {}

    def room(self, folder: Path) -> int:
        """Return the bytes that reading a copy may take beside those of reading the files as they were."""
        sizes = [sum(path.stat().st_size for path in each.rglob("*") if path.is_file()) for each in (self.folder, folder)]
        return self.BYTES * max(sizes)

    @abstractmethod
    def readers(self) -> dict[str, Callable[[Path], Any]]:
        """Return all that reads a folder, by name."""

    def drawn(self, rng: random.Random) -> list[str]:
        """Return the names of the readers of one mutation; of slow ones, one is drawn."""
        return list(self.readers())

    def mutate(self, folder: Path, rng: random.Random) -> Mutation:
        return mutations.mutate(folder, rng)

    @abstractmethod
    def judge(self, reader: str, result: Any, folder: Path, mutation: Mutation) -> str:
        """Return an entry of `GOOD` for the result of a reader, or what is wrong with it."""

    def counts(self, reader: str) -> bool:
        """Return whether the outcome of a reader is that of the mutation; others only add faults."""
        return True

    def prepare(self) -> None:
        """Read the files as they were written, with every reader."""
        self.expected = {name: read(self.folder) for name, read in self.readers().items()}


# ── folders of weights ──


def _dense(folder: Path) -> Weights:
    return dict(read_dense(folder))


def _source(folder: Path) -> Weights:
    reader = source_reader(folder, read_config(folder))
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
        return nearplane.load(folder, dtype=torch.float32, device="cpu")(TOKENS).logits


def _inspect(folder: Path) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        app(["inspect", str(folder)], result_action="return_value", exit_on_error=False)
    return out.getvalue()


def _faults(folder: Path) -> bool:
    return bool(nearplane.verify(folder).faults)


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
            "evaluate": lambda folder: asdict(nearplane.evaluate(folder, WINDOWS, device="cpu")),
        }  # fmt: skip
        if self.source:
            found["open_model"] = _blocks
        if self.loads:
            found["load"] = _logits
        if self.signed:
            found |= {"verify": _faults, "inspect": _inspect}
        if (self.folder / FILE).exists():
            found["header"] = lambda folder: asdict(read_header(folder / FILE))
            found["inspect alone"] = lambda folder: _inspect(folder / FILE)
        return found

    def drawn(self, rng: random.Random) -> list[str]:
        names = list(self.readers())
        network = rng.choice([name for name in names if name in NETWORKS])
        return [name for name in names if name not in NETWORKS or name == network]

    def counts(self, reader: str) -> bool:
        return reader in ("dense_network", "load", "open_model") or (reader == "read" and not self.signed)

    def judge(self, reader: str, result: Any, folder: Path, mutation: Mutation) -> str:
        expected, unchanged = self.expected[reader], _unchanged(self.folder, folder)
        if reader == "header":
            return RIGHT
        if reader == "verify":
            return RIGHT if result or unchanged else "verify finds nothing"
        if same(result, expected):
            return RIGHT
        text = mutation.file.endswith(".json")
        if self.signed and reader == "read" and not self.name.startswith(("gguf", "nearplane")):
            return _as_bytes_say(result, folder, whole=True)  # the other readers compare hashes before
        if self.signed:
            named = text and _named(folder)
            return NAMED if named else "other weights" if self.counts(reader) else "another result"
        if reader in ("evaluate", "inspect", "inspect alone"):
            return UNSURE
        if reader == "load":
            return self._loaded(result, folder)
        return _as_bytes_say(result, folder, whole=reader == "read")

    def _loaded(self, logits: Tensor, folder: Path) -> str:
        """Compare what transformers computes with a network of decoded weights."""
        try:
            weights = dense_network(folder)
        except nearplane.NearplaneError:
            return UNSURE
        with torch.no_grad():
            return AS_BYTES_SAY if same(logits, weights(TOKENS).logits) else "transformers computes something else"


def _unchanged(one: Path, other: Path) -> bool:
    """Return whether all files of two folders are the same."""
    paths = {path.name: path for path in other.iterdir()}
    return paths.keys() == {path.name for path in one.iterdir()} and all(
        path.is_file() and not path.is_symlink() and path.read_bytes() == (one / name).read_bytes()
        for name, path in paths.items()
    )


def _named(folder: Path) -> bool:
    """Return whether `verify` finds a fault, or refuses the folder."""
    try:
        return _faults(folder)
    except nearplane.NearplaneError:
        return True


def _as_bytes_say(weights: Weights, folder: Path, *, whole: bool) -> str:
    """Compare weights with what the files decode to; a network has them as float32, and may lack some or tie them."""
    try:
        expected = plain_formats.decoded(folder)
    except UnsureError:
        return UNSURE
    if whole and weights.keys() != expected.keys():
        return f"other tensors: {sorted(weights.keys() ^ expected.keys())[:3]}"
    for name, tensor in weights.items():
        tied = name == "lm_head.weight" and name not in expected
        raw = expected.get("model.embed_tokens.weight" if tied else name)
        if raw is None:
            return f"{name} is made up"
        values = torch.from_numpy(np.array(raw.values if whole else raw.floats()))
        values = values if whole else values.float()
        there = tensor.detach()
        if whole and raw.dtype == "BF16":
            there, values = there.float(), torch.from_numpy(raw.floats().copy())
        elif whole and there.dtype != values.dtype and there.numel():
            there = _bytes(there).view(values.dtype).reshape(there.shape)
        if not same(there, values):
            return f"{name} is not what its bytes say"
    return AS_BYTES_SAY


class LoneGGUF(Folder):
    """A GGUF without its folder; the hashes of one of ours are inside, one of another program has none."""

    def __init__(self, name: str, folder: Path, *, signed: bool) -> None:
        super().__init__(name, folder, signed=signed)

    def readers(self) -> dict[str, Callable[[Path], Any]]:
        def file(folder: Path) -> Path:
            return folder / ALONE

        found: dict[str, Callable[[Path], Any]] = {
            "dense_network": lambda folder: _network(source_folder(file(folder))), "load": lambda folder: _logits(file(folder)),
            "evaluate": lambda folder: asdict(nearplane.evaluate(file(folder), WINDOWS, device="cpu")),
            "evaluate a text": lambda folder: asdict(nearplane.evaluate(file(folder), CALIBRATION, samples=2, seqlen=16)),
        }  # fmt: skip
        return found | ({"inspect": lambda folder: _inspect(file(folder))} if self.signed else {})

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
    ends = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    parts = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    stem, _, end = name.rpartition(".")
    if stem in ends:
        return f"{ends[stem]}.{end}"
    _, _, block, part = stem.split(".", 3)
    return f"blk.{block}.{parts[part]}.{end}"


# ── the record ──


class Record(Subject):
    """nearplane.json, as `inspect`, `report` and `verify` read it."""

    def readers(self) -> dict[str, Callable[[Path], Any]]:
        def report(folder: Path) -> str:
            page = folder.with_name("page.html")
            page.unlink(missing_ok=True)
            return nearplane.write_report(folder, page).read_text()

        return {
            "record": lambda folder: read_record(folder).to_json(),
            "inspect": _inspect,
            "report": report,
            "verify": _faults,
        }

    def mutate(self, folder: Path, rng: random.Random) -> Mutation:
        if rng.random() < 0.5:
            return mutations.of_bytes(folder / RECORD, rng)
        done = mutations.edit(folder, rng, [RECORD])
        return Mutation(kind="metadata", file=done.file, what=done.what)

    def judge(self, reader: str, result: Any, folder: Path, mutation: Mutation) -> str:
        if reader == "verify":
            return NAMED if result else RIGHT if _unchanged(self.folder, folder) else "verify finds nothing"
        return RIGHT if same(result, self.expected[reader]) else NAMED if _named(folder) else "another record"


# ── texts, and coded matrices ──


class Texts(Subject):
    """A .txt or .jsonl file, which has no checksum: its tokens are those of the text that its bytes are."""

    BYTES = 250  # a letter may be a token, of which the tokenizer keeps the text, its place and five numbers

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name, folder)
        self.tokenizer = AutoTokenizer.from_pretrained(MODEL)

    def readers(self) -> dict[str, Callable[[Path], Any]]:
        return {
            "read_windows": lambda folder: read_windows(self.tokenizer, folder / self.name, samples=10**6, seqlen=16)
        }

    def mutate(self, folder: Path, rng: random.Random) -> Mutation:
        path = folder / self.name
        if self.name.endswith(".txt") or rng.random() < 0.4:
            return mutations.of_bytes(path, rng)
        lines = path.read_bytes().split(b"\n")
        place = rng.randrange(len(lines) - 1)
        row = json.loads(lines[place])
        if rng.random() < 0.3:
            kind = rng.choice(list(mutations.TEXT))
            lines[place], what = mutations.TEXT[kind](lines[place], rng), kind
        else:
            what = mutations.edit_json(row, rng)
            lines[place] = json.dumps(row, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
        path.write_bytes(b"\n".join(lines))
        return Mutation(kind="header", file=path.name, what=f"line {place}: {what}")

    def judge(self, reader: str, result: Any, folder: Path, mutation: Mutation) -> str:
        if same(result, self.expected[reader]):
            return RIGHT
        content = (folder / self.name).read_bytes().decode().replace("\r\n", "\n").replace("\r", "\n")
        texts = [content]
        if self.name.endswith(".jsonl"):
            texts = [json.loads(line)["text"] for line in content.split("\n") if line.strip()]
        ids: list[int] = []
        for text in texts:
            ids += [self.tokenizer.eos_token_id] if ids and self.tokenizer.eos_token_id is not None else []
            ids += self.tokenizer(text, add_special_tokens=False)["input_ids"]
        windows = len(ids) // 16
        return (
            AS_BYTES_SAY
            if result.tolist() == torch.tensor(ids[: 16 * windows]).view(windows, 16).tolist()
            else "other tokens"
        )


class Blob(Subject):
    """A coded matrix; half of the mutations come with checksums made right again."""

    def readers(self) -> dict[str, Callable[[Path], Any]]:
        return {"decode": lambda folder: _values(np.fromfile(folder / "blob", np.uint8))}

    def mutate(self, folder: Path, rng: random.Random) -> Mutation:
        done = mutations.of_bytes(folder / "blob", rng)
        if rng.random() < 0.5:
            return done
        mended(np.fromfile(folder / "blob", np.uint8)).tofile(folder / "blob")
        return Mutation(kind=done.kind, file="", what=f"{done.what}, checksums made right")

    def judge(self, reader: str, result: Any, folder: Path, mutation: Mutation) -> str:
        if same(result, self.expected[reader]):
            return RIGHT
        if mutation.file:
            return "other codes"
        _, codes, columns, rows = plain_reader.read((folder / "blob").read_bytes())
        expected = {"codes": codes, "columns": columns, "rows": rows}
        return (
            AS_BYTES_SAY
            if all(np.array_equal(result[name].numpy(), each) for name, each in expected.items())
            else "other codes"
        )


def _values(blob: np.ndarray) -> Weights:
    found = decode(blob, name="layer 7")
    from nearplane.formats.native import matrix_of

    matrix = matrix_of(found)
    return {"codes": matrix.codes.long(), "columns": matrix.grid.column_scale(), "rows": matrix.grid.row_scale()}


# ── a stopped run ──


class Journal(Subject):
    """OUT.unfinished: the same command goes on to the same bytes, or says why not."""

    WORDS: Mapping[str, Any] = dict(bits=4, group_size=16, solver="round-to-nearest", calibration=WINDOWS, device="cpu")

    def __init__(self, name: str, folder: Path, model: Path) -> None:
        super().__init__(name, folder)
        self.model = model

    def run(self, folder: Path) -> Weights:
        nearplane.quantize(self.model, folder / "out", **self.WORDS)
        return {
            name: tensor
            for path in sorted((folder / "out").glob("*.safetensors"))
            for name, tensor in load_file(path).items()
        }

    def prepare(self) -> None:
        """Run once without a stop."""
        whole = self.folder.with_name("whole")
        whole.mkdir()
        self.expected["quantize"] = self.run(whole)

    def readers(self) -> dict[str, Callable[[Path], Any]]:
        return {"quantize": self.run}

    def mutate(self, folder: Path, rng: random.Random) -> Mutation:
        unfinished = folder / "out.unfinished"
        journal = unfinished / "journal"
        paths = sorted(path for path in unfinished.rglob("*") if path.is_file() and path.stat().st_size)
        match rng.choice(("state", "state", "refitted", "any", "gone")):
            case "state":
                done = mutations.edit(journal, rng, ["state.json"])
                return Mutation(kind="metadata", file=done.file, what=done.what)
            case "refitted":
                path = rng.choice(sorted(journal.glob("*.pt")))
                done = mutations.of_bytes(path, rng)
                state = json.loads((journal / "state.json").read_text())
                state["pages"][path.name] = nearplane.system.files.sha256(path)
                (journal / "state.json").write_text(json.dumps(state))
                return Mutation(kind=done.kind, file="", what=f"{path.name}: {done.what}, its hash made right")
            case "gone":
                path = rng.choice(paths)
                path.unlink()
                return Mutation(kind="files", file=path.name, what="missing")
        path = rng.choice(paths)
        return mutations.of_bytes(path, rng)

    def judge(self, reader: str, result: Any, folder: Path, mutation: Mutation) -> str:
        if same(result, self.expected[reader]):
            return RIGHT
        return UNSURE if not mutation.file else "other weights"


# ── all of them ──


def subjects(place: Path) -> list[Subject]:
    """Write tiny models in every format, and all else that is read."""
    models = {
        "llama": ("llama", ONE_BLOCK | dict(attention_bias=False)), "wide": ("llama", WIDE), "experts": ("qwen3_moe", EXPERTS),
        "two blocks": ("llama", ONE_BLOCK | dict(num_hidden_layers=2)), "gpt_oss": ("gpt_oss", GPT_OSS),
    }  # fmt: skip
    for name, (kind, sizes) in models.items():
        if name in ("llama", "wide"):  # with a tokenizer, which a GGUF holds
            tokenizer = over_bytes("gpt-2", 300)
            sizes |= dict(vocab_size=tokenizer.get_vocab_size())
            PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(
                place / "models" / name
            )
        random_model(config_of(kind, **sizes)).float().save_pretrained(place / "models" / name)
    signed: dict[str, tuple[str, dict[str, Any]]] = {
        "compressed-tensors": ("llama", dict(bits=4, group_size=16)),
        "compressed-tensors, mixed": ("llama", dict(bits=3.5, group_size=16)),
        "mxfp4": ("llama", dict(grid="mxfp4")),
        "gptq": ("llama", dict(bits=4, group_size=16, format="gptq")),
        "gptq_v2": ("llama", dict(bits=2, group_size=16, symmetric=False, format="gptq_v2")),
        "nearplane": ("llama", dict(rate=3.0, include_embeddings=True, include_head=True)),
        "nearplane, experts": ("experts", dict(rate=3.0)),
        "gguf, q4_0": ("llama", dict(grid="q4_0")),
        "gguf, q8_0": ("llama", dict(grid="q8_0", embeddings="q8_0")),
        "gguf, k-quants": ("wide", dict(grid="q4_k_m")),
        "gguf, experts": ("experts", dict(grid="q4_0")),
    }
    found: list[Subject] = []
    for name, (model, words) in signed.items():
        folder = place / "signed" / name
        nearplane.quantize(
            place / "models" / model, folder, calibration=WINDOWS, solver="round-to-nearest", device="cpu", **words
        )
        found.append(Folder(name, folder, signed=True))
        if name in ("compressed-tensors", "mxfp4", "gptq", "gptq_v2"):
            foreign = Path(shutil.copytree(folder, place / "foreign" / name))
            (foreign / RECORD).unlink()
            found.append(Folder(f"{name}, unsigned", foreign))
    for name in ("q4_0", "k-quants"):
        content = (place / "signed" / f"gguf, {name}" / FILE).read_bytes()
        parts = mutations.GGUF.of(content)
        parts.keys = [key for key in parts.keys if not key[0].startswith(b"nearplane.")]
        for title, file in ((f"gguf alone, {name}", content), (f"gguf alone, {name}, unsigned", parts.joined())):
            (place / title).mkdir()
            (place / title / ALONE).write_bytes(file)
            found.append(LoneGGUF(title, place / title, signed=file is content))
    found.append(
        Folder(
            "compressed-tensors, asymmetric, unsigned",
            _asymmetric(place / "models" / "llama", place / "asymmetric"),
            loads=False,
        )
    )
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        title = str(dtype).removeprefix("torch.")
        folder = place / "sources" / title
        rows = 2**15 if dtype is torch.float32 else 96  # 8 MB, beside which twice the file is more than what is spare
        random_model(config_of("llama", **(ONE_BLOCK | dict(vocab_size=rows)))).to(dtype).save_pretrained(
            folder, max_shard_size=f"{rows // 4}KB"
        )
        found.append(Folder(f"source, {title}", folder, source=True))
    found.append(
        Folder(
            "source, 8 bits",
            _in_eight_bits(place / "models" / "llama", place / "sources" / "fp8"),
            source=True,
            loads=False,
        )
    )
    found.append(
        Folder(
            "source, 4 bits",
            _in_four_bits(place / "models" / "gpt_oss", place / "sources" / "mxfp4"),
            source=True,
            loads=False,
        )
    )
    record = place / "record"
    shutil.copytree(place / "signed" / "nearplane", record)
    found.append(Record("run record", record))
    found.append(_stopped(place))
    found += [_texts(place / "texts", name) for name in ("text.txt", "text.jsonl")]
    for name, codes in (
        ("blob", gaussian(24, 40, 2.0, rows=0.5)[0]),
        ("blob, escapes", gaussian(8, 24, 8.5)[0]),
        ("blob, zeros", contents_of(np.zeros((2, 3), np.int64))),
    ):
        (place / name).mkdir()
        encode(codes).tofile(place / name / "blob")
        found.append(Blob(name, place / name))
    return found


def _asymmetric(source: Path, folder: Path) -> Path:
    """Write what other programs write: zero points, and groups of columns that are no neighbours."""
    shutil.copytree(source, folder)
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
    group_0 = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    _configure(folder, {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed", "ignore": ["lm_head"],
        "config_groups": {"group_0": group_0},
    })  # fmt: skip
    return folder


def _in_eight_bits(source: Path, folder: Path) -> Path:
    shutil.copytree(source, folder)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensors[name] = tensor.bfloat16()
        if name.endswith("_proj.weight"):
            tensors[name] = tensor.to(torch.float8_e4m3fn)
            factors = [-(-side // 24) for side in tensor.shape]
            tensors[f"{name}_scale_inv"] = 0.5 + torch.rand(factors, generator=torch.Generator().manual_seed(0))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    _configure(
        folder, {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [24, 24]}
    )
    return folder


def _in_four_bits(source: Path, folder: Path) -> Path:
    shutil.copytree(source, folder)
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


def _configure(folder: Path, quantization: Mapping[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}, indent=2))


def _stopped(place: Path) -> Journal:
    """Stop a run behind its first block."""
    import pytest

    from killing import stopped_behind

    journal = Journal("stopped run", place / "stopped", place / "models" / "two blocks")
    journal.folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nearplane.formats.journal_pages.MAX_JOURNAL_SHARE", float("inf"))
        stopped_behind(1, journal.model, journal.folder / "out", patch, **Journal.WORDS)
    return journal


def _texts(folder: Path, name: str) -> Texts:
    folder = folder / name.replace(".", "-")
    folder.mkdir(parents=True)
    text = CALIBRATION.read_text()[:3000]
    lines = [json.dumps({"text": part, "id": number}) for number, part in enumerate(text.split("\n\n")) if part]
    (folder / name).write_text(text if name.endswith(".txt") else "\n".join(lines) + "\n")
    return Texts(name, folder)
