"""The names under which TTVD is registered: its default, and the stages of the paper and its code."""

from typing import NamedTuple

from ttvd.methods.ttvd.options import TTVDOptions
from ttvd.nn.norms import Statistics

_PLAIN: TTVDOptions = {
    "structure": "cipd",
    "mirror": False,
    "agreement_filter": False,
    "diversity_weight": 0.0,
    "rotation_weight": 0.0,
    "slr_weight": 0.0,
    "prior": None,
    "output_temperature": 1.0,
    "reference_batch_size": 1,
    "adaptive_step": False,
    "detect_changes": False,
    "lr": 1e-3,
    "momentum": 0.9,
    "statistics": Statistics.batch(),
}
"""Without everything that the paper and its code do not have."""
_PAPER: TTVDOptions = {**_PLAIN, "objective": "entropy", "gamma": -0.8}
_THIRD: TTVDOptions = {**_PAPER, "structure": "cipd", "agreement_filter": True}
_CODE: TTVDOptions = {**_PLAIN, "objective": "joint", "agreement_filter": True}


class Preset(NamedTuple):
    """An entry of the registry.

    Attributes:
        name: The name that users give.
        summary: One sentence about it.
        defaults: What differs from the defaults of TTVD.
        revision: As in :class:`~ttvd.methods.registry.Method`.
    """

    name: str
    summary: str
    defaults: TTVDOptions
    revision: int = 2


PRESETS = (
    Preset("ttvd", "Views agree on a class; each learns the cell of that class and its own rotation.", {}, 9),
    Preset(
        "vd",
        "First stage: entropy of the Voronoi diagram's soft labels, upright view.",
        {**_PAPER, "structure": "vd"},
    ),
    Preset(
        "civd",
        "Second stage: entropy of the cluster-induced Voronoi diagram's.",
        {**_PAPER, "structure": "civd"},
    ),
    Preset(
        "pd",
        "Entropy of the head's power diagram's soft labels, upright view.",
        {**_PAPER, "structure": "pd"},
    ),
    Preset("cipd", "Third stage: cluster-induced power diagram with the filter.", _THIRD),
    Preset(
        "ttvd-paper",
        "The third stage with the paper's constants to the letter: tau 1.",
        {**_THIRD, "tau": 1.0},
    ),
    Preset(
        "ttvd-reference",
        "The loss of the authors' code, joint entropies, with a filter that filters.",
        _CODE,
    ),
)
