"""Documents of Python's documentation: docstrings and comments of the standard library, and pages of its manual.

The library is that of the running Python. The manual is the folder `_sources` of the documentation in HTML, as Debian's
package python3.11-doc holds it in usr/share/doc/python3.11/html. Both have the PSF licence.
"""

from __future__ import annotations

import ast
import inspect
import re
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

SKIPPED = {"test", "tests", "idle_test", "idlelib", "lib2to3", "site-packages", "ensurepip", "encodings", "pydoc_data"}
FOREIGN = re.compile(r"permission notice|redistribut|copyright message|altered source versions", re.IGNORECASE)
LEGAL = re.compile(r"copyright|licen[sc]e|rights reserved", re.IGNORECASE)
SKIPPED_PAGES = {"license", "copyright", "about", "contents", "bugs"}
ROLE = re.compile(r":[a-z:+-]+:`[!~]?([^`<]*?)(?:\s*<[^>`]*>)?`")
HIDDEN = re.compile(
    r"(?m)^[ \t]*\.\. (?:(?:section|module|code)author::|index::|_[^\n]*:$|highlight::)[^\n]*\n(?:[ \t]+[^\n]+\n)*"
)


def entries(source: str, module: str) -> Iterator[tuple[str, str]]:
    """Yield (heading, text) of every docstring in a module's source, then of its comment blocks."""

    def visit(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield f"{name}.{child.name}", ast.get_docstring(child) or ""
                yield from visit(child, f"{name}.{child.name}")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{name}.{child.name}({ast.unparse(child.args)})", ast.get_docstring(child) or ""
            elif not isinstance(child, ast.expr):
                yield from visit(child, name)

    tree = ast.parse(source)
    yield module, ast.get_docstring(tree) or ""
    yield from visit(tree, module)
    blocks = [match[0] for match in re.finditer(r"(?m)(^[ \t]*#.*\n)+", source) if len(match[0]) >= 120]
    comments = [inspect.cleandoc(re.sub(r"(?m)^[ \t]*# ?", "", block)) for block in blocks]
    yield f"{module}, comments", "\n\n".join(comments)


def has_own_licence(source: str) -> bool:
    """Tell whether a module carries conditions of its own beside the PSF licence."""
    prose = re.sub(r"[\s#]+", " ", source)
    return FOREIGN.search(prose) is not None and "Licensed to PSF under a Contributor Agreement" not in prose


class Unseen:
    """Filter of paragraphs: it drops legal notices, and paragraphs of 40 letters or more that it was given before."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def __call__(self, text: str) -> str:
        """Return the text without such paragraphs; markup and white space do not make a paragraph new."""
        kept = []
        for paragraph in re.split(r"\n\s*\n", text):
            key = " ".join(re.findall(r"\w+", paragraph))
            if key and key not in self.seen and not LEGAL.search(key):
                kept.append(paragraph.rstrip())
                if len(key) >= 40:
                    self.seen.add(key)
        return "\n\n".join(kept)


def read_pages(sources: Path, unseen: Callable[[str], str]) -> dict[str, str]:
    """Read the manual, one document per page, without roles (`:func:`), anchors, index entries and names of authors."""
    documents = {}
    for path in sorted(sources.rglob("*.rst.txt")):
        name = path.relative_to(sources).as_posix().removesuffix(".rst.txt")
        page = path.read_text(encoding="utf-8")
        if name not in SKIPPED_PAGES and not FOREIGN.search(page):
            documents[name] = unseen(HIDDEN.sub("", ROLE.sub(r"\1", page))) + "\n\n"
    if not documents:
        raise SystemExit(f"{sources} has no pages (*.rst.txt). Pass the folder _sources of Python's documentation.")
    return documents


def read_library(unseen: Callable[[str], str]) -> dict[str, str]:
    """Read the docstrings and comments of the standard library, one document per module."""
    library = Path(sysconfig.get_path("stdlib"))
    documents = {}
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).with_suffix("").parts
        if not SKIPPED.isdisjoint(parts) or parts[0].startswith("_sysconfigdata"):
            continue
        source = path.read_text(encoding="utf-8", errors="replace")
        if not has_own_licence(source):
            module = ".".join(part for part in parts if part != "__init__")
            texts = ((heading, unseen(text)) for heading, text in entries(source, module))
            documents[module] = "".join(f"{heading}\n\n{text}\n\n" for heading, text in texts if text)
    return documents


def read_documents(sources: Path) -> dict[str, str]:
    """Read all documents by name: pages of the manual, then modules of the library."""
    unseen = Unseen()
    documents = read_pages(sources, unseen) | read_library(unseen)
    return {name: text for name, text in documents.items() if len(text) >= 200}
