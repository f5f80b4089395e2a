"""Pieces of networks: features and head of a classifier, norms and their statistics, views, residual networks."""

from ttvd.nn.norms import Statistics as Statistics
from ttvd.nn.split import SplitModel as SplitModel
from ttvd.nn.split import split as split
