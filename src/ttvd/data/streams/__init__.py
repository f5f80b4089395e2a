"""In which order samples arrive, and in which batches: seeded functions from labels to indices."""

from ttvd.data.streams.batching import batch_iterable as batch_iterable
from ttvd.data.streams.batching import batches as batches
from ttvd.data.streams.batching import order_hash as order_hash
from ttvd.data.streams.domains import continual as continual
from ttvd.data.streams.domains import gradual as gradual
from ttvd.data.streams.domains import mixed as mixed
from ttvd.data.streams.orders import Order as Order
from ttvd.data.streams.orders import class_sorted as class_sorted
from ttvd.data.streams.orders import dirichlet as dirichlet
from ttvd.data.streams.orders import dirichlet_slots as dirichlet_slots
from ttvd.data.streams.orders import iid as iid
from ttvd.data.streams.orders import imbalanced as imbalanced
from ttvd.data.streams.orders import label_shift as label_shift
