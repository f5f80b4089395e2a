"""Random numbers that belong to an image, not to a batch.

A random number is a pure function of (seed, image index, corruption, severity, stream, position): a counter is hashed;
no state is advanced. So an image is corrupted in the same way alone or in a batch, in any order, with any number of
threads, and integers agree bit for bit between devices.

Keys are derived with the SplitMix64 finaliser (Steele, Lea and Flood, 2014); positions are hashed with two keyed rounds
of a 32-bit multiply-xorshift mixer whose constants come from Wellons' search for low-bias mixers (2018).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


def mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scramble 64-bit words: a bijection that flips about half of the bits for each bit flipped."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def fold(keys: npt.NDArray[np.uint64], value: int) -> npt.NDArray[np.uint64]:
    """Mix one integer into every key."""
    return mix(keys + np.uint64((value + 1) * _GOLDEN & _WORD))


@dataclass(frozen=True, eq=False)
class RandomFields:
    """The random fields of a batch of images; `keys` holds one 64-bit key for each image.

    Example:
        >>> random = RandomFields.create(seed=0, index=np.arange(3), corruption=1, severity=5)
        >>> alone = RandomFields.create(seed=0, index=np.array([2]), corruption=1, severity=5)
        >>> bool((random.uniform(0, 4, 4)[2] == alone.uniform(0, 4, 4)[0]).all())
        True
    """

    keys: npt.NDArray[np.uint64]
    device: torch.device

    @classmethod
    def create(
        cls,
        seed: int,
        index: npt.NDArray[np.int64],
        corruption: int,
        severity: int,
        device: torch.device | str = "cpu",
    ) -> RandomFields:
        """Derive the keys of the images with the given indices."""
        keys = np.full(len(index), seed & _WORD, dtype=np.uint64)
        keys = mix(mix(keys) + index.astype(np.uint64) * np.uint64(_GOLDEN))
        keys = fold(fold(keys, corruption), severity)
        return cls(keys, torch.device(device))

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, part: slice) -> RandomFields:
        return RandomFields(self.keys[part], self.device)

    def bits(self, stream: int, *shape: int) -> Tensor:
        """Uniform int32 words of shape (b, *shape); different streams are independent."""
        low, high = self._split_keys(stream)
        size = math.prod(shape)
        if size >= 1 << 31:
            raise ValueError(f"expected fewer than 2^31 positions for each image, got shape {shape}")
        word = torch.arange(size, dtype=torch.int32, device=self.device) * _signed(0x9E3779B9) + low
        word = _xor_shift(word, 16).mul_(_signed(0x21F0AAAD)).add_(high)
        word = _xor_shift(word, 15).mul_(_signed(0xD35A2D97))
        return _xor_shift(word, 15).view(len(self), *shape)

    def uniform(self, stream: int, *shape: int) -> Tensor:
        """Uniform float32 numbers strictly between 0 and 1, on a grid of 2^23 points."""
        word = self.bits(stream, *shape)
        return word.bitwise_right_shift_(9).bitwise_and_(0x7FFFFF).float().add_(0.5).mul_(2.0**-23)

    def normal(self, stream: int, *shape: int) -> Tensor:
        """Standard normal float32 numbers, by the quantile function (so at most 5.3 in size)."""
        return self.uniform(stream, *shape).mul_(2).sub_(1).erfinv_().mul_(math.sqrt(2))

    def integers(self, stream: int, low: int, high: int, *shape: int) -> Tensor:
        """Uniform int64 numbers in low..high - 1; the bias is below (high - low) / 2^23."""
        return self.uniform(stream, *shape).mul_(high - low).to(torch.int64).add_(low).clamp_(max=high - 1)

    def _split_keys(self, stream: int) -> tuple[Tensor, Tensor]:
        halves = fold(self.keys, stream).view(np.int32).reshape(-1, 2)
        words = torch.from_numpy(halves).to(self.device)
        return words[:, :1], words[:, 1:]


def _xor_shift(word: Tensor, bits: int) -> Tensor:
    # The shift of a signed word repeats its sign, which the mask takes away again.
    return word.bitwise_xor_((word >> bits).bitwise_and_((1 << (32 - bits)) - 1))


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word
