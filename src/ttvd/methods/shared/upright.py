"""The k-way classifier in a model that has sites."""

from torch import nn

from ttvd.nn.split import SplitModel, split
from ttvd.zoo.sites import Sites


def find_upright(model: nn.Module, sites: Sites) -> SplitModel:
    """The classifier of upright images that a model with sites holds, for methods that know nothing of rotations.

    Args:
        model: The classifier; its head has k outputs, or k * v with label augmentation.
        sites: Its sites, which are checked.
    """
    parts = split(model)
    sites.check(parts)
    plain = parts.linear.out_features == sites.num_classes
    return parts if plain else parts.upright(sites.views)
