"""The list of methods, which the command line, the conformance suite, the documentation and the benchmark read."""

import difflib
import importlib
import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from torch import nn

from ttvd.methods.adapter import Adapter
from ttvd.methods.gradient import GradientAdapter
from ttvd.nn.split import split
from ttvd.nn.views import AggregatedViews
from ttvd.zoo.sites import Sites

if TYPE_CHECKING:
    from ttvd.zoo.catalog import Source

A = TypeVar("A", bound=type[Adapter])
ENTRY_POINTS = "ttvd.methods"
"""The group of entry points in which an installed package offers methods: a name for each :class:`Adapter`."""


@dataclass(frozen=True)
class Method:
    """What is known about a method without running it.

    Attributes:
        name: The name that users give.
        adapter: The class of the method.
        summary: One sentence about it.
        paper: Where it comes from.
        updates: What changes at test time.
        forwards: Forward passes for each image of a batch and step.
        backwards: Backward passes, likewise.
        needs: What it needs besides a model. ``"sites"``, ``"features"`` and ``"fisher"`` are made by
            ``ttvd.source`` and passed to :func:`create`; ``"rotation head"`` and ``"instance-aware norm"`` are parts
            that the model itself must have.
        defaults: Parameters whose defaults this entry changes; a preset of a class is an entry of its own.
        revision: Grows when the same parameters begin to give other results, so that stored runs are not mixed up.
    """

    name: str
    adapter: type[Adapter]
    summary: str
    paper: str
    updates: str
    forwards: int
    backwards: int
    needs: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    revision: int = 1

    def parameters(self) -> dict[str, Any]:
        """Names and defaults of the parameters that a user may set.

        These are the keyword arguments of the class. Where its ``__init__`` takes ``**options``, they are listed in
        the attribute ``defaults`` of the class.
        """
        build = self.adapter.__init__
        signature = inspect.signature(build).parameters.values()
        own = {p.name: p.default for p in signature if p.kind is p.KEYWORD_ONLY}
        if build is GradientAdapter.__init__:
            own = {}  # what a method may decide in its own __init__, users may not set
        if any(p.kind is p.VAR_KEYWORD for p in signature):
            own |= getattr(self.adapter, "defaults", {})
        return own | dict(self.defaults)

    def takes_both(self, parameter: str) -> bool:
        """Whether a parameter may be a number or a word, whatever its default is."""
        hints = get_type_hints(self.adapter.__init__, include_extras=True)
        if parameter not in hints and "options" in hints:
            hints = get_type_hints(get_args(hints["options"])[0])
        kinds = get_args(hints.get(parameter))
        return {float, str} <= {
            type(get_args(kind)[0]) if get_origin(kind) is Literal else kind for kind in kinds
        }


_METHODS: dict[str, Method] = {}
_MAKERS = {
    "sites": "ttvd.estimate_sites(model, source_data)",
    "features": "ttvd.source.collect_features(model, source_data)",
    "fisher": "ttvd.source.estimate_fisher(model, source_images)",
}


def register(
    name: str,
    *,
    summary: str,
    paper: str,
    updates: str,
    forwards: int,
    backwards: int,
    needs: frozenset[str] = frozenset(),
    defaults: Mapping[str, Any] | None = None,
    revision: int = 1,
) -> Callable[[A], A]:
    """Class decorator that adds a method to the list; the arguments are those of :class:`Method`."""

    def add(adapter: A) -> A:
        if name in _METHODS:
            raise ValueError(
                f"a method called {name!r} is registered already ({_METHODS[name].adapter.__name__})"
            )
        _METHODS[name] = Method(
            name, adapter, summary, paper, updates, forwards, backwards, needs, dict(defaults or {}), revision
        )
        return adapter

    return add


def list_methods() -> dict[str, Method]:
    """All registered methods by name, those of installed packages included.

    A package offers its methods in the entry-point group ``ttvd.methods``. One that cannot be loaded gives a warning
    and is left out.

    Example:
        >>> import ttvd
        >>> "tent" in ttvd.list_methods()
        True
    """
    for name, offered in _find_offered().items():
        if name not in _METHODS:
            try:
                _METHODS[name] = _load_offered(offered)
            except (ImportError, AttributeError, TypeError, ValueError) as error:
                _warn_broken(name, str(error))
    return dict(_METHODS)


def find_method(name: str) -> Method:
    """The method with a name.

    Args:
        name: A registered name, the name of an entry point in the group ``ttvd.methods``, or ``package.module:Class``
            for a class that can be imported. A class that is not registered needs no entry: its parameters are read
            from its signature.

    Raises:
        ValueError: There is no such method; the message names the nearest ones.

    Example:
        >>> find_method("ttvd.methods.tent:Tent").name
        'tent'
    """
    if name in _METHODS:
        return _METHODS[name]
    if ":" in name:
        return _import_method(name)
    if (offered := _find_offered().get(name)) is not None:
        try:
            _METHODS[name] = _load_offered(offered)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise ValueError(
                f"the method {name!r} of an installed package cannot be loaded: {error}"
            ) from error
        return _METHODS[name]
    names = [*_METHODS, *_find_offered()]
    near = difflib.get_close_matches(name, names, n=3)
    known = f"there are: {', '.join(names)}; a class of your own is package.module:Class"
    hint = f"did you mean {' or '.join(near)}?" if near else known
    raise ValueError(f"no method is called {name!r}; {hint}")


