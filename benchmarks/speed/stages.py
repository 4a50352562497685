"""What every stage of a run costs: CPU time by parts, as multiples of the products that the layers' shapes stand for.

    OMP_NUM_THREADS=1 taskset -c 1 python benchmarks/speed/stages.py [SRC ...]
    OMP_NUM_THREADS=1 taskset -c 1 python benchmarks/speed/stages.py --model FOLDER --text FILE --group-size 64 [SRC ...]

Quantizes a random Llama of two blocks (hidden 1024, intermediate 3072), or the first blocks of your model (default: all; one
safetensors file, blocks named as Llama's), to 4 bits on windows of 512 tokens, in a process of its own for every SRC, the `src`
folder of some commit (default: that of the checkout), one after another. The unit is one float32 product (out, in) x (in, in)
for every layer, timed in the same process. Stages contain one another: what `certificates` take is part of `layers`.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LETTERS = 512  # of the alphabet
ROOT = Path(__file__).resolve().parents[2]
STAGES = {  # name: (file, functions), whichever of them a commit has; what torch has built in has no file
    "before the first block": ("planning/run.py", ["start_run"]),
    "products of the forward passes": ("~", ["<built-in method torch._C._nn.linear>"]),
    "attention": ("~", ["<built-in method torch._C._nn.scaled_dot_product_attention>"]),
    "moments": ("lattice/moments.py", ["add"]),
    "factors": ("matrix/inputs.py", ["factor"]),
    "layers": ("planning/solve_stage.py", ["solve_layer"]),
    "correction": ("matrix/inputs.py", ["corrected"]),
    "steps": ("lattice/scale.py", ["grid"]),
    "sweeps": ("lattice/solvers.py", ["sweep_planes", "nearest_plane"]),
    "sweeps and refinement": ("lattice/polish.py", ["refine"]),
    "certificates": ("matrix/certificate.py", ["measured_rows", "record_of"]),
    "of them the limit": ("matrix/certificate.py", ["limit_under"]),
    "of them extra windows": ("lattice/bounds.py", ["losses_on_extra"]),
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


def first_blocks(model: str, blocks: int, folder: str) -> None:
    """Write a copy of a model that ends after some blocks."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
    cut = {"num_hidden_layers": blocks}
    if "layer_types" in config:
        cut["layer_types"] = config["layer_types"][:blocks]
    Path(folder, "config.json").write_text(json.dumps(config | cut), encoding="utf-8")
    weights = load_file(Path(model, "model.safetensors"))
    number = {name: re.search(r"\.layers\.(\d+)\.", name) for name in weights}
    kept = {name: weights[name] for name, found in number.items() if found is None or int(found[1]) < blocks}
    save_file(kept, Path(folder, "model.safetensors"), {"format": "pt"})


def shapes_in(model: str) -> list[tuple[int, int]]:
    """Return (out, in) of the layers of a folder's blocks, from the headers of its files."""
    from safetensors import safe_open

    shapes = []
    for file in sorted(Path(model).glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            every = [(name, tuple(tensors.get_slice(name).get_shape())) for name in tensors.keys()]  # noqa: SIM118
            shapes += [shape for name, shape in every if len(shape) == 2 and ".layers." in name]
    return shapes


def unit(shapes: list[tuple[int, int]]) -> float:
    """Return the CPU seconds of one product for every layer: the best of five by the better of two libraries."""
    import torch

    found: dict[tuple[int, int], float] = {}
    for out, columns in set(shapes):
        W, H, times = torch.randn(out, columns), torch.randn(columns, columns), []
        for precision in 6 * ("ieee", "bf16"):  # by MKL, and by oneDNN: see src/nearplane/system/matmul_library.py
            torch.backends.mkldnn.matmul.fp32_precision = precision
            began = time.process_time()
            W @ H
            times.append(time.process_time() - began)
        found[out, columns] = min(times)
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"
    return sum(found[shape] for shape in shapes)


def measure(model: str, text: str, out: str, windows: int, group_size: int) -> None:
    """Quantize in this process, and print a line for every stage."""
    import nearplane

    nearplane.quantize  # noqa: B018  # imports
    asked = {"bits": 4, "group_size": group_size, "seqlen": 512, "calibration": text}
    nearplane.quantize(model, f"{out}-first", **asked, samples=7)  # compiles
    product, profile = unit(shapes_in(model)), cProfile.Profile(time.process_time)
    before = resource.getrusage(resource.RUSAGE_SELF)
    profile.enable()
    nearplane.quantize(model, out, **asked, samples=windows)
    profile.disable()
    after = resource.getrusage(resource.RUSAGE_SELF)
    stats = pstats.Stats(profile)
    whole = float(stats.total_tt)  # type: ignore[attr-defined]
    system, peak = after.ru_stime - before.ru_stime, 1024 * after.ru_maxrss / 1e9
    print(f"one product a layer: {product:.3f} s; peak {peak:.2f} GB")
    print(f"whole run: {whole:.1f} s, {system:.1f} s of it the system's")
    for name, (file, functions) in STAGES.items():
        times = [
            value[3]
            for (path, _, function), value in stats.stats.items()  # type: ignore[attr-defined]
            if (path == file or path.endswith(f"nearplane/{file}")) and function in functions
        ]
        seconds = max(times, default=0.0) if name == "sweeps" else sum(times)
        print(f"| {name} | {seconds:.2f} s | {seconds / product:.1f} | {100 * seconds / whole:.1f} % |", flush=True)


def main() -> None:
    """Measure every tree in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", default=[str(ROOT / "src")], metavar="SRC")
    parser.add_argument("--model", help="folder; default: a random model", metavar="FOLDER")
    parser.add_argument("--text", help="calibration text of --model", metavar="FILE")
    parser.add_argument("--blocks", type=int, help="quantize the first of --model only")
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=128)
    arguments = parser.parse_args()
    if (arguments.model is None) != (arguments.text is None):
        parser.error("--model and --text belong together")
    with tempfile.TemporaryDirectory() as place:
        model, text = arguments.model, arguments.text
        if model is None:
            model, text = f"{place}/model", f"{place}/text.txt"
            build(model, text)
        elif arguments.blocks is not None:
            first_blocks(model, arguments.blocks, model := f"{place}/model")
        for index, tree in enumerate(arguments.trees):
            print(tree, flush=True)
            numbers = [str(arguments.windows), str(arguments.group_size)]
            command = [sys.executable, __file__, "--one", model, text, f"{place}/out-{index}", *numbers]
            subprocess.run(command, env=os.environ | {"PYTHONPATH": tree}, check=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        measure(*sys.argv[2:5], *map(int, sys.argv[5:]))
    else:
        main()
