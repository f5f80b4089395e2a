"""Lets ``python -m ttvd`` run the command line."""

from ttvd.cli import main

if __name__ == "__main__":
    main()
