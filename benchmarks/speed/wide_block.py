"""What one wide block costs by parts, for one or more commits at equal tokens: CPU seconds at 4 bits and at rates.

    OMP_NUM_THREADS=1 taskset -c 1 python benchmarks/speed/wide_block.py [--hidden 1024] [--rates 3,1.5] [SRC ...]

Quantizes a random Llama of one block (three times as wide inside) on 24 windows of 512 random tokens, in a process of its
own for every SRC, the `src` folder of some commit (default: that of the checkout), one after another. A model of hidden
256 is quantized before, in the same process, so that imports and compiled kernels are not part of the figures. Parts do
not overlap: what the moments of the probe take is part of the probe. "The rest" is forward passes above all.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from stages import LETTERS, ROOT, save_tokenizer, write_text

WINDOWS, SEQLEN = 24, 512
PARTS = {  # function: part; modules and names as of whichever commit has them
    "planning.estimates.estimated": "probe",
    "planning.probe.probe": "probe",
    "budget.probe.probe": "probe",
    "calibration.sensitivity.sensitivity": "sensitivity of rows",
    "models.sensitivity.sensitivity": "sensitivity of rows",
    "lattice.moments.MomentSums.add": "moments",
    "matrix.inputs.corrected": "factors and correction",
    "matrix.on_grid.solve": "steps, sweeps, refinement",
    "matrix.to_rate.search": "search of the rate",
    "lattice.beam.k_best": "k-best",
    "matrix.to_rate.scaled": "scaled",
    "matrix.certificate.measure": "certificates",
    "matrix.certificate.measured_rows": "certificates",
    "matrix.certificate.record_of": "certificates",
    "matrix.certificate.profiles": "certificates",
}


def build(folder: str, hidden: int) -> None:
    """Write the random model, whose tokens are letters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=1, num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128, vocab_size=LETTERS, max_position_embeddings=1024, head_dim=64,
        tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    save_tokenizer(folder)


class Clock:
    """CPU seconds and calls of parts; a part that runs within another one of `PARTS` but the probe stops the other's clock."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        self._running, self._since = ["the rest"], time.process_time()

    def switch(self) -> None:
        """Count the time since the last switch for the part that runs."""
        now, part = time.process_time(), self._running[-1]
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._since
        self._since = now

    def wrapped(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """Return the function with its time counted for a part."""

        @wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.switch()
            self._running.append("probe" if "probe" in self._running else part)
            self.calls[part] = self.calls.get(part, 0) + 1
            try:
                return function(*args, **kwargs)
            finally:
                self.switch()
                self._running.pop()

        return counted

    def watch(self) -> None:
        """Wrap the functions of `PARTS` wherever a module of the package holds them."""
        modules = [module for name, module in sys.modules.items() if name.startswith("nearplane")]
        for path, part in PARTS.items():
            module, *names = path.rsplit(".", 2 if "MomentSums" in path else 1)
            holder = sys.modules.get(f"nearplane.{module}")
            for name in names[:-1]:
                holder = getattr(holder, name, None)
            if (function := getattr(holder, names[-1], None)) is None:
                continue
            counted = self.wrapped(function, part)
            for each in (holder, *modules):
                for name in [name for name, value in vars(each).items() if value is function]:
                    setattr(each, name, counted)


def measure(place: str, hidden: str, *asked: str) -> None:
    """Quantize in this process, and print the parts of every run in `asked`: "4" bits or rates."""
    import nearplane

    text = f"{place}/text.txt"
    for one in asked:
        began = time.process_time()
        given = {"bits": 4, "group_size": 128} if one == "4" else {"rate": float(one)}
        given |= {"seqlen": SEQLEN, "calibration": text, "overwrite": True}
        nearplane.quantize(f"{place}/256", f"{place}/out", **given, samples=7)
        first, clock = time.process_time() - began, Clock()
        clock.watch()
        clock.switch()
        nearplane.quantize(f"{place}/{hidden}", f"{place}/out", **given, samples=WINDOWS)
        clock.switch()
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(f"{one} bits: {sum(clock.seconds.values()):.1f} s, peak {peak / 1e9:.2f} GB; before it {first:.1f} s")
        for part, seconds in sorted(clock.seconds.items(), key=lambda pair: -pair[1]):
            print(f"| {part} | {seconds:.1f} | {clock.calls.get(part, '')} |", flush=True)


def main() -> None:
    """Measure every tree in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", default=[str(ROOT / "src")], metavar="SRC")
    parser.add_argument("--hidden", default="1024")
    parser.add_argument("--rates", default="4,3,1.5", help="separated by commas; 4 is 4 bits on a grid")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        for hidden in ("256", arguments.hidden):
            build(f"{place}/{hidden}", int(hidden))
        write_text(Path(place, "text.txt"), 60 * SEQLEN)
        for tree in arguments.trees:
            for one in arguments.rates.split(","):  # each in a process of its own, whose clock wraps functions once
                print(tree, flush=True)
                command = [sys.executable, __file__, "--one", place, arguments.hidden, one]
                subprocess.run(command, env=os.environ | {"PYTHONPATH": tree}, check=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        measure(*sys.argv[2:])
    else:
        main()
