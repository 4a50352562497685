"""How long does a run take on several processes beside one, what do they send, and how much memory does each take?

    python benchmarks/speed/ranks.py [--ranks 1 2 4] [--rounds 3] [--blocks 4] [--quick]

A random Llama (hidden 1,024, intermediate 3,072, 4 blocks) is quantized to 4 bits with 64 windows of 512 tokens. Each process has
one thread and, as far as there are enough, a core of its own. Seconds are of wall time, from the first forward pass to the last
write; rounds take turns, and the median of their ratios counts. Bytes are what rank 0 passes to groups of torch, without
pages of the journal, beside a count of what a block needs.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from reach import Run
from stages import write_text

from nearplane.calibration.windows import EXTRA_TOKENS
from nearplane.lattice.kernels import CPU

RUN = Run(1024, 3072, 16, 8, 64, 4, 64, 512)
SMALL = Run(256, 768, 4, 4, 64, 2, 16, 256)


def counted(run: Run, ranks: int) -> float:
    """Return the bytes of a block that rank 0 takes part in passing on, by count; two limbs of 8 bytes are an exact sum.

    A stage passes on sums of all windows and of those held out: H, whose low limb lies below its diagonal, and C or, for a
    layer alone, its lost outputs, in two limbs; rows of the extra windows in both networks, of all ranks;
    codes, in a byte, of the rows that other ranks solve; then the values of each layer in 4 bytes.
    """
    sums = sum(
        2 * (8 * (n * n + CPU.span * n) + 16 * n * (group[0][0] if len(group) == 1 else n))
        for group, n in ((group, group[0][1]) for group in run.layers)
    )
    extra = sum(2 * 4 * EXTRA_TOKENS * group[0][1] for group in run.layers)
    codes = run.weights * (ranks - 1) / ranks
    return sums + extra + codes + 4.0 * run.weights


def measure(model: str, text: str, out: str, windows: str, seqlen: str) -> None:
    """Quantize on this rank; print as JSON its seconds, peak and the bytes that it passed on."""
    import nearplane
    from nearplane.formats import journal_pages
    from nearplane.system import process_group
    from nearplane.verbs import quantize

    sent, began = [0], [0.0]
    walk, passed = quantize.walk, process_group.ProcessGroup._exchange

    @contextmanager
    def timed(*args: Any, **kwargs: Any) -> Any:
        began[0], sent[0] = time.perf_counter(), 0
        with walk(*args, **kwargs) as stages:
            yield stages

    def noted(group: Any, *args: Any) -> Any:
        tensors = args[1][0] if isinstance(args[1][0], list) else args[1]  # of a gather: what all give
        sent[0] += sum(tensor.nbytes for tensor in tensors)
        return passed(group, *args)

    journal_pages.JournalPages.due = lambda *_: False  # pages of the journal are passed on only now and then
    quantize.walk, process_group.ProcessGroup._exchange = timed, noted
    options = {"samples": int(windows), "seqlen": int(seqlen), "calibration": text, "device": "cpu"}
    nearplane.quantize(model, out, bits=4, group_size=128, **options)
    seconds = time.perf_counter() - began[0]
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"seconds": seconds, "peak": peak, "sent": sent[0]}))


def on_ranks(world: int, words: list[str]) -> list[dict[str, float]]:
    """Run on so many ranks; return what each measured."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cores = sorted(os.sched_getaffinity(0))
    started = []
    for rank in range(world):
        env = os.environ | {"OMP_NUM_THREADS": "1", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
        if world > 1:
            env |= {"RANK": f"{rank}", "WORLD_SIZE": f"{world}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
        pinned = ["taskset", "-c", str(cores[rank % len(cores)])]
        command = [*pinned, sys.executable, __file__, "--one", *words]
        started.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    said = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        sys.exit(f"A rank of {world} failed.")
    return [json.loads(each.splitlines()[-1]) for each in said]


def main() -> None:
    """Measure by turns, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=RUN.blocks, help="of the model; all take equally long")
    parser.add_argument("--quick", action="store_true", help="a small model: does it work?")
    arguments = parser.parse_args()
    run = SMALL if arguments.quick else replace(RUN, blocks=arguments.blocks)
    found: dict[int, list[list[dict[str, float]]]] = {world: [] for world in arguments.ranks}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        model, text = place / "model", place / "text.txt"
        subprocess.run(
            [sys.executable, str(Path(__file__).with_name("reach.py")), "--build", json.dumps(vars(run)), model],
            check=True,
        )
        write_text(text, (run.windows + max(4, run.windows // 8)) * run.seqlen)
        for number in range(arguments.rounds):
            for world in arguments.ranks:
                out = place / f"out-{world}-{number}"
                words = [str(model), str(text), str(out), str(run.windows), str(run.seqlen)]
                found[world].append(on_ranks(world, words))
                took, sent = found[world][-1][0]["seconds"], found[world][-1][0]["sent"]
                print(f"round {number}, {world} ranks: {took:.1f} s, {sent / 1e6:,.0f} MB", file=sys.stderr, flush=True)
    first = arguments.ranks[0]
    print(f"| ranks | s | / {first} rank, by rounds | median | MB a block | by count | peak GB of each rank |")
    for world, rounds in found.items():
        seconds = [each[0]["seconds"] for each in rounds]
        ratios = [took / each[0]["seconds"] for took, each in zip(seconds, found[first], strict=True)]
        sent = rounds[0][0]["sent"] / run.blocks / 1e6
        peaks = " ".join(f"{each['peak'] / 1e9:.2f}" for each in rounds[-1])
        by_count = f"{counted(run, world) / 1e6:.0f}" if world > 1 else "0"
        print(
            f"| {world} | {statistics.median(seconds):.1f} | {' '.join(f'{each:.2f}' for each in ratios)} | "
            f"{statistics.median(ratios):.2f} | {sent:.0f} | {by_count} | {peaks} |"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        measure(*sys.argv[2:])
    else:
        main()
