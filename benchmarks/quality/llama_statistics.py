"""The statistics of `nearplane evaluate --protocol llama.cpp` beside those of llama.cpp on the same GGUF file.

    PYTHON benchmarks/quality/llama_statistics.py [--grids q4_k_m q2_k] [--windows 16] [--perplexity llama-perplexity]

PYTHON is that of an environment with nearplane and llama-cpp-python (0.3.36). For each grid, a column for each source:

    nearplane    what `nearplane evaluate` says of the file
    decoded      the same formulas, written out here, on logits of llama.cpp, to which it gives all tensors decoded to F32
    native       the same on logits of llama.cpp of the file as it is: its kernels round activations to 8 bits
    printed      what `llama-perplexity --kl-divergence` prints of the decoded file and of the file as it is; with --perplexity

The logits of the original are those of transformers in float32. llama-perplexity reads them from a file in its own format,
which rounds log-probabilities to steps of 2.4e-4 and leaves out what is less likely than e^-16. It is built from the sources
in the source package of llama-cpp-python. The line of sed makes it print all lines before it ends, see llama.cpp's issue 22142:

    pip download --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36 && tar xf llama_cpp_python-0.3.36.tar.gz
    sed -i 's/^ *llama_backend_free();/common_log_flush(common_log_main());&/' \\
        llama_cpp_python-0.3.36/vendor/llama.cpp/tools/perplexity/perplexity.cpp
    cmake -S llama_cpp_python-0.3.36/vendor/llama.cpp -B build -DLLAMA_BUILD_TOOLS=ON -DLLAMA_BUILD_SERVER=OFF \\
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF
    cmake --build build --target llama-perplexity
"""

from __future__ import annotations

import argparse
import ctypes
import re
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import llama_cpp
import numpy as np
import torch
from llama_client import SILENT, converted, opened

import nearplane
from nearplane.demo import CALIBRATION, HELD_OUT, MODEL
from nearplane.evaluation.protocols import ScoredText, scored_text
from nearplane.formats.gguf.gguf_header import FILE
from nearplane.verbs.evaluate import load_dense

SHOWN = (
    "Mean PPL(Q)", "Mean PPL(base)", "Mean ln(PPL(Q)/PPL(base))", "Mean KLD", "Maximum KLD", "99.9% KLD", "99.0% KLD",
    "Median KLD", "Mean Δp", "RMS Δp", "Same top p",
)  # fmt: skip
LEAST = 16  # largest distance of a logit from the largest one that llama-perplexity's file holds


