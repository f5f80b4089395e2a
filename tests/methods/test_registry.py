"""Methods of the user's own, of installed packages, and what method files may contain."""

import ast
import re
import sys
import textwrap
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from torch import nn

import ttvd
from ttvd.methods import find_method, registry
from ttvd.methods.registry import Method

METHODS = Path(registry.__file__).parent
CONTRACT = {"adapter.py", "gradient.py", "policies.py", "registry.py"}
WORDS = r"\b(compil\w*|captur\w*|record(?:ed|ing)\w*|plan|agenda|(?:cuda )?graphs?|_take)\b"
MACHINERY = re.compile(WORDS, re.IGNORECASE)
OWN = """
import torch
import ttvd
from torch import nn

class Colder(ttvd.GradientAdapter):
    '''Scales logits before it minimises their entropy.

    Args:
        factor: Factor on the logits.
    '''

    def __init__(self, model, *, factor: float = 2.0, **options):
        super().__init__(model, **options)
        self.factor = factor

    def loss(self, x):
        logits = self.factor * self.output(x)
        entropy = -(logits.softmax(1) * logits.log_softmax(1)).sum(1).mean()
        return ttvd.Step(logits, entropy, torch.ones_like(self.kept))

class Plain(ttvd.Adapter):
    def __init__(self, model, sites, *, statistics=ttvd.Statistics.source()):
        super().__init__(model, statistics=statistics)

class Demanding(ttvd.Adapter):
    def __init__(self, model, teacher):
        super().__init__(model, statistics=ttvd.Statistics.source())

@ttvd.register("own-registered", summary="s", paper="p", updates="u", forwards=1, backwards=0)
class Registered(ttvd.Adapter):
    def __init__(self, model):
        super().__init__(model, statistics=ttvd.Statistics.source())

number = 3
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's that can be imported."""
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))
    (tmp_path / "own_methods.py").write_text(textwrap.dedent(OWN))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_methods", raising=False)
    return "own_methods"


def make_net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def test_a_class_of_the_user_is_a_method(own_module: str) -> None:
    method = find_method(f"{own_module}:Colder")
    assert method.parameters() == {"factor": 2.0, **ttvd.GradientAdapter.defaults}
    assert method.summary == "Scales logits before it minimises their entropy."
    assert (method.needs, method.backwards) == (frozenset(), 1)
    adapter = ttvd.create(f"{own_module}:Colder", make_net(), factor=3.0, lr=0.1)
    assert adapter(torch.rand(8, 1, 2, 2)).shape == (8, 2)
    with pytest.raises(ValueError, match="did you mean 'factor'"):
        ttvd.create(f"{own_module}:Colder", make_net(), factr=3.0)
    assert find_method(f"{own_module}:Plain").needs == {"sites"}
    assert find_method(f"{own_module}:Registered").name == f"{own_module}:Registered"
    assert find_method("own-registered").name == "own-registered"
    assert find_method("ttvd.methods.tent:Tent") is ttvd.list_methods()["tent"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_methods:Coldr", "did you mean 'Colder'"),
        ("own_methods:number", "not a subclass"),
        ("own_methods:Demanding", "teacher"),
        ("no_such_module:Colder", "PYTHONPATH"),
        ("own_method", "package.module:Class"),
    ],
)
def test_names_that_lead_nowhere(own_module: str, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_method(name)


@pytest.fixture
def offered(own_module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package offers two methods that work and two that do not."""
    paths = {"colder": "own_methods:Colder", "own-registered": "own_methods:Registered"}
    paths |= {"gone": "no_such_module:Class", "wrong": "own_methods:number"}
    points = [EntryPoint(name, path, registry.ENTRY_POINTS) for name, path in paths.items()]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    registry._find_offered.cache_clear()
    registry._warn_broken.cache_clear()


@pytest.mark.usefixtures("offered")
def test_methods_of_installed_packages() -> None:
    try:
        assert find_method("colder").parameters()["factor"] == 2.0
        assert find_method("own-registered").summary == "s"
        with pytest.raises(ValueError, match="'gone' of an installed package"):
            find_method("gone")
        with pytest.warns(UserWarning, match="cannot be loaded") as caught:
            names = ttvd.list_methods()
        assert {"tent", "colder", "own-registered"} <= names.keys()
        told = " ".join(str(warning.message) for warning in caught)
        assert "'gone'" in told
        assert "'wrong'" in told
        assert not {"gone", "wrong"} & names.keys()
        ttvd.list_methods()  # says nothing a second time
    finally:
        registry._find_offered.cache_clear()


def method_files() -> list[Path]:
    folders = [*METHODS.glob("*.py"), *(METHODS / "ttvd").glob("*.py")]
    return [path for path in folders if path.name not in CONTRACT]


def find_machinery(source: str) -> list[str]:
    """Imports of the engine and its words in a method's file; explanations count too."""
    imported = [
        node.module or ""
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ttvd.engine")
    ]
    return imported + MACHINERY.findall(source)


@pytest.mark.parametrize("path", method_files(), ids=lambda path: path.stem)
def test_methods_see_their_idea_only(path: Path) -> None:
    assert find_machinery(path.read_text()) == []


def test_the_check_of_method_files_can_fail() -> None:
    assert find_machinery("from ttvd.engine.flat import all_finite") == ["ttvd.engine.flat"]
    assert find_machinery("y = torch.compile(f)") == ["compile"]


@pytest.mark.parametrize("method", ttvd.list_methods().values(), ids=lambda method: method.name)
def test_constructors_refuse_unknown_options(method: Method) -> None:
    needed = {"sites", "features", "fisher"} & method.needs
    with pytest.raises(TypeError, match="no_such_option"):
        method.adapter(make_net(), *[None] * len(needed), no_such_option=1)  # type: ignore[call-arg]


def test_constructors_refuse_options_that_the_registry_does_not_offer() -> None:
    with pytest.raises(TypeError, match="ETA has no option 'optimizer'"):
        ttvd.methods.ETA(make_net(), optimizer="adam")


def test_bn_takes_statistics() -> None:
    net, x = make_net(), torch.rand(8, 1, 2, 2)
    assert torch.equal(
        ttvd.create("bn", net, statistics=ttvd.Statistics(count=16))(x), ttvd.create("bn", net, count=16)(x)
    )
    with pytest.raises(ValueError, match="either count or statistics"):
        ttvd.create("bn", net, count=16, statistics=ttvd.Statistics.batch())
