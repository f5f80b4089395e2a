"""Methods of test-time adaptation, one file each. Importing this package registers them all."""

from ttvd.methods.adapter import Adapter as Adapter
from ttvd.methods.gradient import GradientAdapter as GradientAdapter
from ttvd.methods.gradient import Step as Step
from ttvd.methods.policies import Episodic as Episodic
from ttvd.methods.policies import ResetEvery as ResetEvery
from ttvd.methods.registry import Method as Method
from ttvd.methods.registry import create as create
from ttvd.methods.registry import find_method as find_method
from ttvd.methods.registry import list_methods as list_methods
from ttvd.methods.registry import register as register
from ttvd.methods.shared.guard import Guard as Guard
from ttvd.methods.shared.guard import GuardStatus as GuardStatus

# Each import below puts a method on the list, in the order in which tables show them.
# isort: off
from ttvd.methods.source import Source as Source
from ttvd.methods.bn import BatchNormAdapt as BatchNormAdapt
from ttvd.methods.tent import Tent as Tent
from ttvd.methods.t3a import T3A as T3A
from ttvd.methods.tast import TAST as TAST
from ttvd.methods.tast_bn import TASTBN as TASTBN
from ttvd.methods.adanpc import AdaNPC as AdaNPC
from ttvd.methods.shot import SHOT as SHOT
from ttvd.methods.ttt import TTT as TTT
from ttvd.methods.note import NOTE as NOTE
from ttvd.methods.conjugate import ConjugatePL as ConjugatePL
from ttvd.methods.sar import SAR as SAR
from ttvd.methods.eata import ETA as ETA
from ttvd.methods.eata import EATA as EATA
from ttvd.methods.cotta import CoTTA as CoTTA
from ttvd.methods.rotta import RoTTA as RoTTA
from ttvd.methods.memo import MEMO as MEMO
from ttvd.methods.lame import LAME as LAME
from ttvd.methods.roid import ROID as ROID
from ttvd.methods.deyo import DeYO as DeYO
from ttvd.methods.rdumb import RDumb as RDumb
from ttvd.methods.come import COME as COME
from ttvd.methods.come import ConservativeEATA as ConservativeEATA
from ttvd.methods.come import ConservativeSAR as ConservativeSAR
from ttvd.methods.cmf import CMF as CMF
from ttvd.methods.petta import PeTTA as PeTTA
from ttvd.methods.poem import POEM as POEM
from ttvd.methods.neo import NEO as NEO
from ttvd.methods.ttvd.method import TTVD as TTVD
