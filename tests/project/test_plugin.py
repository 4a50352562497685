"""The package nearplane-vllm: what its wheel holds can be imported beside vLLM, which excludes most of what nearplane needs."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from nearplane.formats.layer_format import METHOD
from nearplane.formats.native import CODER, VERSION

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "plugins" / "vllm"
BESIDE = {"torch", "numpy", "numba", "llvmlite", "triton", "vllm"}  # numba brings llvmlite; triton is looked for before


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--quiet", "--wheel", "--no-isolation", "--outdir", folder, PLUGIN]
    subprocess.run(command, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_it_imports_only_what_stands_beside_vllm(wheel: zipfile.ZipFile) -> None:
    names = [name for name in wheel.namelist() if name.endswith(".py")]
    modules, found = {name.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for name in names}, set()
    for name in names:
        for node in ast.walk(ast.parse(wheel.read(name))):
            if isinstance(node, ast.ImportFrom):
                found.add(str(node.module))
            elif isinstance(node, ast.Import):
                found |= {each.name for each in node.names}
    ours = {name for name in found if name.startswith("nearplane")}
    assert ours <= modules | {"nearplane_vllm.coding", "nearplane_vllm.loading"}
    others = {name.partition(".")[0] for name in found - ours}
    assert others - BESIDE <= sys.stdlib_module_names
    assert {
        "nearplane_vllm.serving.vllm_plugin",
        "nearplane_vllm.coding.blob",
        "nearplane_vllm.coding.decode_triton",
    } <= modules


def test_it_has_the_version_of_the_project_and_an_entry_point(wheel: zipfile.ZipFile) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    about = f"nearplane_vllm-{version}.dist-info"
    assert "nearplane = nearplane_vllm.serving.vllm_plugin:register" in wheel.read(f"{about}/entry_points.txt").decode()
    assert f"Version: {version}" in wheel.read(f"{about}/METADATA").decode()


def test_it_reads_what_the_format_writes() -> None:
    """The plugin cannot import the format, which needs what vLLM excludes."""
    source = ast.parse((ROOT / "src" / "nearplane" / "serving" / "vllm_config.py").read_text())
    known = {}
    for node in source.body:
        if isinstance(node, ast.Assign):
            (target,) = node.targets
            names = [each.id for each in (target.elts if isinstance(target, ast.Tuple) else [target])]
            values = ast.literal_eval(node.value) if names != ["log"] else None
            known |= dict(zip(names, values if len(names) > 1 else [values], strict=True))
    assert (known["METHOD"], known["FORMAT_VERSION"], known["CODER"]) == (METHOD, VERSION, CODER)
