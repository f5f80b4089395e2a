"""Labelled images: the official sets where a user has them, arrays, folders and torch data sets.

Every loader returns an `ImageSet` (bytes in memory) or an `ImageFolder` (decoded on demand), which share `labels`,
`classes` and `floats(index)`, and give floats in [0, 1]. Nothing is downloaded here; `ttvd data get` does that.
"""

from __future__ import annotations

from ttvd.data.sets.arrays import from_arrays as from_arrays
from ttvd.data.sets.arrays import from_dataset as from_dataset
from ttvd.data.sets.arrays import load_arrays as load_arrays
from ttvd.data.sets.cifar import load_cifar as load_cifar
from ttvd.data.sets.classmap import ClassMap as ClassMap
from ttvd.data.sets.classmap import read_synsets as read_synsets
from ttvd.data.sets.folder import ImageFolder as ImageFolder
from ttvd.data.sets.imagenet import find_classes as find_classes
from ttvd.data.sets.imageset import ImageSet as ImageSet
from ttvd.data.sets.imageset import LabelledImages as LabelledImages
from ttvd.data.sets.loader import Batch as Batch
from ttvd.data.sets.loader import image_loader as image_loader
from ttvd.data.sets.mnist import load_mnist as load_mnist
from ttvd.data.sets.mnist import load_mnist_c as load_mnist_c
from ttvd.data.sets.names import SETS as SETS
from ttvd.data.sets.names import load_set as load_set
from ttvd.data.sets.pictures import Preparation as Preparation
from ttvd.data.sets.pictures import read_image as read_image
from ttvd.data.sets.stacks import load_stack as load_stack
