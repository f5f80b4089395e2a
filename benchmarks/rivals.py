"""Who our steps are measured against: plain eager ones, and what public code does on top."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.plain import (
    Plain,
    PlainBN,
    PlainETA,
    PlainSAR,
    PlainSHOT,
    PlainSource,
    PlainT3A,
    PlainTent,
    keep_everything,
)
from benchmarks.plain_ttvd import PlainReference, PlainTTVD, PublicTTVD
from torch import Tensor


class PublicTent(PlainTent):
    """Tent in TTAB, the toolkit that the paper evaluates in."""

    def follow(self, loss: Tensor) -> None:
        keep_everything(self, loss)


class PublicSHOT(PlainSHOT):
    """SHOT in TTAB."""

    def follow(self, loss: Tensor) -> None:
        keep_everything(self, loss)


class PublicETA(PlainETA):
    """ETA and EATA in TTAB."""

    def follow(self, loss: Tensor) -> None:
        keep_everything(self, loss)


PLAIN: Mapping[str, type[Plain]] = {
    "source": PlainSource,
    "bn": PlainBN,
    "tent": PlainTent,
    "shot": PlainSHOT,
    "eta": PlainETA,
    "eata": PlainETA,
    "sar": PlainSAR,
    "t3a": PlainT3A,
    "ttvd": PlainTTVD,
    "ttvd-reference": PlainReference,
}
"""The method written straightforwardly in torch."""
PUBLIC: Mapping[str, type[Plain]] = {
    "tent": PublicTent,
    "shot": PublicSHOT,
    "eta": PublicETA,
    "eata": PublicETA,
    "ttvd": PublicTTVD,
    "ttvd-reference": PublicTTVD,
}
"""The same in the code that is published, where that does more than the arithmetic."""
RIVALS = {"plain": PLAIN, "public": PUBLIC}
