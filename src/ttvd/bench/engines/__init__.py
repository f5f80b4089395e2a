"""Who does the runs: processes on this machine, or a Ray cluster. Both say what happens in the same words."""

from ttvd.bench.engines.events import Advanced as Advanced
from ttvd.bench.engines.events import Broken as Broken
from ttvd.bench.engines.events import Engine as Engine
from ttvd.bench.engines.events import Event as Event
from ttvd.bench.engines.events import Finished as Finished
from ttvd.bench.engines.events import Noted as Noted
from ttvd.bench.engines.events import Passed as Passed
from ttvd.bench.engines.events import Started as Started
from ttvd.bench.engines.events import Waited as Waited
from ttvd.bench.engines.local import LocalEngine as LocalEngine
from ttvd.bench.engines.ray import RayEngine as RayEngine
