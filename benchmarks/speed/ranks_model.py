"""Where would the time of a run on many GPUs go? A model, from the modelled seconds of one GPU and the bytes that ranks pass on.

    python benchmarks/speed/ranks_model.py

Ranks divide forward passes and moments, and the rows of the layers of a stage in strips. All factor the moments, which is not
divided, and rank 0 packs and writes while the others wait. So, per block,

    seconds = (forwards + moments) / ranks + solve x (strips of the busiest rank / strips) + all else + bytes / bandwidth

The seconds of one H100 are those of docs/results/gpu-model.md at 4 bits, with 256 windows of 2,048 tokens. For shapes that it
does not have, each part grows from that of 70B as its multiplications do. Bytes are counted from shapes: the sums of each stage,
twice for a ring of ranks, and the values of all layers in 4 bytes. No GPU and no network between machines was measured.
"""

from __future__ import annotations

import re
from pathlib import Path

from gpu_parts import MODELS, Shape

from nearplane.lattice.kernels import GPU

PAGE = Path(__file__).resolve().parents[2] / "docs" / "results" / "gpu-model.md"
DIVIDED = ("forwards", "moments")
SOLVE = ("target", "search of steps", "sweep", "descent", "certificate")  # of rows
NETWORKS = {"NVLink, 300 GB/s": 300e9, "PCIe, 20 GB/s": 20e9, "100 Gbit/s": 11e9, "10 Gbit/s": 1.1e9}
RANKS = (1, 2, 8, 64)


SHAPES = {
    "8B": MODELS["Llama-3.1-8B"],
    "70B": MODELS["Llama-3.1-70B"],
    "405B": Shape(hidden=16384, intermediate=53248, heads=128, keys=8, head=128, blocks=126),
    "671B, 256 experts, 8 active": Shape(
        hidden=7168, intermediate=2048, heads=128, keys=128, head=128, blocks=61, experts=256, active=8
    ),
}


def stages(shape: Shape) -> list[tuple[int, int, int, float]]:
    """Return (inputs, outputs of all layers, how many there are, share of the tokens that each sees) of each stage."""
    return [(group.inputs, sum(group.outs), group.experts, group.share) for group in shape.groups]


def work(shape: Shape) -> dict[str, float]:
    """Return multiplications that each part grows with."""
    return {
        "forwards": sum(count * share * n * out for n, out, count, share in stages(shape)),
        "moments": sum(count * share * n * (n / 2 + min(n, out)) for n, out, count, share in stages(shape)),
        "solve": sum(count * out * n * n for n, out, count, _ in stages(shape)),
        "rest": sum(count * (n**3 / 3 + out * n) for n, out, count, _ in stages(shape)),
    }


def sums(shape: Shape) -> float:
    """Return the bytes of the sums of a block: H in 8 bytes an entry, C or lost outputs in 16, with those held out."""
    return sum(2.0 * count * (8 * n * n + 16 * n * min(n, out)) for n, out, count, _ in stages(shape))


def values(shape: Shape) -> float:
    """Return the bytes of the values of a block's layers in float32."""
    return sum(4.0 * count * n * out for n, out, count, _ in stages(shape))


def seconds_of(name: str) -> dict[str, float]:
    """Return the modelled seconds of a block on an H100 at 4 bits: forwards, moments, solve of rows, and the rest."""
    known = modelled()
    if name in known:
        return known[name]
    mine, base = work(SHAPES[name]), work(SHAPES["70B"])
    return {part: took * mine[part] / base[part] for part, took in known["70B"].items()}


def modelled() -> dict[str, dict[str, float]]:
    """Read the table of 4 bits on the page of modelled seconds."""
    lines = PAGE.read_text().split("| 4 bits, one block |")[1].split("\n\n")[0].splitlines()
    heads = [cell.strip() for cell in lines[0].strip("|").split("|")]
    found = {}
    for name in ("8B", "70B"):
        column = heads.index(f"{name} H100 now")
        cells = [[re.sub(r"[*\s]", "", cell) for cell in line.strip("|").split("|")] for line in lines[2:]]
        parts = {row[0]: float(row[column + 1]) for row in cells}
        solve = sum(parts[each.replace(" ", "")] for each in SOLVE)
        rest = parts["allbutreading"] - sum(parts[each] for each in DIVIDED) - solve
        found[name] = {each: parts[each] for each in DIVIDED} | {"solve": solve, "rest": rest}
    return found


def share_of_the_busiest(shape: Shape, ranks: int) -> float:
    """Return the share of the solve's multiplications that the rank has which solves the most strips of each stage."""
    mine = 0.0
    for group in shape.groups:
        strips = group.experts * sum(-(-out // GPU.strip_rows) for out in group.outs)
        mine += group.experts * sum(group.outs) * group.inputs**2 * -(-strips // ranks) / strips
    return mine / work(shape)["solve"]


def main() -> None:
    """Print the tables."""
    print("| model, one block | forwards + moments, s | solve of rows, s | all else, s | sums, GB | values, GB |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, shape in SHAPES.items():
        took = seconds_of(name)
        shared = took["forwards"] + took["moments"]
        parts = f"{shared:.1f} | {took['solve']:.1f} | {took['rest']:.1f}"
        print(f"| {name} | {parts} | {sums(shape) / 1e9:.1f} | {values(shape) / 1e9:.1f} |")
    print()
    print("| minutes of a model | " + " | ".join(f"{ranks} GPU{'s' * (ranks > 1)}" for ranks in RANKS) + " |")
    print("|---|" + "---:|" * len(RANKS))
    for name, shape in SHAPES.items():
        took = seconds_of(name)
        shared = took["forwards"] + took["moments"]
        for network, bandwidth in NETWORKS.items():
            cells = []
            for ranks in RANKS:
                passed = 0.0 if ranks == 1 else (2 * sums(shape) * (ranks - 1) / ranks + values(shape)) / bandwidth
                solve = took["solve"] * share_of_the_busiest(shape, ranks)
                cells.append(f"{shape.blocks * (shared / ranks + solve + took['rest'] + passed) / 60:,.1f}")
            print(f"| {name}, {network} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
