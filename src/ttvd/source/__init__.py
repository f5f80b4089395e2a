"""What is done before deployment, with training data at hand: training, sites, temperatures."""

from ttvd.source.calibration import calibrate as calibrate
from ttvd.source.calibration import fit_temperature as fit_temperature
from ttvd.source.collect import collect_features as collect_features
from ttvd.source.config import Recipe as Recipe
from ttvd.source.evaluate import evaluate as evaluate
from ttvd.source.fisher import estimate_fisher as estimate_fisher
from ttvd.source.sites import SiteAccumulator as SiteAccumulator
from ttvd.source.sites import estimate_sites as estimate_sites
from ttvd.source.state import Epoch as Epoch
from ttvd.source.train import History as History
from ttvd.source.train import train as train
