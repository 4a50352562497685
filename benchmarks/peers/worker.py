"""One tool quantizes one model in its own environment, and says what that took; `run.py` and `tables.py` start this.

    python worker.py TOOL TASKS.json

TASKS is a list of tasks, which run one after the other. A task holds `model` and `warm` (folders; no `warm`: no first
run), `tokens` (safetensors with `windows`, (windows, seqlen)), `out` (folder to write), `bits`, `group_size`,
`symmetric`, `iterations` and `search` of the peers, instead of the first three a `scheme` of llm-compressor, of which
only weights are quantized, also by auto-round, or `schemes` of its own with the layers that have each, inputs
included, and `recipe`, the options of nearplane. GPTQModel and llm-compressor compute on `device` in `dtype`, or else
on the CPU in float32. A line of JSON is printed for each task: CPU seconds of the imports, of the first run (on the
model `warm`, which compiles what is compiled), of loading, quantizing and writing `model`; wall seconds of the same,
peak bytes; or `error`. Weights of llm-compressor and auto-round are written decoded, in float32, as they stand in
memory after the run; the files that these tools write themselves are in the folder `packed`.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace


def nearplane() -> Callable[[SimpleNamespace], None]:
    """Our own, by its defaults, on exactly the tokens given."""
    from nearplane import quantize

    def run(task: SimpleNamespace) -> None:
        quantize(task.model, task.out, calibration=_tokens(task), overwrite=True, **task.recipe)

    return run


def tuned() -> Callable[[SimpleNamespace], None]:
    """Our own with `tune`, on the same tokens or on more, with the steps of five times the windows of the run."""
    from nearplane import quantize, tune

    def run(task: SimpleNamespace) -> None:
        tokens, solved = _tokens(task), f"{task.out}-solved"
        record = quantize(task.model, solved, calibration=tokens[: task.solved], overwrite=True, **task.recipe)
        tune(solved, task.out, against=task.model, calibration=tokens, samples=5 * record.windows, overwrite=True)

    return run


def gptqmodel() -> Callable[[SimpleNamespace], None]:
    """GPTQModel, by its defaults, or with its search for steps."""
    from gptqmodel import GPTQModel, QuantizeConfig

    def run(task: SimpleNamespace) -> None:
        config = QuantizeConfig(
            bits=task.bits,
            group_size=task.group_size,
            sym=task.symmetric,
            format="gptq_v2",
            mse=task.search,
            device=getattr(task, "device", "cpu"),
        )
        model = GPTQModel.load(task.model, config, dtype=_dtype(task))
        model.quantize([{"input_ids": row[None], "attention_mask": row[None] * 0 + 1} for row in _tokens(task)])
        model.save(task.out)

    return run


def llmcompressor() -> Callable[[SimpleNamespace], None]:
    """llm-compressor's GPTQ with its default order, and the observer that searches steps."""
    import torch
    from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from transformers import AutoConfig, AutoModelForCausalLM

    def run(task: SimpleNamespace) -> None:
        model = AutoModelForCausalLM.from_pretrained(task.model, dtype=_dtype(task))
        rows = _tokens(task).tolist()
        data = Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]})
        if hasattr(task, "schemes"):
            oneshot(
                model=model,
                dataset=data,
                recipe=_of_parts(task),
                max_seq_length=len(rows[0]),
                num_calibration_samples=len(rows),
            )
            _save(model, task)
            model.save_pretrained(Path(task.out) / "packed", save_compressed=True)
            return
        if hasattr(task, "scheme"):
            weights = preset_name_to_scheme(task.scheme, ["Linear"]).weights.model_dump()
        else:
            form = {"type": "int", "strategy": "group"}
            weights = form | {"num_bits": task.bits, "symmetric": task.symmetric, "group_size": task.group_size}
        search = (
            "nvfp4_expanded_mse" if getattr(task, "scheme", "") == "NVFP4A16" else "memoryless_mse"
        )  # the best of all
        weights["observer"] = search if task.search else "memoryless_minmax"
        groups = {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}
        recipe = GPTQModifier(config_groups=groups, ignore=["lm_head"])
        length = len(rows[0])
        oneshot(model=model, dataset=data, recipe=recipe, max_seq_length=length, num_calibration_samples=len(rows))
        _save(model, task)
        stored = AutoConfig.from_pretrained(task.model).dtype or torch.float32  # of steps, in the file that it writes
        model.to(stored).save_pretrained(Path(task.out) / "packed", save_compressed=True)

    def _of_parts(task: SimpleNamespace) -> GPTQModifier:
        """Return a recipe by which parts of the network have schemes of their own, inputs included."""
        groups = {}
        for name, targets in task.schemes.items():
            scheme = preset_name_to_scheme(name, targets)
            search = "nvfp4_expanded_mse" if name == "NVFP4" else "memoryless_mse"
            weights = scheme.weights.model_dump() | {"observer": search if task.search else "memoryless_minmax"}
            groups[name] = QuantizationScheme(
                targets=targets, weights=weights, input_activations=scheme.input_activations
            )
        return GPTQModifier(config_groups=groups, ignore=["lm_head", "re:.*mlp.gate$"])

    return run


WEIGHTS_ALONE = {  # auto-round's words for schemes of llm-compressor; its own schemes of these formats round inputs too
    "NVFP4A16": {"bits": 4, "group_size": 16, "data_type": "nv_fp"},
    "MXFP4A16": {"bits": 4, "group_size": 32, "data_type": "mx_fp"},
    "W8A8": {"bits": 8, "group_size": -1, "data_type": "int"},
}


