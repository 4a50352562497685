"""Entry point of the command line: it parses, calls a command, and prints an error as one sentence."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version

from cyclopts import App, CycloptsError, MissingArgumentError, UnusedCliTokensError

from nearplane.cli.commands import COMMANDS
from nearplane.cli.flags import refuse_mixed
from nearplane.cli.quantize_command import quantize
from nearplane.cli.streams import Unread, lasting_streams, say_error
from nearplane.cli.terminal import attended, say_stopped
from nearplane.errors import NearplaneError, printable

app = App(
    name="nearplane",
    version=version("nearplane"),
    help="Quantize language models: GPTQ as a closest-vector problem on a lattice.",
    help_format="plaintext",
    help_epilogue="Exit codes: 0 done; 1 refused or failed; 2 mistyped option; 3 verify found faults; 4 --max-loss is "
    "exceeded; 130 stopped by Ctrl-C, 143 by SIGTERM, 141 because nobody reads the output of generate.",
    suppress_keyboard_interrupt=False,  # main() prints what a stopped command left on disk
)
app.register_install_completion_command(help="Install Tab completion of commands and options in the shell.")
for _command in (quantize, *COMMANDS):
    app.command(_command)


def main() -> None:
    """Run the command line; errors of nearplane and signals are printed as one sentence without a traceback."""
    # set before torch loads: spinning threads are slow on a busy machine; oneDNN keeps memory for every shape it has seen
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    with lasting_streams():
        try:
            with attended():
                if sys.argv[1:2] == ["quantize"]:
                    refuse_mixed(sys.argv[2:])
                app(print_error=False, exit_on_error=False)
        except CycloptsError as error:
            say_error(printable(mistyped(error)))
            sys.exit(2)
        except NearplaneError as error:
            say_error(str(error))
            sys.exit(1)
        except Unread:
            sys.exit(141)
        except KeyboardInterrupt as stopped:
            sys.exit(say_stopped(stopped))


def mistyped(error: CycloptsError) -> str:
    """Return what is wrong with the words of a command line, in a sentence."""
    command = " ".join(error.command_chain or ())
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        name = error.argument.name
        needs = name.removeprefix("--").upper() if error.argument.field_info.is_positional else f"{name} with a value"
        return f"{command} needs {needs}. See nearplane {command} --help."
    if isinstance(error, UnusedCliTokensError):
        return f"{command} does not take {' '.join(error.unused_tokens or ())}. See nearplane {command} --help."
    return str(error)
