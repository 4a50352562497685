"""Figures of a checkout by which its structure is judged; counts.py prints them.

A function that returns a `Figure` has its definition as docstring. The sources are read and never imported, except for
`Checkout.entered`. Every layout of the package will do: the main path is verbs/quantize.py where there is one, else
quantize.py.
"""

from __future__ import annotations

import ast
import json
import os
import re
import statistics
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from import_graph import Module, Package, cycles, longest_chain, reachable

HERE = Path(__file__).resolve().parent
LONG_LINE = 120  # characters
MAX_PARAMETERS = 6
MAX_BODY = 60  # lines
FORMAT_NAMES = {"gptq", "gptq_v2", "awq", "mlx", "compressed-tensors", "gguf", "nearplane"}
AMBIGUOUS = {"nearplane"}  # also the name of the package: a format only where the other side of a comparison says so
ENDS = (
    "__init__",
    "__main__",
    "errors",
)  # no floors: the first two import what they start, everything imports the last
GRID_CLASS = re.compile(r"Grid|Codebook|Superblock")
SCHEME_CLASS = re.compile(r"Scheme$")
KERNEL_DECORATOR = re.compile(r"jit|compiled|kernel|intrinsic")  # numba.njit and triton.jit, also behind a wrapper
KERNEL_FILE = re.compile(r"_(cpu|gpu|cuda|triton)\.py$")
CLI = re.compile(r"^(cli/.*|cli|finished|flags)(\.py)?$")

READER_PATHS = {  # by the main path: what a reader opens to follow a 4-bit run from main() to the rename of OUT
    "quantize.py": (
        *("cli.py", "flags.py", "terminal.py", "printed.py"),
        *("quantize.py", "request.py", "beginning.py", "tokens.py", "walk.py", "observe.py"),
        *("models/model.py", "models/activations.py", "models/staged.py"),
        *("matrix/__init__.py", "matrix/on_grid.py"),
        *("budget/ledger.py", "journal.py", "notebook.py"),
        *("formats/__init__.py", "formats/container.py", "formats/folder.py", "formats/unfinished.py"),
    ),
    "verbs/quantize.py": (
        *(
            "cli/app.py",
            "cli/quantize_command.py",
            "verbs/quantize.py",
            "verbs/quantize_request.py|verbs/quantize_api.py",
        ),
        *("planning/request.py|planning/start.py", "planning/run.py|verbs/quantize_run.py", "calibration/walk.py"),
        *("planning/solve_stage.py", "matrix/on_grid.py", "formats/container.py", "system/output_folder.py"),
    ),
}  # keep them true when files or the flow of a run change; NEW|OLD: a file that has moved


class Figure(NamedTuple):
    """A count and the places behind it, one line each."""

    value: float | None
    places: list[str]


class Checkout:
    """A checkout: its package, and what several figures ask of it.

    Args:
        root: folder with pyproject.toml and src/nearplane.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.source = self.root / "src" / "nearplane"
        self.package = Package(self.source)

    @cached_property
    def main_path(self) -> Module:
        """The file that a reader of the program reads first."""
        files = {module.file: module for module in self.package}
        found = [files[file] for file in reversed(READER_PATHS) if file in files]
        if not found:
            raise SystemExit(f"{self.source} has no main path: expected {' or '.join(READER_PATHS)}.")
        return found[0]

    @cached_property
    def reader_path(self) -> list[str]:
        """Files of READER_PATHS, each by the first of its names that is there."""
        files = {module.file for module in self.package}
        names = [entry.split("|") for entry in READER_PATHS[self.main_path.file]]
        return [next((name for name in each if name in files), each[0]) for each in names]

    @cached_property
    def members(self) -> dict[str, set[str]]:
        """Graph of the names at the top level, without `ENDS`."""
        return self.package.members(without=ENDS)

    @cached_property
    def exported(self) -> set[tuple[str, str]]:
        """(module, name) of what the package hands out: by its stub where there is one, else by its __all__."""
        stub = self.source / "__init__.pyi"
        if stub.exists():
            found = [node for node in ast.parse(stub.read_text()).body if isinstance(node, ast.ImportFrom)]
            return {(str(node.module), alias.name) for node in found for alias in node.names}
        tree = self.package.modules[self.package.name].tree
        lists = [each.value for each in tree.body if isinstance(each, ast.Assign) and "__all__" in names_in(each)]
        names: list[str] = ast.literal_eval(lists[0]) if lists else []
        return {(self.package.homes[name], name) for name in names if name in self.package.homes}

    @cached_property
    def entered(self) -> list[str]:
        """Files that a traced run enters, see `entered_files`; the run is made when this is first asked for."""
        beside = [root / ".venv" / "bin" / "python" for root in (self.root, HERE.parent)]
        able = [sys.executable] if find_spec("torch") else [str(python) for python in beside if python.exists()]
        environment = os.environ | {"PYTHONPATH": str(self.root / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [*(able or [sys.executable])[:1], str(HERE / "traced_run.py")]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            message = f"{' '.join(command)} ended with {done.returncode}; the figures without --traced need no run."
            raise SystemExit(message)
        files: list[str] = json.loads(done.stdout)
        return files

    def functions(self) -> Iterator[tuple[Module, ast.FunctionDef | ast.AsyncFunctionDef]]:
        """Yield the functions of the package that are no kernels, with the module that each stands in."""
        for module in self.package:
            for node in module.nodes:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_kernel(module, node):
                    yield module, node


def is_kernel(module: Module, node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function is compiled, see `KERNEL_DECORATOR`, or its file holds kernels, see `KERNEL_FILE`."""
    compiled = any(KERNEL_DECORATOR.search(ast.unparse(each)) for each in node.decorator_list)
    return compiled or KERNEL_FILE.search(module.file) is not None


