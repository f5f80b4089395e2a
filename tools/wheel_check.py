"""Build the wheel, install it into an empty environment and use it.

python tools/wheel_check.py [--constraints FILE]
"""

import argparse
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
SMOKE = """
import torch, ttvd
from importlib.metadata import version
assert version("ttvd") == ttvd.__version__
source = ttvd.load("digits-sla")
adapter = ttvd.TTVD(source.model, source.sites)
logits = adapter(torch.rand(8, 1, 28, 28))
assert logits.shape == (8, 10) and logits.isfinite().all()
print("the installed wheel adapts:", type(adapter).__name__, tuple(logits.shape))
"""
RECIPE = """
data.set = "digits"
data.corruptions = ["fog"]
data.limit = 128
checkpoints.plain = "digits-plain"
[[methods]]
name = ["source", "bn"]
"""


def call(*command: str | Path, cwd: Path) -> None:
    print("$", *command, flush=True)
    subprocess.run([str(part) for part in command], check=True, cwd=cwd)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--constraints", type=Path, help="pinned versions to install with")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        build: list[str | Path] = [
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "--wheel-dir",
            place,
            ROOT,
        ]
        call(sys.executable, *build, cwd=place)
        wheel = next(place.glob("ttvd-*.whl"))
        venv.create(place / "empty", with_pip=True)
        python = place / "empty" / "bin" / "python"
        pins: list[str | Path] = ["-c", chosen.constraints.resolve()] if chosen.constraints else []
        call(python, "-m", "pip", "install", "-q", *pins, wheel, cwd=place)
        call(python, "-c", SMOKE, cwd=place)
        ttvd = place / "empty" / "bin" / "ttvd"
        call(ttvd, "methods", cwd=place)
        call(python, "-m", "pip", "install", "-q", *pins, f"{wheel}[demo]", cwd=place)
        (place / "two.toml").write_text(RECIPE)
        call(ttvd, "bench", "two.toml", "--store", "runs.db", cwd=place)
        call(ttvd, "report", "runs.db", "--out", "page", cwd=place)


if __name__ == "__main__":
    main()
