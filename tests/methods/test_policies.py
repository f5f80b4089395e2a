import pytest
import torch
from torch import Tensor, nn

import ttvd
from ttvd.methods import Adapter
from ttvd.methods.policies import Episodic, ResetEvery, ResetOnCollapse


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def make_batches(count: int = 6) -> list[Tensor]:
    return list(torch.rand(count, 5, 1, 4, 4, generator=torch.Generator().manual_seed(1)))


def make_tent(net: nn.Module) -> Adapter:
    return ttvd.create("tent", net, lr=0.05)


@pytest.mark.parametrize("policy", ["episodic", "every", "collapse"])
def test_policies_are_adapters(policy: str) -> None:
    net = make_net()

    def make() -> Adapter:
        tent = make_tent(net)
        if policy == "episodic":
            return Episodic(tent)
        return ResetEvery(tent, 2) if policy == "every" else ResetOnCollapse(tent, 3, threshold=0.9)

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


def test_collapse_is_noticed_and_mended() -> None:
    net = make_net()
    policy = ResetOnCollapse(make_tent(net), 3, threshold=0.2, momentum=0.5)
    for batch in make_batches():
        policy(batch)
    assert int(policy.resets) == 0
    with torch.no_grad():
        policy.adapter.model[2].bias.fill_(100.0)  # type: ignore[index]
        policy.adapter.model[3].weight[0].fill_(5.0)  # type: ignore[index]
    for batch in make_batches():
        policy(batch)
    assert int(policy.resets) >= 1
    assert bool((policy.adapter.model[2].bias.abs() < 1.0).all())  # type: ignore[index]


def test_what_the_adapter_shows_is_shown() -> None:
    policy = ResetEvery(make_tent(make_net()), 2)
    policy(make_batches()[0])
    assert float(policy.kept) == 1.0
    assert policy.prediction == "before"


def test_impossible_settings() -> None:
    tent = make_tent(make_net())
    with pytest.raises(ValueError, match="batches"):
        ResetEvery(tent, 0)
    with pytest.raises(ValueError, match="threshold"):
        ResetOnCollapse(tent, 3, threshold=2.0)
    with pytest.raises(ValueError, match="2 classes"):
        ResetOnCollapse(tent, 1)
