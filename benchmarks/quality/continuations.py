"""Task for lm-eval from any text, without a network: which of four continuations follows a passage?

python benchmarks/quality/continuations.py FOLDER [--text TEXT] [--documents 500] [--context 300]
nearplane evaluate OUT --tasks continuations --task-path FOLDER --against ORIGINAL

One continuation is the text's own. The other three begin elsewhere in the same text, so that chance is 25 %.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from bisect import bisect_left
from pathlib import Path
from typing import Any

from nearplane.demo import HELD_OUT

CONTINUATION = 60  # letters behind which the next single space ends a continuation
TASK = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: multiple_choice
doc_to_text: context
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
  - metric: acc_norm
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1
"""


def next_space(spaces: list[int], position: int) -> int:
    """Return the first space at or behind a position; the last one if there is none."""
    return spaces[min(bisect_left(spaces, position), len(spaces) - 1)]


def documents(text: str, count: int, context: int, seed: int) -> list[dict[str, Any]]:
    """Return passages of a text, each with four continuations in random order and the place of the right one.

    Passages are spread evenly over the text. They are cut at single spaces, as a task joins both parts by one.

    Raises:
        SystemExit: The text is too short.
    """
    draw = random.Random(seed)
    spaces = [match.start() for match in re.finditer(r"(?<=\S) (?=\S)", text)]
    starts = [space for space in spaces if space < len(text) - 2 * CONTINUATION]
    stride = (len(text) - context - 3 * CONTINUATION) // count
    if stride < 1 or len(starts) < 100:
        raise SystemExit(f"The text has {len(text):,} letters, too few for {count:,} documents. Pass a longer one.")
    rows = []
    for start in range(0, count * stride, stride):
        end = next_space(spaces, start + context)
        elsewhere = [space for space in draw.sample(starts, len(starts) // 10) if abs(space - end) > context]
        choices = [text[space + 1 : next_space(spaces, space + CONTINUATION)] for space in (end, *elsewhere[:3])]
        order = draw.sample(range(4), 4)
        rows.append({"context": text[start:end], "choices": [choices[i] for i in order], "answer": order.index(0)})
    return rows


def main() -> None:
    """Write FOLDER/continuations.yaml and FOLDER/continuations.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the task, made if it is missing")
    parser.add_argument("--text", type=Path, default=HELD_OUT, help="default: the demo's held-out text")
    parser.add_argument("--documents", type=int, default=500)
    parser.add_argument("--context", type=int, default=300, help="letters of a passage")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="continuations", help="name of the task and of its files")
    asked = parser.parse_args()
    rows = documents(asked.text.read_text(), asked.documents, asked.context, asked.seed)
    asked.folder.mkdir(parents=True, exist_ok=True)
    file = asked.folder.resolve() / f"{asked.name}.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (asked.folder / f"{asked.name}.yaml").write_text(TASK.format(name=asked.name, file=json.dumps(str(file))))
    print(f"{len(rows):,} documents of {asked.text}: {file}")


if __name__ == "__main__":
    main()
