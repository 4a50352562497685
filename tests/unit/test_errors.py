"""What errors advise is what the project declares."""

from __future__ import annotations

import tomllib
from pathlib import Path

from nearplane.errors import INSTALL

ROOT = Path(__file__).parents[2]


def test_commands_install_what_the_extras_declare() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    del extras["test"], extras["docs"]  # no command needs them
    commands = {name: " ".join(["pip install", *(f'"{package}"' for package in extras[name])]) for name in extras}
    assert commands == INSTALL
