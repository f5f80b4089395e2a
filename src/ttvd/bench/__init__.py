"""Measuring adapters: the one loop, and what is made of its records."""

from ttvd.bench.compare import Interval as Interval
from ttvd.bench.compare import paired_difference as paired_difference
from ttvd.bench.run import Record as Record
from ttvd.bench.run import Row as Row
from ttvd.bench.run import run as run
