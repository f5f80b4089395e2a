"""Test-time adaptation of classifiers guided by Voronoi geometry.

A deployer needs two lines: ``adapter = ttvd.TTVD(model, sites)`` and ``logits = adapter(images)``.
"""

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
from ttvd.models.sites import Sites as Sites
from ttvd.models.zoo import load as load

__version__ = "0.1.0"
