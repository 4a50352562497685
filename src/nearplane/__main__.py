"""Entry point of `python -m nearplane`."""

from nearplane.cli.app import main

if __name__ == "__main__":
    main()