def counted(places: Iterator[str]) -> Figure:
    """Return how many places there are."""
    found = list(places)
    return Figure(len(found), found)


def names_in(node: ast.AST) -> set[str]:
    """Return the names and attributes that an expression or statement mentions."""
    found = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return found | {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}


def at(module: Module, node: ast.AST) -> str:
    """Return FILE:LINE and the text of that line."""
    line: int = getattr(node, "lineno", 1)
    return f"{module.file}:{line}: {module.source.splitlines()[line - 1].strip()}"


def docstring(node: ast.AST) -> ast.stmt | None:
    """Return the statement that is the docstring of a module, class or function."""
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    return None if ast.get_docstring(node, clean=False) is None else node.body[0]


# Modules and their imports


def top_names(checkout: Checkout) -> Figure:
    """Modules and folders directly in the package, __init__ and __main__ included."""
    return counted(iter(sorted(checkout.package.members())))


def floors(checkout: Checkout) -> Figure:
    """Length of the longest chain of arrows between top-level names, without __init__, __main__ and errors.

    Names in a cycle count as one floor: look at the cycles between siblings first.
    """
    chain = longest_chain(checkout.members)
    return Figure(len(chain), [" > ".join(chain)])


def arrows(checkout: Checkout) -> Figure:
    """Pairs (A, B) of top-level names in which a module of A imports one of B, without __init__, __main__ and errors.

    Imports in functions and under TYPE_CHECKING count here and in all figures below.
    """
    return counted(f"{a} > {b}" for a, others in sorted(checkout.members.items()) for b in sorted(others))


def sibling_cycles(checkout: Checkout) -> Figure:
    """Import cycles between the members of a folder, counted in every folder; members are its files and subfolders."""
    folders = [module.name for module in checkout.package if module.is_folder]
    return counted(f"{each}: {' = '.join(c)}" for each in folders for c in cycles(checkout.package.members(each)))


def cross_imports(checkout: Checkout) -> Figure:
    """Pairs (importing module, imported module) that lie in different top-level names."""
    package = checkout.package
    pairs = [(a, b) for a, imported in package.imports.items() for b in sorted(imported)]
    return counted(f"{a} > {b}" for a, b in pairs if package.member(a) != package.member(b))


def reached(checkout: Checkout) -> Figure:
    """Modules that the main path's file imports directly or through others, itself included."""
    return counted(iter(sorted(reachable(checkout.package.imports, checkout.main_path.name))))


def main_path_imports(checkout: Checkout) -> Figure:
    """Modules of the package that the main path's file itself imports."""
    return counted(iter(sorted(checkout.package.imports[checkout.main_path.name])))


def contract_lines(checkout: Checkout) -> Figure:
    """Lines of `layers` in the import-linter contract of type layers in pyproject.toml."""
    settings = tomllib.loads((checkout.root / "pyproject.toml").read_text())
    contracts = settings.get("tool", {}).get("importlinter", {}).get("contracts", [])
    return counted(line for each in contracts if each["type"] == "layers" for line in each["layers"])


# Sizes


def code_lines(checkout: Checkout) -> Figure:
    """Lines of the package that are neither blank, nor in a docstring, nor a comment alone."""
    places = []
    for module in checkout.package:
        texts = [text for node in module.nodes if (text := docstring(node)) is not None]
        quoted = {number for text in texts for number in range(text.lineno, (text.end_lineno or 0) + 1)}
        lines = enumerate(module.source.splitlines(), 1)
        code = [line for n, line in lines if n not in quoted and line.strip() and not line.lstrip().startswith("#")]
        places.append((len(code), module.file))
    return Figure(sum(lines for lines, _ in places), [f"{lines:5} {file}" for lines, file in sorted(places)])


