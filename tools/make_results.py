"""Make every table and figure of results/ from the rows that are committed there; `make results` calls it.

    python tools/make_results.py [FOLDER]

Works offline and gives the same bytes each time. A table of five rows goes into README.md, between its markers.
"""

import argparse
import sys
from pathlib import Path

from ttvd.report.results_folder import write_results

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "results")
    parser.add_argument("--readme", type=Path, help="README.md beside results/ unless given")
    options = parser.parse_args()
    beside = ROOT / "README.md" if options.folder.resolve() == ROOT / "results" else None
    try:
        written = write_results(options.folder, options.readme or beside)
    except (ValueError, OSError) as error:
        sys.exit(f"make_results: {error}")
    print(f"{len(written)} files in {options.folder}")


if __name__ == "__main__":
    main()