def autoround() -> Callable[[SimpleNamespace], None]:
    """auto-round, by its defaults: 200 iterations a block."""
    import torch
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def run(task: SimpleNamespace) -> None:
        model = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32)
        tokens = _tokens(task)
        if hasattr(task, "scheme"):
            grid = {"scheme": {"sym": True, "act_bits": 16, **WEIGHTS_ALONE[task.scheme]}}
        else:
            grid = {"bits": task.bits, "group_size": task.group_size, "sym": task.symmetric}
        tuned = AutoRound(
            model, AutoTokenizer.from_pretrained(task.model), **grid,
            iters=task.iterations, seqlen=tokens.shape[1], nsamples=len(tokens), device_map="cpu",
            dataset=[{"input_ids": part, "attention_mask": part * 0 + 1} for part in tokens.split(8)],
            enable_torch_compile=False, amp=False,
        )  # fmt: skip
        done, _ = tuned.quantize()
        _save(done, task)
        tuned.save_quantized(str(Path(task.out) / "packed"), format="auto_round")

    return run


def mlx_lm() -> Callable[[SimpleNamespace], None]:
    """mlx_lm's conversion, by its defaults but for embeddings and head, which stay as they are."""
    from mlx_lm.convert import convert

    def run(task: SimpleNamespace) -> None:
        shutil.rmtree(task.out, ignore_errors=True)
        grid = {"q_bits": task.bits, "q_group_size": task.group_size}
        convert(
            _for_mlx(task), task.out, quantize=True, **grid, quant_predicate=lambda path, _: "layers" in path.split(".")
        )

    return run


def mlx_gptq() -> Callable[[SimpleNamespace], None]:
    """mlx_lm's GPTQ of the same layers; it rounds the embeddings too, which are put back."""
    import mlx.core as mx
    from mlx_lm.quant.gptq import gptq_quantize
    from mlx_lm.utils import load, save

    def run(task: SimpleNamespace) -> None:
        model, tokenizer, config = load(_for_mlx(task), return_config=True)
        embeddings = model.model.embed_tokens
        grid = {"bits": task.bits, "group_size": task.group_size}
        fallback = {f"fallback_{name}": value for name, value in grid.items()}
        model, _ = gptq_quantize(model, mx.array(_tokens(task).numpy()), **grid, **fallback)
        model.model.embed_tokens = embeddings
        save(task.out, task.model, model, tokenizer, config | {"quantization": grid})

    return run


TOOLS = {
    "nearplane": nearplane, "nearplane tuned": tuned, "gptqmodel": gptqmodel, "llmcompressor": llmcompressor,
    "auto-round": autoround, "mlx_lm": mlx_lm, "mlx_lm gptq": mlx_gptq,
}  # fmt: skip


def _for_mlx(task: SimpleNamespace) -> str:
    """Return a copy of the model whose config names the base of rotary embeddings where mlx_lm looks for it.

    Of two kinds of layers, mlx_lm has the base of those that attend to nearby tokens alone as its default.
    """
    copy = f"{task.out}-source"
    shutil.copytree(task.model, copy, dirs_exist_ok=True)
    path = Path(copy) / "config.json"
    config = json.loads(path.read_text())
    rope = config["rope_parameters"]
    path.write_text(json.dumps(config | {"rope_theta": rope.get("full_attention", rope)["rope_theta"]}))
    return copy


def _dtype(task: SimpleNamespace):
    import torch

    return getattr(torch, getattr(task, "dtype", "float32"))


def _tokens(task: SimpleNamespace):
    from safetensors.torch import load_file

    return load_file(task.tokens)["windows"]


def _save(model, task: SimpleNamespace) -> None:
    """Write what the network computes with now beside the model's other files."""
    import torch
    from safetensors.torch import save_file

    out = Path(task.out)
    out.mkdir(parents=True, exist_ok=True)
    state = {
        name: x.float().contiguous() for name, x in model.state_dict().items() if name.endswith(("weight", "bias"))
    }
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    save_file({name: x.clone() for name, x in state.items() if x.dtype == torch.float32}, out / "model.safetensors")
    for path in Path(task.model).iterdir():
        if path.suffix == ".json":
            shutil.copy(path, out)


def _cpu() -> float:
    """Return CPU seconds of this process and of children that have ended, a compiler's say."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _peak() -> int:
    """Return the most bytes that this process had in memory; that of getrusage counts those of the parent that started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def main() -> None:
    """Import, and do one task after the other; a task that fails does not stop those after it."""
    tool, tasks = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    run = TOOLS[tool]()
    imports = _cpu()
    for task in tasks:
        spent = {"imports": imports}
        try:
            began = _cpu()
            if task["warm"]:
                run(SimpleNamespace(**{**task, "model": task["warm"], "out": task["out"] + "-warm"}))
            spent["first"] = _cpu() - began
            began, clock = _cpu(), time.perf_counter()
            run(SimpleNamespace(**task))
            spent |= {"cpu": _cpu() - began, "wall": time.perf_counter() - clock, "peak": _peak()}
        except Exception as error:  # tools raise anything; the caller decides what that means
            traceback.print_exc()
            spent = {"error": f"{type(error).__name__}: {error}"}
        print(f"\n{json.dumps(spent)}", flush=True)  # tools print lines without an end
    os._exit(0)  # tools leave threads behind that do not end


if __name__ == "__main__":
    main()
