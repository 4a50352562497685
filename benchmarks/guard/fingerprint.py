"""Whether two commits write the same checkpoints: a fixed list of runs on a small model, and hashes of what each of them writes.

    make fingerprint OLD=<commit>               # or: python benchmarks/guard/fingerprint.py OLD
    python benchmarks/guard/fingerprint.py OLD --quick             # some runs that take every path, in a fifth of the time
    python benchmarks/guard/fingerprint.py OLD --only gguf tuned   # runs whose name has one of these words
    python benchmarks/guard/fingerprint.py --threads 1 2           # whether the checkout writes the same with one thread and two
    python benchmarks/guard/fingerprint.py --ranks 1 2             # or with one process and two

The runs are made twice on this machine, by the code of OLD in a worktree of its own and by that of the checkout, each in a process
of its own, with one thread. Both quantize the same model with the same text: --model and --text, by default the demo's of OLD.
They find these under the same relative names, so that no path differs in what they write.

Four parts of what a run writes are hashed apart, and the command fails where one of them differs:

    tensors  name, dtype, shape and bytes of every tensor that has elements, in safetensors and in model.gguf
    layers   the figures of every layer in the record nearplane.json: losses, bounds, bits, bytes, checksum
    config   config.json and the other files of the folder, metadata of safetensors and of model.gguf
    record   the rest of nearplane.json, and the record inside model.gguf

Not compared are times, peak memory, versions, what follows from these (the size of the record, hashes of the files that hold it),
and the fields in DELETED. A field that says nothing (null, or empty) is as one that is not there. Where a part differs, the first
keys that do are printed; all of what was compared lies as JSON in build/fingerprint: of OLD, where it is found again the next time,
and of the checkout.

A run that OLD makes and the checkout refuses, as its option was removed, is "gone": it is listed, and no failure.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "build" / "fingerprint"
DEMO = Path("src/nearplane/demo")  # of a commit: the model and the text of the runs
PARTS = ("tensors", "layers", "config", "record")
FIRST_BLOCK: dict[str, Any] = {"ignore": ["layers.[1-9]"]}  # only the layers of the first block are quantized
ATTENTION: dict[str, Any] = {"ignore": ["mlp", "layers.[1-9]"]}  # and of these only the attention's

PLAIN: dict[str, dict[str, Any]] = {  # run: keywords of nearplane.quantize
    "compressed-tensors 4 bits": {"bits": 4, "group_size": 128},
    "compressed-tensors 3 bits, a step a row": {"bits": 3, "group_size": None},
    "compressed-tensors 8 bits": {"bits": 8, "group_size": 64},
    "gptq 4 bits": {"bits": 4, "group_size": 128, "format": "gptq"},
    "gptq_v2 3 bits asymmetric": {"bits": 3, "group_size": 128, "symmetric": False, "format": "gptq_v2"},
    "gptq_v2 2 bits asymmetric": {"bits": 2, "group_size": 64, "symmetric": False, "format": "gptq_v2"},
    "natural order": {"bits": 3, "group_size": 64, "order": "natural"},
    "pivoted order": {"bits": 3, "group_size": 64, "order": "pivoted"},
    "steps by range": {"bits": 4, "group_size": 64, "scale": "minmax"},
    "not corrected": {"bits": 3, "group_size": 64, "correct": False},
    "not refined": {"bits": 3, "group_size": 64, "polish": 0, "rounds": 0},
    "not true-sequential": {"bits": 3, "group_size": 64, "true_sequential": False},
    "widths by slope": {"bits": 3.5, "group_size": 64, "format": "gptq_v2", "symmetric": False},
    "to nearest": {"bits": 3, "group_size": 64, "solver": "round-to-nearest"},
    "k-best on a grid": {"bits": 2, "group_size": 64, "solver": "k-best", "beam": 2, **ATTENTION},
    "rate 3": {"rate": 3.0, "solver": "nearest-plane"},
    "rate 2.125, uniform": {"rate": 2.125, "allocate": "uniform", "solver": "nearest-plane"},
    "rate 1.5, k-best": {"rate": 1.5, "allocate": "uniform", **FIRST_BLOCK},
    "rate 2.5 to nearest": {"rate": 2.5, "solver": "round-to-nearest"},
    "head and embeddings": {
        "rate": 2.5, "allocate": "uniform", "solver": "nearest-plane", "include_head": True, "include_embeddings": True
    },
    "size": {"size": "3MB", "allocate": "uniform", "solver": "nearest-plane"},
    "gguf q4_k_m": {"grid": "q4_k_m"},
    "gguf size": {"format": "gguf", "size": "6.1MB", "ignore": ["layers.[2-9]"]},
    "quantized and tuned at once": {"bits": 2, "group_size": 64, "tune": "network", **FIRST_BLOCK},
}  # fmt: skip
EXPERTS: dict[str, dict[str, Any]] = {  # the same, of a small mixture of experts
    "experts 4 bits": {"bits": 4, "group_size": 32},
    "experts rate 2.5": {"rate": 2.5, "solver": "nearest-plane"},
}
TUNED: dict[str, dict[str, Any]] = {  # the same, and then nearplane.tune: what that writes is compared
    "tuned 4 bits": {"bits": 4, "group_size": 128, **FIRST_BLOCK},
    "tuned 2 bits": {"bits": 2, "group_size": 64, "symmetric": False, "format": "gptq_v2", **FIRST_BLOCK},
    "tuned rate 2.5": {"rate": 2.5, "solver": "nearest-plane", **FIRST_BLOCK},
}
TUNING: dict[str, Any] = {"samples": 40, "steps": 48}
COMMANDS: dict[str, list[str]] = {  # flags of `nearplane quantize`
    "--layer": ["--bits", "3", "--group-size", "64", "--layer", "down_proj=bits:4,group_size:32", "--ignore", "layers.[2-9]"],
    "--memory": [  # with so much text that the limit is felt: forwards do not wait for layers, states lie in a file
        "--memory", "1.25GB", "--samples", "128", "--seqlen", "256", "--bits", "4", "--ignore", "layers.[1-9]"
    ],
}  # fmt: skip
COMPARED: dict[str, list[str]] = {  # flags of `nearplane compare`
    "hptq": ["--methods", "gptq-huffman", "--bits", "2.125", "--eval-samples", "8"],
}
KILLED: dict[str, list[str]] = {  # flags of `nearplane quantize`, killed once the first block is kept, and given again
    "killed and resumed": ["--bits", "4", "--group-size", "128", "--ignore", "layers.[3-9]"],
}
RESUMED = "resuming"  # what a run says that goes on
RUNS: dict[str, dict[str, Any] | list[str]] = {**PLAIN, **EXPERTS, **TUNED, **COMMANDS, **COMPARED, **KILLED}
QUICK = {
    "compressed-tensors 4 bits", "widths by slope", "rate 3", "gguf q4_k_m", "experts 4 bits",
    "tuned 2 bits", "--layer", "killed and resumed",
}  # fmt: skip
TEXT: dict[str, Any] = {"samples": 8, "seqlen": 128}
REFUSED = re.compile(  # how a removed option is refused
    r"RecipeError: .*(is not a keyword of|was removed|is no option of|; expected one of)"
    r"|TypeError: .*unexpected keyword argument|[Uu]nknown option",
    re.DOTALL,
)

VOLATILE = {  # keys that no two runs or no two versions share, wherever they are
    "seconds", "peak_memory", "version", "versions", "transformers_version", "written_by", "quantizer", "digest", "folder",
}  # fmt: skip
DELETED = {"repeated", "profiles", "pace", "removed", "factor", "method", "coder"}  # keys of the record that are to go
FIGURES = {  # of a layer in the record
    "out_features", "in_features", "loss", "row_losses", "relative_loss", "nearest_loss", "extra_loss", "extra_relative_loss",
    "extra_nearest_loss", "damped_loss", "worst_case", "expected", "gamma", "clipped", "clipped_rows", "correction", "damp",
    "sweep_damp", "dead", "pruned", "tokens", "alike", "blended", "bits", "asked", "base", "entropy", "limit", "bytes", "checksum",
}  # fmt: skip
LONG = 1000  # entries of a list above which its hash stands for it
LISTED = 5  # differing keys that are printed of a part
PATIENCE = 300.0  # seconds until a run that is to be killed has kept a block

Result = dict[str, Any]  # {"error": text} or {"written": see `written`}, and "seconds" of CPU time


class NotMadeError(Exception):
    """A run did not get to its end."""


# What a side does, in a process of its own, in a folder that holds "model", "experts" and the text


def results(names: Sequence[str], text: str) -> Iterator[tuple[str, Result]]:
    """Yield what each of these runs gives, of the package that is imported here."""
    for name in names:
        began = spent()
        with tempfile.TemporaryDirectory(dir=".", prefix="out-") as place:
            try:
                found: Result = {"written": written(made(name, Path(Path(place).name), text))}
            except Exception as error:  # whatever it is: the other runs are made all the same
                if type(error).__name__ != "RecipeError":
                    traceback.print_exc()
                kind = "" if isinstance(error, NotMadeError) else f"{type(error).__name__}: "
                found = {"error": f"{kind}{error}"}
        yield name, found | {"seconds": spent() - began}


def spent() -> float:
    """Return the seconds of CPU time that this process and those that it waited for have taken."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def made(name: str, place: Path, text: str) -> Path:
    """Make one run; return the folder that it wrote.

    Raises:
        NotMadeError: a command failed.
        Exception: whatever the package raises.
    """
    import nearplane

    out = place / "out"
    if isinstance(keywords := RUNS[name], list):
        flags = [f"--{option}={value}" for option, value in TEXT.items() if f"--{option}" not in keywords]
        verb = (
            ["compare", "model", "--keep", str(out), "--text", text]
            if name in COMPARED
            else ["quantize", "model", str(out)]
        )
        command = [*verb, "--calibration", text, *flags, *keywords]
        if name in KILLED:
            kill(command, out)
        said = run(command)
        if name in KILLED and RESUMED not in said:
            raise NotMadeError("nearplane began anew when it was to go on")
        return out
    nearplane.quantize("experts" if name in EXPERTS else "model", out, calibration=text, **TEXT | keywords)
    if name not in TUNED:
        return out
    nearplane.tune(out, place / "tuned", against="model", calibration=text, **TUNING)
    return place / "tuned"


