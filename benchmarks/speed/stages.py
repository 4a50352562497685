"""What every stage of a run costs: CPU time by parts, as multiples of the products that the layers' shapes stand for.

    OMP_NUM_THREADS=1 taskset -c 1 python benchmarks/speed/stages.py [SRC ...]

Quantizes a random Llama of two blocks (hidden 1024, intermediate 3072) to 4 bits, groups of 128, on windows of 512 random
tokens, in a process of its own for every SRC, the `src` folder of some commit (default: that of the checkout), one after
another. The unit is one float32 product (out, in) x (in, in) for every layer, timed in the same process. Stages contain one
another: what `measure` takes is part of `layers`.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LETTERS = 512  # of the alphabet
ROOT = Path(__file__).resolve().parents[2]
SHAPES = 2 * [(1024, 1024), (512, 1024), (512, 1024), (1024, 1024), (3072, 1024), (3072, 1024), (1024, 3072)]
STAGES = {  # name: (file, functions), whichever of them a commit has
    "moments": ("lattice/moments.py", ["add"]),
    "factors": ("matrix/inputs.py", ["_factorized", "factor"]),
    "layers": ("planning/solve_stage.py", ["solve_layer"]),
    "correction": ("matrix/inputs.py", ["corrected"]),
    "steps": ("lattice/scale.py", ["grid"]),
    "sweeps": ("lattice/solvers.py", ["sweep_planes", "nearest_plane"]),
    "sweeps and refinement": ("lattice/polish.py", ["refine"]),
    "certificates": ("matrix/certificate.py", ["measured_rows", "record_of"]),
    "of them the limit": ("matrix/inputs.py", ["eigenvalues", "mean_log_eigenvalue"]),
    "of them extra windows": ("lattice/bounds.py", ["losses_beside"]),
}


def build(folder: str, text: str) -> None:
    """Write the random model, whose tokens are letters, and a text of random ones."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=8,
        vocab_size=LETTERS, max_position_embeddings=1024, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    save_tokenizer(folder)
    write_text(Path(text), 40 * 512)


def save_tokenizer(folder: str) -> None:
    """Write a tokenizer whose tokens are letters of an alphabet of `LETTERS`."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(BPE({chr(0x4E00 + index): index for index in range(LETTERS)}, []))
    tokenizer.decoder = Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def write_text(file: Path, tokens: int) -> None:
    """Write a text of so many random letters."""
    import torch

    chosen = torch.randint(0, LETTERS, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    file.write_text("".join(chr(0x4E00 + index) for index in chosen), encoding="utf-8")


def unit() -> float:
    """Return the CPU seconds of one product for every layer: the best of five by the better of two libraries."""
    import torch

    found: dict[tuple[int, int], float] = {}
    for out, columns in set(SHAPES):
        W, H, times = torch.randn(out, columns), torch.randn(columns, columns), []
        for precision in 6 * ("ieee", "bf16"):  # by MKL, and by oneDNN: see src/nearplane/system/matmul_library.py
            torch.backends.mkldnn.matmul.fp32_precision = precision
            began = time.process_time()
            W @ H
            times.append(time.process_time() - began)
        found[out, columns] = min(times)
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"
    return sum(found[shape] for shape in SHAPES)


def measure(model: str, text: str, out: str, windows: str) -> None:
    """Quantize in this process, and print a line for every stage."""
    import nearplane

    nearplane.quantize  # noqa: B018  # imports
    asked = {"bits": 4, "group_size": 128, "seqlen": 512, "calibration": text}
    nearplane.quantize(model, f"{out}-first", **asked, samples=7)  # compiles
    product, profile = unit(), cProfile.Profile(time.process_time)
    profile.enable()
    nearplane.quantize(model, out, **asked, samples=int(windows))
    profile.disable()
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    stats = pstats.Stats(profile)
    whole = float(stats.total_tt)  # type: ignore[attr-defined]
    print(f"one product a layer: {product:.3f} s; whole run {whole:.1f} s, peak {peak / 1e9:.2f} GB")
    for name, (file, functions) in STAGES.items():
        times = [
            value[3]
            for key, value in stats.stats.items()  # type: ignore[attr-defined]
            if key[0].endswith(f"nearplane/{file}") and key[2] in functions
        ]
        seconds = max(times, default=0.0) if name == "sweeps" else sum(times)
        print(f"| {name} | {seconds:.2f} s | {seconds / product:.1f} | {100 * seconds / whole:.1f} % |", flush=True)


def main() -> None:
    """Measure every tree in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", default=[str(ROOT / "src")], metavar="SRC")
    parser.add_argument("--windows", type=int, default=32)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        model, text = f"{place}/model", f"{place}/text.txt"
        build(model, text)
        for index, tree in enumerate(arguments.trees):
            print(tree, flush=True)
            command = [sys.executable, __file__, "--one", model, text, f"{place}/out-{index}", str(arguments.windows)]
            subprocess.run(command, env=os.environ | {"PYTHONPATH": tree}, check=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        measure(*sys.argv[2:])
    else:
        main()
