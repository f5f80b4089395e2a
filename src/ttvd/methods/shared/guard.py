"""The guard: notices without labels that an adapter does harm, stops it, and says why.

At some batches, chosen by their number, the answers of the adapter to a few images are compared with those that its
initial state gives to the same images. The initial state is called the source. The comparison uses information: the
entropy of the mean answer minus the mean entropy of the answers, H(mean p) - mean H(p). It measures how much the
answers tell about the images. A collapsed adapter tells nothing, whatever class it has chosen and however sure it is.
On a useful adaptation its information is about that of the source, or above. A run of one class lowers both; over a
window of batches, the classes of a sorted stream count again.

Everything here is a tensor of fixed shape, and nothing waits for the device.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from ttvd.engine.flat import flatten, keep_where, unflatten
from ttvd.engine.transaction import Renewed
from ttvd.geometry.precision import upcast

HARM, SLOW, GOOD = 0.5, 0.65, 0.8
"""Shares of the information of the source.

Below the first the adapter goes back, if its answers are of about one class, or if its mean answer changes and that of
the source does not follow. Below the second it slows down. From the last on, a state may be kept as a good one.
"""
SINGLE = 1.6
"""Effective number of classes that counts as about one."""
FLOOR = 0.01
"""Share of ln k: where the source tells less than this about the images of a batch, there is nothing to learn."""
CHANGED = 0.2
"""Share of ln k by which the information of the source must rise before an adapter that was stopped tries again."""
CONTRADICTION = 0.75
"""Agreement below which answers contradict the source; on images like those of the source, times its accuracy."""
WITNESS = 0.6
"""Share of ln k that the source must tell about the images before answers that differ from its own are guesses."""
FOLLOWS = 0.2
"""Share of a change in the adapter's mean answer that the source must follow, where classes really change."""
TOLD_APART = 0.04
"""Squared distance, beyond chance, at which the mean answers of the source tell batches apart."""
UNRELATED = 0.1
"""Correlation of neighbouring pixels below which a picture is noise."""
FLAT, ALIKE = 1e-8, 1e-4
"""Variance of pixels in a constant image; variance between equal images, as a share of that inside of them."""
FEW = 8
"""Fewer images than this are not compared with each other."""
STRIKES = 3
"""The alarm, among those without a long quiet time between them, that ends at the source."""
CALM = 32
"""Looks without a finding after which earlier alarms are forgotten."""
OFTEN = 10
"""Factor on the number of looks in the first two periods."""
SLOWED, CLOSED = 4, 2**62
"""One step in so many counts while the adapter is slowed down, and while it is stopped."""

State = Literal["adapting", "slowed", "frozen", "rolled back", "source"]
STATES: tuple[State, ...] = ("adapting", "slowed", "frozen", "rolled back", "source")
_ADAPTING, _SLOWED, _FROZEN, _ROLLED_BACK, _SOURCE = range(5)
REASONS = (
    "",
    "images are constant",
    "all images of a batch are the same",
    "neighbouring pixels are unrelated, as in noise",
    "the source gives all images of a batch the same answer",
    "the answers tell less about the images than those of the source",
    "the answers differ from those of the source, and tell less about the images of a batch",
    "the answers contradict the source on images that are like those of the source",
    "the source tells batches of different classes apart, and the answers do not",
)
_CONSTANT, _REPEATED, _NOISE, _ALIKE, _COLLAPSE, _GUESSES, _CONTRADICTS, _BLIND = range(1, 9)
_PICTURES = (1, 3, 4)  # channels of pictures; other inputs may look like noise by their nature