def file_lines(checkout: Checkout) -> list[tuple[int, str]]:
    """Return (lines, file) of every file, sorted by lines."""
    return sorted((len(module.source.splitlines()), module.file) for module in checkout.package)


def median_file(checkout: Checkout) -> Figure:
    """Median of the lines of a file, blank ones, docstrings and comments included."""
    return Figure(statistics.median(lines for lines, _ in file_lines(checkout)), [])


def largest_file(checkout: Checkout) -> Figure:
    """Lines of the longest file, blank ones, docstrings and comments included; the places are the ten longest."""
    longest = file_lines(checkout)[:-11:-1]
    return Figure(longest[0][0], [f"{lines:5} {file}" for lines, file in longest])


def reader_files(checkout: Checkout) -> Figure:
    """Files that a reader opens to follow a 4-bit run from main() to the rename of OUT, as listed in READER_PATHS.

    Those that hold a step of it, from call to call. What a call's name and first sentence tell is not opened: mathematics,
    transformers, what is checked or refused, and what does nothing in such a run (budgets, --memory, going on).
    A listed file that is not there is said on standard error and counts, with no lines, until the list is put right.
    """
    lines = {file: lines for lines, file in file_lines(checkout)}
    listed = checkout.reader_path
    if missing := [file for file in listed if file not in lines]:
        print(f"READER_PATHS in measures.py names what is not there: {', '.join(missing)}", file=sys.stderr)
    return counted(f"{lines[file]:5} {file}" if file in lines else f"missing: {file}" for file in listed)


def reader_lines(checkout: Checkout) -> Figure:
    """Lines, blank ones and docstrings included, of the files that a reader opens; a missing file has none."""
    found = [(lines, file) for lines, file in file_lines(checkout) if file in checkout.reader_path]
    return Figure(sum(lines for lines, _ in found), [f"{lines:5} {file}" for lines, file in found])


def entered_files(checkout: Checkout) -> Figure:
    """Files of which a function was called while the demo model was quantized to 4 bits; see traced_run.py."""
    return counted(iter(checkout.entered))


def entered_lines(checkout: Checkout) -> Figure:
    """Lines, blank ones, docstrings and comments included, of the files that a traced run enters."""
    found = [(lines, file) for lines, file in file_lines(checkout) if file in checkout.entered]
    return Figure(sum(lines for lines, _ in found), [f"{lines:5} {file}" for lines, file in found])


# Places that know too much, and functions that do too much


def format_comparisons(checkout: Checkout) -> Figure:
    """Comparisons with a format's name outside formats/: ==, !=, in, not in, startswith, match-case.

    "nearplane" counts only where the other side mentions a format.
    """
    return counted(
        at(module, node)
        for module in checkout.package
        if not module.file.startswith("formats/")
        for node in module.nodes
        if names_a_format(node)
    )


def names_a_format(node: ast.AST) -> bool:
    """Return whether a node compares something with the name of a format."""
    sides: list[ast.AST]
    match node:
        case ast.Compare(ops=ops) if all(isinstance(op, ast.Eq | ast.NotEq | ast.In | ast.NotIn) for op in ops):
            sides = [node.left, *node.comparators]
        case ast.Call(func=ast.Attribute(attr="startswith")):
            sides = [node.func, *node.args]
        case ast.Match():
            sides = [node.subject, *(each.pattern for each in node.cases)]
        case _:
            return False
    constants = {each.value for side in sides for each in literals(side)}
    said = any("format" in name for side in sides for name in names_in(side))
    return bool(constants & (FORMAT_NAMES if said else FORMAT_NAMES - AMBIGUOUS))


def literals(side: ast.AST) -> Iterator[ast.Constant]:
    """Yield the strings that one side of a comparison is or lists; not the arguments of its calls and subscripts."""
    match side:
        case ast.Constant(value=str()):
            yield side
        case ast.Tuple() | ast.List() | ast.Set() | ast.MatchValue() | ast.MatchOr() | ast.MatchAs():
            for child in ast.iter_child_nodes(side):
                yield from literals(child)


def grid_tests(checkout: Checkout) -> Figure:
    """Tests of a grid's class from lattice/ (Grid, Codebook, ...): isinstance, `type(x) is` or a class pattern."""
    return counted(class_tests(checkout, classes_in(checkout, "lattice/", GRID_CLASS)))


def classes_in(checkout: Checkout, folder: str, name: re.Pattern[str]) -> set[str]:
    """Return the classes of a folder whose name matches."""
    nodes = [node for module in checkout.package if module.file.startswith(folder) for node in module.nodes]
    return {node.name for node in nodes if isinstance(node, ast.ClassDef) and name.search(node.name)}


