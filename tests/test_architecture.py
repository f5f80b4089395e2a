"""The shape of the code base: who may import whom, how light an import is, how long files may be."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ttvd

PACKAGE = Path(ttvd.__file__).parent
ROOT = PACKAGE.parents[1]

MAY_IMPORT: dict[str, set[str]] = {
    "files": set(),
    "geometry": set(),
    "metrics": set(),
    "data": set(),
    "engine": {"geometry", "nn"},
    "nn": {"geometry", "engine"},
    "zoo": {"geometry", "nn"},
    "source": {"geometry", "nn", "zoo", "engine", "data"},
    "methods": {"geometry", "nn", "zoo", "engine"},
    "testing": {"methods", "nn", "zoo", "source"},
    "bench": {"geometry", "nn", "zoo", "source", "methods", "engine", "data", "metrics"},
    "report": {"bench", "geometry", "metrics", "data"},
    "deploy": {"nn", "zoo", "methods", "data"},
    "demo": {"geometry", "nn", "zoo", "source", "methods", "data", "metrics", "bench", "report"},
    "cli": {
        *("geometry", "nn", "zoo", "source", "methods", "data", "metrics"),
        *("bench", "report", "demo", "deploy", "testing"),
    },
    "__main__": {"cli"},
}
LIGHT = {"torch", "numpy", "ttvd", *sys.stdlib_module_names}


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or ""


def forbidden(room: str, source: str) -> list[str]:
    """Rooms that a piece of source in a room imports although it may not."""
    found = {name.split(".")[1] for name in imports(ast.parse(source)) if name.startswith("ttvd.")}
    return sorted(found - MAY_IMPORT[room] - {room, "files"})


def modules() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_import_direction(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert forbidden(room, path.read_text()) == []


def test_the_check_of_directions_can_fail() -> None:
    assert forbidden("geometry", "from ttvd.methods.adapter import Adapter") == ["methods"]
    assert forbidden("methods", "def f():\n    import ttvd.bench.run") == ["bench"]


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_heavy_imports_wait_for_their_use(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0]
    allowed = LIGHT | ({"typer"} if room == "cli" else set())
    top = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {name.split(".")[0] for node in top for name in imports(node)}
    assert names <= allowed


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


BLOCK = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {blocked!r}:
            raise ImportError(f'{{name}} must not be needed')
sys.meta_path.insert(0, Refuse())
"""
OPTIONAL = [
    "safetensors", "typer", "rich", "matplotlib", "scipy", "shapely", "jinja2", "PIL", "mlxtend", "pandas",
    "sklearn", "timm", "torchvision", "imagecorruptions", "ray", "cv2", "numba",
]  # fmt: skip


def test_import_needs_torch_and_numpy_alone_and_never_prints() -> None:
    names = "TTVD, check_adapter, estimate_sites, calibrate, load, Diagram, RunningMetrics"
    done = run_python(
        BLOCK.format(blocked=OPTIONAL) + f"\nfrom ttvd import {names}\nimport ttvd.data, ttvd.bench"
    )
    assert done.stdout == ""
    assert done.stderr == ""


def test_the_check_of_lightness_can_fail() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        run_python(BLOCK.format(blocked=["torch"]) + "\nfrom ttvd import TTVD")


def test_help_does_not_load_torch() -> None:
    code = """
import sys
sys.argv = ['ttvd', '--help']
import ttvd.cli
try:
    ttvd.cli.main()
except SystemExit as stop:
    assert stop.code == 0
assert 'torch' not in sys.modules and 'numpy' not in sys.modules
"""
    assert "demo" in run_python(code).stdout


def test_public_names_exist_and_are_few() -> None:
    assert all(getattr(ttvd, name) is not None for name in ttvd.__all__)
    assert len(ttvd.__all__) <= 20
    assert set(ttvd.__all__) <= set(dir(ttvd))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ttvd.nothing


def test_typing_sees_the_names_that_are_loaded_lazily() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    typed = next(node for node in tree.body if isinstance(node, ast.If))
    declared = {
        alias.asname for node in typed.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert declared == set(ttvd.__all__)


@pytest.mark.parametrize("folder", ["src", "tests", "tools", "benchmarks"])
def test_files_stay_readable(folder: str) -> None:
    long = {str(p): n for p in (ROOT / folder).rglob("*.py") if (n := len(p.read_text().splitlines())) > 300}
    assert long == {}