def run(command: Sequence[str]) -> str:
    """Run `nearplane` with these words, and return what it says beside its summary.

    Raises:
        NotMadeError: it failed; says the end of what it said.
    """
    words, environment = [sys.executable, "-m", "nearplane", *command], dict(os.environ)
    if "MASTER_PORT" in environment:  # the port itself is that of this process
        environment["MASTER_PORT"] = str(int(environment["MASTER_PORT"]) + 1)
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotMadeError(f"nearplane ended with code {done.returncode}: {done.stderr[-600:].strip()}")
    return done.stderr


def kill(command: Sequence[str], out: Path) -> None:
    """Run `nearplane` with these words and kill it as soon as its journal says that a block is behind it.

    Raises:
        NotMadeError: it ended before, or kept none for minutes.
    """
    unfinished = Path(f"{out}.unfinished")
    words = [sys.executable, "-m", "nearplane", *command]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            until = time.monotonic() + PATIENCE
            while not any(json.loads(state.read_text()).get("blocks", 1) for state in unfinished.rglob("state.json")):
                if process.poll() is not None:
                    assert process.stderr is not None
                    said = process.stderr.read()[-600:].strip()
                    raise NotMadeError(f"nearplane ended before it could be killed, code {process.returncode}: {said}")
                if time.monotonic() > until:
                    raise NotMadeError(f"nearplane kept no block in {PATIENCE:g} seconds")
                time.sleep(0.005)
        finally:
            process.kill()
    if not unfinished.exists():
        raise NotMadeError("nearplane left nothing when it was killed")


