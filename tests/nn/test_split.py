from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ttvd
from ttvd.nn.resnet import ResNet
from ttvd.nn.split import evaluating, shared_copy, split, with_linear_head


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
    with pytest.raises(ValueError, match=r"Write model = ttvd.split\(model, head='classify'\)"):
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
        (Scaled(), "does not map features z to the logits.*Pass head=.*linear layers are: fc"),
        (nn.Sequential(nn.Flatten(), nn.ReLU()), "no nn.Linear.*Pass head="),
        (nn.Sequential(nn.Conv2d(1, 3, 1)), "no nn.Linear.*Pass head="),  # it does not average over positions
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
    with pytest.raises(ValueError, match=r"'coarse' does not map.*The head is 'fine'"):
        split(net, x, head="coarse")
    with pytest.raises(ValueError, match=r"The head is 'fine'. Write model = ttvd.split"):
        split(net).features(x)  # the last one registered, until it is used


class Mixed(nn.Module):
    """Averages two heads, as distilled transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.head_dist = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = x.flatten(1)
        return (self.head(z) + self.head_dist(z.flip(1))) / 2  # type: ignore[no-any-return]


def test_a_mix_of_heads_is_refused_and_the_heads_are_named() -> None:
    for example in (None, torch.rand(2, 1, 2, 2)):
        with pytest.raises(ValueError, match=r"'head' and 'head_dist' have as many.*Wrap the model"):
            split(Mixed(), example).features(torch.rand(2, 1, 2, 2))


def do_as_told(error: Exception, model: nn.Module, images: Tensor) -> Any:
    """Run the line of a message, and return the model."""
    names = {"model": model, "images": images}
    exec(str(error).split("Write ")[1], names)  # noqa: S102 - our own message
    return names["model"]


class ConvHead(nn.Module):
    """A 1 x 1 convolution as head, with the average over positions before or after it."""

    def __init__(self, after: str, bias: bool = True) -> None:
        super().__init__()
        self.stem, self.classify = nn.Conv2d(1, 5, 3), nn.Conv2d(5, 3, 1, bias=bias)
        self.gate, self.after = (
            nn.Linear(5, 5),
            after,
        )  # a linear layer that is no head, as in squeeze-and-excitation

    def forward(self, x: Tensor) -> Tensor:
        maps = self.stem(x)
        maps = maps * self.gate(maps.mean((2, 3))).sigmoid()[:, :, None, None]
        if self.after == "pool":
            return self.classify(maps).mean((2, 3))  # type: ignore[no-any-return]
        if self.after == "relu":
            return self.classify(maps).relu().mean((2, 3))  # type: ignore[no-any-return]
        return self.classify(maps.mean((2, 3), keepdim=True)).flatten(1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("after", ["pool", "nothing"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_head_of_convolutions_becomes_a_linear_one_by_the_line_in_the_message(
    after: str, bias: bool
) -> None:
    net, images = ConvHead(after, bias), torch.rand(6, 1, 6, 6)
    with pytest.raises(ValueError, match="is a 1 x 1 convolution") as info:
        split(net, images)
    model = do_as_told(info.value, net, images)
    torch.testing.assert_close(model(images), net(images))
    parts = split(model, images)
    assert parts.head_name == "classify.2"
    torch.testing.assert_close(parts.head(parts.features(images)), net(images))
    assert isinstance(net.classify, nn.Conv2d)


def test_what_is_no_linear_head_is_not_made_one() -> None:
    net, images = ConvHead("relu"), torch.rand(2, 1, 6, 6)
    with pytest.raises(ValueError, match="computes something else"):
        with_linear_head(net, "classify", images)
    with pytest.raises(ValueError, match="'stem' is no 1 x 1 convolution"):
        with_linear_head(net, "stem", images)
    with pytest.raises(ValueError, match=r"with_linear_head.*'1'"):
        split(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()))


class Cosine(nn.Linear):
    def forward(self, z: Tensor) -> Tensor:
        return 16 * F.linear(F.normalize(z), F.normalize(self.weight))


def test_a_cosine_head_becomes_a_linear_one_by_the_line_in_the_message() -> None:
    """Its own forward is not W z + b, so its weights are not the sites of the logits."""
    images = torch.rand(6, 1, 2, 2)
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.ReLU(), Cosine(5, 3, bias=False))
    expected = net(images)
    with pytest.raises(ValueError, match=r"cosine head of scale 16.*Write ") as info:
        split(net, images)
    do_as_told(info.value, net, images)
    torch.testing.assert_close(net(images), expected)
    parts = split(net, images)
    assert parts.head_name == "3.1"
    z = parts.features(images)
    torch.testing.assert_close(F.linear(z, parts.linear.weight), expected)
    torch.testing.assert_close(z.norm(dim=1), torch.full((6,), 16.0))


def test_of_a_head_of_several_layers_the_last_one_counts() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.GELU(), nn.Dropout(), nn.Linear(8, 3)).train()
    assert split(net, torch.rand(2, 1, 2, 2)).head_name == "4"


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
