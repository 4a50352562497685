"""Count what makes the code harder to change: one line a figure, for this checkout or for the one in another folder.

    python tools/counts.py [FOLDER]          # figures of the checkout in FOLDER (default: this one)
        --list WORD                          # also the places behind the figures whose name has the word
        --explain                            # also what each figure counts
        --compare OTHER                      # a markdown table and nothing else: FOLDER beside OTHER
        --traced                             # also the files that a 4-bit run of the demo enters (20 seconds), and their lines;
                                             # needs torch: in this Python, or in the .venv of FOLDER or of this checkout

Definitions stand in measures.py and language.py.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from pathlib import Path

import language
import measures
from measures import LONG_LINE, MAX_BODY, MAX_PARAMETERS, Checkout, Figure

SMELLS = {  # name: (what a line of the package holds, files and folders that are allowed to)
    "places that ask which mode": (
        r"\.wanted\b|isinstance\(.*(GridScheme|RateScheme)|case RateScheme\(\)",
        (),
    ),
    "isinstance on grids outside lattice/grid.py": (
        r"isinstance\(.*\b(Product)?Grid\b|case .*\b(Product)?Grid\(\)",
        ("lattice/grid.py",),
    ),
    "copies of the rounding formula": (
        r"np\.rint\(position|np\.rint\(.*\+|position\.round\(|"
        r"/ \w*s\w*(\[.*\])? \+ z\w*(\[.*\])?\)\.round|add_\(zero.*\)\.round",
        (),
    ),
    "lines with scheme_of(": (r"scheme_of\(", ()),
    "names of readers outside formats/ and recipe/": (
        r"\b(for_mlx|for_llama_cpp|by_gptqmodel|by_nearplane)\b",
        ("formats/", "recipe/"),
    ),
    "fmt: skip": (r"#\s*fmt: skip", ()),
}
FIGURES: dict[str, Callable[[Checkout], Figure]] = {
    "names at the top level of the package": measures.top_names,
    "floors of the top level": measures.floors,
    "arrows of the top level": measures.arrows,
    "import cycles between siblings": measures.sibling_cycles,
    "module imports across the top level": measures.cross_imports,
    "modules reachable from the main path": measures.reached,
    "imports of the main path's file": measures.main_path_imports,
    "lines of the layers contract": measures.contract_lines,
    "lines of code": measures.code_lines,
    "median file, lines": measures.median_file,
    "largest file, lines": measures.largest_file,
    "files that a reader of a run opens": measures.reader_files,
    "lines of the files that a reader opens": measures.reader_lines,
    "comparisons with a format's name outside formats/": measures.format_comparisons,
    "type tests of grids": measures.grid_tests,
    "type tests of grids outside lattice/": measures.grid_tests_outside,
    "isinstance on schemes outside recipe/": measures.scheme_tests,
    "class patterns on schemes outside recipe/": measures.scheme_patterns,
    f"functions with more than {MAX_PARAMETERS} parameters": measures.all_many_parameters,
    f"functions with more than {MAX_PARAMETERS}, no cli, verb or kernel": measures.many_parameters,
    f"function bodies over {MAX_BODY} lines, no kernel": measures.long_bodies,
    "file names that occur twice": measures.same_names,
    **{name: measures.smell(*what) for name, what in SMELLS.items()},
    f"lines over {LONG_LINE} characters in README and docs": measures.long_lines,
    "docstrings of modules that begin with a question's word": language.question_modules,
    "documented arguments and fields": language.argument_entries,
    "documented arguments that begin in their name": language.fragment_entries,
    "assignments to vague names": language.vague_names,
    "adjectives as constants": language.adjective_constants,
    "sentences in README and docs": language.all_sentences,
    f"sentences over {language.MAX_SENTENCE} words in README and docs": language.long_sentences,
}
TRACED = {
    "files that a traced run enters": measures.entered_files,
    "lines of the files that a traced run enters": measures.entered_lines,
}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=measures.HERE.parent)
    parser.add_argument("--list", metavar="WORD", help="print the places of the figures whose name has this word")
    parser.add_argument("--explain", action="store_true", help="print what each figure counts")
    parser.add_argument("--compare", metavar="OTHER", type=Path, help="print a table of both checkouts' figures")
    parser.add_argument("--traced", action="store_true", help="also quantize the demo and count the files entered")
    arguments = parser.parse_args()
    checkouts = [Checkout(root) for root in (arguments.folder, arguments.compare) if root is not None]
    if len(checkouts) > 1:
        print(f"| figure | {arguments.folder} | {arguments.compare} |\n|---|---|---|")
    for name, figure in (FIGURES | (TRACED if arguments.traced else {})).items():
        found = [figure(checkout) for checkout in checkouts]
        if len(found) > 1:
            print(f"| {name} | {' | '.join(f'{each.value:,}' for each in found)} |")
            continue
        print(f"{found[0].value:7,}  {name}")
        if arguments.explain:
            print("\n".join(f"           {line}" for line in (inspect.getdoc(figure) or "").splitlines() if line))
        if arguments.list is not None and arguments.list in name:
            for place in found[0].places:
                print(f"         {place}")


if __name__ == "__main__":
    main()
