"""Watches the images themselves: whether the stream has changed, and whether it differs from the source at all."""

from typing import NamedTuple

import torch
from torch import Tensor

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


class Windows(NamedTuple):
    """What is known of a stream: moments of its descriptors, in standard deviations of the source.

    Attributes:
        mean: Mean of the long window, (f,).
        square: Mean of the squares of the long window, (f,).
        images: Number of images in the long window.
        recent: Mean of the short window, (f,).
        recent_images: Number of images in the short window.
    """

    mean: Tensor
    square: Tensor
    images: Tensor
    recent: Tensor
    recent_images: Tensor

    def deviations(self) -> Tensor:
        """Standard deviations of the long window, at least those of the source."""
        return (self.square - self.mean.square()).clamp_min(1.0).sqrt()


class InputDrift(TracksStream):
    """Compares the last images of a stream with those before, and with the source.

    The descriptors of an image (:func:`ttvd.nn.descriptors.describe`) do not depend on the network. The radius of a
    descriptor is how far the mean of a single class may lie from the mean of all. A stream that comes sorted by class
    moves within it, so a move within it says nothing. Where the stream mixes classes, their mean lies closer, and the
    radius is smaller (:meth:`ttvd.methods.ttvd.class_shares.ClassShares.class_scale`).

    - The stream has *changed* if a short window differs from a long one by more than one radius, or by more than two
      in a stream whose batches hold few classes each. The long window starts again then.
    - The *evidence* of a shift is 0 as long as the long window lies within one radius of the source, and 1 from
      1 + ``RAMP`` radii on. A stream that spreads further than the source is evidence too.

    Both allow for chance: ``CHANCE`` standard errors of the means.

    Args:
        source: Moments of the descriptors of source images.
        like: A tensor with the device of the state.

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

    mean: Tensor
    square: Tensor
    images: Tensor
    recent: Tensor
    recent_images: Tensor
    source_mean: Tensor
    source_deviation: Tensor
    radius: Tensor

    def __init__(self, source: InputMoments, like: Tensor) -> None:
        super().__init__()
        for name in Windows._fields:
            shape = () if name.endswith("images") else source.means.shape
            self.register_buffer(name, torch.zeros(shape, device=like.device))
        constants = (source.means, source.deviations, source.radii / source.deviations)
        for name, value in zip(("source_mean", "source_deviation", "radius"), constants, strict=True):
            self.register_buffer(name, value.to(like.device, torch.float32), persistent=False)

    def windows(self) -> Windows:
        """The present windows; not copies."""
        return Windows(*(self.get_buffer(name) for name in Windows._fields))

    def scaled_radius(self, scale: Tensor | float) -> Tensor:
        """Radii (f,) in standard deviations of the source, by a factor smaller, but not below the least radius."""
        return torch.minimum(self.radius, (self.radius * scale).clamp_min(LEAST_RADIUS))

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
        chance = (
            CHANCE
            * old.deviations()
            * (recent_images.reciprocal() + old.images.clamp_min(1.0).reciprocal()).sqrt()
        )
        jump = (((recent - old.mean).abs() - chance) / self.scaled_radius(scale)).amax()
        changed = (jump > tolerance) & (old.images > 0)
        kept = old.images.clamp_max(MEMORY) * ~changed
        share = size / (kept + size)
        new = Windows(
            torch.lerp(old.mean, mean, share),
            torch.lerp(old.square, square, share),
            kept + size,
            torch.where(changed, mean, recent),
            torch.where(changed, size, recent_images),
        )
        return new, changed

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
        return ((torch.maximum(away, wide) - 1.0) / RAMP).clamp(0.0, 1.0)

    @torch.no_grad()
    def write(self, windows: Windows) -> None:
        """Store the windows after a batch. Values that are not finite change nothing."""
        fine = all_finite(torch.cat([part.flatten() for part in windows]))
        for old, new in zip(self.windows(), windows, strict=True):
            old.copy_(torch.where(fine, new, old))
