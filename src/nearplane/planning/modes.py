"""Ways to quantize that `nearplane suggest` chooses from, and what each loses as a multiple of what 4 bits lose. Needs no torch.

The multiples are figures of docs/results/tables.jsonl; `tests/project/test_modes.py` computes them again.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from nearplane.recipe.readers import Weights, packing
from nearplane.recipe.recipe import Recipe
from nearplane.recipe.runtimes import Runtime
from nearplane.recipe.scheme import DEFAULT_GROUP_SIZES

# nats per token of 4 bits on two networks of 135 and 270 million weights: mean of the rows of docs/results/real-models.jsonl
KL_OF_4_BITS = 0.1


class Loss(NamedTuple):
    """KL from the original as a multiple of that of 4 bits on the same model, with groups of the same size.

    Args:
        mean: Geometric mean over models.
        low, high: Smallest and largest of the models.
        models: Number of models.
    """

    mean: float
    low: float
    high: float
    models: int

    def nats(self) -> str:
        """Return the KL to expect, in nats per token, if 4 bits lose `KL_OF_4_BITS`: larger networks mostly lose less."""
        low, high = (f"{KL_OF_4_BITS * each:.1g}" for each in (self.low, self.high))
        return f"about {low}" if low == high else f"{low} to {high}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """A way to quantize.

    Args:
        setting: Name of its rows in the tables of quality.
        options: Options of `quantize` as keywords.
        loss: What it loses.
        packed_bits: Bits of a quantized weight in memory if the program packs it otherwise; None: as in the file.
    """

    setting: str
    options: Mapping[str, Any] = field(hash=False)
    loss: Loss
    packed_bits: float | None = None

    @property
    def name(self) -> str:
        """Name of the way in the name of a folder: int4, int4-gptq, nvfp4, q4_k_m, mlx4, rate3.125."""
        if self.setting.startswith("mlx"):
            return self.setting
        bits, rate, format = (self.options.get(word) for word in ("bits", "rate", "format"))
        named = f"int{bits}" if bits else f"rate{rate}" if rate else str(self.options["grid"])
        return f"{named}-{format}" if format else named

    @property
    def bits(self) -> int:
        """Bits of its codes, as its name says: 4 of q4_k_m, nvfp4 and --bits 4; 0 of a rate."""
        return int(self.options.get("bits") or re.findall(r"\d", str(self.options.get("grid", "0")))[0])

    def runtimes(self, *, experts: bool = False) -> tuple[Runtime, ...]:
        """Return the programs that keep such weights packed, those of experts, too, as they are in the file or packed otherwise."""
        files, weights = Recipe.from_spellings(**self.options).format, self.weights(experts=experts)
        of_experts = packing(files, weights)
        return tuple(name for name in packing(files, weights._replace(expert=False)) if name in of_experts)

    def weights(self, *, experts: bool = False) -> Weights:
        """Return the weights of a layer, or of an expert, as a program meets them."""
        scheme = Recipe.from_spellings(**self.options).scheme
        return Weights(scheme.grouped([max(DEFAULT_GROUP_SIZES)]).number_format, expert=experts)

    @property
    def words(self) -> str:
        """Options of the command that quantizes in this way."""
        return flags(self.options)

    def for_runtime(self, runtime: Runtime | None) -> Mode:
        """Return the way for a program, named in its options if weights have zero points for it alone."""
        options = {**self.options, "runtime": runtime}
        alike = runtime is None or runtime not in self.runtimes()
        if alike or Recipe.from_spellings(**options).scheme == Recipe.from_spellings(**self.options).scheme:
            return self
        return replace(self, options=options)

    def for_experts(self, runtime: Runtime | None) -> Mode:
        """Return the way for a network with experts, with a runtime if it needs one: that which is given, or a possible one."""
        if Recipe.from_spellings(**self.options).readers.takes(self.weights(experts=True)):
            return self
        return replace(self, options={**self.options, "runtime": runtime or next(iter(self.runtimes(experts=True)))})


# share of the energy of normally distributed weights that rounding them to the nearest value of a type loses
ENERGY = {
    "q4_0": 0.0068, "q5_0": 0.00175, "q5_1": 0.0013, "q8_0": 0.000028, "q2_k": 0.068, "q3_k": 0.021, "q4_k": 0.005,
    "q5_k": 0.0012, "q6_k": 0.00031,
}  # fmt: skip
MLX = {"group_size": 64, "format": "mlx"}
GPTQ = {"symmetric": False, "format": "gptq_v2"}


def flags(options: Mapping[str, Any]) -> str:
    """Return options of `quantize` as words of its command."""
    words = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        words += [f"--no-{flag}"] if value is False else [f"--{flag}"] if value is True else [f"--{flag}", str(value)]
    return shlex.join(words)


MODES = (
    Mode(setting="int8", options={"grid": "int8"}, loss=Loss(0.0051, 0.0048, 0.0057, 3)),
    Mode(setting="fp8", options={"grid": "fp8"}, loss=Loss(0.062, 0.055, 0.075, 3)),
    Mode(setting="nvfp4", options={"grid": "nvfp4"}, loss=Loss(0.72, 0.64, 0.91, 3)),
    Mode(setting="4", options={"bits": 4}, loss=Loss(1.0, 1.0, 1.0, 4)),
    Mode(setting="4", options={"bits": 4, "format": "gptq"}, loss=Loss(1.0, 1.0, 1.0, 4)),
    Mode(setting="3-symmetric", options={"bits": 3}, loss=Loss(4.1, 3.8, 4.5, 3)),
    Mode(setting="2-symmetric", options={"bits": 2}, loss=Loss(21, 18, 26, 3)),
    Mode(setting="3", options={"bits": 3, **GPTQ}, loss=Loss(3.5, 3.4, 3.6, 4)),
    Mode(setting="2", options={"bits": 2, **GPTQ}, loss=Loss(18, 16, 20, 4)),
    Mode(setting="q8_0", options={"grid": "q8_0"}, loss=Loss(0.0025, 0.0025, 0.0025, 2)),
    Mode(setting="q6_k", options={"grid": "q6_k"}, loss=Loss(0.029, 0.029, 0.029, 2)),
    Mode(setting="q5_k_m", options={"grid": "q5_k_m"}, loss=Loss(0.098, 0.096, 0.099, 2)),
    Mode(setting="q4_k_m", options={"grid": "q4_k_m"}, loss=Loss(0.34, 0.28, 0.39, 3)),
    Mode(setting="q3_k_m", options={"grid": "q3_k_m"}, loss=Loss(0.99, 0.79, 1.1, 3)),
    Mode(setting="q2_k", options={"grid": "q2_k"}, loss=Loss(8.3, 7.4, 10, 3)),
    Mode(setting="mlx8", options={"bits": 8, **MLX}, loss=Loss(0.0026, 0.0026, 0.0026, 3)),
    Mode(setting="mlx6", options={"bits": 6, **MLX}, loss=Loss(0.041, 0.04, 0.042, 3)),
    Mode(setting="mlx5", options={"bits": 5, **MLX}, loss=Loss(0.16, 0.16, 0.16, 3)),
    Mode(setting="mlx4", options={"bits": 4, **MLX}, loss=Loss(0.66, 0.64, 0.67, 3)),
    Mode(setting="mlx3", options={"bits": 3, **MLX}, loss=Loss(2.9, 2.7, 3.1, 3)),
    Mode(setting="mlx2", options={"bits": 2, **MLX}, loss=Loss(13, 12, 15, 3)),
    # in the memory of a GPU columns of codes take 4 or 8 bits a weight; on the demo 6.3, 4.4 and 4.3 with steps and patches
    Mode(
        setting="3.125",
        options={"rate": 3.125},
        loss=Loss(0.8, 0.66, 0.97, 4),
        packed_bits=6.3,
    ),
    Mode(setting="2.125", options={"rate": 2.125}, loss=Loss(3.8, 3.2, 4.8, 4), packed_bits=4.5),
    Mode(setting="1.5", options={"rate": 1.5}, loss=Loss(11, 8.7, 17, 4), packed_bits=4.4),
)
