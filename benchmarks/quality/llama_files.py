"""GGUF files by llama.cpp's own quantizer: the original in F32, the importance matrix, and what `llama_quantize.py` makes of them.

The importance matrix is computed here, on the same windows as everything else: mean squares of the inputs of every layer, as
llama.cpp's own tool sums them. Embeddings and head stay F32, as in the files of ours that are compared.
"""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from nearplane.formats.gguf.architecture import architecture_of, tell
from nearplane.formats.gguf.gguf_container import EMBEDDING_TENSORS
from nearplane.formats.gguf.names import llama_names, rule_of
from nearplane.formats.gguf.tokenizer import vocabulary
from nearplane.system.safetensors_files import ShardReader

BATCH = 8
TYPES = {"q2_k": "Q2_K", "q2_k_m": "Q2_K", "mxfp4": "MXFP4_MOE"} | {
    f"q{bits}_k": f"Q{bits}_K_S" for bits in (3, 4, 5)
}  # llama.cpp's names
PURE = (
    "q4_0",
    "iq4_nl",
    "iq4_xs",
    "mxfp4",
    "q5_0",
    "q8_0",
    "q2_k",
    "q3_k",
    "q4_k",
    "q5_k",
    "q6_k",
)  # the same type in every layer


class Original:
    """A network in float32, and llama.cpp's names of its tensors."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.network: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.config = self.network.config.to_dict()
        self.reader = ShardReader(folder)
        self.names = llama_names(self.reader.names(), self.config)

    def write(self, path: Path) -> None:
        """Write all tensors in F32; the matrices of a block's experts are one tensor."""
        heads, shared = self.config.get("num_attention_heads"), self.config.get("num_key_value_heads")
        fields = {"llama.attention.head_count": heads, "llama.attention.head_count_kv": shared or heads}
        fields["general.architecture"] = architecture_of(self.config).name
        parts: dict[str, list[Tensor]] = defaultdict(list)
        for name, new in sorted(self.names.items(), key=lambda pair: (pair[1], _expert(pair[0]))):
            values = self.reader.read([name])[name].float()
            parts[new].append(rule_of(new, fields, dims=values.dim()).into(values).contiguous())
        writer = gguf.GGUFWriter(path, fields["general.architecture"])
        tell(writer, self.config)
        vocabulary(self.folder, self.config["vocab_size"], None).write(writer, self.folder)
        for new, tensors in parts.items():
            writer.add_tensor(new, (torch.stack(tensors) if "_exps." in new else tensors[0]).numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    @torch.inference_mode()
    def imatrix(self, windows: Tensor) -> dict[str, Tensor]:
        """Return the mean square of every input of every layer; of experts one after the other."""
        sums: dict[str, Tensor] = {}
        counts: dict[str, Tensor] = {}
        hooks = []

        def add(key: str, squares: Tensor, tokens: Tensor) -> None:
            sums[key] = sums.get(key, torch.zeros(())) + squares
            counts[key] = counts.get(key, torch.zeros(())) + tokens

        def watch_layer(key: str, inputs: Tensor) -> None:
            rows = inputs.flatten(0, -2).double()
            add(key, rows.square().sum(0), torch.tensor(len(rows)))

        def watch_experts(block: str, experts: Any, rows: Tensor, chosen: Tensor) -> None:
            tokens = torch.stack([(chosen == expert).any(-1).sum() for expert in range(len(experts.down_proj))])[
                :, None
            ]
            inputs = [rows[(chosen == expert).any(-1)] for expert in range(len(experts.down_proj))]
            both = [(x @ W.T).chunk(2, -1) for x, W in zip(inputs, experts.gate_up_proj, strict=True)]
            inner = [experts.act_fn(gate) * up for gate, up in both]
            for part, each in (("gate", inputs), ("up", inputs), ("down", inner)):
                squares = torch.stack([x.double().square().sum(0) for x in each])
                add(f"{block}.ffn_{part}_exps.weight", squares, tokens)

        for name, new in self.names.items():
            path = name.rpartition(".")[0]
            block = new.rpartition(".ffn_")[0]
            if "_exps." in new and new.endswith("gate_exps.weight") and _expert(name) == 0:
                experts = self.network.get_submodule(path.partition(".experts.")[0] + ".experts")
                hook = lambda module, inputs, block=block: watch_experts(block, module, *inputs[:2])  # noqa: E731
                hooks.append(experts.register_forward_pre_hook(hook))
            elif new.startswith("blk.") and "_exps." not in new and self.reader.shape(name)[1:]:
                hook = lambda module, inputs, key=new: watch_layer(key, inputs[0])  # noqa: E731
                hooks.append(self.network.get_submodule(path).register_forward_pre_hook(hook))
        for batch in windows.split(BATCH):
            self.network(batch, use_cache=False)
        for hook in hooks:
            hook.remove()
        return {key: (value / counts[key].clamp(min=1)).flatten().float() for key, value in sums.items()}


def _expert(name: str) -> int:
    """Return the number of the expert in the name of a tensor; 0 of others."""
    return int(name.partition(".experts.")[2].partition(".")[0] or 0) if ".experts." in name else 0


def quantized(
    original: Original, windows: Tensor, settings: Sequence[str], python: Path, place: Path
) -> dict[str, Path]:
    """Let llama.cpp's own quantizer write a file for each type or mix, with the importance matrix of the windows."""
    source, weights = place / "f32.gguf", place / "imatrix.npz"
    original.write(source)
    np.savez(weights, **{key: value.numpy() for key, value in original.imatrix(windows).items()})
    files = {setting: place / f"{setting}.gguf" for setting in settings}
    jobs = [
        {
            "source": str(source), "out": str(out), "type": TYPES.get(setting, setting.upper()),
            "pure": setting in PURE, "imatrix": str(weights),
        }
        for setting, out in files.items()
    ]  # fmt: skip
    (place / "jobs.json").write_text(json.dumps(jobs))
    command = [python, Path(__file__).with_name("llama_quantize.py"), place / "jobs.json"]
    done = subprocess.run(command, env={"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr).strip()[-500:])
    return files


def matrices(path: Path) -> list[gguf.ReaderTensor]:
    """Return the matrices in blocks but those that choose experts."""
    tensors = [each for each in gguf.GGUFReader(path).tensors if each.name not in EMBEDDING_TENSORS]
    return [each for each in tensors if len(each.shape) > 1 and "ffn_gate_inp" not in each.name]


def rate(path: Path) -> tuple[float, int]:
    """Return bits per weight of the matrices in blocks, every byte counted, and the number of these weights."""
    found = matrices(path)
    weights = sum(int(each.n_elements) for each in found)
    return 8 * sum(int(each.n_bytes) for each in found) / weights, weights
