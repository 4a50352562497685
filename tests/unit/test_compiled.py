"""Compiled functions run whatever is in their cache, and where none can be written."""

import os
import subprocess
import sys
from pathlib import Path

import numba
import pytest

from children import Child, drop_rights

SOURCE = """from typing import NamedTuple
from nearplane.compiled import compiled

class {name}(NamedTuple):
    x: float

@compiled()
def double(pair):
    return 2 * pair.x

print(double({name}(1.5)))
"""


def test_a_cache_that_names_a_class_that_is_gone_is_not_read(tmp_path: Path) -> None:
    """After an upgrade in place, numba's index named classes of the old version: an AttributeError of pickle."""
    module, place = tmp_path / "doubling.py", {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    for name in ("Pair", "Renamed"):
        module.write_text(SOURCE.format(name=name))
        done = subprocess.run(
            [sys.executable, "-c", "import doubling"],
            env=os.environ | place | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stdout) == (0, "3.0\n"), done.stderr
    assert len(list((tmp_path / "cache").rglob("*.nbi"))) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_where_no_cache_can_be_written_a_function_is_compiled_without(tmp_path: Path) -> None:
    """As in a container whose user owns neither the package nor a home: importing the package failed."""
    (tmp_path / "doubling.py").write_text(SOURCE.format(name="Pair"))

    def run() -> None:
        drop_rights()
        os.environ.pop("NUMBA_CACHE_DIR", None)
        os.environ |= {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
        numba.core.config.reload_config()
        sys.path.insert(0, str(tmp_path))
        import doubling  # noqa: F401

    tmp_path.chmod(0o500)
    code, printed, said = Child(run).ended()
    tmp_path.chmod(0o700)
    assert (code, printed) == (0, "3.0\n"), said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["doubling.py"]
