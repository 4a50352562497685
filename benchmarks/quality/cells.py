"""What the tables of quality measure: tools with their environments, settings, and the order of all cells.

A batch is a model, a tool, a calibration and several settings, which one process quantizes one after the other. All tools get the
same tokens and nothing else. Models and texts are in `subjects.py`.
"""

from __future__ import annotations

import math
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from llama_files import Original, matrices, quantized, rate
from rows import Row
from safetensors import safe_open
from safetensors.torch import save_file
from subjects import Subject
from torch import Tensor
from transformers import PreTrainedModel

from nearplane import evaluate
from nearplane.errors import NearplaneError
from nearplane.loading.dense_network import dense_network
from nearplane.record.record_file import read_record
from nearplane.system.safetensors_files import ShardReader
from nearplane.verbs.evaluation_result import Evaluation

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks" / "peers"))
from run import ITERATIONS, one_block, recipe_of, run_tasks  # noqa: E402

GRIDS, RATES = ("4", "3", "2"), ("3.125", "2.125", "1.5")
SCHEMES = {  # scheme of llm-compressor with the same weights
    "nvfp4": "NVFP4A16", "mxfp4": "MXFP4A16", "fp8": "FP8_DYNAMIC", "fp8-block": "FP8_BLOCK", "mxfp8": "MXFP8A16",
    "int8": "W8A8",
}  # fmt: skip
WIDTHS = {  # bits, and whether symmetric
    "4": (4, True), "3": (3, False), "2": (2, False), "4-asymmetric": (4, False), "3-symmetric": (3, True),
    "2-symmetric": (2, True),
}  # fmt: skip
MLX = ("mlx2", "mlx3", "mlx4", "mlx5", "mlx6", "mlx8")  # the digit is the number of bits
MORE = 5  # times the tokens of a calibration, by default those of `tune`
ON_MORE = ", 5 x tokens"
TOOLS = {  # function of worker.py, environment, search for steps
    "nearplane": ("nearplane", None, 0.0),
    "nearest": ("nearplane", None, 0.0),
    "GPTQModel": ("gptqmodel", "gptqmodel", 0.0),
    "llm-compressor": ("llmcompressor", "llmcompressor", 0.0),
    "auto-round": ("auto-round", "auto-round", 0.0),
    "llama.cpp": ("llama.cpp", None, 0.0),
    "nearplane tuned": ("nearplane tuned", None, 0.0),
    "GPTQModel, mse": ("gptqmodel", "gptqmodel", 2.4),
    "llm-compressor, mse": ("llmcompressor", "llmcompressor", 1.0),
    f"nearplane tuned{ON_MORE}": ("nearplane tuned", None, 0.0),
    f"llm-compressor{ON_MORE}": ("llmcompressor", "llmcompressor", 0.0),
    f"llm-compressor, mse{ON_MORE}": ("llmcompressor", "llmcompressor", 1.0),
    "mlx_lm": ("mlx_lm", "mlx", 0.0),
    "mlx_lm, gptq": ("mlx_lm gptq", "mlx", 0.0),
}
SLOW = ("auto-round", "nearplane tuned")  # they train
NEAREST = {"nearest": {"solver": "round-to-nearest"}}  # options of nearplane by tool
STEPS = ("scales", "weight_scale")  # names of a layer's steps in the files of peers


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Settings that one process measures."""

    model: str
    tool: str
    calibration: int
    settings: tuple[str, ...]


def plan(models: dict[str, Subject]) -> Iterator[Batch]:
    """Yield all batches, the most important first."""
    large = [name for name in models if name in ("study", "demo")]
    small = [name for name in models if name not in large]
    peers = ("nearplane", "llm-compressor", "GPTQModel")

    def batches(names: Sequence[str], tools: Sequence[str], calibrations: range, *settings: str) -> Iterator[Batch]:
        for calibration in calibrations:
            for name in names:
                for tool in tools:
                    yield Batch(model=name, tool=tool, calibration=calibration, settings=settings)

    def sizes(names: Sequence[str], calibrations: range) -> Iterator[Batch]:
        for name in names:
            yield from batches([name], ["nearplane"], calibrations, *RATES, *models[name].mixes)
            if models[name].mixes:
                yield from batches([name], ["llama.cpp"], calibrations, *models[name].mixes)

    def trained(names: Sequence[str]) -> Iterator[Batch]:
        for name in names:
            for setting in GRIDS:
                yield from batches([name], SLOW, range(models[name].trained), setting)

    yield from batches(large, peers, range(3), *GRIDS)
    yield from sizes(large, range(3))
    yield from batches(large, peers, range(3, 10), "4")
    yield from trained(large)
    yield from batches(small, peers, range(1), *GRIDS)
    yield from sizes(small, range(1))
    yield from trained(small)
    yield from batches(large, ("GPTQModel, mse", "llm-compressor, mse"), range(3), *GRIDS)


def chosen(
    models: dict[str, Subject], tools: Sequence[str], numbers: Sequence[int], settings: Sequence[str]
) -> list[Batch]:
    """Return batches of any settings, for the tools that take them."""

    def takes(tool: str, setting: str) -> bool:
        ours = tool == "nearest" or tool.startswith("nearplane")
        if setting in WIDTHS:
            return tool != "llama.cpp" and not tool.startswith("mlx_lm")
        if setting in SCHEMES:
            trains = tool == "auto-round" and setting in ("nvfp4", "mxfp4", "int8")
            packs = tool == "llama.cpp" and setting == "mxfp4"
            return ours or trains or packs or tool.startswith("llm-compressor")
        if setting in MLX:
            return ours or tool == "mlx_lm" or (tool == "mlx_lm, gptq" and setting in ("mlx2", "mlx4", "mlx8"))
        return tool.startswith("nearplane") or (tool == "llama.cpp" and not setting[0].isdigit())

    batches = [
        Batch(model=name, tool=tool, calibration=number, settings=tuple(each for each in settings if takes(tool, each)))
        for name in models
        for number in numbers
        for tool in tools
    ]
    return [batch for batch in batches if batch.settings]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Where cells are measured.

    Args:
        peers: Folder of the environments of peers.
        llama: Python of an environment with llama-cpp-python.
        core: Core on which tools run.
        place: Folder for files that are thrown away.
        options: Options of nearplane beside the setting.
        iterations: Of auto-round, for each block.
    """

    peers: Path
    llama: Path
    core: int
    place: Path
    options: dict[str, Any]
    iterations: int = ITERATIONS

    def python(self, tool: str) -> Path:
        """Return the Python of a tool.

        Raises:
            SystemExit: There is none.
        """
        function, environment, _ = TOOLS[tool]
        python = Path(sys.executable) if environment is None else self.peers / environment / "bin" / "python"
        python = self.llama if function == "llama.cpp" else python
        if not python.exists():
            sys.exit(
                f"{python} is not there, in which {tool} should run. Let make bench-tables make it, or choose --tools."
            )
        return python

    def label(self, tool: str) -> str:
        """Return the name of a tool in the rows, with the options."""
        if tool == "auto-round" and self.iterations != ITERATIONS:
            return f"{tool}, {self.iterations} iterations"
        return tool + "".join(f", {name}={value}" for name, value in self.options.items())

    def measure(self, subject: Subject, batch: Batch) -> Iterator[Row]:
        """Quantize by the settings of a batch, and yield a row for each."""
        function = TOOLS[batch.tool][0]
        python = self.python(batch.tool)
        key = {
            "model": subject.name, "sha": subject.sha, "text": subject.digest(batch.calibration),
            "tool": self.label(batch.tool),
            "calibration": batch.calibration, "samples": subject.samples, "commit": commit(), "version": version(python, function),
        }  # fmt: skip
        windows = subject.calibration(batch.calibration, MORE if batch.tool.endswith(ON_MORE) else 1)
        if function == "llama.cpp":
            results = self._by_llama(subject, windows, batch.settings, python)
        else:
            results = self._by_worker(subject, windows, batch, python)
        for setting, (out, spent) in zip(batch.settings, results, strict=True):
            began = time.process_time()
            rounded = "activations" in self.options
            figures = {"error": spent["error"]} if "error" in spent else scores(subject, out, spent["cpu"], rounded)
            if "peak" in spent and "error" not in figures:
                figures["peak"] = spent["peak"]
            took = round(time.process_time() - began, 1)
            yield key | {"setting": setting} | figures | {"cell_cpu": round(spent.get("cell_cpu", 0) + took, 1)}

    def _by_worker(
        self, subject: Subject, windows: Tensor, batch: Batch, python: Path
    ) -> list[tuple[Path, dict[str, Any]]]:
        function, _, search = TOOLS[batch.tool]
        options = NEAREST.get(batch.tool, {}) | self.options
        tokens = self.place / "tokens.safetensors"
        save_file({"windows": windows}, tokens)
        warm = None if function in SLOW else str(one_block(subject.folder, self.place / "warm"))
        tasks = []
        for setting in batch.settings:
            task = {"model": str(subject.folder), "warm": warm, "tokens": str(tokens), "out": str(self.place / setting)}
            task |= {"iterations": self.iterations, "search": search, "solved": subject.samples}
            tasks.append(task | asked(subject, setting, options))
            warm = None  # the first task alone begins with a run on one block
        began = cpu_seconds()
        spent = run_tasks(function, tasks, self.place, python, self.core)
        share = (cpu_seconds() - began) / len(tasks)
        for each in spent:
            each["cell_cpu"] = share
            if "error" in each:
                print(each["printed"], file=sys.stderr)
            else:
                each["cpu"] = round(each["cpu"], 1)
        return [(Path(task["out"]), each) for task, each in zip(tasks, spent, strict=True)]

    def _by_llama(
        self, subject: Subject, windows: Tensor, settings: Sequence[str], python: Path
    ) -> list[tuple[Path, dict[str, Any]]]:
        began = cpu_seconds()
        try:
            files = quantized(original(subject.folder), windows, settings, python, self.place)
        except Exception as error:  # a row says so, and other batches go on
            return [(self.place, {"error": f"{type(error).__name__}: {error}"})] * len(settings)
        share = round((cpu_seconds() - began) / len(settings), 1)
        return [(files[setting], {"cpu": share, "cell_cpu": share}) for setting in settings]


