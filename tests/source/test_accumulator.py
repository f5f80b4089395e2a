import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ttvd.source.sites import SiteAccumulator


def test_bf16_features_are_summed_in_float64() -> None:
    z = torch.full((1, 4096, 1), 1.0, dtype=torch.bfloat16)
    sums = SiteAccumulator(1, 1, 1)
    sums.update(z, torch.zeros(4096, dtype=torch.int64))
    assert sums.sums.item() == 4096.0
    assert sums.sums.dtype == torch.float64


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 40), st.integers(0, 1000))
def test_merged_halves_are_the_whole(cut: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(2, 41, 3, generator=generator)
    labels = torch.cat([torch.arange(4), torch.randint(0, 4, (37,), generator=generator)])
    whole, left, right = (SiteAccumulator(4, 2, 3) for _ in range(3))
    whole.update(z, labels)
    left.update(z[:, :cut], labels[:cut])
    right.update(z[:, cut:], labels[cut:])
    left.merge(right)
    torch.testing.assert_close(left.means(), whole.means(), rtol=0, atol=1e-12)
    assert torch.equal(left.counts, whole.counts)
    with pytest.raises(ValueError, match="cannot merge sums of shape"):
        left.merge(SiteAccumulator(3, 2, 3))
