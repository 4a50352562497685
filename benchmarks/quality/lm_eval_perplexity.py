"""The perplexities of `nearplane evaluate --protocol lm-eval` beside those of lm-eval's own command line on the same file.

    PYTHON benchmarks/quality/lm_eval_perplexity.py [--model FOLDER] [--text TXT] [--documents 6] [--letters 4000]

PYTHON is that of an environment with nearplane and lm_eval[hf] (0.4.13). The beginning of the text is cut into documents,
some longer than the model's maximum length. lm-eval runs the model in float32 on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import nearplane
from nearplane.demo import HELD_OUT, MODEL

TASK = """task: local_text
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: word_perplexity
  - metric: byte_perplexity
  - metric: bits_per_byte
"""


def by_lm_eval(model: Path, file: Path, scratch: Path) -> dict[str, float]:
    """Return the figures of `lm_eval` on the lines of a file."""
    (scratch / "local_text.yaml").write_text(TASK.format(file=file))
    words = [
        "--model",
        "hf",
        "--model_args",
        f"pretrained={model},dtype=float32",
        "--tasks",
        "local_text",
        "--device",
        "cpu",
    ]
    words += ["--include_path", scratch, "--batch_size", 1, "--output_path", scratch / "found"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(scratch / "hub")}
    command = [sys.executable, "-m", "lm_eval", *map(str, words)]
    run = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(run.stderr[-3000:])
    (found,) = (scratch / "found").rglob("results_*.json")
    results = json.loads(found.read_text())["results"]["local_text"]
    return {name.partition(",")[0]: value for name, value in results.items() if isinstance(value, float)}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--text", type=Path, default=HELD_OUT)
    parser.add_argument("--documents", type=int, default=6)
    parser.add_argument("--letters", type=int, default=4000)
    asked = parser.parse_args()
    text = asked.text.read_text(encoding="utf-8")
    starts = [number * asked.letters for number in range(asked.documents)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "documents.jsonl"
        file.write_text("\n".join(json.dumps({"text": text[start : start + asked.letters]}) for start in starts))
        score = nearplane.evaluate(asked.model, file, protocol="lm-eval", device="cpu")
        theirs = by_lm_eval(asked.model, file, Path(folder))
    print(
        f"{score.documents} documents, {score.words:,} words, {score.tokens:,} tokens in {score.windows} windows of {score.seqlen}"
    )
    for name, value in asdict(score.lm_eval).items():
        print(f"{name:18}{value:16.6f}{theirs[name]:16.6f}")


if __name__ == "__main__":
    main()
