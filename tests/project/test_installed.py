"""What is installed: the command, the files beside the code, and all that loads what is written by default."""

from __future__ import annotations

import subprocess
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.resources import files
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import nearplane

PACKAGE = Path(nearplane.__file__).parent


@pytest.fixture
def installed() -> Distribution:
    """Return the distribution that the tests run on."""
    try:
        found = distribution("nearplane")
    except PackageNotFoundError:
        pytest.skip("the package is imported from a checkout and not installed")
    if Path(str(found.locate_file("nearplane"))).resolve() != PACKAGE.resolve():
        pytest.skip("another nearplane is installed than the one that is imported")
    return found


def test_the_command_is_installed_and_is_the_main_of_the_package(installed: Distribution) -> None:
    (command,) = installed.entry_points.select(group="console_scripts", name="nearplane")
    from nearplane.__main__ import main

    assert command.load() is main
    (script,) = (file for file in installed.files or () if file.name in ("nearplane", "nearplane.exe"))
    said = subprocess.run([installed.locate_file(script), "--help"], capture_output=True, text=True, check=True).stdout
    assert "quantize" in said


def test_every_file_of_the_wheel_is_there_and_the_page_is_among_them(installed: Distribution) -> None:
    listed = {str(file) for file in installed.files or ()}
    assert {"nearplane/record/report/page.html", "nearplane/record/report/page.js"} <= listed
    assert all(Path(str(installed.locate_file(file))).is_file() for file in listed if not file.endswith(".pyc"))


@pytest.mark.parametrize("name", ["page.html", "page.js"])
def test_the_page_lies_beside_the_code_that_fills_it(name: str) -> None:
    assert (files("nearplane.record.report") / name).read_text(encoding="utf-8")


def test_what_is_written_by_default_loads_without_extras(installed: Distribution) -> None:
    needed = [Requirement(text) for text in installed.requires or ()]
    assert {"torch", "transformers", "compressed-tensors"} <= {one.name for one in needed if one.marker is None}
