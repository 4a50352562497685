"""Entry point of the command line: it parses, calls a command, and prints an error as one sentence."""

from __future__ import annotations

import logging
import os
import sys
import tomllib
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from cyclopts import App, Parameter
from cyclopts.config import Toml

from nearplane.cli.auto_command import auto
from nearplane.cli.checkpoint_commands import card, export, inspect, report, rotate, tune, verify
from nearplane.cli.compare_command import compare
from nearplane.cli.demo_commands import demo, geometry
from nearplane.cli.evaluate_command import evaluate
from nearplane.cli.flags import exactly
from nearplane.cli.generate_command import generate
from nearplane.cli.quantize_command import quantize, refuse_mixed
from nearplane.cli.streams import lasting_streams
from nearplane.cli.suggest_command import suggest
from nearplane.cli.terminal import attended, errors_as_sentences, stopping
from nearplane.errors import FormatError, RecipeError
from nearplane.system.launch import forget_launch, launched
from nearplane.system.repeatable import repeatable_products

COMMANDS = (
    auto,
    quantize,
    evaluate,
    compare,
    geometry,
    demo,
    inspect,
    verify,
    report,
    card,
    export,
    rotate,
    tune,
    generate,
    suggest,
)

app = App(
    name="nearplane",
    version=version("nearplane"),
    help="Quantize language models: GPTQ as a closest-vector problem on a lattice.",
    help_format="plaintext",
    help_epilogue="Every command takes --config FILE.toml: options that the command line leaves open are those of the table that "
    "is named after the command. Exit codes: 0 done; 1 refused or failed; 2 mistyped option; 3 verify found faults; 4 --max-loss "
    "is exceeded; 130 stopped by Ctrl-C, 143 by SIGTERM, 141 because nobody reads the output of generate.",
    default_parameter=Parameter(converter=exactly),
    suppress_keyboard_interrupt=False,  # main() prints what a stopped command left on disk
)
app.register_install_completion_command(help="Install Tab completion of commands and options in the shell.")
for _command in COMMANDS:
    app.command(_command)


SHARED = (["quantize"], ["evaluate"], ["verify"])  # commands that several processes share
MIN_COLUMNS, MAX_COLUMNS = 20, 1000  # widths of a terminal


def refuse_deleted_folder() -> None:
    """Refuse to work in a folder that was deleted, where no path can be resolved.

    Raises:
        FormatError: The current folder does not exist.
    """
    try:
        Path.cwd()
    except FileNotFoundError:
        raise FormatError("The current folder was deleted. Change to another folder, and repeat the command.") from None


def serves_rank_0(command: Sequence[str]) -> bool:
    """Make a process that torchrun or srun started beside others leave all words to rank 0.

    Commands that several processes do not share run on rank 0 alone.

    Returns:
        Whether nothing is left to do for this process.
    """
    if (launch := launched()) is None:
        return False
    if [*command] not in SHARED:
        forget_launch()
        return launch.rank > 0
    if launch.rank > 0:
        logging.getLogger("nearplane").setLevel(logging.ERROR)
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    return False


def with_config(words: Sequence[str]) -> list[str]:
    """Take `--config FILE` out of a command line, and let the file's table of the command decide what the line leaves open.

    Raises:
        RecipeError: The file is missing or no TOML, or the option is given twice or without a file.
    """
    left, files = [], list[str]()
    for word in (each := iter(words)):
        if word == "--config" or word.startswith("--config="):
            files.append(word.partition("=")[2] or next(each, ""))
        else:
            left.append(word)
    if not files:
        return left
    if len(files) > 1 or not files[0]:
        raise RecipeError(
            f"--config needs one file, found {' and '.join(files) or 'none'}. Pass --config run.toml once."
        )
    try:
        tables = tomllib.loads(Path(files[0]).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecipeError(f"--config {files[0]} cannot be read as TOML ({error}).") from error
    names = {command.__name__.replace("_", "-") for command in COMMANDS}
    if unknown := sorted(name for name, table in tables.items() if name not in names or not isinstance(table, dict)):
        raise RecipeError(
            f"--config {files[0]} has {', '.join(unknown)}; expected tables named after commands, for example [quantize]."
        )
    app.config = (Toml(files[0], must_exist=True),)
    return left


def main() -> None:
    """Run the command line; errors of nearplane and signals are printed as one sentence without a traceback."""
    # set before torch loads: spinning threads are slow on a busy machine; oneDNN keeps memory for every shape it has seen
    if sys.argv[1:2] != ["generate"]:  # operations of one token are so short that waking a thread takes longer
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    repeatable_products()
    if (columns := os.environ.get("COLUMNS", "")).isdigit():
        os.environ["COLUMNS"] = str(min(max(int(columns), MIN_COLUMNS), MAX_COLUMNS))  # rich never ends with 2
    with stopping() as stopped, lasting_streams(), errors_as_sentences(), attended(stopped):
        refuse_deleted_folder()
        if serves_rank_0(sys.argv[1:2]):
            return
        words = with_config(sys.argv[1:])
        if words[:1] == ["quantize"]:
            refuse_mixed(words[1:])
        app(words, print_error=False, exit_on_error=False)
