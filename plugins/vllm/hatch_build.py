"""Collects the files of the package nearplane-vllm: the entry point, and all files of nearplane that it imports, renamed."""

from __future__ import annotations

import ast
import re
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

ROOT = Path(__file__).resolve().parents[2]
ENTRY = "nearplane.serving.vllm_plugin"


class Version(MetadataHookInterface):
    """Takes the version from nearplane's own metadata."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the version."""
        metadata["version"] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


class Files(BuildHookInterface):
    """Adds the files to the wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the files to a temporary folder, from which the wheel takes them."""
        del version
        self.folder = tempfile.TemporaryDirectory()
        for path in files():
            there = Path(self.folder.name, "nearplane_vllm", path.relative_to(ROOT / "src" / "nearplane"))
            there.parent.mkdir(parents=True, exist_ok=True)
            there.write_text(renamed(path.read_text()))
            build_data["force_include"][str(there)] = str(there.relative_to(self.folder.name))
        build_data["force_include"][str(ROOT / "LICENSE")] = "nearplane_vllm/LICENSE"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary folder."""
        del version, build_data, artifact_path
        self.folder.cleanup()


def renamed(source: str) -> str:
    """Return the source of a file with imports from the package that holds it."""
    return re.sub(r"\b(from|import) nearplane\b", r"\1 nearplane_vllm", source)


def files() -> list[Path]:
    """Return the file of the entry point and all that it imports, at any place in the code, and their packages."""
    found, left = dict[str, Path](), [ENTRY]
    while left:
        name = left.pop()
        stem = ROOT / "src" / name.replace(".", "/")
        path = next((each for each in (stem.with_suffix(".py"), stem / "__init__.py") if each.is_file()), None)
        if (
            path is None or name in found or name == "nearplane"
        ):  # a name within a module; nearplane itself imports everything
            continue
        found[name] = path
        left += [name.rpartition(".")[0], *imported(ast.parse(path.read_text()))]
    return sorted(found.values())


def imported(node: ast.AST) -> Iterator[str]:
    """Yield the names that may be modules of nearplane, without those that only annotations need."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.ImportFrom) and (child.module or "").partition(".")[0] == "nearplane":
            yield str(child.module)
            yield from (f"{child.module}.{each.name}" for each in child.names)
        yield from imported(child)