def second_halves(logits: np.ndarray) -> np.ndarray:
    """Return the logits of all windows that predict scored tokens, (tokens, vocabulary) in float64."""
    length = logits.shape[1]
    return logits[:, length // 2 : length - 1].reshape(-1, logits.shape[-1]).astype(np.float64)


def by_formulas(model: np.ndarray, original: np.ndarray, right: np.ndarray) -> dict[str, float]:
    """Return the statistics of llama.cpp from logits (tokens, vocabulary) and the right tokens, written out plainly."""
    log_q, log_p = (x - np.log(np.exp(x - x.max(1, keepdims=True)).sum(1, keepdims=True)) - x.max(1, keepdims=True)
                    for x in (model, original))  # fmt: skip
    every = np.arange(len(right))
    ours, theirs = log_q[every, right], log_p[every, right]
    kl, change = (np.exp(log_p) * (log_p - log_q)).sum(1), 100 * (np.exp(ours) - np.exp(theirs))
    return {
        "Mean PPL(Q)": np.exp(-ours.mean()),
        "Mean PPL(base)": np.exp(-theirs.mean()),
        "Mean ln(PPL(Q)/PPL(base))": (theirs - ours).mean(),
        "Mean KLD": kl.mean(),
        "Maximum KLD": kl.max(),
        "99.9% KLD": np.quantile(kl, 0.999),
        "99.0% KLD": np.quantile(kl, 0.99),
        "Median KLD": np.median(kl),
        "Mean Δp": change.mean(),
        "RMS Δp": np.sqrt((change**2).mean()),
        "Same top p": 100 * (log_q.argmax(1) == log_p.argmax(1)).mean(),
    }


def logits_of(path: Path, text: ScoredText) -> np.ndarray:
    """Return the logits (windows, seqlen, vocabulary) of llama.cpp."""
    length, found = text.tokens.shape[1], []
    with opened(path, logits_all=True, n_ctx=length, n_batch=length, n_ubatch=length) as model:
        for window in text.tokens:
            model.reset()
            model.eval(window.tolist())
            found.append(np.array(model.scores[:length], np.float32))
    return np.stack(found)


def write_base(path: Path, text: ScoredText, logits: np.ndarray) -> None:
    """Write the original's logits as `llama-perplexity --kl-divergence-base` does: 16 bits for each log-probability."""
    windows, length = text.tokens.shape
    vocabulary = logits.shape[-1]
    with path.open("wb") as file:
        file.write(b"_logits_" + struct.pack("<3i", length, vocabulary, windows))
        file.write(text.tokens.numpy().astype("<i4").tobytes())
        for row in second_halves(logits):
            least = max(row.min(), row.max() - LEAST)
            step = (row.max() - least) / 65535
            head = np.array([step, least - row.max() - np.log(np.exp(row - row.max()).sum())], "<f4")
            codes = np.zeros(2 * ((vocabulary + 1) // 2), "<u2")
            codes[:vocabulary] = np.rint(np.maximum(row - least, 0) / step)
            file.write(head.tobytes() + codes.tobytes())


def printed(program: Path, model: Path, base: Path, length: int) -> dict[str, float]:
    """Return the figures that `llama-perplexity` prints of a model."""
    words = ["-m", model, "--kl-divergence", "--kl-divergence-base", base, "-c", length, "-b", length, "-ub", length]
    words += ["-t", 1, "-fa", "off", "-ctk", "f32", "-ctv", "f32"]
    run = subprocess.run([str(word) for word in (program, *words)], capture_output=True, text=True, check=True)
    lines = re.findall(r"^ *(\S.*?) *: *(-?[\d.]+)", run.stdout + run.stderr, re.MULTILINE)
    figures = {re.sub(" +", " ", name): float(value) for name, value in lines}
    if missing := [name for name in SHOWN if name not in figures]:
        sys.exit(f"{program} ended before it had printed {', '.join(missing)}. Build it with the line of sed above.")
    return figures


def main() -> None:
    """Print a table for each grid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grids", nargs="+", default=["q4_k_m", "q2_k"])
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--calibration", type=Path, default=CALIBRATION)
    parser.add_argument("--text", type=Path, default=HELD_OUT)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--perplexity", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    llama_cpp.llama_log_set(SILENT, ctypes.c_void_p(0))
    network, tokenizer = load_dense(asked.model, torch.device("cpu"))
    text = scored_text("llama.cpp", tokenizer, asked.text, seqlen=512, samples=asked.windows)
    with torch.inference_mode():
        logits = torch.cat([network(window[None]).logits for window in text.tokens]).numpy()
    original, right = second_halves(logits), text.targets[text.targets >= 0].numpy()
    for grid in asked.grids:
        with tempfile.TemporaryDirectory() as scratch:
            place = Path(scratch)
            out, base = place / "out", place / "base.kld"
            nearplane.quantize(
                asked.model, out, grid=grid, calibration=str(asked.calibration), samples=asked.samples, seqlen=256
            )
            plain = converted(out / FILE, place / "plain.gguf", 0)
            score = nearplane.evaluate(
                out / FILE, asked.text, protocol="llama.cpp", samples=asked.windows, against=asked.model
            )
            columns = {"nearplane": {each.name: each.value for each in score.llama_cpp}}
            for name, path in (("decoded", plain), ("native", out / FILE)):
                columns[name] = by_formulas(second_halves(logits_of(path, text)), original, right)
            if asked.perplexity is not None:
                write_base(base, text, logits)
                for name, path in (("printed decoded", plain), ("printed native", out / FILE)):
                    columns[name] = printed(asked.perplexity, path, base, 512)
        print(f"\n{grid}, {score.tokens:,} tokens scored in {score.windows} windows of {score.seqlen}")
        print(f"{'':28}" + "".join(f"{name:>17}" for name in columns))
        for name in SHOWN:
            print(f"{name:28}" + "".join(f"{column[name]:17.6f}" for column in columns.values()), flush=True)


if __name__ == "__main__":
    main()
