"""Entry point of the command line: it parses, calls a command, and prints an error as one sentence."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version

from cyclopts import App, Parameter

from nearplane.cli.commands import COMMANDS
from nearplane.cli.flags import exactly, refuse_mixed
from nearplane.cli.quantize_command import quantize
from nearplane.cli.terminal import attended, say_stopped
from nearplane.errors import NearplaneError

app = App(
    name="nearplane",
    version=version("nearplane"),
    help="Quantize language models: GPTQ as a closest-vector problem on a lattice.",
    help_format="plaintext",
    default_parameter=Parameter(converter=exactly),
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
    try:
        with attended():
            if sys.argv[1:2] == ["quantize"]:
                refuse_mixed(sys.argv[2:])
            app()
    except NearplaneError as error:
        print(f"nearplane: {error}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:  # `nearplane inspect out | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except KeyboardInterrupt as stopped:
        sys.exit(say_stopped(stopped))
