"""Our GGUF beside llama.cpp's own quantizer: same types, same bytes, same calibration text, KL of the decoded weights.

    python benchmarks/gguf.py --llama PYTHON [--grids q4_k q4_k_m ...] [--model FOLDER --calibration TXT --text TXT]

PYTHON is that of an environment with llama-cpp-python; without --model it is the demo's model on its own texts. Every file, of
theirs and of ours, is decoded by the `gguf` package, and its layers are put into the original network in place of its own;
embeddings, norms and head stay the original's. KL and perplexity are of the first windows of --text. Type and bytes of every layer
are compared. With --parts instead: what ours is worth without some of its parts.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from nearplane import Calibration, Recipe, quantize
from nearplane.block_types import MIXES
from nearplane.demo import CALIBRATION, HELD_OUT, MODEL
from nearplane.divergence import Divergence, divergence
from nearplane.formats.gguf.architecture import architecture_of, called, rule_of, tell
from nearplane.formats.gguf.tokenizer import vocabulary
from nearplane.schemes import BlockScheme
from nearplane.shards import ShardReader

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
        self.names = called(self.reader.names(), self.config)
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
        """Return type, bytes and values of every matrix in blocks, by its name in the checkpoint."""
        import gguf

        back = {new: name for name, new in self.names.items()}
        found = {}
        for tensor in gguf.GGUFReader(path).tensors:
            if tensor.name.startswith("blk.") and len(tensor.shape) == 2:
                values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()).float()
                rule = rule_of(tensor.name, self.fields, dims=2)
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


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", type=Path, required="--parts" not in sys.argv)
    parser.add_argument("--grids", nargs="+", default=GRIDS, choices=(*GRIDS, "q4_1", "q5_0", "q5_1"))
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--calibration", type=Path, default=CALIBRATION)
    parser.add_argument("--text", type=Path, default=HELD_OUT)
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--windows", type=int, default=96)
    options = parser.parse_args()
    torch.set_num_threads(1)
    network = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    file, measure = (
        File(options.model, network),
        Measure(network, windows_of(options.model, options.text, options.windows)),
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if options.parts:
            _parts(options, measure, file, folder)
            return
        file.dense(folder / "f32.gguf")
        imatrix(network, windows_of(options.model, options.calibration, options.samples), file, folder / "imatrix.npz")
        jobs = [
            {
                "source": str(folder / "f32.gguf"),
                "out": str(folder / f"{grid}-{weighted}.gguf"),
                "type": THEIRS.get(grid, grid.upper()),
                "pure": grid not in MIXES,
                "imatrix": str(folder / "imatrix.npz") if weighted else None,
            }
            for grid in options.grids
            for weighted in (False, True)
        ]
        (folder / "jobs.json").write_text(json.dumps(jobs))
        quantizer = Path(__file__).with_name("llama_quantize.py")
        subprocess.run([options.llama, quantizer, folder / "jobs.json"], check=True, env={"OMP_NUM_THREADS": "1"})
        print("| grid | bits | bytes | llama.cpp | with imatrix | ours | share of the latter | CPU seconds |")
        print("|---|---|---|---|---|---|---|---|")
        for grid in options.grids:
            plain, weighted = (file.layers(folder / f"{grid}-{each}.gguf") for each in (False, True))
            began = time.process_time()
            ours = _quantized(options, grid, file, folder)
            seconds = time.process_time() - began
            layout = [{name: layer[:2] for name, layer in each.items()} for each in (plain, weighted, ours)]
            if not layout[0] == layout[1] == layout[2]:
                raise SystemExit(f"{grid}: layers are stored differently: {layout}")
            kls = [measure.of(_values(each)) for each in (plain, weighted, ours)]
            size = sum(layer[1] for layer in ours.values())
            bits = 8 * size / sum(layer[2].numel() for layer in ours.values())
            cells = [f"{kl:.3e} ({perplexity:.3f})" for kl, perplexity in kls]
            share = kls[2][0] / kls[1][0]
            print(
                f"| {grid} | {bits:.4f} | {size:,} | {' | '.join(cells)} | **{share:.3f}** | {seconds:.0f} |",
                flush=True,
            )


PARTS: dict[str, dict[str, Any]] = {
    "rounded to nearest": {"solver": "round-to-nearest"},
    "error feedback alone": {"correct": False, "rounds": 0, "polish": 0},
    "feedback, correction": {"rounds": 0, "polish": 0},
    "feedback, correction, polish": {"rounds": 0},
    "feedback, refits, polish": {"correct": False},
    "all": {},
}


def _parts(options: argparse.Namespace, measure: Measure, file: File, folder: Path) -> None:
    """Print what ours is worth without some of its parts."""
    print(f"| grid | {' | '.join(PARTS)} |\n|{'---|' * (1 + len(PARTS))}")
    for grid in options.grids:
        found = (measure.of(_values(_quantized(options, grid, file, folder, **own)))[0] for own in PARTS.values())
        print(f"| {grid} | {' | '.join(f'{kl:.3e}' for kl in found)} |", flush=True)


def _values(layers: dict[str, tuple[str, int, Tensor]]) -> dict[str, Tensor]:
    return {name: layer[2] for name, layer in layers.items()}


def _quantized(
    options: argparse.Namespace, grid: str, file: File, folder: Path, **own: Any
) -> dict[str, tuple[str, int, Tensor]]:
    """Return the layers of a file of ours."""
    recipe = Recipe(
        scheme=BlockScheme(grid, embeddings="f32", **own),
        calibration=Calibration(calibration=str(options.calibration), samples=options.samples, seqlen=SEQLEN),
    )
    quantize(str(options.model), folder / grid, recipe, overwrite=True)
    return file.layers(folder / grid / "model.gguf")


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, in which this very file has the name of the package
    main()
