"""The store: finished runs, what recipes ask for, failures, claims and figures, in one SQLite file."""

from ttvd.bench.store.claims import LEASE as LEASE
from ttvd.bench.store.claims import Owner as Owner
from ttvd.bench.store.errors import StoreError as StoreError
from ttvd.bench.store.reader import Reader as Reader
from ttvd.bench.store.store import Store as Store
from ttvd.bench.store.values import Failure as Failure
from ttvd.bench.store.values import Figure as Figure
from ttvd.bench.store.values import Summary as Summary
