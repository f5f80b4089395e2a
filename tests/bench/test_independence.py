"""What bench does not know: the names of methods; and what its loop does not import."""

import ast
import subprocess
import sys
from pathlib import Path

import ttvd

BENCH = Path(ttvd.__file__).parent / "bench"
OTHER_MEANINGS = {"source", "vd", "pd", "civd", "cipd", "note", "ttvd"}
"""Methods whose names have another meaning: the source model, diagrams, the note of a recipe, the package."""
CONTRACT = {"ttvd.methods.adapter", "ttvd.methods.registry", "ttvd.methods.fitting"}


def find_methods(code: str) -> set[str]:
    """Methods that a module names in its strings or imports."""
    names, found = set(ttvd.list_methods()) - OTHER_MEANINGS, set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Constant) and node.value in names:
            found.add(str(node.value))
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        if module.startswith("ttvd.methods.") and module not in CONTRACT:
            found.add(module)
    return found


def test_bench_names_no_method_outside_the_table_of_the_papers_figures() -> None:
    modules = {
        path.relative_to(BENCH).as_posix(): find_methods(path.read_text()) for path in BENCH.rglob("*.py")
    }
    assert {name for name, found in modules.items() if found} == {"figures/paper.py"}


def test_the_search_for_names_can_fail() -> None:
    assert find_methods('if method == "tent":\n    pass') == {"tent"}
    assert find_methods("from ttvd.methods.t3a import T3A") == {"ttvd.methods.t3a"}


def test_the_loop_and_the_worker_need_neither_pydantic_nor_the_compiler() -> None:
    """The import of torch's compiler takes a second, in every process."""
    code = """
import sys
sys.modules['pydantic'] = None
import ttvd, ttvd.bench, ttvd.bench.job, ttvd.bench.resources
ttvd.load('digits-plain')
assert 'torch._dynamo' not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
