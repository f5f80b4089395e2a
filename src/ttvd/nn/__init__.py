"""Pieces of networks: features and head of a classifier, norms and their statistics, views, residual networks."""

from ttvd.nn.normalize import Normalize as Normalize
from ttvd.nn.norms import Statistics as Statistics
from ttvd.nn.split import SplitModel as SplitModel
from ttvd.nn.split import cosine_head as cosine_head
from ttvd.nn.split import split as split
from ttvd.nn.split import with_linear_head as with_linear_head
