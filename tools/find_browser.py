"""Print the path of a Chromium for `make test-browser`; install one where that is possible; else say what to do.

Tried in this order: $TTVD_BROWSER, the names below on the path, Playwright's own, Debian's package chromium (as root).
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
REMEDIES = """no Chromium was found for the browser tests. Any one of these helps:
  - install it: apt-get install chromium, or Google Chrome, or: .venv/bin/playwright install chromium
  - set TTVD_BROWSER=/path/to/chromium"""


def find_browser() -> str:
    """The path of a browser.

    Raises:
        FileNotFoundError: There is none, and none could be installed.
    """
    named = os.environ.get("TTVD_BROWSER")
    if named:
        if not os.access(named, os.X_OK):
            raise FileNotFoundError(f"TTVD_BROWSER is {named!r}, which cannot be run")
        return named
    found = _look() or _find_own() or _install()
    if found is None:
        raise FileNotFoundError(REMEDIES)
    return found


def _look() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def _find_own() -> str | None:
    """The browser that `playwright install chromium` has put in place, if it has."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = playwright.chromium.executable_path
    return path if Path(path).is_file() else None


def _install() -> str | None:
    if os.name != "posix" or os.geteuid() != 0 or shutil.which("apt-get") is None:
        return None
    print("installing chromium by apt-get", file=sys.stderr)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    packages = ["chromium", "fonts-dejavu-core"]  # without a font, text has no width
    for command in (["update", "-q"], ["install", "-y", "-q", "--no-install-recommends", *packages]):
        subprocess.run(["apt-get", *command], env=environment, stdout=sys.stderr, check=False)
    return _look()


def main() -> int:
    try:
        print(find_browser())
    except FileNotFoundError as error:
        print(f"find_browser: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
