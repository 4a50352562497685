"""Whether the formats that --mix chooses are better than rules that people use, at equal bytes.

    python benchmarks/quality/mixes.py measure --rows ROWS.jsonl --models study demo [--targets 3.5 4.5 5.5] [--assets FOLDER]
    python benchmarks/quality/mixes.py measure --rows ROWS.jsonl --models smollm2 --published build/models [--held-out 8]
    python benchmarks/quality/mixes.py page --rows ROWS.jsonl

`measure` adds a line for every way of a target that the file does not hold yet; it may be stopped at any time. A target is a
mean number of bits. 3.5 and 4.5 are of the codes of integers: the limit of the mix is halfway between the bytes of the two
widths around it. 5.5 counts every byte of NVFP4, FP8 and BF16; inputs are rounded as the formats say, in the run and where KL
is measured. Ways:

- int3, int4, int5: all layers alike. The page interpolates log KL between the two widths at the bytes of the mix.
- mix: `nearplane.quantize(mix=..., bits_per_weight=...)`.
- ends: the first and the last block get the widest format that fits, and then their neighbours the next larger one.
- down: down_proj gets the next larger format, in as many blocks as fit; then all layers of a block do, block by block.
- _m: likewise, but before it q, k, v and down_proj of the first and the last eighth of the blocks and of every third between
  them, as in llama.cpp's mixes of types.
- experts: attention in FP8, the rest in NVFP4; then more of it in FP8, block by block.
- random-0 to random-4: units get the next larger format in random order.

In every way q, k and v have one format, so have gate and up, and all experts of a block, as vLLM loads them. Each rule goes on
until it has the bytes of the mix, and leaves out steps by which it would have many more: rules never have fewer.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cells import commit, remembering
from rows import Row, append, average, claimed, key, ratio, read, table
from subjects import Subject, published_subjects, subjects
from tables import resized

import nearplane
from nearplane.models.layers import Layer
from nearplane.models.model import Model, open_model
from nearplane.planning.mix_recipe import patterns_of
from nearplane.planning.mix_size import offered_bytes
from nearplane.planning.request import resolved

UNQUANTIZED = "bf16"
RANDOM = tuple(f"random-{seed}" for seed in range(5))
KINDS = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
ATTENTION = ("qkv", "o_proj")
FLOATS: Mapping[str, Mapping[str, Any]] = {
    "nvfp4": {"grid": "nvfp4", "activations": "fp4"}, "fp8": {"grid": "fp8", "activations": "fp8"},
}  # fmt: skip


class Target(NamedTuple):
    """Ways that are compared at equal bytes.

    Args:
        mix: Formats that the mix chooses from.
        words: Formats of the rules, smallest first.
        uniform: The two widths around the target; none: it counts every byte.
        rules: The ways beside these and the mix.
    """

    mix: tuple[str, ...]
    words: tuple[str, ...]
    uniform: tuple[str, ...]
    rules: tuple[str, ...]


INTEGERS = tuple(f"int{bits}" for bits in range(3, 9))
NUMBERS = ("nvfp4", "fp8", UNQUANTIZED)
TARGETS = {
    "3.5": Target(INTEGERS[:3], INTEGERS, ("int3", "int4"), ("ends", "down", "_m")),
    "4.5": Target(INTEGERS[:4], INTEGERS[1:], ("int4", "int5"), ("ends", "down", "_m")),
    "5.5": Target(NUMBERS, NUMBERS, (), ("experts", "ends", "down", *RANDOM)),
}


WAYS = sorted({"mix", *(way for each in TARGETS.values() for way in (*each.uniform, *each.rules))})


class Unit(NamedTuple):
    """Layers that get one format: those of a block with the same input, or all of its experts."""

    block: int
    kind: str


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The units of a model, and what they take in each format.

    Args:
        subject: The model.
        target: Formats of the rules, and of the mix among them.
    """

    subject: Subject
    target: Target

    @cached_property
    def ways(self) -> list[str]:
        """All ways, those first that others need; in a mixture of experts none that are about down_proj alone."""
        dense = any(unit.kind == "down_proj" for unit in self.layers)
        rules = [way for way in self.target.rules if dense or way not in ("down", "_m")]
        return [*self.target.uniform, "mix", *rules]

    @cached_property
    def options(self) -> dict[str, Any]:
        """Options that all ways of the target have; experts in any format are not for every program."""
        grouped = {"group_size": self.subject.group_size} if self.target.uniform else {}
        routed = {"runtime": "nearplane", "format": "compressed-tensors"}
        return grouped | (routed if any(layer.routed for layer in self.model.layers) else {})

    @cached_property
    def model(self) -> Model:
        """The model, of which no weight is read."""
        return open_model(str(self.subject.folder), trust_remote_code=False)

    @cached_property
    def layers(self) -> dict[Unit, list[Layer]]:
        """Layers by unit."""
        units: dict[Unit, list[Layer]] = {}
        for number, block in enumerate(self.model.blocks):
            for layer in block.layers:
                last = layer.name.rpartition(".")[2]
                units.setdefault(Unit(number, "experts" if layer.routed else KINDS.get(last, last)), []).append(layer)
        return units

    @cached_property
    def weights(self) -> dict[Unit, int]:
        """Number of weights by unit."""
        return {unit: sum(math.prod(each.shape) for each in layers) for unit, layers in self.layers.items()}

    @cached_property
    def sizes(self) -> dict[str, dict[Unit, int]]:
        """Bytes by format and unit."""
        words = {"mix": ",".join(self.target.words), "bits_per_weight": 16.0}
        recipe = resolved(self.model, nearplane.Recipe.from_spellings(**words, **self.options)).recipe
        assert recipe.mix is not None, "a recipe with a mix"
        return {
            offer.word: {
                unit: sum(offered_bytes(self.model, recipe, each, offer) for each in layers)
                for unit, layers in self.layers.items()
            }
            for offer in recipe.mix.offers
        }

    def bits(self, nbytes: float) -> float:
        """Return bits per weight of so many bytes."""
        return 8 * nbytes / sum(self.weights.values())

    def limit(self, target: str) -> float:
        """Return the bits per weight of the mix: of bytes halfway between two widths, or the target itself."""
        both = [sum(self.sizes[word].values()) for word in self.target.uniform]
        return self.bits(sum(both) / 2) if both else float(target)

    def formats(self, way: str, nbytes: int) -> dict[Unit, str]:
        """Return the format of every unit by a rule with as many bytes as the mix, or by one format for all."""
        if way in self.sizes:
            return dict.fromkeys(self.layers, way)
        words, blocks = self.target.words, range(len(self.model.blocks))
        if not self.target.uniform and way in ("experts", "down"):
            words = words[:2]
        spread = sorted(blocks, key=lambda block: block * (math.sqrt(5) - 1) / 2 % 1)
        levels = dict.fromkeys(self.layers, 0)
        eighth = len(blocks) // 8
        most = [n for n in blocks if n < eighth or n >= 7 * len(blocks) // 8 or (n - eighth) % 3 == 2]  # as llama.cpp
        first = {"down": (spread, "down_proj"), "experts": (spread, *ATTENTION), "_m": (most, "qkv", "down_proj")}
        if way == "ends":
            ends, inward = {0, blocks[-1]}, sorted(blocks, key=lambda block: min(block, blocks[-1] - block))
            for level in range(len(words) - 1, 0, -1):
                wide = {unit: level * (unit.block in ends) for unit in self.layers}
                if self.total(words, wide) <= nbytes:
                    levels = wide
                    break
            steps = [unit for unit in self.some(inward) if not levels[unit]]
        elif way in first:
            steps = [*self.some(*first[way]), *self.some(spread)]
        else:
            steps = [unit for unit in self.layers for _ in words[1:]]
            random.Random(int(way.removeprefix("random-"))).shuffle(steps)
        levels = self.filled(words, levels, steps, nbytes)
        return {unit: words[level] for unit, level in levels.items()}

    def some(self, blocks: Sequence[int], *kinds: str) -> list[Unit]:
        """Return the units of these kinds, or all, of blocks in this order."""
        return [
            unit
            for block in blocks
            for unit in self.layers
            if unit.block == block and (not kinds or unit.kind in kinds)
        ]

    def total(self, words: Sequence[str], levels: Mapping[Unit, int]) -> int:
        """Return the bytes of all units."""
        return sum(self.sizes[words[level]][unit] for unit, level in levels.items())

    def filled(
        self, words: Sequence[str], levels: Mapping[Unit, int], steps: Sequence[Unit], nbytes: int
    ) -> dict[Unit, int]:
        """Return the levels after steps, each to the next larger format, whose bytes come nearest to so many, and not below.

        A step that reaches them may be the last; where later ones come nearer, it is left out.
        """
        found, size = dict(levels), self.total(words, levels)
        best, least = (found, size) if size >= nbytes else (None, math.inf)
        for unit in steps if best is None else ():
            at, more = found[unit], min(found[unit] + 1, len(words) - 1)
            grown = size + self.sizes[words[more]][unit] - self.sizes[words[at]][unit]
            if grown < nbytes:
                found[unit], size = more, grown
            elif grown < least:
                best, least = found | {unit: more}, grown
        assert best is not None, "the largest formats have more bytes"
        return best

    def asked(self, formats: Mapping[Unit, str]) -> dict[str, Any]:
        """Return the options of a run by which units have these formats: of the most frequent one, and by patterns."""
        counts, names = Counter[str](), dict[str, list[str]]()
        for unit, word in formats.items():
            counts[word] += self.weights[unit] * (word != UNQUANTIZED)
            names.setdefault(word, []).extend(layer.name for layer in self.layers[unit])
        usual = counts.most_common(1)[0][0]
        options = {word: FLOATS[word] if word in FLOATS else {"bits": int(word[3:])} for word in counts.keys() & names}
        others = [word for word in self.target.words if word in names and word not in (usual, UNQUANTIZED)]
        layers = {pattern: options[word] for word in others for pattern in patterns_of(self.model, names[word])}
        ignore = patterns_of(self.model, names.get(UNQUANTIZED, []))
        return self.options | options[usual] | {"layers": layers, "ignore": ignore}


def measure(asked: argparse.Namespace) -> None:
    """Measure all ways that were asked for and are not in the file."""
    torch.set_num_threads(1)
    models = subjects(asked.assets, asked.study, asked.mixture)
    if asked.published is not None:
        models |= published_subjects(asked.published, asked.assets)
    if missing := set(asked.models) - set(models):
        sys.exit(f"{', '.join(missing)}: no such model. There are {', '.join(models)}; see --published and --mixture.")
    for name in asked.models:
        subject = resized(models[name], asked.samples, asked.held_out)
        for calibration in asked.calibrations:
            same = {
                "model": name, "sha": subject.sha, "text": subject.digest(calibration), "tool": "nearplane",
                "calibration": calibration, "samples": subject.samples,
                "held_out": sum(map(len, subject.held_out.values())), "commit": commit(),
            }  # fmt: skip
            for target in asked.targets:
                layout = Layout(subject=subject, target=TARGETS[target])
                for way in (each for each in layout.ways if each in (asked.ways or layout.ways)):
                    setting = way if way in TARGETS[target].uniform else f"{target} {way}"
                    row = same | {"setting": setting, "target": target, "way": way}
                    with claimed(asked.rows, f"mixes {name} {calibration} {setting}") as mine:
                        if mine and key(row) not in {key(each) for each in read(asked.rows)}:
                            append(asked.rows, row | measured(layout, row, read(asked.rows)))
                            print(time.strftime("%H:%M:%S"), read(asked.rows)[-1], file=sys.stderr, flush=True)


def measured(layout: Layout, row: Row, rows: Sequence[Row]) -> Row:
    """Quantize in one way, and return its figures."""
    subject, target, way = layout.subject, row["target"], row["way"]
    weights, nbytes = sum(layout.weights.values()), 0
    if way == "mix":
        options = layout.options | {"mix": ",".join(layout.target.mix), "bits_per_weight": layout.limit(target)}
    else:
        if way not in layout.target.uniform:
            of_mix = [each for each in rows if key(each) == key(row | {"setting": f"{target} mix"})]
            if not of_mix:
                sys.exit(f"{row['setting']} needs the bytes of the mix. Measure it first, with --ways mix.")
            nbytes = of_mix[0]["bytes"]
        options = layout.asked(layout.formats(way, nbytes))
    with tempfile.TemporaryDirectory() as place:
        out, began = Path(place) / "out", time.process_time()
        windows = subject.calibration(row["calibration"])
        record = nearplane.quantize(str(subject.folder), out, calibration=windows, progress=False, **options)
        cpu = time.process_time() - began
        kinds = divergences(subject, out, rounded=not layout.target.uniform)
    formats = Counter({layer.format: 0 for layer in record.layers})
    for layer in record.layers:
        formats[layer.format] += layer.in_features * layer.out_features
    left = weights - formats.total()
    stored = sum(layer.bytes for layer in record.layers) + 2 * left
    chosen = {name: getattr(record.mix, name) for name in ("estimated", "predicted", "measured")} if record.mix else {}
    shares = {name: round(count / weights, 4) for name, count in (formats + Counter({UNQUANTIZED: left})).items()}
    counts = [len(each) for each in subject.held_out.values()]
    kl = sum(count * each for count, each in zip(counts, kinds.values(), strict=True)) / sum(counts)
    return {
        "formats": shares, "bytes": stored, "bits_per_weight": round(layout.bits(stored), 5), "kl": float(f"{kl:.6g}"),
        "kinds": {kind: float(f"{each:.6g}") for kind, each in kinds.items()},
        **{name: float(f"{value:.6g}") for name, value in chosen.items()}, "cpu": round(cpu, 1),
    }  # fmt: skip


def divergences(subject: Subject, out: Path, *, rounded: bool) -> dict[str, float]:
    """Return KL by kind of held-out text; if `rounded`, of the network that rounds inputs as the files say."""
    network = nearplane.load(out, dtype=torch.float32, device="cpu", packed=False, activations=rounded)
    original = remembering(subject.folder)
    return {
        kind: nearplane.evaluate(network, windows, against=original, progress=False).kl
        for kind, windows in subject.held_out.items()
    }


def page(asked: argparse.Namespace) -> None:
    """Print the tables: one for each model and target."""
    parts: dict[tuple[Any, ...], list[Row]] = {}
    for row in read(asked.rows):
        parts.setdefault(tuple(row[name] for name in ("model", "sha", "samples", "held_out")), []).append(row)
    for (model, _, samples, held_out), rows in parts.items():
        commits = ", ".join(sorted({row["commit"] for row in rows}))
        print(f"\n## {model}\n\n{samples} windows for calibration, {held_out} held out, measured at {commits}.")
        for target in TARGETS:
            if lines := [*of_target(rows, target)]:
                print(f"\n{target} bits{' of codes' if TARGETS[target].uniform else ', inputs rounded'}:\n")
                print("\n".join(lines))


def of_target(rows: Sequence[Row], target: str) -> Iterator[str]:
    """Yield the table of a target over calibrations; nothing before its mix was measured."""
    by_way: dict[str, dict[int, Row]] = {}
    for row in rows:
        if row["way"] in TARGETS[target].uniform or row["target"] == target:
            by_way.setdefault(row["way"], {})[row["calibration"]] = row
    mixes = by_way.pop("mix", {})
    if not mixes:
        return
    uniform = [by_way.get(word, {}) for word in TARGETS[target].uniform]
    if between := {number: interpolated(row, *(each[number] for each in uniform)) for number, row in mixes.items()
                   if uniform and all(number in each for each in uniform)}:  # fmt: skip
        by_way[" and ".join(TARGETS[target].uniform) + ", interpolated"] = between
    lines = [line("**mix**", [*mixes.values()], [])]
    lines += [
        line(way, [*of.values()], [(of[n]["kl"], mixes[n]["kl"]) for n in of if n in mixes])
        for way, of in by_way.items()
    ]
    drawn = [by_way[way] for way in RANDOM if way in by_way]
    if drawn:
        pairs = [(row["kl"], mixes[n]["kl"]) for of in drawn for n, row in of.items() if n in mixes]
        lines.append(line(f"random, mean of {len(drawn)}", [row for of in drawn for row in of.values()], pairs))
    kinds = [*next(iter(mixes.values()))["kinds"]]
    heads = (
        "way",
        "bits per weight",
        "KL",
        *(kinds if len(kinds) > 1 else ()),
        "mix / this",
        "share of weights",
        "CPU s",
    )
    yield from table(heads, lines)
    figures = ("estimated", "predicted", "measured")
    said = ", ".join(f"{name} {average([row[name] for row in mixes.values()])}" for name in figures)
    yield f"\nKL of the mix before the run: {said}."


def interpolated(mix: Row, lower: Row, upper: Row) -> Row:
    """Return KL at the bytes of a mix, on a line in its logarithm between two rows."""
    share = (mix["bytes"] - lower["bytes"]) / (upper["bytes"] - lower["bytes"])

    def at(first: float, second: float) -> float:
        return math.exp((1 - share) * math.log(first) + share * math.log(second))

    kinds = {kind: at(lower["kinds"][kind], upper["kinds"][kind]) for kind in mix["kinds"]}
    return {"bits_per_weight": mix["bits_per_weight"], "kl": at(lower["kl"], upper["kl"]), "kinds": kinds}


def line(way: str, rows: Sequence[Row], pairs: Sequence[tuple[float, float]]) -> tuple[str, ...]:
    """Return a line of a table: means, and the ratio of KL of the mix over that of this way."""
    kinds = [f"{average([row['kinds'][kind] for row in rows])}" for kind in rows[0]["kinds"]]
    formats = ", ".join(f"{name} {100 * share:.0f} %" for name, share in rows[0].get("formats", {}).items())
    against = "-"
    if pairs:
        found = ratio(*zip(*pairs, strict=True))
        against = f"**{found.value:.3f}**" + ("" if found.error is None else f" ± {found.error:.3f}")
    cpu = f"{average([row['cpu'] for row in rows]).value:.0f}" if "cpu" in rows[0] else "-"
    bits = f"{average([row['bits_per_weight'] for row in rows]).value:.4f}"
    kl = f"{average([row['kl'] for row in rows])} ({len(rows)})"
    shown = "-" if way.startswith("random,") else formats or "-"
    return (way, bits, kl, *(kinds if len(kinds) > 1 else ()), against, shown, cpu)


def main() -> None:
    """Do one of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("measure")
    one.set_defaults(run=measure)
    one.add_argument("--rows", type=Path, required=True)
    one.add_argument("--models", nargs="+", required=True)
    one.add_argument("--targets", nargs="+", default=[*TARGETS], choices=[*TARGETS])
    one.add_argument("--ways", nargs="+", default=[], choices=WAYS, help="default: all of the target")
    one.add_argument("--calibrations", nargs="+", type=int, default=[0])
    one.add_argument("--samples", type=int, help="windows of a calibration")
    one.add_argument("--held-out", type=int, help="held-out windows of each text")
    one.add_argument("--assets", type=Path, default=Path(os.environ.get("ASSETS", "../shared/assets")))
    one.add_argument("--study", type=Path, default=Path(__file__).parents[1] / "models" / "study")
    one.add_argument("--published", type=Path, help="folder that tools/published_models.py wrote")
    one.add_argument("--mixture", type=Path, help="folder that tools/train_model.py wrote")
    two = commands.add_parser("page")
    two.set_defaults(run=page)
    two.add_argument("--rows", type=Path, required=True)
    asked = parser.parse_args()
    asked.run(asked)


if __name__ == "__main__":
    main()
