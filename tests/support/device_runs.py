"""Runs of tiny models on a pretended GPU; as a command, the table of what each function of the package costs there.

python tests/support/device_runs.py            writes tests/data/device_traffic.json
python tests/support/device_runs.py --print    prints launches, synchronizations and copies of every function instead
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from safetensors.torch import load_file

import nearplane
from families import TEXT_VOCABULARY, add_tokenizer, config_of, random_model
from nearplane.record.record import RunRecord
from pretended import pretended
from traffic import Traffic

TABLE = Path(__file__).parents[1] / "data" / "device_traffic.json"
COMMAND = "python tests/support/device_runs.py"
TOKENS = torch.randint(3, TEXT_VOCABULARY, (12, 32), generator=torch.Generator().manual_seed(1))
WIDE = dict(hidden_size=64, head_dim=16, intermediate_size=256)  # blocks of llama.cpp's k-quants hold 256 weights

# family, its config where it is not the smallest, options of quantize
RUNS: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "grid": ("llama", {}, dict(bits=4, group_size=16)),
    "rate": ("llama", {}, dict(rate=3.0, allocate="uniform")),
    "gguf": ("llama", {}, dict(grid="q4_0")),
    "experts": ("mixtral", {}, dict(bits=4, group_size=16)),
    "k-quants": ("llama", WIDE, dict(grid="q4_k")),
    "nvfp4": ("llama", {}, dict(grid="nvfp4")),
    "slope": ("llama", {}, dict(rate=3.0, allocate="slope")),
    "ends": ("llama", {}, dict(rate=3.0, include_embeddings=True, include_head=True)),
    "parallel": ("llama", {}, dict(bits=4, group_size=16, true_sequential=False)),
    "inputs": ("llama", {}, dict(grid="int8-row", activations="int8")),
}
COUNTED = ("grid", "rate", "gguf", "experts")  # in the table
KEPT = ("synchronizations", "to_device", "to_device_bytes", "to_host", "to_host_bytes", "waiting")


def model_of(run: str) -> dict[str, Any]:
    """Return what the counts of a run depend on."""
    family, changes, options = RUNS[run]
    config = config_of(family, **changes)
    sizes = {name: getattr(config, name) for name in ("hidden_size", "intermediate_size")}
    return dict(family=family, **sizes, blocks=1, tokens="x".join(map(str, TOKENS.shape)), options=str(options))


def save_model(run: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write the model of a run: one block."""
    family, changes, _ = RUNS[run]
    config = config_of(family, vocab_size=TEXT_VOCABULARY, num_hidden_layers=1, **changes)
    random_model(config).to(dtype).save_pretrained(folder)
    add_tokenizer(folder)
    return folder


def quantized(run: str, model: Path, out: Path, device: str) -> RunRecord:
    """Quantize the model of a run on a device."""
    return nearplane.quantize(model, out, calibration=TOKENS, device=device, **RUNS[run][2])


def stored(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every tensor in a folder's files."""
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= {name: x.contiguous().view(torch.uint8).numpy().tobytes() for name, x in load_file(path).items()}
    for path in folder.glob("*.gguf"):
        found |= {tensor.name: tensor.data.tobytes() for tensor in GGUFReader(path).tensors}
    return found


def table_of(traffic: dict[str, Traffic]) -> dict[str, dict[str, int]]:
    """Return what is kept of the counts: functions that wait or copy, by name."""
    rows = {place: {name: asdict(one)[name] for name in KEPT if asdict(one)[name]} for place, one in traffic.items()}
    return {place: row for place, row in sorted(rows.items()) if row}


def counted(run: str) -> dict[str, Traffic]:
    """Quantize on a pretended GPU and return what every function of the package caused."""
    with tempfile.TemporaryDirectory() as place:
        model = save_model(run, Path(place) / "model")
        with pretended() as gpu:
            quantized(run, model, Path(place) / "out", "pretend:0")
        return gpu.traffic


def markdown(run: str, traffic: dict[str, Traffic]) -> str:
    """Return the counts of a run as a table, most launches first, with the sum."""
    names = ["launches", *KEPT]
    total = sum(traffic.values(), Traffic())
    rows = sorted(traffic.items(), key=lambda row: -row[1].launches)
    lines = [f"## {run}: {RUNS[run][0]} {RUNS[run][2]}", "", "| function | " + " | ".join(names) + " |"]
    lines.append("|---|" + "---:|" * len(names))
    for place, one in [("all", total), *rows]:
        lines.append(f"| {place} | " + " | ".join(f"{getattr(one, name):,}" for name in names) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the table, or print all counts."""
    torch.set_num_threads(1)
    runs = {run: counted(run) for run in COUNTED}
    if "--print" in sys.argv[1:]:
        print("\n".join(markdown(run, traffic) for run, traffic in runs.items()))
        return
    about = (
        f"Written by `{COMMAND}`. What each function of the package costs on a GPU in one run: values and sizes that the CPU "
        "waits for, copies with their bytes, and copies that the CPU waits for. All of it grows with the model."
    )
    data = dict(about=about, models={run: model_of(run) for run in runs})
    data["functions"] = {run: table_of(traffic) for run, traffic in runs.items()}
    text = re.sub(
        r"\{\s+([^{}]*[^{}\s])\s+\}", lambda row: "{" + re.sub(r"\s+", " ", row[1]) + "}", json.dumps(data, indent=1)
    )
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(text + "\n")


if __name__ == "__main__":
    main()
