"""Test-time adaptation of classifiers guided by Voronoi geometry.

A deployer needs two lines: ``adapter = ttvd.TTVD(model, sites)`` and ``logits = adapter(images)``.

Names are loaded at their first use, so that the command line answers before torch is there.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ttvd.adapters import TTVD as TTVD
    from ttvd.adapters import Adapter as Adapter
    from ttvd.adapters import GradientAdapter as GradientAdapter
    from ttvd.adapters import Step as Step
    from ttvd.adapters import create as create
    from ttvd.adapters import methods as methods
    from ttvd.adapters import register as register
    from ttvd.check import check_adapter as check_adapter
    from ttvd.geometry import Diagram as Diagram
    from ttvd.metrics import RunningMetrics as RunningMetrics
    from ttvd.models import SplitModel as SplitModel
    from ttvd.models import Statistics as Statistics
    from ttvd.models import split as split
    from ttvd.models.anchors import anchor_norms as anchor_norms
    from ttvd.models.sites import Sites as Sites
    from ttvd.models.zoo import load as load
    from ttvd.source import calibrate as calibrate
    from ttvd.source import estimate_sites as estimate_sites

__version__ = "0.1.0"

_HOMES = {
    "ttvd.adapters": ("TTVD", "Adapter", "GradientAdapter", "Step", "create", "methods", "register"),
    "ttvd.check": ("check_adapter",),
    "ttvd.geometry": ("Diagram",),
    "ttvd.metrics": ("RunningMetrics",),
    "ttvd.models": ("SplitModel", "Statistics", "split"),
    "ttvd.models.anchors": ("anchor_norms",),
    "ttvd.models.sites": ("Sites",),
    "ttvd.models.zoo": ("load",),
    "ttvd.source": ("calibrate", "estimate_sites"),
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
