"""Where the browser comes from, and what is said when there is none."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
from tools import find_browser as tool


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine without a browser, on which nothing can be installed."""
    monkeypatch.delenv("TTVD_BROWSER", raising=False)
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr(tool, "_find_own", lambda: None)
    return monkeypatch


def test_the_one_that_is_named_comes_first(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "browser"
    program.touch(mode=0o755)
    bare.setenv("TTVD_BROWSER", str(program))
    assert tool.find_browser() == str(program)


def test_a_name_that_cannot_be_run_is_refused(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bare.setenv("TTVD_BROWSER", str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError, match="which cannot be run"):
        tool.find_browser()


def test_without_a_browser_the_command_fails_and_names_remedies(
    bare: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main() == 1
    said = capsys.readouterr()
    assert said.out == ""
    for remedy in ("apt-get install chromium", "playwright install chromium", "TTVD_BROWSER="):
        assert remedy in said.err


def test_root_installs_one(bare: pytest.MonkeyPatch) -> None:
    done: list[list[str]] = []

    def which(name: str) -> str | None:
        there = name == "apt-get" or (name == "chromium" and len(done) == 2)
        return f"/usr/bin/{name}" if there else None

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        done.append(command[:2])
        return subprocess.CompletedProcess(command, 0)

    bare.setattr("shutil.which", which)
    bare.setattr("subprocess.run", run)
    bare.setattr("os.geteuid", lambda: 0)
    assert tool.find_browser() == "/usr/bin/chromium"
    assert done == [["apt-get", "update"], ["apt-get", "install"]]
