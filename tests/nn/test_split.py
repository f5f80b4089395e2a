from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ttvd
from ttvd.nn.resnet import ResNet
from ttvd.nn.split import evaluating, shared_copy, split


class Unordered(nn.Module):
    """Registers its head first, so that only watching it run finds the head."""

    def __init__(self) -> None:
        super().__init__()
        self.classify = nn.Linear(5, 3)
        self.embed = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(torch.relu(self.embed(x.flatten(1))))  # type: ignore[no-any-return]


class Scaled(nn.Module):
    """Does something after its last linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.fc(x.flatten(1))  # type: ignore[no-any-return]


def test_head_is_found_by_running_the_model() -> None:
    net, x = Unordered(), torch.rand(6, 1, 2, 2)
    parts = split(net, x)
    assert parts.head_name == "classify"
    assert torch.equal(parts.head(parts.features(x)), net(x))
    z, logits = parts.features_and_logits(x)
    assert z.shape == (6, 5)
    assert torch.equal(logits, parts(x))


def test_without_an_example_a_wrong_guess_is_caught_at_the_first_use() -> None:
    parts = split(Unordered())
    assert parts.head_name == "embed"
    with pytest.raises(ValueError, match="Pass head="):
        parts.features(torch.rand(2, 1, 2, 2))
    assert split(Unordered(), head="classify").features(torch.rand(2, 1, 2, 2)).shape == (2, 5)


def test_timm_convention_needs_no_example() -> None:
    net = ResNet(4, in_channels=1, widths=(4,), blocks=(1,), bottleneck=2)
    assert split(net).head_name == "fc"


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224", "efficientnet_lite0"])
def test_timm_models(name: str) -> None:
    timm = pytest.importorskip("timm")
    size = 224 if "vit" in name else 32
    x = torch.rand(2, 3, size, size)
    net = timm.create_model(name, num_classes=7).eval()
    parts = split(net, x)
    assert torch.allclose(parts.head(parts.features(x)), net(x), atol=1e-5)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Scaled(), "differs from model"),
        (nn.Sequential(nn.Flatten(), nn.ReLU()), "no nn.Linear"),
        (nn.Sequential(nn.Conv2d(1, 3, 1)), "no nn.Linear"),
    ],
)
def test_what_cannot_be_split_is_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split(model, torch.rand(2, 1, 2, 2))


def test_unknown_head_name_lists_the_layers() -> None:
    with pytest.raises(ValueError, match="embed"):
        split(Unordered(), head="fc")


class Wrapped(nn.Module):
    """Returns its logits inside something else."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.fc, self.wrap = nn.Linear(4, 3), wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.fc(x.flatten(1)))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda z: (z, z[:, :1]),
        lambda z: [z],
        lambda z: {"loss": None, "logits": z},
        lambda z: SimpleNamespace(loss=None, logits=z),
    ],
)
@pytest.mark.parametrize("given", [True, False])
def test_logits_are_unwrapped(wrap: Callable[[Tensor], Any], given: bool) -> None:
    net, x = Wrapped(wrap), torch.rand(5, 1, 2, 2)
    parts = split(net, x if given else None)
    expected = net.fc(x.flatten(1))
    assert torch.equal(parts(x), expected)
    z, logits = parts.features_and_logits(x)
    assert torch.equal(z, x.flatten(1))
    assert torch.equal(logits, expected)


@pytest.mark.parametrize(
    "wrap", [lambda z: {"scores": z}, lambda _: "cat", lambda z: ((z, z),), lambda _: []]
)
def test_output_without_known_logits_is_refused(wrap: Callable[[Tensor], Any]) -> None:
    with pytest.raises(ValueError, match=r"logits \(b, k\), got a .*Wrap the model"):
        split(Wrapped(wrap), torch.rand(2, 1, 2, 2))


def test_logits_must_be_a_matrix() -> None:
    with pytest.raises(ValueError, match=r"\(b, k\), got \(2,\)"):
        split(Wrapped(lambda z: z[:, 0]), torch.rand(2, 1, 2, 2))


class TwoHeads(nn.Module):
    def __init__(self, both: bool) -> None:
        super().__init__()
        self.fine, self.coarse, self.both = nn.Linear(4, 6), nn.Linear(4, 2), both

    def forward(self, x: Tensor) -> Any:
        z = x.flatten(1)
        fine, coarse = self.fine(z), self.coarse(z)
        return (fine, coarse) if self.both else fine


@pytest.mark.parametrize("both", [True, False])
def test_of_two_heads_the_one_of_the_output_is_used_and_the_other_named(both: bool) -> None:
    net, x = TwoHeads(both), torch.rand(5, 1, 2, 2)
    with pytest.warns(UserWarning, match="'fine' is used.*head='coarse'"):
        assert split(net, x).head_name == "fine"
    assert split(net, x, head="fine").head_name == "fine"  # without a warning
    with pytest.raises(ValueError, match="'coarse' does not map"):
        split(net, x, head="coarse")
    with pytest.raises(ValueError, match="Pass head="):
        split(net).features(x)  # the last one registered, until it is used