def class_tests(checkout: Checkout, names: set[str], patterns: bool | None = None) -> Iterator[str]:
    """Yield the places that test whether something is of some classes.

    Args:
        checkout: the checkout.
        names: the classes' names.
        patterns: True: class patterns of match-case alone; False: isinstance and `type(x) is` alone; None: all.
    """

    def tests(node: ast.AST) -> bool:
        match node:
            case ast.MatchClass(cls=classes) if patterns is not False:
                return bool(names_in(classes) & names)
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, classes]) if patterns is not True:
                return bool(names_in(classes) & names)
            case ast.Compare(left=ast.Call(func=ast.Name(id="type")), comparators=[classes]) if patterns is not True:
                return bool(names_in(classes) & names)
        return False

    return (at(module, node) for module in checkout.package for node in module.nodes if tests(node))


def grid_tests_outside(checkout: Checkout) -> Figure:
    """Tests of a grid's class outside lattice/."""
    return counted(place for place in grid_tests(checkout).places if not place.startswith("lattice/"))


def scheme_tests(checkout: Checkout) -> Figure:
    """Tests of a scheme's class outside recipe/: isinstance and `type(x) is`, asserts included."""
    places = class_tests(checkout, classes_in(checkout, "recipe/", SCHEME_CLASS), patterns=False)
    return counted(place for place in places if not place.startswith("recipe/"))


def scheme_patterns(checkout: Checkout) -> Figure:
    """Class patterns on schemes (`case GridScheme()`) outside recipe/; `case A() | B()` are two."""
    places = class_tests(checkout, classes_in(checkout, "recipe/", SCHEME_CLASS), patterns=True)
    return counted(place for place in places if not place.startswith("recipe/"))


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return how many parameters a function has, self and cls, *args and **kwargs not counted."""
    names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def all_many_parameters(checkout: Checkout) -> Figure:
    """Functions with more than 6 parameters, self and cls not counted, kernels, verbs and commands included."""
    functions = [
        (parameters(node), f"{module.file}:{node.lineno}: {node.name}")
        for module in checkout.package
        for node in module.nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return counted(f"{place} has {count}" for count, place in functions if count > MAX_PARAMETERS)


def many_parameters(checkout: Checkout) -> Figure:
    """Functions with more than 6 parameters outside the command line's files, names in __all__ and kernels."""
    return counted(
        f"{module.file}:{node.lineno}: {node.name} has {parameters(node)}"
        for module, node in checkout.functions()
        if parameters(node) > MAX_PARAMETERS
        and not CLI.match(module.file)
        and (module.name, node.name) not in checkout.exported
    )


def long_bodies(checkout: Checkout) -> Figure:
    """Functions other than kernels whose body has more than 60 lines, from behind the docstring to the end."""
    found = []
    for module, node in checkout.functions():
        body = node.body[1:] if docstring(node) is not None else node.body
        lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
        if lines > MAX_BODY:
            found.append(f"{module.file}:{node.lineno}: {node.name} has {lines}")
    return counted(iter(found))


def same_names(checkout: Checkout) -> Figure:
    """Names that two or more files of the package have, __init__.py not counted."""
    files = defaultdict(list)
    for module in checkout.package:
        if not module.is_folder:
            files[module.file.split("/")[-1]].append(module.file)
    return counted(f"{name}: {', '.join(each)}" for name, each in sorted(files.items()) if len(each) > 1)


def long_lines(checkout: Checkout) -> Figure:
    """Lines over 120 characters in README.md and docs/, outside tables and code."""
    found = []
    for path in (checkout.root / "README.md", *sorted((checkout.root / "docs").rglob("*.md"))):
        code = False
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if line.lstrip().startswith("```"):
                code = not code
            elif not code and len(line) > LONG_LINE and not line.lstrip().startswith(("|", "    ", "![")):
                found.append(f"{path.relative_to(checkout.root)}:{number}: {len(line)} characters")
    return counted(iter(found))


def smell(pattern: str, allowed: tuple[str, ...]) -> Callable[[Checkout], Figure]:
    """Return a figure: the lines of the package that hold a pattern, outside the files and folders that are allowed to."""

    def figure(checkout: Checkout) -> Figure:
        lines = [(each.file, *line) for each in checkout.package for line in enumerate(each.source.splitlines(), 1)]
        found = [line for line in lines if not line[0].startswith(allowed) and re.search(pattern, line[2])]
        return counted(f"{file}:{number}: {line.strip()}" for file, number, line in found)

    outside = f" outside {', '.join(allowed)}" if allowed else ""
    figure.__doc__ = f"Lines of the package that hold {pattern}{outside}."
    return figure
