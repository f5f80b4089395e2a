"""Measuring adapters: the loop, and the comparison of its records. Recipes, stores and engines are in the modules."""

from ttvd.bench.compare import Interval as Interval
from ttvd.bench.compare import paired_difference as paired_difference
from ttvd.bench.compare import paired_differences as paired_differences
from ttvd.bench.run import Record as Record
from ttvd.bench.run import Row as Row
from ttvd.bench.run import run_stream as run_stream
