"""Entry point of the command line, also as `python -m nearplane`: it attends to Ctrl-C before anything is imported."""

import signal
import sys


def main() -> None:
    """Run the command line; Ctrl-C while it is imported, or while Python ends, prints no traceback."""
    try:
        from nearplane.cli.app import main as run

        run()
    except KeyboardInterrupt:  # before `run` attends to it
        print("nearplane: stopped by Ctrl-C. Repeat the command.", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left but to end


if __name__ == "__main__":
    main()
