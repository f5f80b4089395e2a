"""What a classifier looks like to the library: its parts, its norms, its views, its sites, shipped checkpoints."""

from ttvd.models.norms import Statistics as Statistics
from ttvd.models.split import SplitModel as SplitModel
from ttvd.models.split import split as split
