"""What the programs that are to load a checkpoint accept, by the table of `runtimes.py`. Needs no torch.

A run without a runtime keeps the rules of one usual reader of its format (`USUAL`); with one, those of this program.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from nearplane.errors import RecipeError
from nearplane.number_formats import NumberFormat, integers, number_format
from nearplane.recipe.file_formats import Format
from nearplane.recipe.runtimes import RUNTIMES, USUAL, Form, Integers, Program, Runtime


class Weights(NamedTuple):
    """Weights of a layer as a program meets them in a file.

    Args:
        format: Their number format.
        rounded: Whether the program is to round the layer's inputs, too.
        expert: Whether the layer is a matrix of an expert.
    """

    format: NumberFormat
    rounded: bool = False
    expert: bool = False


@dataclass(frozen=True, slots=True)
class Readers:
    """Programs that are to load files of a format.

    Args:
        format: The format of the files; None: not chosen yet, by which nothing is refused.
        runtimes: The programs; the rules of the last are kept.
        named: Whether this is a program that was asked for, and not the usual ones.
    """

    format: Format | None
    runtimes: tuple[Runtime, ...]
    named: bool = False

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs."""
        return tuple(RUNTIMES[name] for name in self.runtimes)

    @property
    def forms(self) -> tuple[Form, ...]:
        """What the program whose rules are kept loads of the format."""
        return () if self.format is None else self.programs[-1].loads[self.format]

    @property
    def joins(self) -> bool:
        """Whether a program joins layers of a module, which must then have one number format."""
        return any(program.joins for program in self.programs)

    @property
    def by_transformers(self) -> bool:
        """Whether transformers, or GPTQModel which builds on it, is among them."""
        return not {"transformers", "gptqmodel"}.isdisjoint(self.runtimes)

    @property
    def one_grid(self) -> tuple[Runtime, ...]:
        """Those that load only layers of one number format."""
        return tuple(name for name in self.runtimes if self.format in RUNTIMES[name].one_grid)

    @property
    def one_grid_for_experts(self) -> bool:
        """Whether the experts of all blocks must have one number format, and not only those of each block."""
        return any(self.format in program.one_grid_for_experts for program in self.programs)

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of integers that all layers may have, narrowest first."""
        return tuple(sorted({bits for form in self.forms for bits in form.bits}))

    @property
    def words(self) -> list[str]:
        """Names of the number formats that are loaded, as in --mix."""
        kinds = {"symmetric": "int{}", "minima": "int{}", "zero points": "int{}-g128-asym"}
        numbers = [kinds[form.integers].format(bits) for form in self.forms for bits in sorted(form.bits)]
        grids = [name.removesuffix("-row") for form in self.forms for name in form.grids if name != "coded"]
        return [*dict.fromkeys([*numbers, *grids])]

    def fault(self, weights: Weights) -> str | None:
        """Return why such weights are not loaded, and what to do; None: they are."""
        if (reason := self.reason(weights)) is None:
            return None
        others = _loading(self.format, weights)
        judge = "" if self.named or not others else f" (without --runtime, the rules of {self.programs[-1].title} hold)"
        ways = self._near(weights) or options_of(self.forms, expert=weights.expert)
        ways += [f"--runtime {_listed(others, 'or')}"] if others else []
        files = [each for each in USUAL if each != self.format and self._elsewhere(each, weights)]
        ways += [f"--format {_listed(files, 'or')}"] if files else []
        if weights.expert and self.takes(weights._replace(expert=False)):
            ways.append("--ignore 'experts'")
        return f"{reason}{judge}. Use {', or '.join(ways or ['other weights'])}."

    def reason(self, weights: Weights) -> str | None:
        """Return why such weights are not loaded, as a clause; None: they are."""
        if self.format is None or self.takes(weights):
            return None
        inputs, program = weights.format.inputs, self.programs[-1]
        what = f"experts in {weights.format.name}" if weights.expert else weights.format.name
        what += f" with {inputs.name} inputs" if weights.rounded and inputs is not None else ""
        if not _loading(self.format, weights):
            return f"{self.format} does not store {what}"
        verb = "does not load" if program.version else "is not known to load"
        return f"{program.title} {program.version}".strip() + f" {verb} {what} from {self.format}"

    def _near(self, weights: Weights) -> list[str]:
        """Return the options by which weights that are not loaded would be: rounded inputs or none, zero points or none."""
        ways, format = list[str](), weights.format
        if format.inputs is not None and self.takes(weights._replace(rounded=not weights.rounded)):
            ways.append("--activations none" if weights.rounded else f"--activations {format.inputs.name}")
        if format.name.startswith("int") and not format.minimum:
            other = integers(format.bits, format.group, symmetric=not format.symmetric)
            flag = "--no-symmetric" if format.symmetric else "--symmetric"
            ways += [flag] if self.takes(weights._replace(format=other)) else []
        return ways

    def takes(self, weights: Weights) -> bool:
        """Return whether such weights are loaded."""
        return self.format is None or _form(self.forms, weights) is not None

    def _elsewhere(self, format: Format, weights: Weights) -> bool:
        """Return whether the program whose rules are kept loads such weights from another format, or its usual readers do."""
        if not self.named or self.runtimes == ("nearplane",):
            return Readers(format, USUAL[format]).takes(weights)
        return format in self.programs[-1].loads and Readers(format, self.runtimes).takes(weights)

    def check(self, name: str, weights: Weights) -> None:
        """Refuse weights that are not loaded; `name` is the layer, or several, in the error.

        Raises:
            RecipeError: They are not; the message says what is, and who loads them.
        """
        if (fault := self.fault(weights)) is not None:
            raise RecipeError(f"{name}: {fault}")


@cache
def readers_of(format: Format | None, runtime: Runtime | None) -> Readers:
    """Return the programs that are to load files of a format: all usual ones, or the one that is named.

    Raises:
        RecipeError: The program does not read the format; the message names those that it reads.
    """
    if runtime is None:
        return Readers(format, () if format is None else USUAL[format])
    known = RUNTIMES[runtime].loads
    if format is None or format not in known:
        others = " or ".join(name for name, other in RUNTIMES.items() if format in other.loads)
        raise RecipeError(
            f"--runtime {runtime} writes --format {_listed(known, 'or')}, found --format {format}. Use one of these with options "
            f"that go with it, or --runtime {others}."
        )
    return Readers(format, (runtime,), named=True)


def usual_format(runtime: object) -> Format | None:
    """Return the format of a run for a program that does not read the default one; None: the default."""
    for name, program in RUNTIMES.items():
        if name == runtime and "compressed-tensors" not in program.loads:
            return next(iter(program.loads))
    return None


def loads(runtime: Runtime, format: Format | None, weights: Weights) -> bool:
    """Return whether a program loads such weights from a format."""
    known = RUNTIMES[runtime].loads
    return format is not None and format in known and _form(known[format], weights) is not None


def _loading(format: Format | None, weights: Weights) -> list[Runtime]:
    return [name for name in RUNTIMES if loads(name, format, weights)]


def packing(format: Format | None, weights: Weights) -> tuple[Runtime, ...]:
    """Return the programs that keep such weights packed in memory and would not do so from their more usual formats."""
    found = []
    for name, program in RUNTIMES.items():
        kept = program.packed or tuple(program.loads)
        usual = next((each for each in program.loads if each in kept and loads(name, each, weights)), None)
        found += [name] if usual == format else []
    return tuple(found)


def loads_experts(runtime: Runtime, format: Format | None) -> bool:
    """Return whether a program loads any experts from a format."""
    forms = RUNTIMES[runtime].loads.get(format, ()) if format is not None else ()
    return any(form.experts is not None for form in forms)


def options_of(forms: Iterable[Form], *, expert: bool = False) -> list[str]:
    """Return the options that give weights of these forms: --bits 2 to 8, --grid mxfp4 or fp8, --grid nvfp4 --activations fp4."""
    widths, plain = dict[tuple[Integers, tuple[int, ...]], set[int]](), dict[str, None]()
    rounded = dict[str, dict[str, None]]()  # by the numbers of their inputs
    for form in forms:
        if (form.experts if expert else form.dense) is None:
            continue
        widths.setdefault((form.integers, form.groups), set()).update(form.bits)
        for name in form.grids:
            inputs = number_format(name).inputs
            grids = rounded.setdefault(inputs.name, {}) if form.rounded and inputs is not None else plain
            grids[name.removesuffix("-row")] = None
    options = []
    for (kind, groups), bits in widths.items():
        more = " --no-symmetric" if kind == "zero points" else ""
        more += f" --group-size {_listed(groups, 'or')}" if groups else ""
        options += [f"--bits {_range(sorted(bits))}{more}"] if bits else []
    options += ["--rate"] if plain.pop("coded", "") is None else []
    options += [f"--grid {_listed(plain, 'or')}"] if plain else []
    for name, grids in rounded.items():
        left = [each for each in grids if each not in plain]
        options += [f"--grid {_listed(left, 'or')} --activations {name}"] if left else []
    return options


def _range(numbers: list[int]) -> str:
    whole = len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1
    return f"{numbers[0]} to {numbers[-1]}" if whole else _listed(numbers, "or")


def _listed(numbers: Iterable[int | str], word: str) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} {word} {last}" if others else last


def _form(forms: Iterable[Form], weights: Weights) -> Form | None:
    """Return the form that such weights have; None if none of them has it."""
    for form in forms:
        known = form.experts if weights.expert else form.dense
        if known is not None and form.rounded in (None, weights.rounded) and _holds(form, weights.format):
            return form
    return None


def _holds(form: Form, format: NumberFormat) -> bool:
    """Return whether weights of a form may have a number format."""
    if format.name in form.grids:
        return True
    kind: Integers = "minima" if format.minimum else "symmetric" if format.symmetric else "zero points"
    plain = format.name.startswith("int") and (format.bits in form.bits, kind) == (True, form.integers)
    return plain and (not form.groups or format.group in form.groups)