def written(folder: Path) -> dict[str, Any]:
    """Return what is in a checkpoint, as JSON: "tensors" by name, "files" and "records" by file, nothing left out of these."""
    found: dict[str, Any] = {"tensors": {}, "files": {}, "records": {}}
    for path in sorted(folder.iterdir()):
        if path.name == "nearplane.json":
            found["records"][path.name] = json.loads(path.read_text(encoding="utf-8"))
        elif path.suffix == ".safetensors":
            tensors, found["files"][path.name] = of_safetensors(path)
            found["tensors"] |= tensors
        elif path.suffix == ".gguf":
            tensors, found["files"][path.name], found["records"][path.name] = of_gguf(path)
            found["tensors"] |= tensors
        elif path.suffix == ".json" and path.name != "tokenizer.json":
            found["files"][path.name] = json.loads(path.read_text(encoding="utf-8"))
        else:
            found["files"][path.name] = file_hash(path)
    return found


def of_safetensors(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Return dtype, shape and hash of every tensor of a file by its name, and the metadata."""
    import torch
    from safetensors import safe_open

    tensors = {}
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118
            tensor = file.get_tensor(name)
            if tensor.numel():  # else it only stops programs that do not know the format
                data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
                tensors[name] = f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(data).hexdigest()}"
        return tensors, file.metadata() or {}


def of_gguf(path: Path) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
    """Return type, shape and hash of every tensor of a GGUF by its name, the other keys, and the record among them.

    The bytes of the file itself are no measure: it holds the record, and room for it.
    """
    from gguf import GGUFReader

    reader = GGUFReader(path)
    tensors = {
        tensor.name: f"{tensor.tensor_type.name} {tensor.shape.tolist()} {hashlib.sha256(tensor.data.tobytes()).hexdigest()}"
        for tensor in reader.tensors
    }
    fields = {name: shortened(field.contents()) for name, field in reader.fields.items()}
    record = json.loads(fields.pop("nearplane.record", "").strip() or "{}")
    if "nearplane.quantization_config" in fields:
        fields["nearplane.quantization_config"] = json.loads(fields["nearplane.quantization_config"])
    return tensors, fields, record


def shortened(value: Any) -> Any:
    """Return a value of a GGUF; for a long list, as vocabularies are, its hash."""
    return f"{len(value)} entries, {digest(value)}" if isinstance(value, list) and len(value) > LONG else value


def save_experts(folder: Path) -> None:
    """Write a small random mixture of experts with the tokenizer of "model"."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    tokenizer = Path("model")
    words = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    config = Qwen3MoeConfig(
        hidden_size=64, intermediate_size=128, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
        vocab_size=len(words), tie_word_embeddings=True, bos_token_id=0, eos_token_id=1, pad_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = 0.1 * torch.randn(parameter.shape, generator=generator)
        parameter.data = noise + (1.0 if "norm" in name else 0.0)
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tokenizer / name).read_bytes())


