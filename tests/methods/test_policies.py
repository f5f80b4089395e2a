import pytest
import torch
from torch import Tensor, nn

import ttvd
from ttvd.methods import Adapter
from ttvd.methods.policies import Episodic, ResetEvery


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def make_batches(count: int = 6) -> list[Tensor]:
    return list(torch.rand(count, 5, 1, 4, 4, generator=torch.Generator().manual_seed(1)))


def make_tent(net: nn.Module) -> Adapter:
    return ttvd.create("tent", net, lr=0.05)


@pytest.mark.parametrize("policy", ["episodic", "every"])
def test_policies_are_adapters(policy: str) -> None:
    net = make_net()

    def make() -> Adapter:
        tent = make_tent(net)
        return Episodic(tent) if policy == "episodic" else ResetEvery(tent, 2)

    ttvd.check_adapter(make, net, make_batches())


def test_episodic_knows_nothing_of_the_past() -> None:
    net = make_net()
    episodic, first, *rest = Episodic(make_tent(net)), *make_batches()
    for batch in rest:
        episodic(batch)
    assert torch.equal(episodic(first), make_tent(net)(first))


def test_reset_every_equals_fresh_adapters() -> None:
    net, batches = make_net(), make_batches(7)
    policy = ResetEvery(make_tent(net), 3)
    outputs = [policy(batch) for batch in batches]
    expected = []
    for start in range(0, 7, 3):
        fresh = make_tent(net)
        expected += [fresh(batch) for batch in batches[start : start + 3]]
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))


def test_what_the_adapter_shows_is_shown() -> None:
    policy = ResetEvery(make_tent(make_net()), 2)
    policy(make_batches()[0])
    assert float(policy.kept) == 1.0
    assert policy.prediction == "before"


def test_impossible_settings() -> None:
    tent = make_tent(make_net())
    with pytest.raises(ValueError, match="batches"):
        ResetEvery(tent, 0)