def test_split_leaves_flags_and_hooks_alone() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(4, 3)).train()
    net[1].eval()
    split(net, torch.rand(2, 1, 2, 2)).features(torch.rand(2, 1, 2, 2))
    assert [m.training for m in net.modules()] == [True, True, False, True]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_flags_are_restored_after_an_error() -> None:
    net = nn.Sequential(nn.Dropout(), nn.Linear(2, 2)).train()

    def fail() -> None:
        with evaluating(net):
            assert not net[0].training
            net(torch.zeros(1, 3))

    with pytest.raises(RuntimeError, match="shapes"):
        fail()
    assert net[0].training


def test_an_augmented_head_starts_with_what_the_classes_know() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 3))
    x = torch.rand(5, 3, 2, 2)
    parts = split(net)
    wide = parts.augmented(4)
    assert torch.allclose(wide(x), net(x).repeat_interleave(4, 1))
    assert torch.allclose(wide.upright(4)(x), net(x))
    with torch.no_grad():
        for parameter in wide.parameters():  # it shares nothing: training it leaves the classifier alone
            parameter.zero_()
    assert net(x).abs().sum() > 0
    assert parts.linear.out_features == 3
    alone = split(nn.Linear(4, 2)).augmented(2)
    assert alone(torch.rand(3, 4)).shape == (3, 4)


def test_upright_takes_the_columns_of_the_first_view() -> None:
    net, x = nn.Sequential(nn.Flatten(), nn.Linear(4, 12)), torch.rand(5, 1, 2, 2)
    parts = split(net, x)
    state = torch.get_rng_state()
    assert torch.allclose(parts.upright(4)(x), net(x)[:, ::4])
    assert torch.equal(state, torch.get_rng_state())
    assert net[1].out_features == 12
    with pytest.raises(ValueError, match="5 views"):
        parts.upright(5)


def test_shared_copy_owns_buffers_and_what_is_named_and_shares_the_rest() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    copy = shared_copy(net, {"1.weight"})

    def shares(name: str) -> bool:
        return bool(copy.state_dict()[name].data_ptr() == net.state_dict()[name].data_ptr())

    assert [name for name in net.state_dict() if not shares(name)] == [
        "1.weight",
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    ]
    assert [name for name, p in copy.named_parameters() if p.requires_grad] == ["1.weight"]
    assert all(p.requires_grad for p in net.parameters())


def test_adapting_costs_the_memory_of_what_adapts() -> None:
    net = ResNet(4, in_channels=1, widths=(8, 16), blocks=(2, 2))
    tent = ttvd.create("tent", net)
    theirs = {p.data_ptr() for p in net.parameters()}
    own = sum(p.numel() for p in tent.parameters() if p.data_ptr() not in theirs)
    affine = sum(p.numel() for m in net.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters())
    assert own == affine


def test_a_model_that_writes_to_its_buffers_stays_as_it_is() -> None:
    class Counting(nn.Module):
        calls: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.fc(input=x.flatten(1))  # type: ignore[no-any-return]

    net = Counting()
    adapter = ttvd.create("t3a", net)
    adapter(torch.rand(4, 1, 2, 2))
    adapter.predict(torch.rand(4, 1, 2, 2))
    assert net.calls == 0


def test_a_data_parallel_wrapper_is_taken_off() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    wrapped = nn.DataParallel(net)  # moves the net to a GPU where there is one
    x = torch.rand(6, 1, 2, 2).to(next(net.parameters()).device)
    for name in ("source", "tent", "t3a"):
        assert torch.equal(ttvd.create(name, wrapped)(x), ttvd.create(name, net)(x))


def test_a_head_with_two_names_is_replaced_under_both() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 3)
            self.alias = self.first

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.alias(x.flatten(1))  # type: ignore[no-any-return]

    wide = split(Twice()).augmented(4)
    assert wide(torch.rand(2, 1, 2, 2)).shape == (2, 12)
    assert wide.features(torch.rand(2, 1, 2, 2)).shape == (2, 4)


def test_logits_of_a_half_precision_head_are_computed_in_full() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(64, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.fc(x.flatten(1))  # type: ignore[no-any-return]

    net, x = Half(), torch.rand(8, 1, 8, 8)
    z, logits = split(net).features_and_logits(x)
    assert net(x).dtype == torch.bfloat16
    assert torch.allclose(logits, net.fc(x.flatten(1)), atol=1e-5)
    assert torch.equal(z, x.flatten(1))
