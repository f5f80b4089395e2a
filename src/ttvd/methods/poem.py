"""POEM: the entropies of the stream are matched with those of the source, as far as bets against it have won."""

from collections.abc import Mapping
from math import log, sqrt
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn

from ttvd.geometry.precision import upcast
from ttvd.methods.gradient import GradientAdapter, Step, StepOptions
from ttvd.methods.registry import register
from ttvd.methods.sar import LAST_LAYERS
from ttvd.methods.shared.losses import entropy, mean_over
from ttvd.zoo.sites import Sites, find_upright

GAMMA = 1 / (8 * sqrt(3))
"""The authors' step of a bet."""


class EntropyMatcher(nn.Module):
    """Bets that entropies do not have the distribution of the source, and gives each the entropy that it should have.

    The rank u = F(z) of an entropy z is uniform on source images. A gambler bets e on it: the wealth is multiplied by
    1 + e (u - 1/2). The density 1 + e (u - 1/2) is what the bet takes the ranks to have, so its distribution function
    Q(u) = u + e (u^2 - u) / 2 makes them uniform again. The target is F^-1(Q(u)): the entropy that the source would
    have at that rank. The bet follows the gradient of the log wealth, g = (u - 1/2) / (1 + e (u - 1/2)), by steps
    gamma * g / sqrt(sum of g^2) that are free of scale, one for each sample. A bet that is larger than ``limit`` does
    not grow.

    F and its inverse interpolate between the quantiles, so that without a bet the target is the entropy itself. Beyond
    the quantiles it is the nearest one.

    Args:
        quantiles: Sorted quantiles (q,) of the entropies of the source, for equally spaced probabilities.
        gamma: Length of a step of the bet.
        limit: Size from which a bet does not grow.

    Attributes:
        bet: e, a scalar; 0 at the start.
        squares: Sum of g^2, a scalar.
        log_wealth: Logarithm of the wealth, a scalar; large values are evidence of a shift.

    Example:
        >>> matcher = EntropyMatcher(torch.linspace(0, 1, 65))
        >>> entropies = torch.full((4,), 0.8)
        >>> bool((matcher.match(entropies)[1:] < entropies[1:]).all())  # too high: the target falls with the bet
        True
    """

    quantiles: Tensor
    bet: Tensor
    squares: Tensor
    log_wealth: Tensor

    def __init__(self, quantiles: Tensor, *, gamma: float = GAMMA, limit: float = 1.8) -> None:
        super().__init__()
        self.gamma, self.limit = gamma, limit
        self.register_buffer("quantiles", quantiles.detach().clone(), persistent=False)
        for name in ("bet", "squares", "log_wealth"):
            self.register_buffer(name, self.quantiles.new_zeros(()))

    @torch.no_grad()
    def match(self, entropies: Tensor) -> Tensor:
        """Return the target entropy of each sample (b,), and bet on the ranks of the samples one after the other."""
        ranks = self.rank(entropies)
        bets = self._bet(ranks - 0.5)
        self.log_wealth.add_(torch.log1p(bets * (ranks - 0.5)).sum())
        return self.invert(ranks + 0.5 * bets * (ranks.square() - ranks)).to(entropies.dtype)

    def rank(self, entropies: Tensor) -> Tensor:
        """Ranks (b,) in [0, 1]; the middle one for an entropy that several quantiles have."""
        values, last = entropies.to(self.quantiles.dtype).contiguous(), len(self.quantiles) - 1
        left = torch.searchsorted(self.quantiles, values)
        right = torch.searchsorted(self.quantiles, values, right=True)
        below, above = self._neighbours(left - 1)
        gap = above - below
        between = (left - 1).clamp(0, last - 1) + (values - below) / torch.where(gap > 0, gap, 1.0)
        places = torch.where(right > left, 0.5 * (left + right - 1), between)
        places = torch.where(
            left > last, last, places
        )  # above all quantiles, also where the last ones are equal
        return (places / last).clamp(0.0, 1.0)

    def invert(self, ranks: Tensor) -> Tensor:
        """Entropies (b,) of the source at ranks (b,)."""
        places = ranks * (len(self.quantiles) - 1)
        start = places.floor().clamp_max(len(self.quantiles) - 2)
        below, above = self._neighbours(start.long())
        return torch.lerp(below, above, places - start)

    def _neighbours(self, place: Tensor) -> tuple[Tensor, Tensor]:
        """The quantiles at places (b,) and behind them; places beyond the ends are moved to them."""
        place = place.clamp(0, len(self.quantiles) - 2)
        return self.quantiles.gather(0, place), self.quantiles.gather(0, place + 1)

    def _bet(self, centred: Tensor) -> Tensor:
        """The bet (b,) on each rank; it moves after each of them."""
        bet, squares, bets = self.bet.clone(), self.squares.clone(), []
        tiny = torch.finfo(centred.dtype).tiny
        for value in centred.unbind():
            bets.append(bet)
            slope = torch.where(bet * value.sign() > self.limit, 0.0, value / (1.0 + bet * value))
            squares = squares + slope.square()
            bet = bet + self.gamma * slope / squares.clamp_min(tiny).sqrt()
        self.bet.copy_(bet)
        self.squares.copy_(squares)
        return torch.stack(bets)


