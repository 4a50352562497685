"""What the programs that are to load a checkpoint accept, by the table of `runtimes.py`. Needs no torch.

A run without a runtime writes what all usual readers of its format load; with one, what this program loads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from nearplane.errors import RecipeError
from nearplane.number_formats import NumberFormat, integers
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
    """

    format: Format | None
    runtimes: tuple[Runtime, ...]

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
    def without_experts(self) -> tuple[Runtime, ...]:
        """Those that load no experts from the format."""
        return tuple(name for name in self.runtimes if not loads_experts(name, self.format))

    @property
    def one_grid_for_experts(self) -> bool:
        """Whether the experts of all blocks must have one number format, and not only those of each block."""
        return any(self.format in program.one_grid_for_experts for program in self.programs)

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of integers that all layers may have, narrowest first."""
        return tuple(sorted({bits for form in self.forms for bits in form.bits}))

    def fault(self, weights: Weights) -> str | None:
        """Return why such weights are not loaded, and what to do; None: they are."""
        if self.format is None or _form(self.forms, weights) is not None:
            return None
        others = [name for name in RUNTIMES if needs(name, self.format, weights) is not None]
        inputs, program = weights.format.inputs, self.programs[-1]
        what = f"experts in {weights.format.name}" if weights.expert else weights.format.name
        what += f" with {inputs.name} inputs" if weights.rounded and inputs is not None else ""
        forms = self.forms if others else RUNTIMES["nearplane"].loads[self.format]
        loaded = [form for form in forms if (form.experts if weights.expert else form.dense) is not None]
        said = f"{program.title} {program.version}".strip() + f" does not load {what} from {self.format}"
        if not others:
            said = f"{self.format} does not store {what}"
        ways = []
        if _form(self.forms, weights._replace(rounded=not weights.rounded)) is not None and inputs is not None:
            ways.append("--activations none" if weights.rounded else f"--activations {inputs.name}")
        format = weights.format
        if format.name.startswith("int") and not format.minimum:
            other = integers(format.bits, format.group, symmetric=not format.symmetric)
            flag = "--no-symmetric" if format.symmetric else "--symmetric"
            ways += [flag] if self.takes(weights._replace(format=other)) else []
        ways += [f"--runtime {_listed(others, 'or')}"] if others else []
        files = [each for each in USUAL if each != self.format and self._elsewhere(each, weights)]
        ways += [f"--format {_listed(files, 'or')}"] if files else []
        if weights.expert and self.takes(weights._replace(expert=False)):
            ways.append("--ignore 'experts'")
        said += f", but {in_words(loaded)}" if loaded else ""
        return f"{said}. Use {', or '.join(ways or ['one of these'])}."

    def takes(self, weights: Weights) -> bool:
        """Return whether such weights are loaded."""
        return self.format is None or _form(self.forms, weights) is not None

    def _elsewhere(self, format: Format, weights: Weights) -> bool:
        """Return whether the program whose rules are kept loads such weights from another format, or its usual readers do."""
        if self.runtimes in (("nearplane",), USUAL.get(self.format or "nearplane")):
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
    loads = RUNTIMES[runtime].loads
    if format is None or format not in loads:
        others = " or ".join(name for name, other in RUNTIMES.items() if format in other.loads)
        raise RecipeError(
            f"{RUNTIMES[runtime].title} does not read the format {format}, but {', '.join(loads)}. Use --format with one of "
            f"these, or --runtime {others}."
        )
    return Readers(format, (runtime,))


def usual_format(runtime: object) -> Format | None:
    """Return the format of a run for a program that does not read the default one; None: the default."""
    for name, program in RUNTIMES.items():
        if name == runtime and "compressed-tensors" not in program.loads:
            return next(iter(program.loads))
    return None


def needs(runtime: Runtime, format: Format | None, weights: Weights) -> str | None:
    """Return the version of a program that loads such weights, "" if any does; None: it does not load them."""
    loads = RUNTIMES[runtime].loads
    form = _form(loads[format], weights) if format is not None and format in loads else None
    return None if form is None else form.needs


def packing(format: Format | None, weights: Weights) -> tuple[Runtime, ...]:
    """Return the programs that keep such weights packed in memory and would not do so from their more usual formats."""
    found = []
    for name, program in RUNTIMES.items():
        kept = program.packed or tuple(program.loads)
        usual = next((each for each in program.loads if each in kept and needs(name, each, weights) is not None), None)
        found += [name] if usual == format else []
    return tuple(found)


def loads_experts(runtime: Runtime, format: Format | None) -> bool:
    """Return whether a program loads any experts from a format."""
    forms = RUNTIMES[runtime].loads.get(format, ()) if format is not None else ()
    return any(form.experts is not None for form in forms)


def in_words(forms: Iterable[Form]) -> str:
    """Return weights in words, with integers of one kind together: integers of 2 to 8 bits, nvfp4."""
    widths, grids = dict[tuple[Integers, tuple[int, ...]], set[int]](), dict[str, None]()
    for form in forms:
        widths.setdefault((form.integers, form.groups), set()).update(form.bits)
        grids |= dict.fromkeys(f"{each} with rounded inputs" if form.rounded else each for each in form.grids)
    words = []
    for (kind, groups), bits in widths.items():
        ends = {"symmetric": "", "zero points": " with zero points", "minima": " with minima"}[kind]
        if kind != "minima" and widths.get(("symmetric", groups)) == widths.get(("zero points", groups)):
            ends = " with or without zero points"
        ends += f" in groups of {_listed(groups, 'or')}" if groups else ""
        words += [f"integers of {_range(sorted(bits))} bits{ends}"] if bits else []
    grids = {each: None for each in grids if each.partition(" ")[0] not in grids or " " not in each}
    return ", ".join(dict.fromkeys([*words, *grids]))


def _range(numbers: list[int]) -> str:
    whole = len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1
    return f"{numbers[0]} to {numbers[-1]}" if whole else _listed(numbers, "and")


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
