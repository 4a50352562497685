"""The page on architecture: its rooms are those of the import contract, and its way from a flag to bytes stays short."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
MAX_FILES, MAX_LINES = 25, 5_500  # that a newcomer opens to follow one layer


def section(title: str) -> str:
    """Return the text below a heading of the second level."""
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def test_the_rooms_are_those_of_the_import_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (each["layers"] for each in contracts if each["type"] == "layers")
    floors = [set(re.findall(r"`(\w+)`", cell)) for cell in re.findall(r"^\| (`[^|]*) \|", section("Rooms"), re.M)]
    assert floors == [set(layer.split(" | ")) for layer in layers if layer != "__main__"]


def test_one_layer_is_followed_from_a_flag_to_bytes_in_few_files() -> None:
    files = re.findall(r"^\| `([\w/]+\.py)`", section("From a flag to bytes"), re.M)
    lines = [len((ROOT / "src" / "nearplane" / file).read_text().splitlines()) for file in files]
    assert len(set(files)) == len(files) <= MAX_FILES
    assert sum(lines) <= MAX_LINES