@dataclass(frozen=True, eq=False)
class Guard:
    """Settings of the guard.

    Attributes:
        period: Batches between two looks at the adapter; by default 20 for methods that take gradient steps and 40
            for others, which keeps the cost below 3 % of a step.
        sample: Number of images of a batch that are looked at.
        window: Number of images that the averages count as at most.
        snapshot_every: Quiet looks between two copies of the state that the adapter can go back to.
        hold: Looks for which an adapter that was stopped stays so, unless the stream changes. Each further alarm
            doubles the number, up to 16 times.
        alpha: Rate of false alarms of the test for a shift: on a stream like the source it fires at most once in
            1 / alpha looks on average.
        tolerance: Difference between the mean rank of entropies and 1/2 that the test does not count as a shift, since
            the quantiles are estimates.
        entropy_quantiles: Sorted quantiles (q,) of the entropy of the source's answers on held-out source images, for
            equally spaced probabilities from 0 to 1, such as 65 of them. Without them there is no test for a shift.
            TTVD takes them from its sites.
        source_accuracy: Accuracy of the source on its own kind of images. A good adapter agrees with the source about
            that often there. TTVD takes it from its sites.

    Example:
        >>> import ttvd
        >>> net = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, 2))
        >>> tent = ttvd.create("tent", net, guard=ttvd.methods.Guard(period=8))
        >>> _ = tent(torch.rand(8, 1, 2, 2))
        >>> tent.status.state
        'adapting'
    """

    period: int | None = None
    sample: int = 32
    window: int = 128
    snapshot_every: int = 4
    hold: int = 32
    alpha: float = 1e-3
    tolerance: float = 0.05
    entropy_quantiles: Tensor | None = None
    source_accuracy: float = 1.0

    def __post_init__(self) -> None:
        for name in ("period", "sample", "window", "snapshot_every", "hold"):
            number = getattr(self, name)
            if number is not None and not (isinstance(number, int) and number >= 1):
                raise ValueError(f"{name} of a guard must be a whole number of at least 1, got {number!r}")
        if not (0.0 < self.alpha < 1.0 and 0.0 <= self.tolerance < 0.5):
            raise ValueError(
                f"alpha must lie in (0, 1) and tolerance in [0, 0.5), got {self.alpha} and {self.tolerance}"
            )
        if not 0.0 <= self.source_accuracy <= 1.0:
            raise ValueError(f"source_accuracy must lie in [0, 1], got {self.source_accuracy}")
        quantiles = self.entropy_quantiles
        if quantiles is None:
            return
        if quantiles.ndim != 1 or len(quantiles) < 2 or not bool(quantiles.isfinite().all()):
            raise ValueError(
                f"entropy_quantiles must be two or more finite numbers in a row, got {quantiles!r}"
            )
        if bool((quantiles.diff() < 0).any()):
            raise ValueError("entropy_quantiles must be sorted, from the lowest to the highest")


@dataclass(frozen=True)
class GuardStatus:
    """What the guard of an adapter sees and does.

    Attributes:
        state: ``"adapting"``; ``"slowed"``, one step in four counts; ``"frozen"``, nothing can be learnt from these
            images; ``"rolled back"``, stopped at the last good state; ``"source"``, stopped at the initial state.
        reason: Why the guard acted last; empty if it never did.
        batches: Batches that the adapter has seen.
        freezes: How often images from which nothing can be learnt have begun.
        rollbacks: How often the adapter went back to a good state because of its answers.
        returns: How often it went back to the initial state.
        concentration: Effective number of classes in the adapter's answers, exp(H(mean p)).
        source_concentration: The same for the answers of the source to the same images.
        information: Information of the adapter's answers as a share of that of the source's; 1 means as much.
        agreement: Share of the images to which both give the same class.
        wealth: Wealth of the test for a shift; at 1 / alpha or above the stream differs from the source. None if the
            guard has no quantiles.
    """

    state: State
    reason: str
    batches: int
    freezes: int
    rollbacks: int
    returns: int
    concentration: float
    source_concentration: float
    information: float
    agreement: float
    wealth: float | None


