"""From class scores to answers: a temperature, and a correction for the shares of the classes."""

from torch import Tensor

from ttvd.geometry.prior import shift_weights
from ttvd.methods.ttvd.agreement_temperature import AgreementTemperature
from ttvd.methods.ttvd.label_shift import LabelShiftEstimator
from ttvd.methods.ttvd.online_temperature import OnlineTemperature


def soften(scores: Tensor, temperature: float | OnlineTemperature | AgreementTemperature) -> Tensor:
    """Scores divided by a fixed temperature, or by the one that follows the stream."""
    return scores / (temperature if isinstance(temperature, float) else temperature.factor())


def correct_shares(scores: Tensor, prior: float | LabelShiftEstimator | None) -> Tensor:
    """Scores corrected for the shares of the classes in their batch.

    Args:
        scores: (b, k).
        prior: Number of pseudo-images, spread evenly over the classes, with which shares are estimated; or what
            estimates it along the stream; or None for no correction.
    """
    if prior is None:
        return scores
    count = prior.concentration() if isinstance(prior, LabelShiftEstimator) else prior
    return scores + shift_weights(scores, count)