# What compares the sides


def parts_of(result: Result) -> dict[str, Any]:
    """Return what is compared of a run that was made, by part, as JSON."""
    written = result["written"]
    layers: dict[str, Any] = {}
    record: dict[str, Any] = {}
    for name, told in written["records"].items():
        figures, record[name] = figures_and_rest(told, inside="model.gguf" in written["files"])
        layers |= figures
    return {"tensors": written["tensors"], "layers": layers, "config": stable(written["files"]), "record": record}


def figures_and_rest(told: dict[str, Any], *, inside: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the figures of the layers of a record by their name, and the rest of the record.

    Args:
        told: the record, as JSON.
        inside: whether it is in the file of weights as well: the size of that is then not compared, as the record's is in it.
    """
    record = stable(told, VOLATILE | DELETED)
    layers = {layer["name"]: with_format(layer) for layer in record.pop("layers", ())}
    figures = {name: {key: layer[key] for key in layer if key in FIGURES} for name, layer in layers.items()}
    rest = {name: {key: layer[key] for key in layer if key not in FIGURES} for name, layer in layers.items()}
    record["files"] = sorted(record.get("files", ()))  # their contents are compared themselves
    if inside:
        record.pop("bytes", None)
    return figures, record | {"layers": rest, "order of layers": list(layers)}


def with_format(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a record says of a layer with the name of its number format, which records of 0.1.0 said in four fields."""
    bits, group, symmetric, blocks = (layer.get(name) for name in ("bits", "group_size", "symmetric", "blocks"))
    name = f"int{bits}-{f'g{group}' if group else 'row'}{'' if symmetric else '-asym'}" if bits else "coded"
    said = {key: value for key, value in layer.items() if key not in ("bits", "group_size", "symmetric", "blocks")}
    return {"format": blocks or name} | said


def stable(value: Any, without: set[str] = VOLATILE) -> Any:
    """Return JSON without some keys, and without what says nothing."""
    if isinstance(value, dict):
        parts = {key: stable(part, without) for key, part in value.items() if key not in without}
        return {key: part for key, part in parts.items() if part is not None and part not in ("", [], {})}
    return [stable(part, without) for part in value] if isinstance(value, list) else value


@contextmanager
def inputs(arguments: argparse.Namespace, names: Sequence[str]) -> Iterator[tuple[Path, str]]:
    """Give a folder with what the runs read, and the name of the text in it."""
    with tempfile.TemporaryDirectory(prefix="fingerprint-") as place:
        folder = Path(place)
        if arguments.old is not None and not (
            arguments.model and arguments.text
        ):  # of a commit that need not be checked out
            archive = ["git", "-C", ROOT, "archive", arguments.old, f"{DEMO}/model", f"{DEMO}/calibration.txt"]
            with subprocess.Popen(archive, stdout=subprocess.PIPE) as packed:
                subprocess.run(["tar", "-x", "-C", folder], stdin=packed.stdout, check=True)
        demo = (ROOT if arguments.old is None else folder) / DEMO
        model = arguments.model or demo / "model"
        given = arguments.text or demo / "calibration.txt"
        text = folder / f"text{given.suffix}"
        (folder / "model").symlink_to(model.resolve(strict=True))
        text.symlink_to(given.resolve(strict=True))
        if EXPERTS.keys() & set(names):
            (folder / "experts").symlink_to(experts(folder))
        yield folder, text.name


def read_by(name: str, folder: Path, text: str) -> list[list[str]]:
    """Return name and hash of every file that a run reads of a folder that `inputs` gives."""
    read = ["model", text, *(["experts"] if name in EXPERTS else [])]
    files = sorted(path for part in read for path in files_of(folder / part))
    return [[str(path.relative_to(folder)), file_hash(path)] for path in files]


def files_of(path: Path) -> list[Path]:
    """Return the files of a folder, the file itself, or nothing."""
    return [path] if path.is_file() else [each for each in path.glob("**/*") if each.is_file()]


@cache
def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def experts(folder: Path) -> Path:
    """Return the mixture of experts with the tokenizer of "model" in a folder; it is made once."""
    tokenizer = [file_hash(folder / "model" / name) for name in ("tokenizer.json", "tokenizer_config.json")]
    there = KEPT / f"experts-{digest([tokenizer, version('torch'), version('transformers')])[:12]}"
    if not there.exists():
        part = Path(f"{there}.part")
        words = [sys.executable, str(Path(__file__).resolve()), "--experts", str(part)]
        subprocess.run(words, cwd=folder, env=os.environ | {"PYTHONSAFEPATH": "1"}, check=True)
        part.rename(there)
    return there


def of(
    tree: Path,
    names: Sequence[str],
    folder: Path,
    text: str,
    kept: Callable[[str], Path],
    threads: int = 1,
    ranks: int = 1,
) -> dict[str, Result]:
    """Return what runs give of the code in a tree, and keep each in a file.

    Args:
        tree: checkout.
        names: of the runs.
        folder: what they read is in it, see `inputs`; they run there.
        text: name of the text.
        kept: gives the file for the result of a run; one that failed is not kept.
        threads: of torch.
        ranks: processes that share each run.
    """
    environment = os.environ | {
        "PYTHONPATH": str(tree / "src"),
        "PYTHONSAFEPATH": "1",  # else scripts beside this one, as gguf.py, would be imported for packages
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    command = [sys.executable, str(Path(__file__).resolve()), "--here", json.dumps([list(names), text])]
    found: dict[str, Result] = {}
    with ExitStack() as all_ranks:
        if ranks > 1:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "RANK": "0"}
            for rank in range(1, ranks):  # they write nothing
                own, nothing = environment | {"RANK": str(rank)}, subprocess.DEVNULL
                follower = subprocess.Popen(command, env=own, cwd=folder, stdout=nothing, stderr=nothing)
                all_ranks.enter_context(follower)
        run = all_ranks.enter_context(
            subprocess.Popen(command, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True)
        )
        assert run.stdout is not None
        for line in run.stdout:
            name, result = json.loads(line)
            found[name] = result
            path = kept(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            if "error" not in result:
                path.write_text(json.dumps(result, indent=1))
            gives = result.get("error") or " ".join(short_hashes(parts_of(result)).values())
            print(f"  {name}: {gives[:100]} ({result['seconds']:.1f} s of CPU time)", file=sys.stderr, flush=True)
    if run.returncode:
        sys.exit(f"The runs of {tree} ended with code {run.returncode}.")
    total = sum(result["seconds"] for result in found.values())
    print(f"  {len(found)} runs of {tree.name}: {total:.0f} s of CPU time", file=sys.stderr)
    return found


def of_commit(commit: str, names: Sequence[str], folder: Path, text: str) -> dict[str, Result]:
    """Return what runs give of a commit: what is not kept yet is made in a worktree."""
    sha = subprocess.check_output(["git", "-C", ROOT, "rev-parse", f"{commit}^{{commit}}"], text=True).strip()
    keys = {name: digest([definition(name), read_by(name, folder, text)])[:12] for name in names}
    there = {name: file_of(f"{sha[:12]}/{key}", name) for name, key in keys.items()}
    found = {name: json.loads(path.read_text()) for name, path in there.items() if path.is_file()}
    missing = [name for name in names if name not in found]
    if not missing:
        return found
    with tempfile.TemporaryDirectory() as place:
        tree = Path(place) / "old"
        subprocess.run(["git", "-C", ROOT, "worktree", "add", "--quiet", "--detach", tree, sha], check=True)
        try:
            return found | of(tree, missing, folder, text, there.__getitem__)
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", tree], check=True)


def definition(name: str) -> list[Any]:
    """Return what a run is, as JSON."""
    return [name, RUNS[name], TEXT, TUNING if name in TUNED else None]


def file_of(folder: str, name: str) -> Path:
    """Return the file that keeps the result of a run in a folder."""
    return KEPT / folder / (re.sub(r"[^\w.-]+", "-", name).strip("-") + ".json")


def digest(value: Any) -> str:
    """Return the SHA-256 of JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def short_hashes(parts: Mapping[str, Any]) -> dict[str, str]:
    """Return the first digits of the hash of each part."""
    return {part: digest(parts[part])[:8] for part in PARTS}


def flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values in JSON with their keys, joined by colons."""
    if isinstance(value, Mapping) and value:
        for name, part in value.items():
            yield from flat(part, f"{key}: {name}" if key else str(name))
    elif isinstance(value, list) and value:
        for index, part in enumerate(value):
            yield from flat(part, f"{key}[{index}]")
    else:
        yield key, value


def differing(old: Any, new: Any) -> list[str]:
    """Return a line for each of the first keys with different values in JSON, and how many there are."""
    before, after = dict(flat(old)), dict(flat(new))
    keys = [key for key in {**before, **after} if key not in before or key not in after or before[key] != after[key]]
    lines = [f"{key}: {shown(before, key)} -> {shown(after, key)}" for key in keys[:LISTED]]
    return lines + ([f"and {len(keys) - LISTED} more"] if len(keys) > LISTED else [])


def shown(values: Mapping[str, Any], key: str) -> str:
    """Return a value as text that is not long; of a tensor or another hash its end."""
    text = json.dumps(values[key]) if key in values else "(not there)"
    return text if len(text) <= 80 else f"{text[:40]}..{text[-16:]}"


def compared(name: str, old: Result, new: Result, ignored: Sequence[str]) -> str:
    """Print what became of a run, and return it: same, DIFFERENT, gone or BROKEN."""
    if "error" in old:
        verdict, cells = "BROKEN", ["-"] * len(PARTS)
        notes = [f"the first side does not make it: {old['error']}"]
    elif "error" in new:
        removed = REFUSED.search(new["error"])
        verdict, cells, notes = "gone" if removed else "DIFFERENT", ["-"] * len(PARTS), [new["error"]]
    else:
        first, second = parts_of(old), parts_of(new)
        before, after = short_hashes(first), short_hashes(second)
        parts = [part for part in PARTS if before[part] != after[part]]
        cells = [f"{before[part]} -> {after[part]}" if part in parts else before[part] for part in PARTS]
        verdict = "DIFFERENT" if set(parts) - set(ignored) else "same"
        notes = [f"{part}: {line}" for part in parts for line in differing(first[part], second[part])]
    print(f"| {name} | {' | '.join(cells)} | {verdict} |")
    for note in notes:
        print(f"    {note[:400]}")
    return verdict


def main() -> None:
    """Compare two commits; with --here print what runs of one give as JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", nargs="?", metavar="OLD", help="commit to compare the checkout with")
    parser.add_argument("--model", type=Path, metavar="PATH", help="folder of the model; default: the demo's of OLD")
    parser.add_argument("--text", type=Path, metavar="PATH", help="calibration text; default: the demo's of OLD")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="WORD", help="runs whose name has one of these words"
    )
    parser.add_argument("--quick", action="store_true", help="some runs that take every path")
    parser.add_argument(
        "--ignore", nargs="+", default=[], choices=PARTS, help="parts that may differ: shown, and no failure"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the runs")
    parser.add_argument(
        "--threads", type=int, nargs=2, metavar="N", help="compare the checkout with itself, by threads"
    )
    parser.add_argument(
        "--ranks", type=int, nargs=2, metavar="N", help="compare the checkout with itself, by number of processes"
    )
    parser.add_argument("--here", help=argparse.SUPPRESS)  # JSON: names of runs, name of the text
    parser.add_argument("--experts", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        for row in results(*json.loads(arguments.here)):
            print(json.dumps(row), flush=True)
        return
    if arguments.experts:
        save_experts(arguments.experts)
        return
    names = [name for name in RUNS if any(word in name for word in arguments.only)]
    names = [name for name in names if name in QUICK or not arguments.quick]
    if arguments.list:
        print("\n".join(names))
        return
    if [arguments.old, arguments.threads, arguments.ranks].count(None) != 2:
        parser.error("give the commit to compare with, or two numbers of threads or of ranks")
    if arguments.ranks is not None:
        names = [name for name in names if name not in KILLED]  # the tests kill runs on several ranks
    if not names:
        parser.error("no run has such a name")
    with inputs(arguments, names) as (folder, text):
        if arguments.threads is not None:
            old, new = (
                of(ROOT, names, folder, text, partial(file_of, f"threads-{threads}"), threads)
                for threads in arguments.threads
            )
        elif arguments.ranks is not None:
            old, new = (
                of(ROOT, names, folder, text, partial(file_of, f"ranks-{ranks}"), ranks=ranks)
                for ranks in arguments.ranks
            )
        else:
            old = of_commit(arguments.old, names, folder, text)
            new = of(ROOT, names, folder, text, partial(file_of, "checkout"))
    print(f"| run | {' | '.join(PARTS)} | verdict |")
    verdicts = {name: compared(name, old[name], new[name], arguments.ignore) for name in names}
    if gone := [name for name in names if verdicts[name] == "gone"]:
        print(f"gone: {', '.join(gone)}")
    if wrong := [name for name in names if verdicts[name] in ("DIFFERENT", "BROKEN")]:
        sys.exit(f"{len(wrong)} of {len(names)} runs differ or are not made: {', '.join(wrong)}.")
    print(f"all {len(names) - len(gone)} runs write the same")


if __name__ == "__main__":
    main()
