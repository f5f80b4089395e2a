"""The command line: parses arguments, calls the public functions of the other packages, and prints.

No module here imports torch at its top, so that ``ttvd --help`` answers at once.
"""

from ttvd.cli.main import main as main
