"""What a classifier looks like to the library: its parts, its norms, its views, its sites, shipped checkpoints."""

from ttvd.nn.norms import Statistics as Statistics
from ttvd.nn.split import SplitModel as SplitModel
from ttvd.nn.split import split as split
