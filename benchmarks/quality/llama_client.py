"""Our GGUF files in llama.cpp itself: does it compute what we compute, cut text alike, and take as many bytes?

    PYTHON benchmarks/quality/llama_client.py [--grids q4_0 q4_k_m ...] [--model FOLDER --calibration TXT --text TXT
        --ignore PATTERN --embeddings TYPE --like GGUF]

PYTHON is that of an environment with nearplane and llama-cpp-python (0.3.36). A line for each type and mix:

    bytes        of all tensors in the file, and in that of llama.cpp's own quantizer with its default choices for the same type
    decoded      KL from our own evaluation of the file to llama.cpp, all tensors decoded to F32 by it: noise of floating point
    native       the same with the file as it is: its kernels round activations to 8 bits
    original     KL from the original to llama.cpp, the file as it is: what a user has
    tokens       of the text, all of which the file's tokenizer has to cut as the original's

KL in nats per token on the first windows of the text; caches in float32, one thread.
"""

from __future__ import annotations

import argparse
import ctypes
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import torch
from torch import Tensor

import nearplane
from nearplane.demo import CALIBRATION, HELD_OUT, MODEL
from nearplane.formats.gguf.gguf_header import FILE
from nearplane.formats.gguf.mixes import MIXES
from nearplane.number_formats import TYPES
from nearplane.verbs.evaluate import load_dense

FILE_TYPES = {
    "q4_0": 2, "q4_1": 3, "iq4_nl": 25, "iq4_xs": 30, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q6_k": 18,
    "q2_k_m": 10, "q3_k_m": 12, "q4_k_m": 15, "q5_k_m": 17,
}  # fmt: skip
SILENT = llama_cpp.llama_log_callback(lambda level, text, data: None)


@contextmanager
def opened(path: Path, **options: Any) -> Iterator[Any]:
    """Open a file as exactly as llama.cpp computes."""
    exact = dict(type_k=0, type_v=0, flash_attn=False, n_threads=1, n_threads_batch=1, verbose=False)
    model = llama_cpp.Llama(str(path), **exact, **options)
    try:
        yield model
    finally:
        model.close()


def converted(source: Path, out: Path, type: int) -> Path:
    """Let llama.cpp's own quantizer write a file of a type of its own; 0 is F32."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.nthread, params.ftype, params.allow_requantize = 1, type, True
    if llama_cpp.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(params)):
        raise SystemExit(f"llama.cpp does not convert {source} to {type}")
    return out


def predicted(path: Path, windows: Tensor) -> list[Tensor]:
    """Return log-probabilities (seqlen - 1, vocabulary) of every window."""
    length, found = windows.shape[1], []
    with opened(path, logits_all=True, n_ctx=length, n_batch=length, n_ubatch=length) as model:
        for window in windows:
            model.reset()
            model.eval(window.tolist())
            found.append(torch.from_numpy(np.array(model.scores[: length - 1], np.float64)).log_softmax(-1))
    return found


def apart(expected: list[Tensor], found: list[Tensor]) -> float:
    """Return the mean KL per token."""
    sums = [float((a.exp() * (a - b)).sum()) for a, b in zip(expected, found, strict=True)]
    return sum(sums) / sum(len(each) for each in found)


@torch.inference_mode()
def of_a_network(folder: Path, windows: Tensor) -> list[Tensor]:
    """Return log-probabilities of our own evaluation."""
    network, _ = load_dense(folder, torch.device("cpu"))
    return [network(window[None]).logits[0, :-1].double().log_softmax(-1) for window in windows]


def size(path: Path) -> int:
    """Return the bytes of all tensors."""
    return sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grids", nargs="+", default=[*TYPES, *MIXES], choices=[*TYPES, *MIXES])
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--calibration", type=Path, default=CALIBRATION)
    parser.add_argument("--text", type=Path, default=HELD_OUT)
    parser.add_argument("--ignore", nargs="*", default=())
    parser.add_argument("--embeddings", default="auto")
    parser.add_argument("--like", help="file of the model by llama.cpp's converter, for architectures of its own")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--seqlen", type=int, default=128)
    parser.add_argument("--windows", type=int, default=32)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    llama_cpp.llama_log_set(SILENT, ctypes.c_void_p(0))
    _, tokenizer = load_dense(asked.model, torch.device("cpu"))
    text = asked.text.read_text(encoding="utf-8")[:200_000]
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    windows = torch.tensor(ids[: asked.windows * asked.seqlen]).view(-1, asked.seqlen)
    original = of_a_network(asked.model, windows)
    print(f"{'grid':8}{'bytes':>12}{'llama.cpp':>12}{'decoded':>10}{'native':>10}{'original':>10}{'tokens':>9}")
    for grid in asked.grids:
        with tempfile.TemporaryDirectory() as scratch:
            out, place = Path(scratch) / "out", Path(scratch)
            words = {"samples": asked.samples, "seqlen": asked.seqlen, "ignore": asked.ignore}
            words |= {"embeddings": asked.embeddings, "like": asked.like}
            nearplane.quantize(asked.model, out, grid=grid, format="gguf", calibration=str(asked.calibration), **words)
            plain = converted(out / FILE, place / "plain.gguf", 0)
            theirs = size(converted(plain, place / "theirs.gguf", FILE_TYPES[grid])) if grid in FILE_TYPES else None
            ours, native = of_a_network(out, windows), predicted(out / FILE, windows)
            figures = [apart(ours, predicted(plain, windows)), apart(ours, native), apart(original, native)]
            with opened(out / FILE, vocab_only=True) as model:
                same = model.tokenize(text.encode(), add_bos=False, special=False) == ids
            said = "".join(f"{figure:10.1e}" for figure in figures)
            alike = f"{len(ids):9,}" if same else "   differ"
            print(f"{grid:8}{size(out / FILE):12,}{theirs or '-':>12,}{said}{alike}" if theirs else
                  f"{grid:8}{size(out / FILE):12,}{'-':>12}{said}{alike}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
