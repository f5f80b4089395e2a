"""Images and the order in which they arrive: data sets, corruptions, streams and the loading of images."""

from ttvd.data.corruptions import corrupt as corrupt
from ttvd.data.corruptions import select_corruptions as select_corruptions
from ttvd.data.digits import load_digits_5k as load_digits_5k
from ttvd.data.digits import split_digits as split_digits
from ttvd.data.download import download_set as download_set
from ttvd.data.download import list_sets as list_sets
from ttvd.data.export import export_set as export_set
from ttvd.data.loading import load_batches as load_batches
from ttvd.data.loading import prefetch as prefetch
from ttvd.data.sets import ImageFolder as ImageFolder
from ttvd.data.sets import ImageSet as ImageSet
from ttvd.data.sets import load_set as load_set
