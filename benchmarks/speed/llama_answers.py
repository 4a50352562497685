"""How fast does llama.cpp answer on the CPU with F16, Q8_0 and Q4_K weights of the shapes of `answers.py`?

make build/llama/.installed
OMP_NUM_THREADS=1 taskset -c 0 build/llama/bin/python benchmarks/speed/llama_answers.py --hidden 2048 --intermediate 8192

The model is a random Llama whose file has no tokenizer. Types take turns. On one thread seconds are those of the CPU.
"""

from __future__ import annotations

import argparse
import ctypes
import tempfile
import time
from pathlib import Path

import gguf
import llama_cpp
import numpy as np

TYPES = {"F16": None, "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "Q4_K": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_S}
TURNS = 3


def write(path: Path, options: argparse.Namespace) -> None:
    """Write a random Llama in F16."""
    hidden, inner, heads = options.hidden, options.intermediate, options.hidden // 64
    writer, rng = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0)
    writer.add_context_length(2048)
    writer.add_embedding_length(hidden)
    writer.add_block_count(options.blocks)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads // 4)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(64)
    writer.add_vocab_size(options.vocabulary)
    writer.add_file_type(llama_cpp.LLAMA_FTYPE_MOSTLY_F16)
    writer.add_tokenizer_model("no_vocab")

    def matrix(name: str, out: int, columns: int) -> None:
        writer.add_tensor(name, (rng.standard_normal((out, columns), np.float32) * np.float32(0.02)).astype(np.float16))

    def norm(name: str) -> None:
        writer.add_tensor(name, np.ones(hidden, np.float32))

    matrix("token_embd.weight", options.vocabulary, hidden)
    matrix("output.weight", options.vocabulary, hidden)
    norm("output_norm.weight")
    sizes = {
        "attn_q": (hidden, hidden), "attn_k": (hidden // 4, hidden), "attn_v": (hidden // 4, hidden),
        "attn_output": (hidden, hidden), "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner),
    }  # fmt: skip
    for block in range(options.blocks):
        for name, size in sizes.items():
            matrix(f"blk.{block}.{name}.weight", *size)
        for name in ("attn_norm", "ffn_norm"):
            norm(f"blk.{block}.{name}.weight")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(source: Path, target: Path, file_type: int) -> None:
    """Let llama.cpp quantize a file."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = file_type, 1
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params)):
        raise SystemExit(f"llama.cpp did not quantize {source}")


def answer(model: llama_cpp.Llama, prompt: list[int], tokens: int) -> tuple[float, float]:
    """Return the seconds of the prompt, and of each further token: wall-clock seconds on several threads."""
    clock = time.process_time if model.n_threads == 1 else time.perf_counter
    model.reset()
    began = clock()
    model.eval(prompt)
    first = clock() - began
    for _ in range(tokens - 1):
        model.eval([7])
    return first, (clock() - began - first) / (tokens - 1)


def main() -> None:
    """Write, quantize, and let each type answer in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=8192)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--place", help="folder for the files, which are deleted")
    options = parser.parse_args()
    prompt = np.random.default_rng(1).integers(0, options.vocabulary, options.prompt).tolist()
    with tempfile.TemporaryDirectory(dir=options.place) as folder:
        files = {name: Path(folder, f"{name}.gguf") for name in TYPES}
        write(files["F16"], options)
        for name, file_type in TYPES.items():
            if file_type is not None:
                quantize(files["F16"], files[name], file_type)
        threads = {"n_threads": options.threads, "n_threads_batch": options.threads}
        models = {name: llama_cpp.Llama(str(path), n_ctx=512, verbose=False, **threads) for name, path in files.items()}
        turns = [{name: answer(model, prompt, options.tokens) for name, model in models.items()} for _ in range(TURNS)]
        sizes = {name: path.stat().st_size for name, path in files.items()}
    print("type | file, MB | first token, s | further tokens per second")
    for name in models:
        first, further = np.median([turn[name] for turn in turns], axis=0)
        print(f"{name} | {sizes[name] / 1e6:.0f} | {first:.2f} | {1 / further:.2f}")


if __name__ == "__main__":
    main()
