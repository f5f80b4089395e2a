"""Watches the images themselves: whether the stream has changed, and whether it differs from the source at all."""

from typing import NamedTuple

import torch
from torch import Tensor

from ttvd.geometry.precision import upcast
from ttvd.methods.shared.losses import all_finite
from ttvd.nn.descriptors import LEAST_RADIUS, InputMoments, describe
from ttvd.nn.norms import TracksStream

WINDOW = 32
"""Images that the short window holds; a larger batch fills it alone."""
MEMORY = 256
"""Images that the long window counts as at most; older ones fade."""
CHANCE = 2.5
"""Standard errors of a mean that chance explains."""
RAMP = 0.25
"""Beyond one radius of the classes, the evidence of a shift rises from 0 to 1 over this many radii."""
SPREAD = 1.3
"""A stream of several domains spreads this many times as far as the source, or further."""
MISTAKEN, LEAST_MISTAKEN = 3.0, 0.08
"""Factor on the share of wrong predictions, in the worst class, and the least share that is allowed for."""
STEADY = 192
"""Images after which it is known how far the classes of a stream move a short window."""
MIXED = 1.5
"""Tolerance below which the batches of a stream hold many classes each."""
SWINGS, LEAST_JUMP = 3.0, 0.4
"""How many such moves are no jump, and the least jump, in standard deviations of the source."""


class Windows(NamedTuple):
    """What is known of a stream: moments of its descriptors, in standard deviations of the source.

    Attributes:
        mean: Mean of the long window, (f,).
        square: Mean of the squares of the long window, (f,).
        images: Number of images in the long window.
        recent: Mean of the short window, (f,).
        recent_square: Mean of its squares, (f,).
        recent_images: Number of images in the short window.
        explained: Mean of the long window that source images of the predicted classes would have, (f,).
        recent_explained: The same of the short window, (f,).
        residual: What the classes did not explain of the long window before the present batch, (f,).
        residual_images: Number of images from which that was known; 0 for none.
        pending: Whether a change was found after the last batch was answered; the next batch starts again.
        swing: Mean square of how far the classes of the short window moved it from the long one, (f,).
        swing_images: Number of images from which that is known.
    """

    mean: Tensor
    square: Tensor
    images: Tensor
    recent: Tensor
    recent_square: Tensor
    recent_images: Tensor
    explained: Tensor
    recent_explained: Tensor
    residual: Tensor
    residual_images: Tensor
    pending: Tensor
    swing: Tensor
    swing_images: Tensor

    def deviations(self) -> Tensor:
        """Standard deviations of the long window, at least those of the source."""
        return (self.square - self.mean.square()).clamp_min(1.0).sqrt()


