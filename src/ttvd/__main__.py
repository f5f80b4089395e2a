"""`python -m ttvd` is the command `ttvd`, where it is not on the path."""

from ttvd.cli import main

if __name__ == "__main__":
    main()