@cache
def _find_offered() -> dict[str, EntryPoint]:
    return {offered.name: offered for offered in entry_points(group=ENTRY_POINTS)}


@cache
def _warn_broken(name: str, reason: str) -> None:
    warnings.warn(f"the method {name!r} of an installed package cannot be loaded: {reason}", stacklevel=3)


def _load_offered(offered: EntryPoint) -> Method:
    known = set(_METHODS)
    adapter = offered.load()
    if offered.name in _METHODS.keys() - known:  # loading has registered it
        return _METHODS[offered.name]
    return _describe_class(adapter, offered.name, offered.value)


def _import_method(path: str) -> Method:
    """The method of a class ``package.module:Class``."""
    module_name, _, class_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"cannot import {module_name!r} of the method {path!r}: {error}. The module must be installed, or its "
            "folder on PYTHONPATH"
        ) from error
    if (adapter := getattr(module, class_name, None)) is None:
        near = difflib.get_close_matches(class_name, vars(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"the module {module_name!r} has no class {class_name!r}{hint}")
    try:
        method = _describe_class(adapter, path, path)
    except TypeError as error:
        raise ValueError(str(error)) from error
    # Only a method of this package is known by its registered name in every process, such as a worker's.
    return method if module_name.startswith("ttvd.") else replace(method, name=path)


def _describe_class(adapter: object, name: str, path: str) -> Method:
    """The entry of a class: its own where it is registered, else one made from its signature and docstring."""
    if not (isinstance(adapter, type) and issubclass(adapter, Adapter)):
        raise TypeError(f"{path!r} is not a subclass of ttvd.Adapter, got {adapter!r}")
    entries = [method for method in _METHODS.values() if method.adapter is adapter]
    if entries:
        return next((method for method in entries if method.name == name), entries[0])
    signature = inspect.signature(adapter.__init__).parameters.values()
    required = [p.name for p in signature if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD][2:]
    if unknown := [key for key in required if key not in _MAKERS]:
        raise TypeError(
            f"{path!r} needs the argument {unknown[0]!r}; besides the model, methods may need {', '.join(_MAKERS)}, "
            "and all other arguments need defaults"
        )
    summary = (inspect.getdoc(adapter) or adapter.__name__).partition("\n")[0]
    passes = 1 if issubclass(adapter, GradientAdapter) else 0
    return Method(name, adapter, summary, "-", "-", 1, passes, frozenset(required))


def create(
    name: str,
    model: nn.Module,
    *,
    sites: Sites | None = None,
    features: Any = None,
    fisher: Any = None,
    guard: Any = None,
    **parameters: Any,
) -> Adapter:
    """Build the adapter called ``name`` around a model.

    Args:
        name: A method as :func:`find_method` takes it.
        model: The classifier; it stays as it is.
        sites: Its class means, for methods that need them (``ttvd.estimate_sites``).
        features: Features of source samples, likewise (``ttvd.source.collect_features``).
        fisher: How much each parameter matters to the source task, likewise (``ttvd.source.estimate_fisher``).
        guard: True for a guard that stops the adapter where it does harm, False for none, or settings; None for what
            the method does by default.
        **parameters: Parameters of the method. An unknown one is refused with the allowed names.

    Example:
        >>> import torch, ttvd
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
        >>> ttvd.create("tent", net, lr=1e-3)(torch.rand(8, 1, 2, 2)).shape
        torch.Size([8, 2])
    """
    method = find_method(name)
    allowed = method.parameters()
    for key in parameters:
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"{name} has no parameter {key!r}{hint} It takes: {', '.join(allowed) or 'none'}"
            )
    build: Callable[..., Adapter] = method.adapter
    made = {"sites": sites, "features": features, "fisher": fisher}
    needed = [key for key in made if key in method.needs]
    for key in needed:
        if made[key] is None:
            raise ValueError(f"{name} needs {key}: pass {key}={_MAKERS[key]}")
    return build(model, *(made[key] for key in needed), guard=guard, **{**method.defaults, **parameters})


def prepare_model(source: "Source", method: Method, views: int) -> nn.Module:
    """The model of a checkpoint in the form that a method expects.

    Methods with sites expect a label-augmented head (k classes x v rotations). All others get a k-way classifier, of
    the upright view alone or of several views aggregated.

    Args:
        source: The model and its card.
        method: The method that is going to use it.
        views: How many views to aggregate for a method that knows nothing of views.
    """
    head_views = _count_head_views(source)
    if "sites" in method.needs or head_views == 1:
        if views > 1:
            raise ValueError(f"{method.name} on this model takes no views; leave the number of views out")
        return source.model
    if views == 1:
        return split(source.model).upright(head_views)
    return AggregatedViews(source.model, views, head_views)


def _count_head_views(source: "Source") -> int:
    """How many rotations the head tells apart, from the card, else from the sites."""
    if source.card is not None:
        return source.card.head_views
    if source.sites is None:
        return 1
    return split(source.model).linear.out_features // source.sites.num_classes
