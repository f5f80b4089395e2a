"""Figures that need a model: what they are drawn from is computed here and kept in the store.

- `kinds`: the kinds by name, and which figures of a recipe are missing.
- `samples`: images that four views correct, with their distances to all sites.
- `slices`: the plane through three sites, in the space of all features.
- `plane`: the diagrams and runs of a model with two features.
- `scene`: the model and the stream that they share.
- `values`: the results, which ``ttvd.report`` draws.
"""

from ttvd.bench.figures.kinds import KINDS as KINDS
from ttvd.bench.figures.kinds import Made as Made
from ttvd.bench.figures.kinds import check_figures as check_figures
from ttvd.bench.figures.kinds import make_figure as make_figure
from ttvd.bench.figures.kinds import make_figures as make_figures
from ttvd.bench.figures.kinds import name_figures as name_figures