class EntropyTest(nn.Module):
    """A test for a shift by betting: do entropies have the distribution that they have on source images?

    Ranks u = F(entropy) are uniform on source images. A gambler whose wealth is multiplied by 1 + e (u - 1/2) gains
    nothing there on average, however e follows the past. So a large wealth is evidence of a shift (Bar, Shaer, Romano,
    NeurIPS 2024: protected online entropy matching). The bet e follows the gradient of the logarithm of the wealth, by
    steps that are free of scale. The gambler begins again with 1 whenever less is left. The mean time to a false alarm
    at 1 / alpha is then at least 1 / alpha batches. Images are taken to be drawn independently.

    Args:
        quantiles: As in :class:`Guard`.
        tolerance: As in :class:`Guard`.
        alpha: As in :class:`Guard`. The wealth is bounded by 1 / alpha^2, so that the test can come back.

    Example:
        >>> test = EntropyTest(torch.linspace(0, 1, 65))
        >>> for _ in range(4):
        ...     test.update(torch.linspace(0.6, 1, 32), torch.tensor(True))  # far too high
        >>> bool(test.is_shifted())
        True
    """

    quantiles: Tensor
    log_wealth: Tensor
    bet: Tensor
    squares: Tensor

    def __init__(self, quantiles: Tensor, *, tolerance: float = 0.05, alpha: float = 1e-3) -> None:
        super().__init__()
        self.tolerance, self.limit = tolerance, -math.log(alpha)
        self.register_buffer("quantiles", quantiles.detach().float().clone(), persistent=False)
        for name in ("log_wealth", "bet", "squares"):
            self.register_buffer(name, self.quantiles.new_zeros(()))

    @torch.no_grad()
    def update(self, entropies: Tensor, fine: Tensor) -> None:
        """Bet on the entropies (m,) of a batch; where ``fine``, a scalar, is false, nothing changes."""
        centred = rank_entropies(self.quantiles, entropies) - 0.5
        side = torch.where(self.bet == 0, centred.mean(), self.bet).sign()
        gains = centred - self.tolerance * side
        factors = 1.0 + self.bet * gains
        slope = (gains / factors).sum()
        # Without a bet there is no side yet, and what lies within the tolerance speaks for none.
        slope = torch.where((self.bet == 0) & (slope * side < 0), 0.0, slope)
        wealth = (self.log_wealth + factors.log().sum()).clamp(0.0, 2.0 * self.limit)
        squares = self.squares + slope.square()
        step = slope / squares.clamp_min(torch.finfo(squares.dtype).tiny).sqrt()
        bet = (self.bet + step).clamp(-1.0, 1.0)
        # The next bet may not be on the other side at once: its tolerance has another sign.
        bet = torch.where(bet * self.bet < 0, 0.0, bet)
        for tensor, new in ((self.log_wealth, wealth), (self.squares, squares), (self.bet, bet)):
            tensor.copy_(torch.where(fine, new, tensor))

    def is_shifted(self) -> Tensor:
        """Whether the wealth says that the stream differs from the source, a scalar."""
        return self.log_wealth >= self.limit