class InputDrift(TracksStream):
    """Compares the last images of a stream with those before, and with the source.

    The descriptors of an image (:func:`ttvd.nn.descriptors.describe`) do not depend on the network. The radius of a
    descriptor is how far the mean of a single class may lie from the mean of all. A stream that comes sorted by class
    moves within it, so a move within it says nothing by itself. Where the stream mixes classes, their mean lies closer,
    and the radius is smaller (:meth:`ttvd.methods.ttvd.class_shares.ClassShares.class_scale`).

    Predictions tell more. On images of the source most of them are right, so the classes that are predicted explain
    where the mean of the descriptors lies, whatever the order of the classes (:meth:`explain`). What they leave
    unexplained is compared with a much smaller radius. A prediction follows its batch, so it counts from the next
    batch on.

    - The stream has *changed* if a short window differs from a long one by more than one radius, or by more than two
      in a stream whose batches hold few classes each; or if only one of the two is explained by its classes, and they
      differ in that. The long window starts again then. Two more changes are seen with the first batch. On images of
      the source, predictions show how far the classes of this stream really move the short window; where that is
      little, smaller jumps count. After a shift, the short window may be where the classes would explain it.
    - The *evidence* of a shift is 0 as long as the long window lies within one radius of the source and is explained,
      and 1 from 1 + ``RAMP`` radii on. A stream that spreads further than the source is evidence too.

    All allow for chance: ``CHANCE`` standard errors of the means.

    Args:
        source: Moments of the descriptors of source images.
        like: A tensor with the device of the state.
        accuracy: Accuracy of the source on its own kind of images.

    Example:
        >>> from ttvd.nn.descriptors import measure_inputs
        >>> generator = torch.Generator().manual_seed(0)
        >>> images = torch.rand(200, 1, 16, 16, generator=generator)
        >>> source = measure_inputs(describe(images), torch.arange(200) % 2)
        >>> drift = InputDrift(source, images)
        >>> drift.write(drift.look(images[:64])[0])
        >>> drift.evidence(drift.windows()).item(), drift.look(0.5 * images[64:128])[1].item()
        (0.0, True)
    """

    source_mean: Tensor
    source_deviation: Tensor
    radius: Tensor
    explained_radius: Tensor
    classes: Tensor | None

    def __init__(self, source: InputMoments, like: Tensor, accuracy: float = 1.0) -> None:
        super().__init__()
        for name in Windows._fields:
            shape = () if name.endswith("images") or name == "pending" else source.means.shape
            dtype = torch.bool if name == "pending" else torch.float32
            self.register_buffer(name, torch.zeros(shape, dtype=dtype, device=like.device))
        radius = source.radii / source.deviations
        known = source.classes
        constants = {
            "source_mean": source.means,
            "source_deviation": source.deviations,
            "radius": radius,
            "explained_radius": _scale(radius, MISTAKEN * max(1.0 - accuracy, LEAST_MISTAKEN)),
            "classes": None if known is None else (known - source.means) / source.deviations,
        }
        for name, value in constants.items():
            constant = None if value is None else value.to(like.device, torch.float32)
            self.register_buffer(name, constant, persistent=False)

    def windows(self) -> Windows:
        """The present windows; not copies."""
        return Windows(*(self.get_buffer(name) for name in Windows._fields))

    def scaled_radius(self, scale: Tensor | float) -> Tensor:
        """Radii (f,) in standard deviations of the source, by a factor smaller, but not below the least radius."""
        return _scale(self.radius, scale)

    @torch.no_grad()
    def look(
        self, x: Tensor, tolerance: Tensor | float = 1.0, scale: Tensor | float = 1.0
    ) -> tuple[Windows, Tensor]:
        """The windows after a batch, and whether the stream has changed with it.

        Args:
            x: The batch.
            tolerance: Radii that the classes of the stream explain.
            scale: Factor on the radii; below 1 where the stream mixes classes.
        """
        found = (describe(x) - self.source_mean) / self.source_deviation
        old, size = self.windows(), float(len(x))
        mean, square = found.mean(0), found.square().mean(0)
        kept = old.recent_images.clamp_max(max(0.0, WINDOW - size))
        recent, recent_images = torch.lerp(old.recent, mean, size / (kept + size)), kept + size
        away = (recent - old.mean).abs() - _chance(old, recent_images, old.images)
        unexplained = self._unexplained(old, old.residual, old.residual_images)
        radius = self.scaled_radius(scale)
        # On images of the source, predictions tell how far classes move the windows of this stream.
        usual = (SWINGS * old.swing.sqrt()).clamp_min(LEAST_JUMP).maximum(self.explained_radius)
        steady = (old.swing_images >= STEADY) & (unexplained == 0.0) & (tolerance < MIXED)
        jump = (away / torch.where(steady, torch.minimum(radius, usual), radius)).amax() > tolerance
        back = (recent - old.explained).abs() - _chance(old, recent_images, old.images)
        returned = (unexplained == 1.0) & ((back / self.explained_radius).amax() <= 1.0)
        returned = returned & ((away / self.explained_radius).amax() > tolerance)
        changed = (jump | returned) & (old.images > 0)
        known = changed & steady & ~returned
        kept = old.images.clamp_max(MEMORY) * ~changed
        share = size / (kept + size)
        new = old._replace(
            mean=torch.lerp(old.mean, mean, share),
            square=torch.lerp(old.square, square, share),
            images=kept + size,
            recent=torch.where(changed, mean, recent),
            recent_square=torch.where(
                changed, square, torch.lerp(old.recent_square, square, size / recent_images)
            ),
            recent_images=torch.where(changed, size, recent_images),
            residual=torch.where(known, recent - old.explained, old.residual * ~changed),
            residual_images=torch.where(known, recent_images, old.residual_images * ~changed),
            pending=torch.zeros_like(old.pending),
        )
        return new, changed | old.pending

    @torch.no_grad()
    def evidence(self, windows: Windows, scale: Tensor | float = 1.0) -> Tensor:
        """The evidence that the stream differs from the source, a scalar from 0 to 1.

        Args:
            windows: What is known of the stream.
            scale: Factor on the radii; below 1 where the stream mixes classes.
        """
        chance = CHANCE * windows.images.clamp_min(1.0).rsqrt()
        away = ((windows.mean.abs() - chance * windows.deviations()) / self.scaled_radius(scale)).amax()
        wide = (windows.deviations() - chance).amax() / SPREAD
        found = _ramp(torch.maximum(away, wide))
        return torch.maximum(found, self._unexplained(windows, windows.residual, windows.residual_images))

    def _unexplained(self, windows: Windows, residual: Tensor, images: Tensor) -> Tensor:
        """Return the evidence of a shift in a residual, a scalar from 0 to 1.

        Args:
            windows: What is known of the stream, for its deviations.
            residual: Mean of the descriptors minus what the predicted classes explain, (f,).
            images: Number of images that the mean is taken over; without any there is no evidence.
        """
        chance = CHANCE * windows.deviations() * images.clamp_min(1.0).rsqrt()
        away = ((residual.abs() - chance) / self.explained_radius).amax()
        return _ramp(away) * (images > 0)

    @torch.no_grad()
    def explain(self, scores: Tensor, tolerance: Tensor | float = 1.0, scale: Tensor | float = 1.0) -> None:
        """Update what the predicted classes explain of the descriptors, after the batch has been answered.

        Inside ``following_stream`` and not inside ``settled_stream``. Nothing changes if the descriptors of the classes
        are not known, or if a value is not finite.

        Args:
            scores: Scores (b, k) of the images of the batch.
            tolerance: As in :meth:`look`.
            scale: As in :meth:`look`.
        """
        if self.classes is None or not self.following or self.settled:
            return
        now, size = self.windows(), float(len(scores))
        shares = upcast(scores).softmax(1).mean(0).to(self.classes.dtype)
        # A matrix product would be rounded inside of autocast.
        found = (shares[:, None] * self.classes).sum(0)
        explained = torch.lerp(now.explained, found, size / now.images)
        recent_explained = torch.lerp(now.recent_explained, found, size / now.recent_images)
        residual, recent = now.mean - explained, now.recent - recent_explained
        kept = now.swing_images.clamp_max(MEMORY)
        swing = torch.lerp(now.swing, (recent_explained - explained).square(), size / (kept + size))
        before = self._unexplained(now, now.residual, now.residual_images)
        after = self._unexplained(now, recent, now.recent_images)
        # A stream is taken for the source, of which all is known, until it has shown something else.
        known = torch.where(now.residual_images > 0, now.residual_images, torch.inf)
        away = (recent - now.residual).abs() - _chance(now, now.recent_images, known)
        pending = (away / self.explained_radius).amax() > tolerance
        unseen = self.evidence(now, scale) < 1.0
        pending = pending & ((unseen & (after == 1.0)) | ((before == 1.0) & (after == 0.0)))
        self.write(
            now._replace(
                mean=torch.where(pending, now.recent, now.mean),
                square=torch.where(pending, now.recent_square, now.square),
                images=torch.where(pending, now.recent_images, now.images),
                explained=torch.where(pending, recent_explained, explained),
                recent_explained=recent_explained,
                residual=torch.where(pending, recent, residual),
                residual_images=torch.where(pending, now.recent_images, now.images),
                pending=pending,
                swing=swing,
                swing_images=kept + size,
            )
        )

    @torch.no_grad()
    def write(self, windows: Windows) -> None:
        """Store the windows after a batch. Values that are not finite change nothing."""
        fine = all_finite(torch.cat([part.flatten() for part in windows]))
        for old, new in zip(self.windows(), windows, strict=True):
            old.copy_(torch.where(fine, new, old))


def _scale(radius: Tensor, scale: Tensor | float) -> Tensor:
    return torch.minimum(radius, (radius * scale).clamp_min(LEAST_RADIUS))


def _ramp(away: Tensor) -> Tensor:
    return ((away - 1.0) / RAMP).clamp(0.0, 1.0)


def _chance(windows: Windows, images: Tensor, others: Tensor) -> Tensor:
    """Return the largest difference of two sample means that chance explains, (f,); ``CHANCE`` standard errors."""
    both = images.clamp_min(1.0).reciprocal() + others.clamp_min(1.0).reciprocal()
    return CHANCE * windows.deviations() * both.sqrt()
