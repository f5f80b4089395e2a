"""The shape of the code base: which room may import which, how light an import is, what tests may share."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ttvd

PACKAGE = Path(ttvd.__file__).parent
ROOT = PACKAGE.parents[1]

BELOW_BENCH = {
    *("files", "geometry", "metrics", "interrupts", "data"),
    *("engine", "nn", "zoo", "source", "methods", "testing"),
}
MAY_IMPORT: dict[str, set[str]] = {
    "files": set(),
    "geometry": set(),
    "metrics": set(),
    "interrupts": set(),
    "data": {"files"},
    "engine": {"geometry"},
    "nn": {"geometry", "engine"},
    "zoo": {"geometry", "nn", "files"},
    "source": {"geometry", "nn", "zoo", "engine", "data", "metrics", "files"},
    "methods": {"geometry", "nn", "zoo", "engine"},
    "testing": {"methods", "nn", "zoo", "source"},
    "bench": BELOW_BENCH,
    "report": {"bench", "geometry", "metrics", "data", "files"},
    "deploy": {"nn", "zoo", "methods", "data", "interrupts", "engine", "files"},
    "demo": {"geometry", "metrics", "data", "nn", "zoo", "source", "methods", "bench", "report", "files"},
    "cli": BELOW_BENCH | {"bench", "report", "deploy", "demo"},
    "__main__": {"cli"},
}
"""The rooms of the package, from the bottom to the top, and the rooms that each may import."""

NO_METHODS = {"__init__.py", "adapter.py", "gradient.py", "registry.py", "policies.py", "shared"}
"""Modules and folders of methods/ that are no method. Only they may import the engine."""

LIGHT = {"torch", "numpy", "ttvd", *sys.stdlib_module_names}
MAY_LOAD: dict[str, set[str]] = {"cli/": {"typer"}, "bench/recipe": {"pydantic"}}
"""Packages that modules, named by how their paths begin, may import at their top."""


def imports(tree: ast.AST) -> Iterator[str]:
    """Full names of what a piece of code imports, at any depth: ``from a import b`` gives ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rooms_imported(source: str) -> set[str]:
    """Rooms of the package that a piece of code imports."""
    names = (name.split(".") for name in imports(ast.parse(source)))
    return {parts[1] for parts in names if parts[0] == "ttvd" and parts[1:] and parts[1] in MAY_IMPORT}


def forbidden_rooms(module: Path, source: str) -> list[str]:
    """Rooms that a module, named by its path inside the package, imports although it may not."""
    room = module.parts[0].removesuffix(".py")
    allowed = MAY_IMPORT[room] | {room}
    if room == "methods" and module.parts[1] not in NO_METHODS:
        allowed -= {"engine"}
    return sorted(rooms_imported(source) - allowed)


def modules() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


def test_rooms_import_only_what_they_may() -> None:
    named = {path.relative_to(PACKAGE): path.read_text() for path in modules()}
    found = {str(module): forbidden_rooms(module, source) for module, source in named.items()}
    assert {module: rooms for module, rooms in found.items() if rooms} == {}


def test_the_table_has_no_cycle() -> None:
    order: list[str] = []
    while len(order) < len(MAY_IMPORT):
        free = [room for room, needed in MAY_IMPORT.items() if room not in order and needed <= set(order)]
        assert free, f"a cycle among {sorted(set(MAY_IMPORT) - set(order))}"
        order += free


@pytest.mark.parametrize(
    ("module", "source", "rooms"),
    [
        ("geometry/distance.py", "from ttvd.methods.adapter import Adapter", ["methods"]),
        ("methods/tent.py", "def f():\n    import ttvd.bench.run", ["bench"]),
        ("methods/tent.py", "from ttvd.engine.flat import flatten", ["engine"]),
        ("methods/ttvd/loss.py", "from ttvd import engine", ["engine"]),
        ("methods/gradient.py", "from ttvd.engine.flat import flatten", []),
        ("methods/shared/losses.py", "from ttvd.engine.flat import flatten", []),
        ("zoo/sites.py", "from ttvd import TTVD\nimport torch", []),
    ],
)
def test_the_check_of_imports_can_fail(module: str, source: str, rooms: list[str]) -> None:
    assert forbidden_rooms(Path(module), source) == rooms


def imported_tests(source: str) -> list[str]:
    """Modules of the tests, helpers apart, that a piece of code imports."""
    names = {name for name in imports(ast.parse(source)) if name.split(".")[0] == "tests"}
    return sorted(name for name in names if name.split(".")[1:2] != ["helpers"])


def test_tests_share_helpers_alone() -> None:
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    assert {path: names for path, source in sources.items() if (names := imported_tests(source))} == {}


def test_the_check_of_tests_can_fail() -> None:
    assert imported_tests("from tests.nn.test_norms import MIXED") == ["tests.nn.test_norms.MIXED"]
    assert imported_tests("from tests import conftest\nfrom tests.helpers.nets import build") == [
        "tests.conftest"
    ]


def heavy_imports(module: Path, source: str) -> set[str]:
    """Packages beyond torch and numpy that a module loads when it is imported."""
    top = [node for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)]
    allowed = next((names for start, names in MAY_LOAD.items() if str(module).startswith(start)), set())
    return {name.split(".")[0] for node in top for name in imports(node)} - LIGHT - allowed


def test_heavy_imports_wait_for_their_use() -> None:
    named = {path.relative_to(PACKAGE): path.read_text() for path in modules()}
    found = {str(module): heavy_imports(module, source) for module, source in named.items()}
    assert {module: names for module, names in found.items() if names} == {}
    assert heavy_imports(Path("data/images.py"), "import PIL\nif True:\n    import cv2") == {"PIL"}


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
    "safetensors", "pydantic", "typer", "rich", "matplotlib", "scipy", "shapely", "jinja2", "PIL", "mlxtend",
    "pandas", "pooch", "sklearn", "timm", "torchvision", "transformers", "imagecorruptions", "ray", "cv2", "numba",
]  # fmt: skip


def test_import_needs_torch_and_numpy_alone_and_never_prints() -> None:
    names = "TTVD, check_adapter, estimate_sites, calibrate, load, Diagram, RunningMetrics"
    code = f"from ttvd import {names}\nimport ttvd.data, ttvd.bench"
    done = run_python(BLOCK.format(blocked=OPTIONAL) + code)
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
