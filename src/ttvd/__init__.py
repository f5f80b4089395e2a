"""Test-time adaptation of classifiers guided by Voronoi geometry.

Before deployment: ``sites = ttvd.prepare(model, data)``. A deployer needs two lines: ``adapter = ttvd.TTVD(model,
sites)`` and ``logits = adapter(images)``.

Names are loaded at their first use, so that the command line answers before torch is there.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ttvd.geometry import Diagram as Diagram
    from ttvd.methods import TTVD as TTVD
    from ttvd.methods import Adapter as Adapter
    from ttvd.methods import GradientAdapter as GradientAdapter
    from ttvd.methods import Step as Step
    from ttvd.methods import create as create
    from ttvd.methods import list_methods as list_methods
    from ttvd.methods import register as register
    from ttvd.metrics import RunningMetrics as RunningMetrics
    from ttvd.nn import Normalize as Normalize
    from ttvd.nn import SplitModel as SplitModel
    from ttvd.nn import Statistics as Statistics
    from ttvd.nn import split as split
    from ttvd.nn.anchors import anchor_norms as anchor_norms
    from ttvd.source import calibrate as calibrate
    from ttvd.source import estimate_sites as estimate_sites
    from ttvd.source import prepare as prepare
    from ttvd.testing import check_adapter as check_adapter
    from ttvd.zoo.catalog import load as load
    from ttvd.zoo.sites import Sites as Sites

__version__ = "0.2.0.dev0"

_HOMES = {
    "ttvd.methods": (
        "TTVD",
        "Adapter",
        "GradientAdapter",
        "Step",
        "create",
        "list_methods",
        "register",
    ),
    "ttvd.testing": ("check_adapter",),
    "ttvd.geometry": ("Diagram",),
    "ttvd.metrics": ("RunningMetrics",),
    "ttvd.nn": ("Normalize", "SplitModel", "Statistics", "split"),
    "ttvd.nn.anchors": ("anchor_norms",),
    "ttvd.zoo.sites": ("Sites",),
    "ttvd.zoo.catalog": ("load",),
    "ttvd.source": ("calibrate", "estimate_sites", "prepare"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ttvd' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
