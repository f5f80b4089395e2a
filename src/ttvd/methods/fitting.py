"""A source model as a method must see it."""

from torch import nn

from ttvd.methods.registry import Method
from ttvd.nn.split import split
from ttvd.nn.views import AggregatedViews
from ttvd.zoo.catalog import Source


def fit_to_method(source: Source, method: Method, views: int) -> nn.Module:
    """The model as a method must see it.

    A label-augmented head (k classes x v rotations) is what methods with sites expect; all others get a k-way
    classifier, of the upright view alone or of several views aggregated.

    Args:
        source: The model and its card.
        method: Which is going to use it.
        views: How many views to aggregate for a method that knows nothing of views.
    """
    head_views = _count_head_views(source)
    if "sites" in method.needs or head_views == 1:
        if views > 1:
            raise ValueError(f"{method.name} on this model takes no views; leave the number of views out")
        return source.model
    if views == 1:
        return split(source.model).upright(head_views)
    return AggregatedViews(source.model, views, head_views)


def _count_head_views(source: Source) -> int:
    """Rotations that the head tells apart: as the card says, else as the sites tell."""
    if source.card is not None:
        return source.card.head_views
    if source.sites is None:
        return 1
    return split(source.model).linear.out_features // source.sites.num_classes
