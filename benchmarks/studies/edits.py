"""What do load, evaluate, verify, inspect, report and export make of a checkpoint whose text files somebody edited at random?

python benchmarks/studies/edits.py [--count 300] [--first 0]

Edits of config.json, nearplane.json, the index and the tokenizer's files: keys deleted, values of other types and sizes, paths,
escapes for the terminal, truncated and deeply nested text. `tests/support/edits.py` makes them. Ends with code 1 if a call ends
in a traceback, opens a file outside of the folder, or gives another result that `nearplane verify` says nothing of.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
from edits import GOOD, calls, copied, edit, made, outcomes, results


def main() -> None:
    """Edit, call, count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="seed of the first edit")
    parser.add_argument("--verbose", action="store_true", help="print every edit")
    words = parser.parse_args()
    counts: Counter[tuple[str, str]] = Counter()
    longest, bad, began = 0.0, 0, time.perf_counter()
    logging.disable_progress_bar()
    logging.set_verbosity_error()

    def say(line: str) -> None:
        print(line.encode("ascii", "backslashreplace").decode(), flush=True)

    with tempfile.TemporaryDirectory() as name:
        folders, text, original = made(Path(name))
        copy, read = Path(name) / "copy", calls(text, original)
        expected = {way: results(copied(folder, copy), read) for way, folder in folders.items()}
        for seed in range(words.first, words.first + words.count):
            way = list(folders)[seed % len(folders)]
            folder = copied(folders[way], copy)
            done = edit(folder, random.Random(seed))
            if words.verbose:
                say(f"{seed} {way}: {done.file}: {done.what}")
            for call, outcome in outcomes(folder, read, expected[way], (text, original)).items():
                counts[call, outcome.kind] += 1
                longest = max(longest, outcome.seconds)
                if words.verbose:
                    say(f"    {call}: {outcome.kind} ({outcome.seconds:.1f} s) {outcome.said[:300]}")
                if not outcome.good:
                    bad += 1
                    say(f"{seed} {way}: {done}: {call}: {outcome}")
    kinds = [*GOOD, *sorted({kind for _, kind in counts} - set(GOOD))]
    print(f"{words.count} edits, {time.perf_counter() - began:.0f} s, longest call {longest:.1f} s of the processor")
    print(f"| call | {' | '.join(kinds)} |")
    print(f"|{'---|' * (len(kinds) + 1)}")
    for call in read:
        print(f"| {call} | {' | '.join(str(counts[call, kind]) for kind in kinds)} |")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
