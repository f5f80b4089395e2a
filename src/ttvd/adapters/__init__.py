"""Methods of test-time adaptation, one file each. Importing this package registers them all."""

from ttvd.adapters.base import Adapter as Adapter
from ttvd.adapters.gradient import GradientAdapter as GradientAdapter
from ttvd.adapters.gradient import Step as Step
from ttvd.adapters.policies import Episodic as Episodic
from ttvd.adapters.policies import ResetEvery as ResetEvery
from ttvd.adapters.policies import ResetOnCollapse as ResetOnCollapse
from ttvd.adapters.registry import Method as Method
from ttvd.adapters.registry import create as create
from ttvd.adapters.registry import find_method as find_method
from ttvd.adapters.registry import methods as methods
from ttvd.adapters.registry import register as register

# Each import below puts a method on the list, in the order in which tables show them.
# isort: off
from ttvd.adapters.source import Source as Source
from ttvd.adapters.bn import BatchNormAdapt as BatchNormAdapt
from ttvd.adapters.tent import Tent as Tent
from ttvd.adapters.t3a import T3A as T3A
from ttvd.adapters.tast import TAST as TAST
from ttvd.adapters.tast_bn import TASTBN as TASTBN
from ttvd.adapters.adanpc import AdaNPC as AdaNPC
from ttvd.adapters.shot import SHOT as SHOT
from ttvd.adapters.ttt import TTT as TTT
from ttvd.adapters.note import NOTE as NOTE
from ttvd.adapters.conjugate import ConjugatePL as ConjugatePL
from ttvd.adapters.sar import SAR as SAR
from ttvd.adapters.eata import ETA as ETA
from ttvd.adapters.eata import EATA as EATA
from ttvd.adapters.cotta import CoTTA as CoTTA
from ttvd.adapters.rotta import RoTTA as RoTTA
from ttvd.adapters.memo import MEMO as MEMO
from ttvd.adapters.lame import LAME as LAME
from ttvd.adapters.roid import ROID as ROID
from ttvd.adapters.deyo import DeYO as DeYO
from ttvd.adapters.rdumb import RDumb as RDumb
from ttvd.adapters.ttvd import TTVD as TTVD
