"""Count what makes the code harder to change: one line a smell, for this checkout or the one in another folder.

python tools/counts.py [FOLDER] [--list WORD]      # --list prints the places of the smells whose name has the word
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

LONG = 120  # characters of a line
MANY = 6  # parameters of a function
PATTERNS = {  # smell: (what a line of it holds, files that are allowed to)
    "places that ask which mode": (
        r"\.wanted\b|isinstance\(.*(GridScheme|RateScheme)|case RateScheme\(\)", ()
    ),
    "isinstance on grids outside lattice/grid.py": (
        r"isinstance\(.*\b(Product)?Grid\b|case .*\b(Product)?Grid\(\)", ("lattice/grid.py",)
    ),
    "copies of the rounding formula": (
        r"np\.rint\(position|np\.rint\(.*\+|position\.round\(|"
        r"/ \w*s\w*(\[.*\])? \+ z\w*(\[.*\])?\)\.round|add_\(zero.*\)\.round", ()
    ),
    "fmt: skip": (r"#\s*fmt: skip", ()),
}  # fmt: skip


def sources(root: Path) -> Iterator[Path]:
    """Yield the Python files of the package."""
    yield from sorted((root / "src" / "nearplane").rglob("*.py"))


def matching(root: Path, pattern: str, allowed: tuple[str, ...]) -> Iterator[str]:
    """Yield FILE:LINE of lines of the package that hold a pattern."""
    for path in sources(root):
        name = path.relative_to(root / "src" / "nearplane").as_posix()
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if name not in allowed and re.search(pattern, line):
                yield f"{name}:{number}: {line.strip()}"


def many_parameters(root: Path) -> Iterator[str]:
    """Yield functions of the package with more than `MANY` parameters, self and cls not counted."""
    for path in sources(root):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                own = [name for name in names if name not in ("self", "cls")]
                if len(own) > MANY:
                    yield f"{path.relative_to(root)}:{node.lineno}: {node.name} has {len(own)}"


def long_lines(root: Path) -> Iterator[str]:
    """Yield lines of README and docs over `LONG` characters, outside tables and code."""
    for path in (root / "README.md", *sorted((root / "docs").glob("*.md"))):
        code = False
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if line.lstrip().startswith("```"):
                code = not code
            elif not code and len(line) > LONG and not line.lstrip().startswith(("|", "    ", "![")):
                yield f"{path.relative_to(root)}:{number}: {len(line)} characters"


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--list", metavar="WORD", help="print the places of the smells whose name has this word")
    arguments = parser.parse_args()
    root = arguments.folder
    found = {name: list(matching(root, *what)) for name, what in PATTERNS.items()}
    found[f"functions with more than {MANY} parameters"] = list(many_parameters(root))
    found[f"lines over {LONG} characters in README and docs"] = list(long_lines(root))
    for name, places in found.items():
        print(f"{len(places):4}  {name}")
        if arguments.list is not None and arguments.list in name:
            print("\n".join(f"        {place}" for place in places))


if __name__ == "__main__":
    main()
