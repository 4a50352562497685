"""Our GGUF beside llama.cpp's own quantizer: same types, same bytes, same calibration text, KL of the decoded weights.

    python benchmarks/quality/gguf.py [ROWS.json] --llama PYTHON [--grids q4_k q4_k_m ...] [--tune] [--offsets 0 20000 ...]
        [--model FOLDER --calibration TXT --text TXT]
    python benchmarks/quality/gguf.py [ROWS.json] --parts [--grids q4_0 q4_k q3_k q2_k]

PYTHON is that of an environment with llama-cpp-python; without --model it is the demo's model on its own texts. Every file, of
theirs and of ours, is decoded by the `gguf` package, and its layers and norms are put into the original network in place of its
own; embeddings and head stay the original's. KL and perplexity are of the first windows of --text. Type and bytes of every layer
are compared. An offset is the letter of the calibration text with which it begins; the table shows means over offsets. With
--tune, ours is tuned too, by its defaults. With --parts instead: what ours is worth without some of its parts.

What is measured is added to ROWS.json, and what that holds already is not measured again, so that the command may be stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from nearplane import Calibration, Recipe, quantize, tune
from nearplane.demo import CALIBRATION, HELD_OUT, MODEL
from nearplane.formats.gguf.architecture import architecture_of, tell
from nearplane.formats.gguf.gguf_container import EMBEDDING_TENSORS
from nearplane.formats.gguf.gguf_header import FILE
from nearplane.formats.gguf.mixes import MIXES
from nearplane.formats.gguf.names import llama_names, rule_of
from nearplane.formats.gguf.tokenizer import vocabulary
from nearplane.models.kinds import Divergence, divergence
from nearplane.recipe.schemes import BlockScheme
from nearplane.system.safetensors_files import ShardReader

SEQLEN, BATCH = 256, 8
GRIDS = ("q4_0", "q4_k", "q3_k", "q2_k", "q5_k", "q6_k", "q8_0", *MIXES)
THEIRS = {"q2_k": "Q2_K", "q2_k_m": "Q2_K"} | {f"q{bits}_k": f"Q{bits}_K_S" for bits in (3, 4, 5)}


def windows_of(folder: Path, text: Path, count: int) -> Tensor:
    """Return the first (windows, SEQLEN) tokens of a text."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text.read_text(encoding="utf-8"), add_special_tokens=False, verbose=False)["input_ids"]
    count = min(count, len(ids) // SEQLEN)
    return torch.tensor(ids[: count * SEQLEN]).view(count, SEQLEN)


class File:
    """What a GGUF calls the tensors of a model, and what becomes of their values."""

    def __init__(self, folder: Path, network: PreTrainedModel) -> None:
        self.folder, self.config = folder, network.config.to_dict()
        self.reader = ShardReader(folder)
        self.names = llama_names(self.reader.names(), self.config)
        heads, shared = self.config.get("num_attention_heads"), self.config.get("num_key_value_heads")
        self.fields = {"llama.attention.head_count": heads, "llama.attention.head_count_kv": shared or heads}
        self.fields["general.architecture"] = architecture_of(self.config).name

    def dense(self, path: Path) -> None:
        """Write the original in F32."""
        import gguf

        writer = gguf.GGUFWriter(path, architecture_of(self.config).name)
        tell(writer, self.config)
        vocabulary(self.folder, self.config["vocab_size"], None).write(writer, self.folder)
        for name, new in self.names.items():
            values = self.reader.read([name])[name].float()
            writer.add_tensor(new, rule_of(new, self.fields, dims=values.dim()).into(values).contiguous().numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def layers(self, path: Path) -> dict[str, tuple[str, int, Tensor]]:
        """Return type, bytes and values of every matrix in blocks and every norm, by its name in the checkpoint."""
        import gguf

        back = {new: name for name, new in self.names.items()}
        found = {}
        for tensor in gguf.GGUFReader(path).tensors:
            if tensor.name in back and tensor.name not in EMBEDDING_TENSORS:
                values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()).float()
                rule = rule_of(tensor.name, self.fields, dims=len(tensor.shape))
                found[back[tensor.name]] = (tensor.tensor_type.name, int(tensor.n_bytes), rule.back(values))
        return found


@torch.inference_mode()
def imatrix(network: PreTrainedModel, tokens: Tensor, file: File, path: Path) -> None:
    """Write the mean square of the inputs of every layer, as llama.cpp's own tool sums it."""
    sums: dict[str, Tensor] = {}
    hooks = []
    for name, new in file.names.items():
        module = network.get_submodule(name.rpartition(".")[0])
        if new.startswith("blk.") and name.endswith("weight") and module.weight.dim() == 2:

            def watch(module: torch.nn.Module, inputs: tuple[Tensor, ...], key: str = new) -> None:
                sums[key] = sums.get(key, torch.zeros(())) + inputs[0].double().square().sum((0, 1))

            hooks.append(module.register_forward_pre_hook(watch))
    for batch in tokens.split(BATCH):
        network(batch, use_cache=False)
    for hook in hooks:
        hook.remove()
    np.savez(path, **{key: (value / tokens.numel()).float().numpy() for key, value in sums.items()})


class Measure:
    """KL and perplexity of other weights in the same network."""

    def __init__(self, network: PreTrainedModel, tokens: Tensor) -> None:
        self.network, self.tokens = network, tokens
        self.own = {name: value.clone() for name, value in network.state_dict().items()}
        self.expected = [self._predicted(batch) for batch in tokens.split(BATCH)]

    @torch.inference_mode()
    def _predicted(self, batch: Tensor) -> Tensor:
        return self.network(batch, use_cache=False).logits[:, :-1].float().log_softmax(-1)

    def of(self, weights: dict[str, Tensor]) -> tuple[float, float]:
        """Return KL(original || these), nats per token, and perplexity."""
        found, nll = Divergence(), 0.0
        self.network.load_state_dict(weights, strict=False)
        for batch, expected in zip(self.tokens.split(BATCH), self.expected, strict=True):
            predicted = self._predicted(batch)
            found += divergence(expected, predicted)
            nll -= float(predicted.gather(-1, batch[:, 1:, None]).double().sum())
        self.network.load_state_dict(self.own)
        return found.kl / found.tokens, math.exp(nll / found.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A model, what it is measured on, and what was measured so far.

    Args:
        options: of the command line.
        network: the original, in float32.
        file: what a GGUF calls its tensors.
        measure: of other weights in it.
        place: a folder for files that are thrown away.
        found: figures by (grid, offset).
    """

    options: argparse.Namespace
    network: PreTrainedModel
    file: File
    measure: Measure
    place: Path
    found: dict[tuple[str, int], dict[str, Any]]

    def known(self, grid: str, offset: int) -> dict[str, Any]:
        """Return the figures of a row, which may be none yet."""
        return self.found.get((grid, offset), {})

    def keep(self, grid: str, offset: int, figures: dict[str, Any]) -> None:
        """Note figures of a row, also in the file."""
        self.found[grid, offset] = self.known(grid, offset) | figures
        if (path := self.options.rows) is None:
            return
        rows = json.loads(path.read_text()) if path.exists() else []
        key = self.key(grid, offset)
        row = key | next((row for row in rows if key.items() <= row.items()), {}) | figures
        rows = [*(row for row in rows if not key.items() <= row.items()), row]
        new = path.with_suffix(".new")
        new.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
        new.replace(path)

    def key(self, grid: str, offset: int) -> dict[str, Any]:
        """Return what a row is of."""
        model = "demo" if self.options.model == MODEL else self.options.model.name
        return {"model": model, "grid": grid, "offset": offset}

    def text(self, offset: int) -> Path:
        """Return the calibration text from a letter on."""
        path = self.place / f"text-{offset}.txt"
        path.write_text(self.options.calibration.read_text(encoding="utf-8")[offset:], encoding="utf-8")
        return path

    def of(self, path: Path) -> dict[str, Any]:
        """Return bytes of layers, what tells whether those of two files are stored alike, and KL and perplexity of a file."""
        layers = self.file.layers(path)
        layout = {name: layer[:2] for name, layer in layers.items() if layer[2].dim() == 2}
        matrices = [layer for layer in layers.values() if layer[2].dim() == 2]
        kl, perplexity = self.measure.of({name: layer[2] for name, layer in layers.items()})
        return {
            "bytes": sum(layer[1] for layer in matrices),
            "weights": sum(layer[2].numel() for layer in matrices),
            "layout": f"{zlib.crc32(json.dumps(layout, sort_keys=True).encode()):08x}",
            "kl": float(f"{kl:.5g}"),
            "perplexity": round(perplexity, 4),
        }

    def theirs(self, offset: int) -> None:
        """Measure the files of llama.cpp's own quantizer that are asked for and were not yet."""
        grids = [grid for grid in self.options.grids if "imatrix" not in self.known(grid, offset)]
        if not grids or self.options.llama is None:
            return
        source, weights = self.place / "f32.gguf", self.place / f"imatrix-{offset}.npz"
        self.file.dense(source)
        tokens = windows_of(self.options.model, self.text(offset), self.options.samples)
        imatrix(self.network, tokens, self.file, weights)
        jobs = [
            {
                "source": str(source),
                "out": str(self.place / f"{grid}-{weighted}.gguf"),
                "type": THEIRS.get(grid, grid.upper()),
                "pure": grid not in MIXES,
                "imatrix": str(weights) if weighted else None,
            }
            for grid in grids
            for weighted in (False, True)
        ]
        (self.place / "jobs.json").write_text(json.dumps(jobs))
        quantizer = Path(__file__).with_name("llama_quantize.py")
        subprocess.run(
            [self.options.llama, quantizer, self.place / "jobs.json"], check=True, env={"OMP_NUM_THREADS": "1"}
        )
        for grid in grids:
            plain, weighted = (self.of(self.place / f"{grid}-{each}.gguf") for each in (False, True))
            self.keep(grid, offset, {"llama.cpp": plain, "imatrix": weighted})

    def ours(self, grid: str, offset: int) -> None:
        """Measure a file of ours, and tuned if that is asked for, where they were not yet."""
        wanted = {"ours", "tuned"} if self.options.tune else {"ours"}
        if wanted <= self.known(grid, offset).keys():
            return
        solved, seconds = self.quantized(grid, offset)
        self.keep(grid, offset, {"ours": self.of(solved / FILE) | {"seconds": seconds}})
        if self.options.tune:
            began, new = time.process_time(), self.place / "tuned"
            tune(solved, new, against=self.options.model, calibration=self.text(offset), overwrite=True)
            seconds = round(time.process_time() - began)
            self.keep(grid, offset, {"tuned": self.of(new / FILE) | {"seconds": seconds}})

    def parts(self, grid: str, offset: int) -> None:
        """Measure what ours is worth without some of its parts."""
        for name, own in PARTS.items():
            if name not in (had := self.known(grid, offset).get("parts", {})):
                solved, _ = self.quantized(grid, offset, **own)
                self.keep(grid, offset, {"parts": had | {name: self.of(solved / FILE)["kl"]}})

    def quantized(self, grid: str, offset: int, **own: Any) -> tuple[Path, int]:
        """Return a folder of ours, and CPU seconds."""
        recipe = Recipe(
            scheme=BlockScheme(grid, embeddings="f32", **own),
            calibration=Calibration(calibration=str(self.text(offset)), samples=self.options.samples, seqlen=SEQLEN),
        )
        began, solved = time.process_time(), self.place / "solved"
        quantize(str(self.options.model), solved, recipe, overwrite=True)
        return solved, round(time.process_time() - began)


PARTS: dict[str, dict[str, Any]] = {
    "rounded to nearest": {"solver": "round-to-nearest"},
    "error feedback alone": {"correct": False, "rounds": 0, "polish": 0},
    "feedback, correction": {"rounds": 0, "polish": 0},
    "feedback, correction, polish": {"rounds": 0},
    "feedback, refits, polish": {"correct": False},
    "all": {},
}
COLUMNS = {"llama.cpp": "llama.cpp", "imatrix": "with imatrix", "ours": "ours", "tuned": "tuned"}


def main() -> None:
    """Measure what is asked for, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, nargs="?")
    parser.add_argument("--llama", type=Path)
    parser.add_argument("--grids", nargs="+", default=GRIDS, choices=(*GRIDS, "q4_1", "q5_0", "q5_1"))
    parser.add_argument("--offsets", nargs="+", type=int, default=[0])
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--calibration", type=Path, default=CALIBRATION)
    parser.add_argument("--text", type=Path, default=HELD_OUT)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--windows", type=int, default=96)
    options = parser.parse_args()
    torch.set_num_threads(1)
    network = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(
            options=options,
            network=network,
            file=File(options.model, network),
            measure=Measure(network, windows_of(options.model, options.text, options.windows)),
            place=Path(scratch),
            found={},
        )
        rows = json.loads(options.rows.read_text()) if options.rows and options.rows.exists() else []
        for row in rows:
            if bench.key(row["grid"], row["offset"]).items() <= row.items():
                bench.found[row["grid"], row["offset"]] = row
        for offset in options.offsets:
            if not options.parts:
                bench.theirs(offset)
            for grid in options.grids:
                (bench.parts if options.parts else bench.ours)(grid, offset)
                print(f"# {grid}, {offset}: {json.dumps(bench.known(grid, offset))}", file=sys.stderr, flush=True)
        (table_of_parts if options.parts else table)(bench)


def table(bench: Bench) -> None:
    """Print means over offsets."""
    shown = [name for name in COLUMNS if all(name in row for row in _rows(bench))]
    share = ["share of the latter"] * ("imatrix" in shown) + ["CPU seconds"]
    shares = [f"{COLUMNS[name]}, {word}" for name in shown if name in ("ours", "tuned") for word in share]
    print(f"| grid | bits | bytes | {' | '.join([*(COLUMNS[name] for name in shown), *shares])} |")
    print(f"|{'---|' * (3 + len(shown) + len(shares))}")
    for grid in bench.options.grids:
        rows = [bench.known(grid, offset) for offset in bench.options.offsets]
        if len({row[name]["layout"] for row in rows for name in shown}) > 1:
            raise SystemExit(f"{grid}: layers are stored differently")
        size, weights = (rows[0]["ours"][name] for name in ("bytes", "weights"))
        kls = {name: [row[name]["kl"] for row in rows] for name in shown}
        cells = [f"{mean(kls[name]):.3e} ({mean(row[name]['perplexity'] for row in rows):.3f})" for name in shown]
        for name in ("ours", "tuned"):
            if name in shown and "imatrix" in shown:
                each = [ours / theirs for ours, theirs in zip(kls[name], kls["imatrix"], strict=True)]
                spread = f" ({min(each):.3f} to {max(each):.3f})" if len(each) > 1 else ""
                cells.append(f"**{mean(kls[name]) / mean(kls['imatrix']):.3f}**{spread}")
            if name in shown:
                cells.append(f"{mean(row[name]['seconds'] for row in rows):.0f}")
        print(f"| {grid} | {8 * size / weights:.4f} | {size:,} | {' | '.join(cells)} |", flush=True)


def table_of_parts(bench: Bench) -> None:
    """Print what ours is worth without some of its parts, means over offsets."""
    print(f"| grid | {' | '.join(PARTS)} |\n|{'---|' * (1 + len(PARTS))}")
    for grid in bench.options.grids:
        rows = [bench.known(grid, offset) for offset in bench.options.offsets]
        kls = {name: mean(row["parts"][name] for row in rows) for name in PARTS}
        theirs = mean(row["imatrix"]["kl"] for row in rows) if all("imatrix" in row for row in rows) else None
        cells = [f"{kl:.3e}" + ("" if theirs is None else f" ({kl / theirs:.2f})") for kl in kls.values()]
        print(f"| {grid} | {' | '.join(cells)} |", flush=True)


def _rows(bench: Bench) -> list[dict[str, Any]]:
    return [bench.known(grid, offset) for grid in bench.options.grids for offset in bench.options.offsets]


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, in which this very file has the name of the package
    main()