@register(
    "poem",
    summary="Matches entropies with those of the source, as far as a betting martingale finds a shift.",
    paper="Bar et al., NeurIPS 2024",
    updates="norm affine",
    forwards=1,
    backwards=1,
    needs=frozenset({"sites"}),
)
class POEM(GradientAdapter):
    """Protected online entropy matching: entropies get the distribution that they have on source images.

    Each entropy H of the calibrated predictions softmax(logits / tau) has a target T, made by bets on the shift
    (:class:`EntropyMatcher`). Without evidence of a shift T is about H, and little is learnt; entropies that are too
    high are lowered, and those that are too low are raised. Samples with H < E0 = margin * ln k count, and weigh
    w = exp(E0 - H): the loss is the mean over them of (w (H - T))^2 / 2, with w and T held constant. Bets are placed
    from the first sample on, steps taken from the batch on with which ``delay`` samples have been seen.

    The quantiles of the source's entropies and tau are those of the sites (``"pd"``): ``ttvd.calibrate`` on held-out
    images measures both. A head that tells rotations apart classifies the upright view. The output is the calibrated
    logits.

    Works with batch, group and layer norm. The entropies of the source were measured with the statistics of its norms.
    Batch norms that use the batch have other entropies on the same images, and then the bets win on source images too,
    in the authors' code as well; ``statistics=Statistics.source()`` keeps the promise that nothing is learnt there. A
    batch of few classes looks like a shift of entropies if these differ between classes.

    Deviations from the authors' code: F interpolates between 65 quantiles, of ranks from 0 to 1 (theirs between all
    held-out entropies, the least of n of rank 1/n); the bet learns from the first sample of a stream too (theirs does
    not: it asks whether there were samples before it has noted the one at hand); E0 scales with ln k (theirs is
    0.4 ln 1000 for every model, which is above ln 10); an empty selection changes nothing (theirs still follows the
    momentum); ``reset`` resets the bets (theirs keeps them); there is one gradient step a batch; dropout stays off. The
    loss is that of their script for ImageNet; the one for CIFAR takes (H - T)^2 / 2 of all samples.

    Args:
        model: The classifier; its head has k outputs, or k * v with label augmentation.
        sites: Its sites, calibrated on held-out images.
        gamma: Length of a step of the bet; 1 / (8 sqrt(3)) in the authors' code.
        limit: Size from which a bet does not grow; 1.8 in the authors' code. limit + gamma must lie below 2.
        margin: E0 as a share of ln k; 0.4 in the paper.
        delay: Number of samples before the first step; 100 in the authors' code.
        skip: Layers that do not adapt, as in SAR.
        lr: Learning rate; the authors use 2.5e-4 for ResNet-50 (times batch size / 32 when it is below 32) and 1e-3
            for ViT-B (times batch size / 64), with plain momentum SGD.

    Example:
        >>> import ttvd
        >>> source = ttvd.load("digits-plain")
        >>> POEM(source.model, source.sites)(torch.rand(8, 1, 28, 28)).shape
        torch.Size([8, 10])
    """

    defaults: ClassVar[StepOptions] = {
        "lr": 2.5e-4,
        "momentum": 0.9,
        "statistics": None,
        "prediction": "before",
    }
    seen: Tensor

    def __init__(
        self,
        model: nn.Module,
        sites: Sites,
        *,
        gamma: float = GAMMA,
        limit: float = 1.8,
        margin: float = 0.4,
        delay: int = 100,
        skip: tuple[str, ...] = LAST_LAYERS,
        **options: Unpack[StepOptions],
    ) -> None:
        self.check_options(options)
        if not (gamma > 0.0 and limit > 0.0 and gamma + limit < 2.0):
            raise ValueError(
                f"gamma and limit must be above 0, and their sum below 2, got {gamma} and {limit}: the wealth "
                "of a larger bet can become negative"
            )
        if not (margin > 0.0 and delay >= 0):
            raise ValueError(f"margin must be above 0 and delay at least 0, got {margin} and {delay}")
        super().__init__(find_upright(model, sites), nesterov=False, skip=skip, **options)
        self.tau, quantiles = sites.temperature("pd"), sites.entropies.get("pd")
        if quantiles is None:
            raise ValueError(
                "the sites hold no entropies of the source: write sites = ttvd.calibrate(model, sites, held_out) with "
                "labelled images that the model was not trained on"
            )
        self.margin, self.delay = margin, delay
        self.matcher = EntropyMatcher(quantiles.to(upcast(self.probe)), gamma=gamma, limit=limit)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64, device=self.device))

    @classmethod
    def site_parts(cls, sites: Sites, parameters: Mapping[str, Any]) -> frozenset[str]:
        """The parts of the sites, beside means and temperatures, on which results depend."""
        return frozenset({"entropies"})

    def output(self, x: Tensor) -> Tensor:
        """Return the logits divided by the temperature of the sites."""
        return super().output(x) / self.tau

    def loss(self, x: Tensor) -> Step:
        """Weighted squared distance between entropies and their targets."""
        logits = self.output(x)
        values = entropy(logits)
        found, limit = values.detach(), self.margin * log(logits.shape[1])
        targets = self.matcher.match(found)
        self.seen.add_(len(x))
        kept = (found < limit) & (self.seen >= self.delay)
        each = 0.5 * ((limit - found).exp() * (values - targets)).square()
        return Step(logits, mean_over(each, kept), kept.to(values.dtype).mean())
