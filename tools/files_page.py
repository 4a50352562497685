"""Write docs/files.md: every file of the package by folder, with the first sentence of its docstring.

python tools/files_page.py           # write it
python tools/files_page.py --check   # end with 1 where it is not up to date
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from pathlib import Path
from textwrap import fill

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "files.md"
HEAD = """# Files

Where what is. `verbs/quantize.py` is the main path: read it first. A folder imports only from those below it on this
page; of two on one line neither imports the other. Written by `python tools/files_page.py` from the files' own
docstrings.
"""
FLOORS = (
    *("__init__.py", "cli", "demo", "verbs", "planning theory", "tuning", "calibration loading"),
    *("matrix formats models", "record", "recipe", "lattice coding system", "errors.py"),
)


def first_sentence(file: Path) -> str:
    """Return the first sentence of a file's docstring, without the full stop."""
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[a-z0-9)`\]])\.(?:\s|$)", paragraph)[0].removesuffix(".").removesuffix(":")


def page(source: Path) -> str:
    """Return the page of a package."""
    parts = [HEAD]
    for floor in FLOORS:
        for name in floor.split():
            place = source / name
            if place.is_file():
                said = f"- `{name}`: {first_sentence(place)}"
                parts.append(f"\n{fill(said, 118, subsequent_indent='  ', break_on_hyphens=False)}\n")
                continue
            beside = [other for other in floor.split() if other != name]
            said = f" (beside {' and '.join(f'`{each}/`' for each in beside)})" if beside else ""
            sentence = fill(f"{first_sentence(place / '__init__.py')}.", 118, break_on_hyphens=False)
            parts.append(f"\n## `{name}/`{said}\n\n{sentence}\n\n")
            for file in sorted(place.rglob("*.py")):
                if file.name != "__init__.py":
                    said = f"- `{file.relative_to(place)}`: {first_sentence(file)}"
                    parts.append(f"{fill(said, 118, subsequent_indent='  ', break_on_hyphens=False)}\n")
    return "".join(parts)


def main() -> None:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; end with 1 where the page is not up to date"
    )
    now = parser.parse_args()
    made = page(ROOT / "src" / "nearplane")
    if not now.check:
        PAGE.write_text(made)
    elif made != PAGE.read_text():
        sys.exit(f"{PAGE} is not up to date: run python tools/files_page.py.")


if __name__ == "__main__":
    main()
