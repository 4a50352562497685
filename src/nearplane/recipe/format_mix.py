"""A mix of number formats: which ones layers choose from, and what all of them together may take. Needs no torch.

`planning/format_mix.py` measures what each format costs the network and chooses. The checkpoint is then written as if each choice
had been asked for with --layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from nearplane.errors import RecipeError
from nearplane.number_formats import InputRounding, find_format
from nearplane.recipe.block_scheme import MEASURED_TYPES
from nearplane.recipe.file_formats import FILE_FORMATS, Format
from nearplane.recipe.runtimes import Runtime
from nearplane.recipe.scheme import Activations
from nearplane.recipe.schemes import AnyScheme, scheme_of
from nearplane.system.arguments import check_fields, whole, within
from nearplane.system.sizes import bytes_in

Weigh = Literal["stored", "active"]
Cost = Literal["file", "bytes-per-token"]
UNQUANTIZED = "bf16"  # a layer as it is in the original, whatever its dtype
WEIGHTS_ALONE = "a16"  # end of the name of a format whose inputs keep 16 bits, as in llm-compressor's NVFP4A16
W8A8 = "w8a8"
INTEGERS = tuple(f"int{bits}" for bits in range(2, 9))
LIMITS = ("size", "bits_per_weight", "served_memory")
MIX_OPTIONS = ("mix", "bits_per_weight", "served_memory", "context", "weigh", "cost")
GROUPS = ("group_size", "symmetric", "minimum")  # options of integers, which a named format has of its own
# by the program that is to load the result: formats for which it has fast kernels, and which span a wide range of sizes
DEFAULTS: Mapping[Runtime, tuple[str, ...]] = {
    "vllm": ("int4", "int8", UNQUANTIZED),
    "sglang": ("int4", "int8", UNQUANTIZED),
    "transformers": ("int2", "int3", "int4", "int6", "int8"),
    "gptqmodel": ("int2", "int3", "int4", "int8"),
    "mlx": ("int2", "int3", "int4", "int5", "int6", "int8"),
    "llama.cpp": MEASURED_TYPES,
}
BY_FORMAT: Mapping[Format, Runtime] = {
    "compressed-tensors": "transformers", "gptq": "gptqmodel", "gptq_v2": "gptqmodel", "mlx": "mlx", "gguf": "llama.cpp",
}  # fmt: skip


class Offer(NamedTuple):
    """A number format that a layer may get.

    Args:
        word: Its name in --mix.
        scheme: How the layer is then solved; None: it stays unquantized.
        activations: Numbers to which its inputs are then rounded.
    """

    word: str
    scheme: AnyScheme | None
    activations: Activations = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatMix:
    """Number formats to choose from, and the limit of all layers together. One of the three limits is given.

    Args:
        offers: The formats.
        size, bits_per_weight, served_memory, context, weigh, cost: See `quantize`.
    """

    offers: tuple[Offer, ...]
    size: str | None = None
    bits_per_weight: float | None = None
    served_memory: str | None = None
    context: int | None = None
    weigh: Weigh = "stored"
    cost: Cost = "file"

    def __post_init__(self) -> None:
        object.__setattr__(self, "offers", tuple(Offer(*each) for each in self.offers))
        check_fields(self, "weigh", "cost")
        given = [name for name in LIMITS if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(f"--{name.replace('_', '-')}" for name in given) or "none"
            raise RecipeError(f"--mix needs one limit of --size, --bits-per-weight and --served-memory; found {found}.")
        for name in ("size", "served_memory"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, str(value))
                bytes_in(str(value), f"--{name.replace('_', '-')}")
        bits = self.bits_per_weight
        within("bits_per_weight", bits, bits is None or (isinstance(bits, int | float) and 0 < bits <= 32), "0 to 32")
        whole("context", self.context, 1)
        if self.context is not None and self.served_memory is None and self.cost == "file":
            raise RecipeError(
                "--context counts in --served-memory and in --cost bytes-per-token. Use one of them, or leave it out."
            )
        if self.weigh == "active" and self.bits_per_weight is None and self.cost == "file":
            raise RecipeError(
                f"--weigh active counts experts in --bits-per-weight and in --cost bytes-per-token, but all of them are in "
                f"{'memory' if self.size is None else 'the folder'}. Leave it out, or use one of these."
            )
        if self.cost != "file" and self.size is None:
            raise RecipeError("--cost bytes-per-token limits the bytes of a token by --size. Use --size.")
        words = ",".join(self.words)
        if len(set(self.words)) < len(self.words):
            raise RecipeError(f"--mix {words} names a format twice. Leave out one of them.")
        if len(self.words) < 2:
            raise RecipeError(
                f"--mix {words} has one format, so that nothing is chosen. Name at least two, or use --bits or --grid."
            )
        kinds = {type(each.scheme) for each in self.offers if each.scheme is not None}
        if len(kinds) > 1:
            raise RecipeError(f"--mix {words} has types of llama.cpp and other formats. No file stores both.")

    @classmethod
    def of(cls, fields: Mapping[str, Any] | None, into: Format | None) -> FormatMix | None:
        """Return the mix with these fields, read from the JSON of a recipe; None if there is none."""
        if fields is None:
            return None
        offers = tuple(
            Offer(word, None if scheme is None else scheme_of(into=into, **scheme), activations)
            for word, scheme, activations in fields["offers"]
        )
        return cls(**{**fields, "offers": offers})

    @property
    def words(self) -> tuple[str, ...]:
        """Names of the formats in --mix."""
        return tuple(offer.word for offer in self.offers)

    @property
    def coarsest_inputs(self) -> InputRounding | None:
        """Numbers of the fewest bits to which a format rounds inputs; None: no format does."""
        rounded = [
            each.scheme.number_format.inputs for each in self.offers if each.scheme and each.activations != "none"
        ]
        return min((each for each in rounded if each is not None), key=lambda each: each.bits, default=None)

    @property
    def first(self) -> Offer:
        """The first of the formats that are quantized."""
        return next(offer for offer in self.offers if offer.scheme is not None)

    def grouped(self, columns: Sequence[int]) -> FormatMix:
        """Return the mix with group size "auto" resolved for layers with these numbers of inputs."""
        return replace(
            self,
            offers=tuple(
                each if each.scheme is None else each._replace(scheme=each.scheme.grouped(columns))
                for each in self.offers
            ),
        )

    @property
    def option(self) -> str:
        """Name of the option of the limit, without dashes in front."""
        return next(name for name in LIMITS if getattr(self, name) is not None).replace("_", "-")

    @property
    def asked(self) -> str:
        """The option of the limit with its value."""
        return f"--{self.option} {self.bits_per_weight or self.size or self.served_memory}"

    @property
    def by_tokens(self) -> bool:
        """Whether experts count by the share of tokens that reach them."""
        return self.weigh == "active" or self.cost != "file"

    @property
    def counts_cache(self) -> bool:
        """Whether the cache of keys and values counts in the limit."""
        return self.served_memory is not None or self.cost != "file"

    @property
    def limit(self) -> tuple[float, str]:
        """The limit that was given, and its unit."""
        if self.bits_per_weight is not None:
            return self.bits_per_weight, "bits per weight"
        return float(bytes_in(str(self.size or self.served_memory))), "bytes"


def parsed_mix(words: object) -> tuple[str, ...]:
    """Return the formats of "nvfp4,fp8,bf16", or of a list of such names.

    Raises:
        RecipeError: It is neither, or a name is unknown.
    """
    names = words.split(",") if isinstance(words, str) else words
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise RecipeError(f"--mix is {str(words)[:60]!r}; expected names such as nvfp4,fp8,bf16 or int3,int4,int8.")
    formats = tuple(name.strip().lower() for name in names)
    for name in formats:
        if name in (UNQUANTIZED, W8A8, *INTEGERS):
            continue
        plain = name.removesuffix(WEIGHTS_ALONE)
        format = find_format(plain)
        if format is None or not format.bits or (plain != name and format.inputs is None):
            raise RecipeError(
                f"--mix has {name!r}; expected {UNQUANTIZED}, int2 to int8, a format with groups as int4-g64, {W8A8}, a float "
                f"as nvfp4, mxfp4, fp8, fp8-block or mxfp8, the same for weights alone as nvfp4{WEIGHTS_ALONE}, or a type of "
                f"llama.cpp as q4_k."
            )
    return formats


def default_mix(runtime: Runtime | None, format: Format | None) -> tuple[str, ...]:
    """Return the formats to choose from for a runtime, or for the usual reader of a file format.

    Raises:
        RecipeError: There is none.
    """
    reader = runtime or BY_FORMAT.get(format or "compressed-tensors")
    if reader is None or reader not in DEFAULTS:
        who = f"--format {format}" if runtime is None else f"--runtime {runtime}"
        raise RecipeError(
            f"{who} has no usual mix of number formats. Name the formats with --mix, or use --bits or --grid."
        )
    return DEFAULTS[reader]


def mix_of(options: Mapping[str, Any], flat: Mapping[str, Any]) -> tuple[FormatMix | None, dict[str, Any]]:
    """Return the mix that flat options ask for, None if they do not, and the other options of schemes.

    A size for a program, or for files, that do not hold entropy-coded weights asks for a mix, too.

    Args:
        options: Options of schemes and of the mix.
        flat: Fields of the recipe.

    Raises:
        RecipeError: Options contradict each other, or a format is unknown.
    """
    own = {name: options[name] for name in MIX_OPTIONS if options.get(name) is not None}
    others = {name: value for name, value in options.items() if name not in MIX_OPTIONS}
    into, runtime = flat.get("format"), flat.get("runtime")
    fixed = [each for each in (into, runtime) if each is not None]
    by_format = bool(fixed) and not any(each in ("nearplane", "gguf", "llama.cpp") for each in fixed)
    if not own and (options.get("size") is None or not by_format):
        return None, others
    for name in ("bits", "grid", "rate", "activations"):
        if (value := {**flat, **others}.get(name)) not in (None, "none"):
            raise RecipeError(
                f"{name} is {value!r} beside a mix, which chooses the number format of every layer, as {_asking(own)} does here. "
                f"Leave out one of them; --layer 'PATTERN={name}:{value}' fixes it for some layers."
            )
    if into == "nearplane":
        raise RecipeError(
            f"{_asking(own)} asks for a mix of fixed grids, which --format nearplane does not hold. Leave out --format nearplane, "
            f"or use --rate or --size without a mix."
        )
    formats = parsed_mix(own.pop("mix")) if "mix" in own else default_mix(runtime, into)
    size = others.pop("size", None)
    others = {name: value for name, value in others.items() if name not in ("bits", "grid", "rate")}
    named = [_options_of(word) for word in formats]
    told = {name for name in GROUPS if all("grid" in each for each in named) and others.get(name) not in (None, "auto")}
    kept = [
        {name: value for name, value in others.items() if "grid" not in each or name not in GROUPS or name in told}
        for each in named
    ]  # options of groups are for integers without groups of their own, and refused where there are none
    offers = tuple(
        Offer(word, scheme_of(into=into, runtime=runtime, **rest, **each), _activations(word, into))
        if word != UNQUANTIZED
        else Offer(word, None)
        for word, each, rest in zip(formats, named, kept, strict=True)
    )
    if all(offer.scheme is None for offer in offers):
        raise RecipeError(f"--mix {','.join(formats)} quantizes nothing. Name another format.")
    return FormatMix(offers=offers, size=size, **own), others


def _asking(own: Mapping[str, Any]) -> str:
    """Return the option that asks for a mix, of those that were given."""
    name = next(iter(own), "size")
    return f"--{name.replace('_', '-')}" + (" with this --runtime or --format" if name == "size" else "")


def _options_of(word: str) -> dict[str, Any]:
    """Return the options of a scheme that a format of a mix stands for."""
    if word in INTEGERS:
        return {"bits": int(word.removeprefix("int"))}
    return {"grid": "int8" if word == W8A8 else word.removesuffix(WEIGHTS_ALONE)}


def _activations(word: str, into: Format | None) -> Activations:
    """Return the numbers to which runtimes round the inputs of a layer with this format of a mix."""
    format = find_format("int8" if word == W8A8 else word)
    weights_alone = word != W8A8 and (word.startswith("int") or word.endswith(WEIGHTS_ALONE))
    if (
        weights_alone
        or format is None
        or format.inputs is None
        or not (into is None or FILE_FORMATS[into].rounds_inputs)
    ):
        return "none"
    name: Activations = format.inputs.name  # type: ignore[assignment]
    return name