class BatchClock(nn.Module):
    """Counts batches on the host, and says at which of them the guard looks.

    At first it looks ``OFTEN`` times as often, because an adapter that does not suit its stream shows it early.

    Args:
        period: Batches between two looks, after the first two periods.
    """

    on_host = True
    count: Tensor

    def __init__(self, period: int) -> None:
        super().__init__()
        self.period, self.early = period, max(1, period // OFTEN)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def advance(self) -> bool:
        """Count a batch; returns whether the guard looks at it."""
        self.count += 1
        count = int(self.count)
        return count % (self.early if count <= 2 * self.period else self.period) == 0

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        return self


class BatchContrast(nn.Module):
    """Compares how the mean answers of the source and of the adapter change from look to look.

    A stream that comes sorted by class shows the source one class after another. Norms that follow the stream may take
    away exactly that: then the mean answer of the source changes, and that of the adapter does not.

    Args:
        classes: Number of classes, k.

    Example:
        >>> contrast, sharp = BatchContrast(4), 0.9 * torch.eye(4) + 0.025
        >>> for look in range(6):
        ...     contrast.update(torch.full((4,), 0.25), sharp[look // 2], 32, torch.tensor(True))
        >>> bool(contrast.is_lost())
        True
    """

    means: Tensor
    products: Tensor
    looks: Tensor

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.register_buffer("means", torch.zeros(2, classes))
        self.register_buffer("products", torch.zeros(2))
        self.register_buffer("looks", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def update(self, adapted: Tensor, source: Tensor, images: int, fine: Tensor) -> None:
        """Take the mean answers (k,) to some images into account; nothing changes unless ``fine`` is true."""
        means = torch.stack([adapted, source]).nan_to_num(0.0, 0.0, 0.0).to(self.means.dtype)
        change, other = (means - self.means) * (self.looks > 0)
        # By chance alone, the mean of these images differs from the average by 5/4 / images at most.
        products = torch.stack([(change * other).sum(), other.square().sum() - 1.25 / images])
        looks = self.looks.to(self.means.dtype)
        self.means.lerp_(means, fine / (looks.clamp_max(3.0) + 1.0))
        self.products.lerp_(products, fine * (looks > 0) / looks.clamp(1.0, 6.0))
        self.looks.add_(fine)

    def is_lost(self) -> Tensor:
        """Whether the adapter does not follow changes that chance does not explain, a scalar."""
        together, source = self.products.unbind()
        return (self.looks > 3) & (source > TOLD_APART) & (together < FOLLOWS * source)

    def forget(self, where: Tensor) -> None:
        """Begin again where the state of the adapter is another one."""
        self.looks.mul_(~where)


class Look(NamedTuple):
    """What one look has found; see :meth:`GuardMonitor.look`."""

    adapted: Tensor
    source: Tensor
    levels: Tensor
    entropies: Tensor
    emptiness: Tensor
    images: int


class _Found(Renewed):
    """Carries what a look has found to the end of the step; an attribute of a module would look like a change of it."""

    def __init__(self) -> None:
        self.look: Look | None = None
        self.stepping = False


class GuardMonitor(nn.Module):
    """The state of a guard: running averages, decisions, and the last good state of the adapter.

    Args:
        guard: The settings.
        classes: Number of classes, k.
        period: Batches between two looks.
        kept: Tensors of the adapter that good states consist of, by name.
    """

    adapted: Tensor
    source: Tensor
    levels: Tensor
    images: Tensor
    looks: Tensor
    alarm_information: Tensor
    mode: Tensor
    pace: Tensor
    reason: Tensor
    batches: Tensor
    freezes: Tensor
    rollbacks: Tensor
    returns: Tensor
    hold: Tensor
    strikes: Tensor
    calm: Tensor

    def __init__(self, guard: Guard, classes: int, period: int, kept: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.window, self.sample, self.holds = guard.window, guard.sample, guard.hold
        self.snapshot_every, self.scale = guard.snapshot_every, math.log(classes)
        self.source_accuracy = guard.source_accuracy
        device = next(iter(kept.values())).device if kept else torch.device("cpu")
        self.clock = BatchClock(period)
        self.contrast = BatchContrast(classes).to(device)
        self.test = None
        if guard.entropy_quantiles is not None:
            quantiles = guard.entropy_quantiles.to(device)
            self.test = EntropyTest(quantiles, tolerance=guard.tolerance, alpha=guard.alpha)
        for name, size in (("adapted", (classes,)), ("source", (classes,)), ("levels", (7,))):
            self.register_buffer(name, torch.zeros(size, device=device))
        self.register_buffer("alarm_information", torch.zeros((), device=device))
        for name in (
            "images",
            "looks",
            "mode",
            "reason",
            "batches",
            "freezes",
            "rollbacks",
            "returns",
            "hold",
        ):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64, device=device))
        for name, value in (("strikes", 0), ("calm", 0), ("pace", 1)):
            self.register_buffer(name, torch.full((), value, dtype=torch.int64, device=device))
        self.kept: tuple[tuple[str, ...], ...] = ()
        self._found = _Found()
        self._make_room(kept)

    def _make_room(self, kept: Mapping[str, Tensor]) -> None:
        """Copy the state that the adapter goes back to: one vector for each type."""
        groups: dict[torch.dtype, list[str]] = {}
        for name, tensor in kept.items():
            groups.setdefault(tensor.dtype, []).append(name)
        self.kept = tuple(map(tuple, groups.values()))
        for number, names in enumerate(self.kept):
            self.register_buffer(f"good_{number}", flatten([kept[name].detach() for name in names]))

    def begin(self) -> None:
        """Begin a step. What a step has left behind that did not reach its end is dropped."""
        self._found.look, self._found.stepping = None, True

    def is_stepping(self) -> bool:
        """Whether a step has begun that is not settled yet."""
        return self._found.stepping

    def count_batch(self) -> bool:
        """Count a batch on the host; returns whether the guard looks at it."""
        return self.clock.advance()

    def is_at_source(self) -> Tensor:
        """Whether the adapter is stopped at its initial state, a scalar."""
        return self.mode == _SOURCE

    def is_open(self) -> Tensor:
        """Whether the present step counts, a scalar."""
        return (self.batches + 1) % self.pace == 0

    @torch.no_grad()
    def look(self, x: Tensor, answers: Tensor, reference: Tensor) -> Tensor:
        """Compare the answers of the adapter and of the source to some images.

        Args:
            x: The images.
            answers: Logits (m, k) of the adapter.
            reference: Logits (m, k) of the source.

        Returns:
            Everything that was found, as a vector: it must be finite.
        """
        adapted, source = (_describe(upcast(logits.detach()).float()) for logits in (answers, reference))
        agreement = (answers.argmax(1) == reference.argmax(1)).float().mean()
        levels = [adapted.entropies.mean(), source.entropies.mean(), agreement]
        levels += [adapted.information, source.information]
        empty = _find_emptiness(x, adapted.mean)
        if len(x) >= FEW:
            alike = source.information < FLOOR * self.scale
            empty = torch.where((empty == 0) & alike, _ALIKE, empty)
        self._found.look = Look(
            adapted.mean, source.mean, torch.stack(levels), source.entropies, empty, images=len(x)
        )
        return torch.cat([adapted.mean, source.mean, self._found.look.levels])

    @torch.no_grad()
    def settle(self, fine: Tensor, read: Callable[[], tuple[dict[str, Tensor], dict[str, Tensor]]]) -> None:
        """End a step. Where the guard has looked, decide, and go back if need be.

        Args:
            fine: Whether all values of the step were finite, a scalar; if not, nothing changes.
            read: Returns the tensors of the adapter that may change, on its device, without those of the guard; and
                their initial values.
        """
        look, self._found.look, self._found.stepping = self._found.look, None, False
        self.batches.add_(fine)
        if look is None:
            return
        own, initial = read()
        usual = self._count_look(fine)
        something = fine & (look.emptiness == 0)
        self.contrast.update(look.adapted, look.source, look.images, something)
        self._follow(look, usual & something)
        harm, reason = self._find_harm(usual & something)
        lost = something & self.contrast.is_lost()
        reason = torch.where(lost, _BLIND, torch.where(something, reason, look.emptiness))
        roll, source = self._decide(look, fine, usual, harm | lost, reason)
        good = self._good(own)
        keep_where(~roll, [own[name] for name in good], list(good.values()))
        keep_where(~source, list(own.values()), [initial[name] for name in own])
        keep_where(~self._is_good(look, usual), list(good.values()), [own[name] for name in good])

    def _count_look(self, fine: Tensor) -> Tensor:
        """Count a look; returns whether it is one of the usual ones, a period apart, which the averages are made of."""
        self.looks.add_(fine)
        batches, period = self.looks * self.clock.early, self.clock.period
        return fine & ((batches > 2 * period) | (batches % period == 0))

    def _follow(self, look: Look, fine: Tensor) -> None:
        """Update the averages."""
        images = self.images.clamp_max(self.window).to(self.adapted.dtype)
        share = torch.where(fine, look.images / (images + look.images), 0.0)
        change, other = (self.images > 0) * (look.adapted - self.adapted), look.source - self.source
        changes = torch.stack([(change * other).sum(), change.square().sum()])
        for average, new in (
            (self.adapted, look.adapted),
            (self.source, look.source),
            (self.levels, torch.cat([look.levels, changes])),
        ):
            average.lerp_(new.nan_to_num(0.0, 0.0, 0.0).to(average.dtype), share)
        self.images.add_(fine * look.images)
        if self.test is not None:
            self.test.update(look.entropies, fine)

    def information(self) -> tuple[Tensor, Tensor]:
        """Information of the answers of the adapter and of the source, over the window."""
        return entropy(self.adapted) - self.levels[0], entropy(self.source) - self.levels[1]

    def _find_harm(self, fine: Tensor) -> tuple[Tensor, Tensor]:
        """Whether the answers show harm, and the number of the reason."""
        adapted, source = self.information()
        enough = fine & (self.images >= self.window) & (source > FLOOR * self.scale)
        # In batches of few classes a good adapter tells less than the source, which confuses them with others. Then
        # the mean answers of both change from batch to batch in the same direction.
        alone = self.levels[5] <= FOLLOWS * self.levels[6]
        single = entropy(self.adapted) < math.log(SINGLE)
        collapse = (alone | single) & (adapted < HARM * source)
        against = self.levels[2] < CONTRADICTION
        # A source that gives most images a few classes is no witness: it mixes the classes of a batch that has few.
        guesses = against & alone & (self.levels[3] < GOOD * self.levels[4]) & (source > WITNESS * self.scale)
        reason = torch.where(collapse, _COLLAPSE, _GUESSES)
        harm = collapse | guesses
        if self.test is not None:
            contradicts = self.levels[2] < CONTRADICTION * self.source_accuracy
            contradicts &= ~self.test.is_shifted()
            reason, harm = torch.where(harm, reason, _CONTRADICTS), harm | contradicts
        return enough & harm, reason

    def _decide(
        self, look: Look, fine: Tensor, usual: Tensor, harm: Tensor, reason: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Choose the mode; returns whether to go back to the good state, and whether to the initial one."""
        mode, nothing = self.mode.clone(), usual & (look.emptiness > 0)
        free, held = mode <= _SLOWED, mode >= _ROLLED_BACK
        self.hold.sub_((usual & held).long())
        changed = look.levels[4] > self.alarm_information + CHANGED * self.scale
        release = fine & held & ((self.hold <= 0) | (changed & ~nothing))
        alarm = free & harm
        self.strikes.add_(alarm)
        in_vain = (mode == _ROLLED_BACK) & harm & ~release
        source = in_vain | (alarm & ((self.strikes >= STRIKES) | (reason == _BLIND)))
        stopped = alarm | in_vain
        self.contrast.forget(stopped | release)
        freeze = nothing & ~held
        thaw = usual & (mode == _FROZEN) & ~nothing
        adapted, known = self.information()
        slow = free & (self.images >= self.window) & (adapted < SLOW * known)
        new = torch.where(free & fine, slow.long(), mode)
        new = torch.where(release | thaw, _ADAPTING, new)
        new = torch.where(freeze, _FROZEN, new)
        new = torch.where(stopped, torch.where(source, _SOURCE, _ROLLED_BACK), new)
        self.mode.copy_(new)
        self.pace.copy_(torch.where(new == _SLOWED, SLOWED, torch.where(new == _ADAPTING, 1, CLOSED)))
        began = freeze & (mode != _FROZEN)
        self.reason.copy_(torch.where(stopped | began, reason, self.reason))
        length = self.holds * 2 ** (self.strikes - 1).clamp(0, 4)
        self.hold.copy_(torch.where(stopped, length, self.hold))
        # A sorted stream shows the source now one class and now two, which is no change of the stream.
        told = torch.where(reason == _BLIND, self.scale, self.levels[4])
        self.alarm_information.copy_(torch.where(stopped, told, self.alarm_information))
        self.freezes.add_(began)
        self.rollbacks.add_(stopped & ~source)
        self.returns.add_(source)
        # What was averaged belongs to another state, or to another stream.
        self.images.mul_(~(stopped | began | release | thaw))
        return (stopped & ~source) | (began & free), source

    def _is_good(self, look: Look, fine: Tensor) -> Tensor:
        """Whether the present state becomes the one to go back to. Also counts the quiet looks."""
        adapted, source = self.information()
        now, reference = look.levels[3], look.levels[4]
        quiet = fine & (self.mode == _ADAPTING) & (look.emptiness == 0) & (self.images > 0)
        quiet &= (adapted >= GOOD * source) & (now >= GOOD * reference - FLOOR * self.scale)
        self.calm.copy_(torch.where(fine, torch.where(quiet, self.calm + 1, 0), self.calm))
        self.strikes.mul_(self.calm < CALM)
        return quiet & (self.calm % self.snapshot_every == 0)

    def _good(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The good state: views, by the names of the tensors."""
        found: dict[str, Tensor] = {}
        for number, names in enumerate(self.kept):
            views = unflatten(self.get_buffer(f"good_{number}"), [own[name] for name in names])
            found |= dict(zip(names, views, strict=True))
        return found

    def describe(self) -> GuardStatus:
        """The status, in numbers of the host; this waits for the device."""
        adapted, source = (float(value) for value in self.information())
        return GuardStatus(
            state=STATES[int(self.mode)],
            reason=REASONS[int(self.reason)],
            batches=int(self.clock.count),
            freezes=int(self.freezes),
            rollbacks=int(self.rollbacks),
            returns=int(self.returns),
            concentration=math.exp(float(entropy(self.adapted))),
            source_concentration=math.exp(float(entropy(self.source))),
            information=adapted / source if source > 0 else 1.0,
            agreement=float(self.levels[2]) if int(self.images) else 1.0,
            wealth=None if self.test is None else math.exp(float(self.test.log_wealth)),
        )

    def check_values(self, state: Mapping[str, Tensor]) -> None:
        """Refuse a mode or a reason that does not exist."""
        known = {"mode": len(STATES), "reason": len(REASONS)}
        for name, count in known.items():
            if not 0 <= int(state[name]) < count:
                raise ValueError(
                    f"this state holds a {name} of a guard that does not exist: {int(state[name])}"
                )
        if int(state["pace"]) < 1:
            raise ValueError("this state holds a pace of a guard below 1: it cannot be continued")


class _Answers(NamedTuple):
    """Mean answer (k,), entropy of each answer (m,), and information, a scalar."""

    mean: Tensor
    entropies: Tensor
    information: Tensor


def _describe(logits: Tensor) -> _Answers:
    probs = logits.softmax(1)
    mean, entropies = probs.mean(0), entropy(probs)
    return _Answers(mean, entropies, entropy(mean) - entropies.mean())


def entropy(probs: Tensor) -> Tensor:
    """Entropy of probabilities over the last dimension, in nats.

    Example:
        >>> round(entropy(torch.tensor([0.25] * 4)).exp().item(), 4)
        4.0
    """
    found: Tensor = torch.special.entr(probs).sum(-1)
    return found


def rank_entropies(quantiles: Tensor, entropies: Tensor) -> Tensor:
    """Ranks from 0 to 1 of entropies (m,) among those of source images.

    On source images they are 1/2 on average, also where some entropies are equal.

    Args:
        quantiles: As in :class:`Guard`.
        entropies: Entropies of answers.

    Example:
        >>> rank_entropies(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0.5, 1.0, 5.0]))
        tensor([0.2500, 0.5000, 1.0000])
    """
    values = entropies.to(quantiles.dtype).contiguous()
    both = torch.searchsorted(quantiles, values) + torch.searchsorted(quantiles, values, right=True)
    return ((both - 1) / (2 * (len(quantiles) - 1))).clamp(0.0, 1.0)


def _find_emptiness(x: Tensor, like: Tensor) -> Tensor:
    """Why nothing can be learnt from images, as the number of a reason; 0 where something can."""
    code = torch.zeros((), dtype=torch.int64, device=like.device)
    values = x.detach().float().flatten(1)
    centred = values - values.mean(1, keepdim=True)
    inside = centred.square().mean()
    if x.ndim == 4 and x.shape[1] in _PICTURES and min(x.shape[2:]) >= FEW:
        picture = x.detach().float()
        picture = picture - picture.mean((2, 3), keepdim=True)
        variance = picture.square().mean()
        across = (picture[..., 1:] * picture[..., :-1]).mean().abs()
        down = (picture[..., 1:, :] * picture[..., :-1, :]).mean().abs()
        code = torch.where(torch.maximum(across, down) < UNRELATED * variance, _NOISE, code)
    if len(x) >= FEW:
        between = values.var(0, correction=0).mean()
        code = torch.where(between <= ALIKE * inside, _REPEATED, code)
    return torch.where(inside < FLAT, _CONSTANT, code)


def choose_guard(guard: Guard | bool | None, default: bool) -> Guard | None:
    """The settings that a user asks for: True for the defaults, False for no guard, None for what the method does."""
    if guard is None:
        guard = default
    if isinstance(guard, bool):
        return Guard() if guard else None
    if not isinstance(guard, Guard):
        raise TypeError(f"guard must be True, False, None or a ttvd.methods.Guard, got {guard!r}")
    return guard
