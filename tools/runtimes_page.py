"""Write the table of what each program loads into docs/serving.md, from `nearplane/recipe/runtimes.py`.

python tools/runtimes_page.py [--check]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from nearplane.recipe.readers import options_of
from nearplane.recipe.runtimes import RUNTIMES, USUAL, Form

PAGE = Path(__file__).resolve().parent.parent / "docs" / "serving.md"
BEGIN, END = "<!-- begun by tools/runtimes_page.py -->", "<!-- ended -->"


def main() -> None:
    """Write the table, or with --check stop if the page has another one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is not up to date")
    check = parser.parse_args().check
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    made = "\n".join([f"{before}{BEGIN}", "", *table(), "", f"{END}{after}"])
    if check and made != text:
        sys.exit(f"{PAGE} is not up to date: run python tools/runtimes_page.py.")
    if not check:
        PAGE.write_text(made)


def table() -> Iterator[str]:
    """Yield the lines of the table, one for each form; a program and a format are named where they change."""
    yield "| program | format | options | layers | experts |"
    yield "|---|---|---|---|---|"
    for name, program in RUNTIMES.items():
        title = f"{program.title} {program.version}".strip() + f" (`{name}`)"
        for files, forms in program.loads.items():
            shown = f"{files} \\*" if USUAL[files][-1] == name else files
            for form in forms:
                yield f"| {title} | {shown} | {weights(form)} | {form.dense or '-'} | {form.experts or '-'} |"
                title = shown = ""


def weights(form: Form) -> str:
    """Return the options that give weights of a form."""
    options = ", ".join(f"`{each}`" for each in options_of([form]))
    return f"{options}, with `--activations` or without" if form.rounded is None else options


if __name__ == "__main__":
    main()
