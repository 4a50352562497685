"""Loads changed copies of an entropy-coded folder by vLLM's own loader, without an engine, and prints what became of each.

    python vllm_loader.py FOLDER COUNT

A line of JSON for each copy: what was changed, and "right", "wrong", or the error. Run as a program by tests.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

CODED = ".weight_coded"
OUTSIDE = ("/proc", "/sys", "/dev", "/etc")  # what libraries ask about the machine


def changed(tensors: dict[str, Tensor], number: int) -> tuple[str, dict[str, Tensor]]:
    """Return what is changed and the tensors of a changed file; `number` decides."""
    rng = random.Random(number)
    name = rng.choice(sorted(each for each in tensors if each.endswith(CODED)))
    other = rng.choice(sorted(each for each in tensors if each.endswith(CODED) and kind_of(each) != kind_of(name)))
    data, place = tensors[name].clone(), rng.randrange(tensors[name].numel())
    kinds = {
        "a bit": lambda: data.__setitem__(place, data[place] ^ 1 << rng.randrange(8)),
        "some bytes": lambda: data[place : place + 9].random_(256, generator=torch.Generator().manual_seed(number)),
    }
    parts = {
        "cut": data[:place],
        "longer": torch.cat([data, data[: 1 + place % 7]]),
        "of another layer": tensors[other],
        "int8": data.view(torch.int8),
        "float32": data.float(),
        "two rows": data[: data.numel() // 2 * 2].reshape(2, -1),
    }
    kind = rng.choice([*kinds, *kinds, *kinds, *parts, "left out", "a weight beside it"])
    if kind in kinds:
        kinds[kind]()
        same = torch.equal(data, tensors[name])
        return f"{kind} of {name}{' (the same)' * same}", tensors | {name: data}
    if kind == "left out":
        return f"{name} left out", {key: value for key, value in tensors.items() if key != name}
    if kind == "a weight beside it":
        beside = name.removesuffix(CODED) + ".weight"
        return f"{beside} beside it", tensors | {beside: torch.zeros(4, 4)}
    return f"{name} {kind}", tensors | {name: parts[kind].contiguous().clone()}


def opened(file: Any) -> str:
    """Return the path of what is opened, without links and dots; of a number, which was opened before, one inside."""
    return OUTSIDE[0] if isinstance(file, int) else os.path.realpath(os.fsdecode(file))


def kind_of(name: str) -> str:
    """Return the first of the matrices of a block that have its shape: to a loader they are as good."""
    last = name.removesuffix(CODED).rpartition(".")[2]
    return {"o_proj": "q_proj", "v_proj": "k_proj", "up_proj": "gate_proj"}.get(last, last)


def loaded(folder: Path) -> Any:
    """Return the network that vLLM's loader makes of a folder."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    torch.accelerator.empty_cache = lambda: None  # as vLLM's worker for CPUs does
    options = EngineArgs(str(folder), dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=2)
    config = options.create_engine_config()
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, (folder / "rendezvous").as_uri(), 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
        return get_model(vllm_config=config)


def weights(network: Any) -> dict[str, Tensor]:
    """Return the decoded weights of all coded layers."""
    return {name: part.weight for name, part in network.named_modules() if getattr(part, "holds_codes", False)}


def outcomes(folder: Path, count: int) -> Iterator[dict[str, Any]]:
    """Yield what became of each changed copy."""
    read = set[str]()
    (file,) = folder.glob("*.safetensors")
    with tempfile.TemporaryDirectory() as place:
        place = os.path.realpath(place)
        copy = shutil.copytree(folder, Path(place, "copy"))
        right, tensors = weights(loaded(copy)), load_file(file)
        inside = (place, *OUTSIDE, sys.prefix, sys.base_prefix)
        sys.addaudithook(
            lambda event, given: event == "open" and not opened(given[0]).startswith(inside) and read.add(str(given[0]))
        )
        for number in range(count):
            change, now = changed(tensors, number)
            save_file(now, copy / file.name, {"format": "pt"})
            read.clear()
            try:
                found = weights(loaded(copy))
                same = found.keys() == right.keys() and all(torch.equal(found[name], right[name]) for name in right)
                became = "right" if same else "wrong"
            except Exception as error:
                became = f"{type(error).__name__}: {error}"
            yield {"change": change, "became": became, "read": sorted(read)}


if __name__ == "__main__":
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    for line in outcomes(Path(sys.argv[1]), int(sys.argv[2])):
        print(f"OUTCOME {json.dumps(line)}", flush=True)