def asked(subject: Subject, setting: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return what a worker is told of a setting: a number of bits, a rate with a point, or the name of a format."""
    if setting in WIDTHS:
        bits, symmetric = WIDTHS[setting]
        grid = {"bits": bits, "group_size": subject.group_size, "symmetric": symmetric}
        return grid | {"recipe": recipe_of(**grid) | options}
    if setting in SCHEMES:
        return {"scheme": SCHEMES[setting], "recipe": {"grid": setting} | options}
    if setting in MLX:
        grid = {"bits": int(setting[3:]), "group_size": min(64, subject.group_size)}
        return grid | {"recipe": grid | {"format": "mlx"} | options}
    recipe = {"rate": float(setting)} if setting[0].isdigit() else {"grid": setting, "embeddings": "f32"}
    return {"recipe": recipe | options}


def scores(subject: Subject, out: Path, cpu: float, rounded: bool) -> Row:
    """Measure a folder or a GGUF on the held-out windows of every kind of text; return an error if it cannot be read.

    If `rounded`, `computed` is KL where inputs are rounded as runtimes do.
    """
    try:
        found = {
            kind: evaluate(out, windows, against=remembering(subject.folder), activations=rounded)
            for kind, windows in subject.held_out.items()
        }
    except NearplaneError as error:
        return {"error": str(error)}
    tokens = sum(each.tokens for each in found.values())

    def mean(name: str) -> float:
        return sum(getattr(each, name) * each.tokens for each in found.values()) / tokens

    original_nll = sum(math.log(each.original) * each.tokens for each in found.values()) / tokens
    bits, weights = stored(subject, out)
    row = {
        "kl": float(f"{mean('kl'):.5g}"), "perplexity": round(math.exp(mean("nll")), 4),
        "original": round(math.exp(original_nll), 4), "agreement": round(mean("agreement"), 5),
        "bits": round(bits, 4), "weights": weights, "cpu": cpu,
        "written": sum(file.stat().st_size for file in files_of(out)), "bytes": size_with(bits, weights, subject.folder),
    }  # fmt: skip
    if rounded:
        row["computed"] = sum(each.computed.kl * each.tokens for each in found.values()) / tokens
        row["computed"] = float(f"{row['computed']:.5g}")
    if len(found) > 1:
        row["kinds"] = {kind: float(f"{each.kl:.4g}") for kind, each in found.items()}
        row["texts"] = {kind: of_text(each) for kind, each in found.items()}
    if types := types_of(out):
        row["types"] = types
    return row


def size_with(bits: float, weights: int, folder: Path) -> int:
    """Return the bytes of a model whose other weights, embeddings say, take 16 bits: GGUF files hold them in F32 here."""
    reader = ShardReader(folder)
    return round(bits * weights / 8 + 2 * (sum(math.prod(reader.shape(name)) for name in reader.names()) - weights))


def of_text(found: Evaluation) -> Row:
    """Return the figures of one text."""
    return {
        "kl": float(f"{found.kl:.5g}"), "kl_999": float(f"{found.statistics.kl_999:.4g}"),
        "perplexity": round(found.perplexity, 4), "original": round(found.original, 4),
    }  # fmt: skip


def files_of(out: Path) -> list[Path]:
    """Return the files that hold weights: of a folder that a tool wrote, those that it would hand on."""
    if out.is_file():
        return [out]
    folder = out / "packed" if (out / "packed").exists() else out
    return [path for path in folder.iterdir() if path.suffix in (".safetensors", ".gguf")]


def types_of(out: Path) -> dict[str, float]:
    """Return the share of the weights in blocks that a GGUF holds in each type; nothing for other files."""
    counts: dict[str, int] = {}
    for file in files_of(out):
        for tensor in matrices(file) if file.suffix == ".gguf" else ():
            counts[tensor.tensor_type.name] = counts.get(tensor.tensor_type.name, 0) + int(tensor.n_elements)
    return {name: round(count / sum(counts.values()), 4) for name, count in counts.items()}


def stored(subject: Subject, out: Path) -> tuple[float, int]:
    """Return bits per weight of quantized layers, with every byte of theirs in the file, and the number of these weights."""
    if out.suffix == ".gguf":
        return rate(out)
    if not (out / "model.safetensors").exists() or (out / "nearplane.json").exists():
        record = read_record(out)
        return record.rate, sum(layer.out_features * layer.in_features for layer in record.layers)
    nbytes: dict[str, int] = {}
    packed = set()
    for path in ((out / "packed") if (out / "packed").exists() else out).glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                layer, _, part = name.rpartition(".")
                packed |= {layer} if part in STEPS else set()
                nbytes[layer] = nbytes.get(layer, 0) + (0 if part == "bias" else file.get_tensor(name).nbytes)
    reader = ShardReader(subject.folder)
    weights = sum(math.prod(reader.shape(f"{layer}.weight")) for layer in packed)
    return 8 * sum(nbytes[layer] for layer in packed) / weights, weights


@cache
def remembering(folder: Path) -> PreTrainedModel:
    """Return an original in float32 that computes the hidden states of the same tokens once, and then only its head."""
    network = dense_network(folder)
    body = network.base_model
    forward, known = body.forward, {}

    def remembered(input_ids: Tensor, **options: Any) -> Any:
        tokens = input_ids.shape, input_ids.numpy().tobytes()
        if tokens not in known:
            known[tokens] = forward(input_ids, **options)
        return known[tokens]

    body.forward = remembered
    return network


@cache
def original(folder: Path) -> Original:
    """Return the network from which llama.cpp's files are made."""
    return Original(folder)


@cache
def commit() -> str:
    """Return the commit of the checkout, with a plus sign if its package has changes."""
    head = subprocess.run(
        ["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    )
    changed = subprocess.run(
        ["git", "-C", ROOT, "status", "--porcelain", "src"], capture_output=True, text=True, check=True
    )
    return head.stdout.strip() + ("+" if changed.stdout else "")


@cache
def version(python: Path, function: str) -> str:
    """Return name and version of the package that quantizes."""
    packages = {
        "llama.cpp": "llama-cpp-python",
        "nearplane tuned": "nearplane",
        "mlx_lm": "mlx-lm",
        "mlx_lm gptq": "mlx-lm",
    }
    package = packages.get(function, function)
    code = f"import importlib.metadata as m; print('{package}', m.version('{package}'))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def cpu_seconds() -> float:
    """Return CPU seconds of this process and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime
