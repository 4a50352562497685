"""Whether two commits write the same weights: a fixed list of runs on the demo model, and the SHA-256 of what each writes.

    make fingerprint OLD=<commit>          # or: python benchmarks/fingerprint.py OLD [--only WORD]
    python benchmarks/fingerprint.py --threads 1 2     # or whether the checkout writes the same with one thread and with two

The runs are made twice on this machine, by the code of OLD in a worktree of its own and by that of the checkout, each in a process
of its own. One line a run: its name, the first digits of both hashes, and whether they agree; the command fails where one does not.
The hash is over name, dtype, shape and bytes of every tensor that has elements: a change of config.json or of the record does
not show.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RUNS: dict[str, dict[str, Any]] = {
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
    "k-best on a grid": {"bits": 2, "group_size": 64, "solver": "k-best", "beam": 2, "ignore": ["mlp", "layers.[1-9]"]},
    "obq": {"bits": 3, "group_size": 64, "solver": "obq", "ignore": ["mlp", "layers.[1-9]"]},
    "factor by qr": {"bits": 3, "group_size": 64, "factor": "qr", "ignore": ["layers.[1-9]"]},
    "rate 3": {"rate": 3.0, "solver": "nearest-plane"},
    "rate 2.125, uniform": {"rate": 2.125, "allocate": "uniform", "solver": "nearest-plane"},
    "rate 1.5, k-best": {"rate": 1.5, "allocate": "uniform", "ignore": ["layers.[1-9]"]},
    "rate 2.5 to nearest": {"rate": 2.5, "solver": "round-to-nearest"},
    "head and embeddings": {
        "rate": 2.5, "allocate": "uniform", "solver": "nearest-plane", "include_head": True, "include_embeddings": True
    },
    "hptq": {"rate": 2.125, "allocate": "uniform", "method": "hptq", "coder": "huffman", "correct": False},
    "size": {"size": "3MB", "allocate": "uniform", "solver": "nearest-plane"},
}  # fmt: skip


def hashes(only: str) -> Iterator[tuple[str, str, float]]:
    """Yield (run, SHA-256 of its tensors or the error, seconds of CPU time) of the package that is imported here."""
    import nearplane
    from nearplane.demo import CALIBRATION, MODEL

    for name, keywords in RUNS.items():
        if only not in name:
            continue
        began = time.process_time()
        with tempfile.TemporaryDirectory() as place:
            try:
                nearplane.quantize(
                    MODEL, Path(place) / "out", calibration=str(CALIBRATION), samples=8, seqlen=128, **keywords
                )
                found = digest(Path(place) / "out")
            except nearplane.NearplaneError as error:
                found = f"{type(error).__name__}: {error}"
        yield name, found, time.process_time() - began


def digest(folder: Path) -> str:
    """Return the SHA-256 over name, dtype, shape and bytes of all tensors of a folder, sorted by name."""
    import torch
    from safetensors import safe_open

    tensors = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        if not tensor.numel():
            continue  # it only stops programs that do not know the format
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def of(tree: Path, only: str, threads: int | None = None) -> dict[str, str]:
    """Return the hashes of the code in a tree, {run: SHA-256}, with so many threads or as many as torch takes."""
    environment = os.environ | {"PYTHONPATH": str(tree / "src"), "OMP_WAIT_POLICY": "PASSIVE"}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    command = [sys.executable, str(Path(__file__).resolve()), "--here", "--only", only]
    found = {}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            name, sha, seconds = json.loads(line)
            found[name] = sha
            print(f"  {name}: {sha[:60]} ({seconds:.1f} s of CPU time)", file=sys.stderr, flush=True)
    if run.returncode:
        sys.exit(f"The runs of {tree} ended with code {run.returncode}.")
    return found


def of_commit(commit: str, only: str) -> dict[str, str]:
    """Return the hashes of a commit, which are kept in build/fingerprint for the next time."""
    sha = subprocess.check_output(["git", "-C", ROOT, "rev-parse", commit], text=True).strip()
    runs = hashlib.sha256(json.dumps([RUNS, only]).encode()).hexdigest()[:12]
    kept = ROOT / "build" / "fingerprint" / f"{sha}-{runs}.json"
    if kept.is_file():
        return dict(json.loads(kept.read_text()))
    with tempfile.TemporaryDirectory() as place:
        tree = Path(place) / "old"
        subprocess.run(["git", "-C", ROOT, "worktree", "add", "--quiet", "--detach", tree, sha], check=True)
        try:
            found = of(tree, only)
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", tree], check=True)
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(found, indent=1))
    return found


def main() -> None:
    """Compare two commits, or with --here print the hashes of one as JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", nargs="?", metavar="OLD", help="commit to compare the checkout with")
    parser.add_argument("--only", default="", metavar="WORD", help="runs whose name has this word")
    parser.add_argument("--here", action="store_true", help="print the hashes of the imported package")
    parser.add_argument(
        "--threads", type=int, nargs=2, metavar="N", help="compare the checkout with itself, by threads"
    )
    arguments = parser.parse_args()
    if arguments.here:
        for row in hashes(arguments.only):
            print(json.dumps(row), flush=True)
        return
    if (arguments.old is None) == (arguments.threads is None):
        parser.error("give the commit to compare with, or two numbers of threads")
    if arguments.threads is not None:
        old, new = (of(ROOT, arguments.only, threads) for threads in arguments.threads)
    else:
        old = of_commit(arguments.old, arguments.only)
        new = of(ROOT, arguments.only)
    for name in [name for name in RUNS if name in old | new]:
        same = "same" if old.get(name) == new.get(name) else "DIFFERENT"
        print(f"| {name} | {old.get(name, '-')[:12]} | {new.get(name, '-')[:12]} | {same} |")
    if old != new:
        sys.exit(f"{sum(old.get(name) != new.get(name) for name in old | new)} of {len(old | new)} runs differ.")
    print(f"all {len(new)} runs write the same tensors")


if __name__ == "__main__":
    main()
