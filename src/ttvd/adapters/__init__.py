"""Methods of test-time adaptation, one file each. Importing this package registers them all."""

from ttvd.adapters.base import Adapter as Adapter
from ttvd.adapters.bn import BatchNormAdapt as BatchNormAdapt
from ttvd.adapters.gradient import GradientAdapter as GradientAdapter
from ttvd.adapters.gradient import Step as Step
from ttvd.adapters.registry import Method as Method
from ttvd.adapters.registry import create as create
from ttvd.adapters.registry import find_method as find_method
from ttvd.adapters.registry import methods as methods
from ttvd.adapters.registry import register as register
from ttvd.adapters.source import Source as Source
from ttvd.adapters.t3a import T3A as T3A
from ttvd.adapters.tent import Tent as Tent
from ttvd.adapters.ttvd import TTVD as TTVD
