"""The command line: the only room that prints and decides exit codes.

Nothing here imports torch at the top: ``ttvd --help`` must answer at once.
"""

from ttvd.cli.main import main as main
