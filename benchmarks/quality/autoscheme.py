"""What is left of a model whose layers have the bits that auto-round's AutoScheme chooses, untuned, and what it costs.

    ASSETS=... python benchmarks/quality/autoscheme.py --python PYTHON --model study --bits 3.625 4.625
    ASSETS=... python benchmarks/quality/autoscheme.py --python PYTHON --model FOLDER/smollm2 --samples 16 --windows 16
        --bits 3.75 4.75 [--widths 3 4 8]
    ASSETS=... python benchmarks/quality/autoscheme.py ... --bits 5.5 --options NVFP4 FP8_STATIC BF16

PYTHON is that of an environment with auto-round (0.16.1); a model is a name of `subjects.py`, or a folder that
tools/published_models.py made. AutoScheme scores every option on the calibration windows and chooses those of all
linear layers of the blocks; then auto-round rounds without training (`iters=0`, which is its opt-rtn: steps that are
searched, errors weighted by the squares of inputs). All in float32, on one thread. Bits are those stored for these
layers: of codes and of a step, 16 bits of a group of integers; AutoScheme's own count has a zero point in each group
too, which symmetric grids do not have. KL to the original is in nats a token, over the first held-out windows of each
text. The second average finds the scores of the first, and its search takes as long as the choice alone. `--options`
are presets of auto-round, and inputs are rounded too where they say so. A line of JSON for each average is printed,
the choice of each layer in it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import chain
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

ASSETS = Path(os.environ.get("ASSETS", "../shared/assets"))
STUDY = Path(__file__).parents[1] / "models" / "study"
NAME = "windows"  # of the calibration, among auto-round's data sets


def states(network: torch.nn.Module, windows: Tensor) -> Tensor:
    """Return what the head is given, (windows, seqlen, hidden)."""
    with torch.inference_mode():
        return torch.cat([network.base_model(each[None]).last_hidden_state.float() for each in windows])


@torch.inference_mode()
def divergences(original: Tensor, rounded: Tensor, head: Tensor) -> list[float]:
    """Return the mean KL per token of each window; the head is the same."""
    found = []
    for before, after in zip(original, rounded, strict=True):
        p, q = (torch.log_softmax(each @ head.T, -1) for each in (before, after))
        found.append(float((p.exp() * (p - q)).sum(-1).mean()))
    return found


def stored(scheme: dict[str, Any], inputs: int) -> float:
    """Return the bits of a weight with its share of a step."""
    if scheme["bits"] >= 16:
        return 16.0
    of_step = 8 if scheme["data_type"].startswith(("nv_fp", "mx_fp")) else 16
    group = scheme["group_size"]
    return scheme["bits"] + of_step / (group if group > 0 else inputs)


def search_and_round(task: SimpleNamespace) -> None:
    """Let AutoScheme choose and auto-round round, and write what the rounded network gives its head; in PYTHON."""
    import auto_round
    import transformers
    from auto_round import AutoRound, AutoScheme
    from auto_round.calib_dataset import register_dataset
    from datasets import Dataset

    tensors = load_file(task.tokens)
    windows = tensors.pop("calibration")

    @register_dataset(NAME)
    def read(*_: object, **__: object) -> Dataset:
        rows = windows.tolist()
        return Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]})

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32)
    shapes = {name: each.weight.shape for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)}
    count, seqlen = windows.shape
    scheme = AutoScheme(
        avg_bits=task.target, options=task.options, ignore_scale_zp_bits=task.codes_alone, nsamples=count,
        seqlen=seqlen, low_cpu_mem_usage=False,
    )  # fmt: skip
    began = time.process_time()
    rounder = AutoRound(
        model, AutoTokenizer.from_pretrained(task.model), scheme=scheme, iters=0, nsamples=count, seqlen=seqlen,
        dataset=NAME, device_map="cpu", enable_torch_compile=False, amp=False, low_cpu_mem_usage=False,
    )  # fmt: skip
    rounder.post_init()
    searched = time.process_time()
    network, _ = rounder.quantize()
    ended = time.process_time()
    chosen = {name: each for name, each in rounder.layer_config.items() if name in shapes and name != "lm_head"}
    assert chosen.keys() == shapes.keys() - {"lm_head"}, "all layers of blocks, and no other"
    network = network.float().eval()
    save_file({name: states(network, each).contiguous() for name, each in tensors.items()}, task.states)
    weights = {name: shapes[name].numel() for name in chosen}
    bits = {name: stored(each, shapes[name][1]) for name, each in chosen.items()}
    kinds = {name: f"{each['data_type']}{each['bits']}" for name, each in chosen.items()}
    print()
    print(
        json.dumps(
            {
                "versions": {each.__name__: each.__version__ for each in (auto_round, torch, transformers)},
                "bits": sum(weights[name] * bits[name] for name in chosen) / sum(weights.values()),
                "layers": dict(Counter(kinds.values())),
                "weights": {
                    kind: sum(n for name, n in weights.items() if kinds[name] == kind) for kind in kinds.values()
                },
                "inputs_rounded": sum(type(each).__name__ == "WrapperWALayer" for each in network.modules()),
                "search_cpu": searched - began,
                "quantize_cpu": ended - searched,
                "chosen": kinds,
            }
        ),
        flush=True,
    )
    os._exit(0)  # auto-round leaves threads behind


def main() -> None:
    """Print a line for each average."""
    if sys.argv[1:2] == ["--task"]:
        search_and_round(SimpleNamespace(**json.loads(sys.argv[2])))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True)
    parser.add_argument("--model", default="study")
    parser.add_argument("--bits", nargs="+", type=float, required=True)
    parser.add_argument("--widths", nargs="+", type=int, default=[3, 4, 8])
    parser.add_argument("--options", nargs="+", help="instead of integers")
    parser.add_argument("--samples", type=int, help="calibration windows; default: all")
    parser.add_argument("--windows", type=int, help="held-out windows of each text; default: all")
    asked = parser.parse_args()
    from subjects import published_subject, subjects

    torch.set_num_threads(1)
    place = Path(asked.model)
    subject = published_subject(place, ASSETS) if place.is_dir() else subjects(ASSETS, STUDY, None)[asked.model]
    group = subject.group_size
    named = "" if group == 128 else f"G{group}"
    options = asked.options or [f"W{width}A16{named}" for width in asked.widths]
    held_out = {name: each[: asked.windows] for name, each in subject.held_out.items()}
    original = AutoModelForCausalLM.from_pretrained(subject.folder, dtype=torch.float32).eval()
    before = {name: states(original, each) for name, each in held_out.items()}
    head = original.get_output_embeddings().weight.detach()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        tokens = {"calibration": subject.calibration(0)[: asked.samples], **held_out}
        save_file({name: each.clone() for name, each in tokens.items()}, scratch / "tokens")
        known = {"OMP_NUM_THREADS": "1", "AR_DISABLE_DATASET_SUBPROCESS": "1", "HF_HUB_OFFLINE": "1"}
        known |= {"AR_AUTO_SCHEME_CACHE": str(scratch / "scores"), "HF_DATASETS_CACHE": str(scratch / "sets")}
        for bits in asked.bits:
            task = {
                "model": str(subject.folder.absolute()), "tokens": str(scratch / "tokens"),
                "states": str(scratch / "states"), "options": options, "codes_alone": not asked.options,
                "target": bits if asked.options else bits - 16 / group,
            }  # fmt: skip
            command = [asked.python, str(Path(__file__).absolute()), "--task", json.dumps(task)]
            run = subprocess.run(command, env=os.environ | known, cwd=scratch, stdout=subprocess.PIPE, text=True)
            if run.returncode:
                raise SystemExit(run.stdout[-3000:])
            row = json.loads(run.stdout.splitlines()[-1])
            after = load_file(scratch / "states")
            kls = {name: divergences(before[name], after[name], head) for name in held_out}
            row = {
                "model": subject.name, "options": options, "asked": bits, "kl": mean(chain(*kls.values())),
                **{f"kl_{name}": mean(each) for name, each in kls.items()}, **row,
            }  # fmt: skip
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
