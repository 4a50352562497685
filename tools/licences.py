"""Print a page of licences: the packages that nearplane needs, and those that they need, as their metadata say.

python tools/licences.py                     (of what is installed beside nearplane in this Python)
"""

from __future__ import annotations

import argparse
import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXTRAS = ("", "datasets", "eval", "gguf", "figures")  # what users install; the empty one is nearplane itself
MAX_LETTERS = 60  # some packages put the whole text of their licence where its name belongs
HEAD = """# Licences

nearplane is under Apache 2.0, the text of its demo under that of Python (PSF-2.0). Below are the packages that `pip`
installs with it, as their own metadata name their licences. The page is made from what is installed where the site is
built, on Linux; on other systems torch brings further packages.
"""


def main() -> None:
    """Print the page."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(licences_page(), end="")


def licences_page() -> str:
    """Return the page: a table for nearplane itself, and one for each extra with what it adds."""
    parts, known = [HEAD], {"nearplane"}
    for extra in EXTRAS:
        title = f'With the extra "{extra}"' if extra else "With nearplane itself"
        asked = {canonicalize_name(each.name) for each in needed(distribution("nearplane"), {extra})}
        found = closure(asked - known)
        rows = [row(name, name in asked) for name in sorted(found - known)]
        known |= found
        parts.append(
            f"\n## {title}\n\n| package | version | licence | asked for by |\n|---|---|---|---|\n{''.join(rows)}"
        )
    return "".join(parts)


def needed(package: Distribution, extras: set[str]) -> list[Requirement]:
    """Return the requirements of a package with these extras that hold on this system."""
    parsed = map(Requirement, package.requires or ())
    return [
        each
        for each in parsed
        if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in extras)
    ]


def closure(names: set[str]) -> set[str]:
    """Return these packages and all that they need without extras, as far as they are installed."""
    found, todo = set(names), list(names)
    while todo:
        try:
            needs = needed(distribution(todo.pop()), {""})
        except PackageNotFoundError:
            continue
        fresh = {canonicalize_name(each.name) for each in needs} - found
        found |= fresh
        todo += fresh
    return found


def row(name: str, direct: bool) -> str:
    """Return the line of one package."""
    by = "nearplane" if direct else "another package"
    try:
        package = distribution(name)
    except PackageNotFoundError:
        return f"| {name} | not installed here | | {by} |\n"
    return f"| {name} | {package.version} | {licence(package)} | {by} |\n"


def licence(package: Distribution) -> str:
    """Return the licence that a package's metadata name: the SPDX expression, a short text, or its classifiers."""
    told = package.metadata
    if expression := told.get("License-Expression"):
        return expression
    classified = [
        text.rpartition(" :: ")[2] for text in told.get_all("Classifier") or () if text.startswith("License :: ")
    ]
    text = " ".join((told.get("License") or "").split())
    found = text if 0 < len(text) <= MAX_LETTERS else ", ".join(classified)
    return re.sub(r"([|*_])", r"\\\1", found) or "not named in the metadata"


if __name__ == "__main__":
    main()
