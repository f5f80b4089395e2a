"""Work before deployment, with source data: training, sites, calibration, source features and Fisher information."""

from ttvd.source.calibration import calibrate as calibrate
from ttvd.source.calibration import fit_temperature as fit_temperature
from ttvd.source.config import Epoch as Epoch
from ttvd.source.config import TrainingConfig as TrainingConfig
from ttvd.source.features import collect_features as collect_features
from ttvd.source.finetune import finetune as finetune
from ttvd.source.fisher import estimate_fisher as estimate_fisher
from ttvd.source.prepare import prepare as prepare
from ttvd.source.produce import evaluate as evaluate
from ttvd.source.sites import SiteAccumulator as SiteAccumulator
from ttvd.source.sites import estimate_sites as estimate_sites
from ttvd.source.train import History as History
from ttvd.source.train import train as train
