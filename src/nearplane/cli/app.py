"""The command line: `main` parses, calls a command, and turns an error into one sentence."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version

from cyclopts import App

from nearplane.cli.commands import COMMANDS
from nearplane.cli.flags import refuse_mixed
from nearplane.cli.quantize_command import quantize
from nearplane.cli.terminal import attended, say_stopped
from nearplane.errors import NearplaneError

app = App(
    name="nearplane",
    version=version("nearplane"),
    help="Shrink language models: GPTQ as a closest-vector problem on a lattice.",
    help_format="plaintext",
    suppress_keyboard_interrupt=False,  # main() says what a command that is stopped leaves on disk
)
app.register_install_completion_command(help="Let the shell complete commands and options with Tab.")
for _command in (quantize, *COMMANDS):
    app.command(_command)


def main() -> None:
    """Run the command line; an error that nearplane raises on purpose, or a signal, is one sentence, never a traceback."""
    # before torch: threads that spin while they wait crawl on a busy machine; oneDNN keeps memory for every shape it has multiplied
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
