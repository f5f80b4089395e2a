"""The names under which TTVD is registered: its default, and the stages of the paper and its code."""

from typing import Any

from ttvd.nn.norms import Statistics

_PLAIN = {
    "agreement_filter": False,
    "diversity_weight": 0.0,
    "rotation_weight": 0.0,
    "slr_weight": 0.0,
    "prior": None,
    "output_temperature": 1.0,
    "reference_batch_size": 1,
    "adaptive_step": False,
    "lr": 1e-3,
    "momentum": 0.9,
    "statistics": Statistics.batch(),
}
"""What the paper and its code do without."""
_PAPER = _PLAIN | {"objective": "entropy", "gamma": -0.8}
_THIRD = _PAPER | {"structure": "cipd", "agreement_filter": True}
_CODE = _PLAIN | {"objective": "joint", "agreement_filter": True}
PRESETS: tuple[tuple[str, str, dict[str, Any], int], ...] = (
    ("ttvd", "Views agree on a class; each learns the cell of that class and its own rotation.", {}, 6),
    (
        "vd",
        "First stage: entropy of the Voronoi diagram's soft labels, upright view.",
        {"structure": "vd"} | _PAPER,
        2,
    ),
    (
        "civd",
        "Second stage: entropy of the cluster-induced Voronoi diagram's.",
        {"structure": "civd"} | _PAPER,
        2,
    ),
    (
        "pd",
        "Entropy of the head's power diagram's soft labels, upright view.",
        {"structure": "pd"} | _PAPER,
        2,
    ),
    ("cipd", "Third stage: cluster-induced power diagram with the filter.", _THIRD, 2),
    (
        "ttvd-paper",
        "The third stage with the paper's constants to the letter: tau 1.",
        _THIRD | {"tau": 1.0},
        2,
    ),
    (
        "ttvd-reference",
        "The loss of the authors' code, joint entropies, with a filter that filters.",
        _CODE,
        2,
    ),
)
"""Name, summary, what differs from the defaults, and revision."""
