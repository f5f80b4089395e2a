"""The one list of methods: command line, conformance suite, documentation and benchmark all read it."""

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from torch import nn

from ttvd.methods.adapter import Adapter
from ttvd.zoo.sites import Sites

A = TypeVar("A", bound=type[Adapter])


@dataclass(frozen=True)
class Method:
    """What is known of a method without running it.

    Attributes:
        name: How users call it.
        adapter: The class behind it.
        summary: One sentence.
        paper: Where it comes from.
        updates: What changes at test time.
        forwards: Forward passes for each image of a batch and step.
        backwards: Backward passes, likewise.
        needs: What it takes besides a model. ``"sites"``, ``"features"`` and ``"fisher"`` are made by
            ``ttvd.source`` and passed to :func:`create`; ``"rotation head"`` and ``"instance-aware norm"`` are parts
            that the model itself must have.
        defaults: Parameters that this entry fixes; a preset of a class is an entry of its own.
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
        """Names and defaults of what a user may set."""
        signature = inspect.signature(self.adapter.__init__).parameters
        chosen = {n: p.default for n, p in signature.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}
        return chosen | dict(self.defaults)

    def takes_both(self, parameter: str) -> bool:
        """Whether a parameter is a number or a word, as the user likes, whatever its default is."""
        hints = get_type_hints(self.adapter.__init__).get(parameter)
        kinds = {type(get_args(kind)[0]) if get_origin(kind) is Literal else kind for kind in get_args(hints)}
        return {float, str} <= kinds


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
    """Class decorator that puts a method on the list."""

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
    """All registered methods by name.

    Example:
        >>> import ttvd
        >>> "tent" in ttvd.list_methods()
        True
    """
    return dict(_METHODS)


def find_method(name: str) -> Method:
    """The method called ``name``; a misspelt name is answered with the nearest ones."""
    if name in _METHODS:
        return _METHODS[name]
    near = difflib.get_close_matches(name, _METHODS, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(_METHODS)}"
    raise ValueError(f"no method is called {name!r}; {hint}")


def create(
    name: str,
    model: nn.Module,
    *,
    sites: Sites | None = None,
    features: Any = None,
    fisher: Any = None,
    **parameters: Any,
) -> Adapter:
    """Build the adapter called ``name`` around a model.

    Args:
        name: One of :func:`list_methods`.
        model: The classifier, left as it is.
        sites: Its class means, for methods that need them (``ttvd.estimate_sites``).
        features: Features of source samples, likewise (``ttvd.source.collect_features``).
        fisher: How much each parameter matters to the source task, likewise (``ttvd.source.estimate_fisher``).
        **parameters: The method's own; an unknown one is refused with the allowed names.

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
    return build(model, *(made[key] for key in needed), **{**method.defaults, **parameters})
