"""What a user gets: the wheel, the documents, the commands in them."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

import ttvd
from tests.helpers.documents import make_reader
from ttvd.cli.main import app
from ttvd.methods import registry
from ttvd.zoo.catalog import available

ROOT = Path(ttvd.__file__).parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("wheel")
    options = ["wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir"]
    subprocess.run([sys.executable, "-m", "pip", *options, str(place), str(ROOT)], check=True)
    return next(place.glob("ttvd-*.whl"))


def test_wheel_holds_code_types_checkpoints_and_templates(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    package = Path(ttvd.__file__).parent
    wanted = {
        str(p.relative_to(package.parent))
        for p in package.rglob("*")
        if p.suffix in (".py", ".jinja", ".toml")
    }
    wanted |= {
        f"ttvd/zoo/checkpoints/{name}.{end}" for name in available() for end in ("safetensors", "json")
    }
    assert wanted | {"ttvd/py.typed"} <= names
    assert not any("__pycache__" in name or name.startswith("tests") for name in names)


def test_wheel_runs_from_where_it_is_installed(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import sys, torch, ttvd; s = ttvd.load('digits-sla'); "
        "print(ttvd.__file__, tuple(ttvd.TTVD(s.model, s.sites)(torch.rand(4, 1, 28, 28)).shape))"
    )
    # The folder of the wheel goes first, so that the checkout is not what is imported.
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert done.stdout.strip() == f"{tmp_path / 'ttvd' / '__init__.py'} (4, 10)"


def test_versions_agree() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{ttvd.__version__}"' in text


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", document.read_text())
    missing = [t for t in targets if "://" not in t and not (document.parent / t).exists()]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_placeholder_is_left(document: Path) -> None:
    assert re.findall(r"^[A-Z]{4,}$", document.read_text(), re.MULTILINE) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_make_targets_in_documents_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", document.read_text())) <= targets


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_python_in_documents_runs(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))  # a document may register a method
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL)):
        code = compile(block, f"{document.name}, block {number + 1}", "exec")
        names = make_reader() if document.name == "README.md" else {}
        exec(code, {"__name__": "__main__", **names})  # noqa: S102 - our own documents


def test_the_documents_list_the_methods_as_the_registry_does() -> None:
    table = CliRunner().invoke(app, ["methods", "--markdown"]).output
    assert table in (ROOT / "docs" / "methods.md").read_text()
