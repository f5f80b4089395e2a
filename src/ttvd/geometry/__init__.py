"""Geometry of classifiers: pure functions of tensors, and one frozen dataclass, the diagram.

- `diagram`: `Diagram`, the sites with their weights and classes; conversion between linear heads and power diagrams.
- `distance`: Euclidean and power distances, their floor, and the margin to the walls of a cell.
- `influence`: influences of clusters (VD, CIVD, PD, CIPD) in point and view form, scores, soft labels, assignment to
  cells, and agreement of several diagrams.
- `planar`: exact cells in the plane, plane slices, and labels on a grid.
- `prior`: correction of the weights for label shift.
- `precision`: float32 or better after a network of lower precision.

Letters: b batch, d feature, k classes, s sites, v views.
"""

from ttvd.geometry.diagram import Diagram as Diagram
from ttvd.geometry.distance import distances as distances
from ttvd.geometry.distance import floor as floor
from ttvd.geometry.distance import margin as margin
from ttvd.geometry.distance import power_distances as power_distances
from ttvd.geometry.distance import squared_distances as squared_distances
from ttvd.geometry.influence import agreement as agreement
from ttvd.geometry.influence import assign as assign
from ttvd.geometry.influence import floored_fraction as floored_fraction
from ttvd.geometry.influence import kept_fraction as kept_fraction
from ttvd.geometry.influence import point_influence as point_influence
from ttvd.geometry.influence import point_scores as point_scores
from ttvd.geometry.influence import soft_labels as soft_labels
from ttvd.geometry.influence import view_influence as view_influence
from ttvd.geometry.influence import view_scores as view_scores
from ttvd.geometry.planar import cells as cells
from ttvd.geometry.planar import grid_labels as grid_labels
from ttvd.geometry.planar import slice_plane as slice_plane
