"""Import graph of a package, read from its sources without importing it, and three questions about graphs.

A graph maps every node to the set of nodes that its arrows lead to. What the figures mean is said in measures.py.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

Graph = Mapping[str, set[str]]
OWN = "__init__"  # name that a folder's own module has among the folder's members


@dataclass(frozen=True)
class Module:
    """A source file.

    Args:
        name: dotted name, "package.folder" for an __init__.py.
        file: path relative to the package's folder, with slashes.
        source: its text.
        tree: its syntax tree.
    """

    name: str
    file: str
    source: str
    tree: ast.Module

    @property
    def is_folder(self) -> bool:
        """True for an __init__.py."""
        return self.file.endswith("__init__.py")

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree, in the order of their lines."""
        return sorted(ast.walk(self.tree), key=lambda node: getattr(node, "lineno", 0))


class Package:
    """The modules of a package and their imports of one another.

    Args:
        folder: the package's folder, for example src/nearplane.
    """

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self.modules: dict[str, Module] = {}
        for path in sorted(folder.rglob("*.py")):
            file, source = path.relative_to(folder).as_posix(), path.read_text()
            parts = file.removesuffix(".py").split("/")
            name = ".".join([self.name, *(parts[:-1] if parts[-1] == OWN else parts)])
            self.modules[name] = Module(name, file, source, ast.parse(source, str(path)))
        if self.name not in self.modules:
            raise SystemExit(f"{folder} is no package: it has no __init__.py. Give the root of a checkout.")

    def __iter__(self) -> Iterator[Module]:
        return iter(self.modules.values())

    @cached_property
    def homes(self) -> dict[str, str]:
        """Names that the package's own __init__ imports, and the module that each comes from."""
        nodes = self.modules[self.name].nodes
        found = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module in self.modules]
        return {alias.asname or alias.name: str(node.module) for node in found for alias in node.names}

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """Graph of modules: an arrow for each import, also those in functions and under TYPE_CHECKING.

        `from a.b import c` is an import of a.b.c where that is a module, else of a.b. A name that the package itself
        hands out lazily is an import of the module that it comes from. The __init__ files on the way to a module are
        not counted.
        """
        return {module.name: set(self._imported(module)) - {module.name} for module in self}

    def _imported(self, module: Module) -> Iterator[str]:
        for node in module.nodes:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name in self.modules)
            elif isinstance(node, ast.ImportFrom):
                base = self._base(module, node)
                for alias in node.names:
                    home = self.homes.get(alias.name, base) if base == self.name else base
                    full = f"{base}.{alias.name}"
                    yield from (name for name in [full if full in self.modules else home] if name in self.modules)

    @staticmethod
    def _base(module: Module, node: ast.ImportFrom) -> str:
        """Return the absolute name of the module that a `from` statement names."""
        above = module.name.split(".")
        above = above[: len(above) + module.is_folder - node.level] if node.level else []
        return ".".join([*above, *([node.module] if node.module else [])])

    def member(self, module: str, folder: str | None = None) -> str | None:
        """Return the file or subfolder of a folder that a module is or lies in; None if it lies elsewhere.

        Args:
            module: its dotted name.
            folder: dotted name of the folder; None: the package.
        """
        folder = folder or self.name
        if module == folder:
            return OWN
        return module[len(folder) + 1 :].split(".")[0] if module.startswith(f"{folder}.") else None

    def members(self, folder: str | None = None, without: tuple[str, ...] = ()) -> dict[str, set[str]]:
        """Return the graph of a folder's members: an arrow from A to B if any module in A imports any module in B."""
        return grouped(self.imports, lambda module: self.member(module, folder), without)


def grouped(graph: Graph, group: Callable[[str], str | None], without: tuple[str, ...] = ()) -> dict[str, set[str]]:
    """Return the graph of groups of nodes; nodes of the group None, and of the groups in `without`, are left out."""
    groups = {node: name for node in graph if (name := group(node)) is not None and name not in without}
    arrows: dict[str, set[str]] = {name: set() for name in groups.values()}
    for node, name in groups.items():
        arrows[name] |= {groups[other] for other in graph[node] if other in groups} - {name}
    return arrows


def reachable(graph: Graph, start: str) -> set[str]:
    """Return all nodes that arrows lead to from a node, and the node itself."""
    reached, waiting = {start}, [start]
    while waiting:
        new = graph[waiting.pop()] - reached
        reached |= new
        waiting += new
    return reached


def cycles(graph: Graph) -> list[list[str]]:
    """Return the groups of two and more nodes that all reach one another, each sorted."""
    reached = {node: reachable(graph, node) for node in graph}
    groups = {frozenset(other for other in reached[node] if node in reached[other]) for node in graph}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def longest_chain(graph: Graph) -> list[str]:
    """Return the longest chain of arrows, from its beginning; nodes in a cycle count as one."""
    names = {node: " = ".join(group) for group in cycles(graph) for node in group}
    condensed = grouped(graph, lambda node: names.get(node, node))
    chains: dict[str, list[str]] = {}

    def chain(node: str) -> list[str]:
        if node not in chains:
            chains[node] = [node, *max(map(chain, sorted(condensed[node])), key=len, default=[])]
        return chains[node]

    return max(map(chain, sorted(condensed)), key=len)
