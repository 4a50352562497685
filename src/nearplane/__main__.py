"""`python -m nearplane`."""

from nearplane.cli import main

if __name__ == "__main__":
    main()
