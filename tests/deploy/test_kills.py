"""`ttvd adapt` is killed again and again, and its file ends as if nothing had happened. The long version is a tool."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "kill_adapt.py"


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="processes look up their files in /proc")
def test_the_file_is_that_of_an_uninterrupted_run() -> None:
    """In a process of its own, which forks before it computes anything."""
    command = [sys.executable, str(TOOL), "--kills", "10", "--fresh", "0"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert "every file equal" in result.stdout
