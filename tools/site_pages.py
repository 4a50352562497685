"""Gather the pages of the site: a copy of docs/, and the pages that are made from the code.

python tools/site_pages.py build/docs        (then `zensical build`; `make docs` does both)

Made are commands.md from the command line, calculator.md from sizes, api.md from docstrings, licences.md from what is
installed, and llms.txt, the list of all pages for language models.
"""

from __future__ import annotations

import argparse
import inspect
import re
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import calculator_page
from licences import licences_page

import nearplane
from nearplane.cli.app import app

ROOT = Path(__file__).resolve().parent.parent
MAX_WIDTH = 100  # of a signature on one line
OUTSIDE = re.compile(r"\[[^\]]*\]\((?:\.\./)+(?!\w[\w-]*\.(?:md|svg))([^)#]+)\)")  # links to files beside docs/
SECTION = re.compile(r"^(Args|Returns|Raises|Yields):\n((?:    .*\n|\n)+)", re.MULTILINE)
TITLES = {"Args": "Arguments", "Returns": "Returns", "Raises": "Raises", "Yields": "Yields"}
KINDS = {  # heading of the page: what belongs to it
    "Before a run": ("suggest", "preview", "frontier"),
    "Commands as functions": (
        "auto",
        "quantize",
        "tune",
        "evaluate",
        "evaluate_chat",
        "evaluate_tasks",
        "compare",
        "generate",
        "verify",
    ),
    "Files": ("load", "register", "export", "rotate", "read_record", "card", "write_report"),
    "One matrix": ("quantize_matrix", "quantize_matrix_to_rate"),
    "Recipes": ("Recipe", "Calibration", "LayerScheme", "GridScheme", "RateScheme", "BlockScheme"),
}


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write; what it holds is deleted")
    out = parser.parse_args().out
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(ROOT / "docs", out)
    for page in out.rglob("*.md"):
        page.write_text(OUTSIDE.sub(r"`\1`", page.read_text()))
    (out / "commands.md").write_text(commands_page())
    (out / "calculator.md").write_text(calculator_page.page())
    (out / "api.md").write_text(api_page())
    (out / "licences.md").write_text(licences_page())
    (out / "llms.txt").write_text(llms_text(out))


def commands_page() -> str:
    """Return the help of all commands; its own heading and table of contents are left out, as the site has them."""
    made = app.generate_docs(output_format="markdown")
    made = made.replace(
        "(#nearplane-install-completion)", "(#nearplane---install-completion)"
    )  # as the heading's anchor
    made = re.sub(r"\n## Table of Contents\n.*?(?=\n\*\*Commands)", "", made, count=1, flags=re.DOTALL)
    return re.sub(r"^# nearplane\n", "# Commands\n", made.replace("\n    ", " "), count=1)


def api_page() -> str:
    """Return the public names with their signatures and docstrings, by kind; errors come last."""
    parts = [
        "# Python API\n\nEvery name is an attribute of `nearplane`. Importing it does nothing; torch and transformers are "
        "imported when something is called.\n"
    ]
    errors = tuple(name for name in nearplane.__all__ if name.endswith("Error"))
    listed = {**KINDS, "Errors": errors}
    if missing := set(nearplane.__all__) - {name for names in listed.values() for name in names}:
        raise SystemExit(f"{', '.join(sorted(missing))} belong to no heading of the page: add them to KINDS.")
    for title, names in listed.items():
        parts.append(f"## {title}\n")
        parts += [described(name, getattr(nearplane, name)) for name in names]
    return "\n".join(parts)


def described(name: str, item: Any) -> str:
    """Return the heading, signature and docstring of one public name."""
    text = (inspect.getdoc(item) or "") + "\n"
    if isinstance(item, type) and issubclass(item, Exception):
        shown = ""
    else:
        shown = f"```python\n{signature(name, item)}\n```\n\n"
    said = SECTION.sub(lambda found: f"**{TITLES[found[1]]}**\n\n{entries(found[1], found[2])}\n", text)
    return f"### {name}\n\n{shown}{said}"


def entries(section: str, block: str) -> str:
    """Return a section of a docstring as Markdown: a list of names with their meaning, or plain text."""
    text = inspect.cleandoc(block)
    if section in ("Returns", "Yields"):
        return text + "\n"
    pairs = re.findall(r"^(\S[^:\n]*): (.*(?:\n +.*)*)", text, re.MULTILINE)
    if not pairs:
        return text + "\n"
    return "".join(f"- `{name}`: {' '.join(said.split())}\n" for name, said in pairs)


def signature(name: str, item: Any) -> str:
    """Return a call of `item` with annotations and defaults, one parameter a line where one line is too short."""
    parameters, starred = [], False
    for each in inspect.signature(item).parameters.values():
        if each.kind is each.KEYWORD_ONLY and not starred:
            parameters.append("*")
            starred = True
        star = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        kind = "" if each.annotation is each.empty else f": {annotated(each.annotation)}"
        parameters.append(
            f"{star}{each.name}{kind}{'' if each.default is each.empty else f' = {default(each.default)}'}"
        )
    returned = inspect.signature(item).return_annotation
    arrow = "" if returned in (inspect.Signature.empty, None, "None") else f" -> {annotated(returned)}"
    line = f"nearplane.{name}({', '.join(parameters)}){arrow}"
    if len(line) <= MAX_WIDTH:
        return line
    return "\n".join([f"nearplane.{name}(", *(f"    {each}," for each in parameters), f"){arrow}"])


def annotated(annotation: Any) -> str:
    """Return an annotation as it is typed."""
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def default(value: Any) -> str:
    """Return a default as it is typed: the name of a function, ... for what a dataclass makes anew."""
    if "factory" in repr(value):
        return "..."
    return str(value.__name__) if callable(value) else repr(value)


def llms_text(folder: Path) -> str:
    """Return the list of pages that llmstxt.org describes: a title, a summary, and a line a page."""
    project = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
    lines = [f"# {project['site_name']}", "", f"> {project['site_description']}", ""]
    for title, pages in sections(project["nav"]):
        lines += [f"## {title}", "", *(f"- {llms_line(folder, page)}" for page in pages), ""]
    return "\n".join(lines)


def sections(nav: list[Any]) -> Iterator[tuple[str, list[str]]]:
    """Yield the sections of the site with their pages."""
    for entry in nav:
        if isinstance(entry, str):
            yield "Start", [entry]
            continue
        ((title, pages),) = entry.items()
        yield title, pages if isinstance(pages, list) else [pages]


def llms_line(folder: Path, page: str) -> str:
    """Return the line of one page: its heading, its address and its first sentence."""
    heading, _, rest = (folder / page).read_text().partition("\n")
    paragraph = next((part for part in rest.split("\n\n") if part.strip() and part.strip()[0].isalnum()), "")
    said = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
    sentence = re.match(r".*?[.?](?=\s[A-Z]|$)", said)
    return f"[{heading.removeprefix('# ')}]({page.removesuffix('.md')}.html): {sentence[0] if sentence else said}"


if __name__ == "__main__":
    main()
