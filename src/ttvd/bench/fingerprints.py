"""Where a run comes from: fingerprints of what it is made of, and refusals where that is not what it should be."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ttvd.methods import find_method
from ttvd.nn.norms import Statistics
from ttvd.zoo.sites import Sites

if TYPE_CHECKING:
    from ttvd.bench.resources import Resources
    from ttvd.bench.spec import Spec


def count_anchored_views(sites: Sites, parameters: Mapping[str, Any]) -> int:
    """Of how many views together a method with sites uses the anchors; 0 where it uses none.

    Args:
        sites: Of the model.
        parameters: Of the method, as a spec holds them.
    """
    how = parameters.get("statistics", "batch")  # by default (None) anchors are used where there are some
    if how is not None and not (isinstance(how, str) and Statistics.parse(how).anchored):
        return 0
    return 1 if parameters.get("structure") in ("vd", "pd") else sites.views


def hash_sites(sites: Sites, anchored_views: int, adaptive_step: bool) -> str:
    """Short hash of the class means and their temperatures, and of what else of the sites matters.

    Args:
        sites: Of the model.
        anchored_views: Of how many views together the anchors matter; 0 for none.
        adaptive_step: Whether the loss of rotations on source data matters.
    """
    digest = hashlib.sha256(repr(tuple(sites.means.shape)).encode())
    digest.update(sites.means.cpu().contiguous().numpy().data)
    digest.update(json.dumps(dict(sites.temperatures), sort_keys=True).encode())
    if anchored_views in sites.anchors:
        anchors = sites.anchors[anchored_views]
        for moments in (anchors.means, anchors.variances):
            digest.update(moments.cpu().contiguous().numpy().data)
    if adaptive_step and sites.rotation_loss is not None:
        digest.update(repr(sites.rotation_loss).encode())
    return digest.hexdigest()[:16]


def check_origin(spec: Spec, resources: Resources) -> None:
    """Refuse a run whose model or images are others here than where it was planned: its key would lie."""
    method = find_method(spec.method)
    found = resources.weights(spec.checkpoint, method, spec.sites, spec.parameters)
    if found != spec.weights:
        raise ValueError(
            f"{spec.checkpoint} has the weights {found} here and had {spec.weights} where the run was planned: all "
            "machines need the same files, and a function that makes a model must make the same one each time"
        )
    if (content := resources.content(spec.data, spec.domains)) != spec.content:
        raise ValueError(
            f"the images of {spec.data} are others here ({content}) than where the run was planned ({spec.content}): "
            "all machines need the same files; if they were changed meanwhile, start again"
        )


def check_method(spec: Spec, resources: Resources) -> None:
    """Refuse, in one sentence, a run whose source model lacks what the method needs."""
    from ttvd.nn.instance_norm import InstanceAwareBatchNorm2d

    method, source = find_method(spec.method), resources.source(spec.checkpoint)
    modules = list(source.model.modules())
    lacks = []
    if "rotation head" in method.needs and not (source.card and source.card.rotation_head):
        lacks.append("a rotation head")
    if "instance-aware norm" in method.needs and not any(
        isinstance(module, InstanceAwareBatchNorm2d) for module in modules
    ):
        lacks.append("instance-aware norms")
    if "features" in method.needs and spec.views > 1:
        raise ValueError(f"{spec.method} looks at the features of one view; leave views out")
    if lacks:
        raise ValueError(f"{spec.method} needs {' and '.join(lacks)}, which {spec.checkpoint} does not have")
