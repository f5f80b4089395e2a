"""What reaches an adapter from outside: inputs, states, parameters, devices."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ttvd
from ttvd.nn.fingerprint import fingerprint
from ttvd.nn.resnet import ResNet


def make_net(outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, outputs)
    )


def images(b: int = 4) -> Tensor:
    return torch.rand(b, 1, 8, 8, generator=torch.Generator().manual_seed(b))


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        (images() * 255, ValueError, "0..255 images by 255"),
        ((images() * 255).byte(), TypeError, r"x.float\(\) / 255"),
        (images() - 0.5, ValueError, r"\[0, 1\]"),
        (images().double(), TypeError, r"x.to\(torch.float32\)"),
        (images()[:0], ValueError, "b >= 1"),
        (images()[0, 0, 0], ValueError, r"batch \(b, ...\)"),
        (images().numpy(), TypeError, "torch.as_tensor"),
        (images().to("meta"), ValueError, "the model is on cpu"),
    ],
)
@pytest.mark.parametrize("name", ["tent", "bn", "t3a"])
def test_batches_that_cannot_be_meant(name: str, batch: Tensor, error: type[Exception], message: str) -> None:
    adapter = ttvd.create(name, make_net())
    adapter(images())
    before = adapter.snapshot()
    with pytest.raises(error, match=message):
        adapter(batch)
    assert all(torch.equal(before[key], value) for key, value in adapter.snapshot().items())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_pixels_are_named_by_sample(value: float) -> None:
    batch = images().clone()
    batch[2, 0, 1, 1] = value
    with pytest.raises(ValueError, match=r"samples \[2\]"):
        ttvd.create("tent", make_net())(batch)


def test_values_can_be_left_unchecked_and_still_do_no_harm() -> None:
    adapter, clean = ttvd.create("tent", make_net()), ttvd.create("tent", make_net())
    adapter.validation = "never"
    adapter(images() * float("nan"))
    assert torch.equal(adapter(images()), clean(images()))


def test_a_word_that_means_nothing_does_not_switch_checks_off() -> None:
    adapter = ttvd.create("tent", make_net())
    adapter.validation = "sometimes"  # type: ignore[assignment]
    with pytest.raises(ValueError, match="must be 'auto', 'always' or 'never', got 'sometimes'"):
        adapter(images())


def test_what_is_no_model_and_no_batch_is_refused() -> None:
    net = make_net()
    with pytest.raises(
        TypeError, match=r"expected a model, a torch.nn.Module, as the first argument; got int"
    ):
        ttvd.create("tent", 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got tuple; pass the images of a batch as one tensor"):
        ttvd.create("tent", net)((images(), torch.zeros(4)))


def test_a_state_that_is_not_finite_is_refused() -> None:
    adapter = ttvd.create("tent", make_net())
    adapter(images())
    before = {name: value.clone() for name, value in adapter.state_dict().items()}
    name = next(name for name, p in adapter.named_parameters() if p.requires_grad)
    with pytest.raises(ValueError, match=f"NaN or infinite values in '{name}'"):
        adapter.load_state_dict(before | {name: before[name] * float("nan")})
    assert all(torch.equal(value, before[key]) for key, value in adapter.state_dict().items())


def test_autocast_is_welcome() -> None:
    adapter = ttvd.create("tent", make_net())
    with torch.autocast("cpu", torch.bfloat16):
        out = adapter(images())
    assert out.isfinite().all()
    assert all(value.dtype == torch.float32 for value in adapter.snapshot().values())


def test_inputs_that_are_no_images() -> None:
    net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    assert ttvd.create("tent", net)(torch.randn(6, 5) * 100).shape == (6, 3)


def test_a_foreign_state_is_refused_and_changes_nothing() -> None:
    tent, other = ttvd.create("tent", make_net()), ttvd.create("tent", make_net(), optimizer="sgd")
    before = tent.snapshot()
    with pytest.raises(ValueError, match="same model, method and parameters"):
        tent.load_state_dict(other.state_dict())
    assert all(torch.equal(before[key], value) for key, value in tent.snapshot().items())


def test_state_dict_holds_what_changes_and_nothing_else() -> None:
    adapter = ttvd.create("tent", make_net())
    names = set(adapter.state_dict())
    assert names == set(adapter.snapshot())
    assert {name for name in names if name.startswith("model.")} == {"model.1.weight", "model.1.bias"}
    nested = nn.ModuleDict({"inner": adapter})
    assert set(nested.state_dict()) == {f"inner.{name}" for name in names}


def test_moving_the_adapter_moves_what_reset_needs() -> None:
    adapter = ttvd.create("tent", make_net())
    first = adapter(images())
    adapter.double()
    adapter.reset()
    assert torch.allclose(adapter(images().double()), first.double(), atol=1e-5)


def test_building_inside_inference_mode_says_what_to_do() -> None:
    with torch.inference_mode(), pytest.raises(RuntimeError, match="outside"):
        ttvd.create("tent", make_net())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "steps"),
        ({"prediction": "during"}, "'before' or 'after'"),
        ({"lr": -1.0}, "lr"),
        ({"optimizer": "rmsprop"}, "'sgd' or 'adam'"),
        ({"learning_rate": 1.0}, "no parameter 'learning_rate'"),
        ({"step": 2}, "did you mean 'steps'"),
    ],
)
def test_parameters_are_checked_before_the_first_batch(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ttvd.create("tent", make_net(), **arguments)


def test_misspelt_method() -> None:
    with pytest.raises(ValueError, match="did you mean tent"):
        ttvd.create("tentt", make_net())


def test_a_name_is_registered_once() -> None:
    method = ttvd.list_methods()["tent"]
    add = ttvd.register("tent", summary="", paper="", updates="", forwards=1, backwards=1)
    with pytest.raises(ValueError, match="registered already"):
        add(method.adapter)


def test_more_steps_go_further_and_after_differs_from_before() -> None:
    one, two = ttvd.create("tent", make_net(), lr=0.1), ttvd.create("tent", make_net(), lr=0.1, steps=2)
    after = ttvd.create("tent", make_net(), lr=0.1, prediction="after")
    first = one(images())
    assert torch.equal(after(images()), two(images()))
    assert not torch.equal(first, two(images()))


def test_a_state_loads_as_a_part_of_a_larger_module() -> None:
    first, second = (nn.ModuleDict({"a": ttvd.create("tent", make_net(), lr=0.1)}) for _ in range(2))
    first["a"](images())
    second.load_state_dict(first.state_dict())
    fresh = ttvd.create("tent", make_net(), lr=0.1)(images())
    assert torch.equal(first["a"](images()), second["a"](images()))
    second["a"].reset()  # type: ignore[operator]
    assert torch.equal(second["a"](images()), fresh)


def test_usual_lines_of_deployment_do_no_harm() -> None:
    adapter, expected = ttvd.create("tent", make_net()), ttvd.create("tent", make_net())
    adapter.requires_grad_(False).eval()
    assert torch.equal(adapter(images()), expected(images()))
    assert set(adapter.state_dict()) == set(expected.state_dict())


def test_one_autocast_block_around_a_stream_sees_every_update() -> None:
    one, many = (ttvd.create("shot", make_net(), lr=0.1, prediction="after") for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        together = [one(images()) for _ in range(3)]
    apart = []
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            apart.append(many(images()))
    assert all(torch.equal(a, b) for a, b in zip(together, apart, strict=True))


def test_half_precision_weights_are_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"torch\.autocast"):
        ttvd.create("tent", make_net().bfloat16())


def test_models_that_return_no_logits_are_refused() -> None:
    maps = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
    with pytest.raises(ValueError, match=r"\(b, k\), got \(2, 4, 6, 6\)"):
        ttvd.create("tent", maps)(images())


def test_statistics_must_be_statistics() -> None:
    with pytest.raises(TypeError, match=r"Statistics\.parse"):
        ttvd.create("tent", make_net(), statistics="batch")


class TestSites:
    """Methods with sites refuse what does not fit."""

    def sites(self, net: nn.Module, classes: int = 3, dim: int = 144) -> ttvd.Sites:
        means = torch.randn(classes, 4, dim, generator=torch.Generator().manual_seed(0)).double()
        return ttvd.Sites(
            means, torch.ones(classes, 4).long(), fingerprint(net), temperatures={"cipd@1": 4.0}
        )

    def test_missing(self) -> None:
        with pytest.raises(ValueError, match="ttvd needs sites"):
            ttvd.create("ttvd", make_net())

    def test_of_another_model(self) -> None:
        net = make_net(12)
        sites = self.sites(net)
        next(net.parameters()).data.add_(1.0)
        with pytest.raises(ValueError, match="weights differ"):
            ttvd.TTVD(net, sites)

    def test_of_another_number_of_classes_or_dimensions(self) -> None:
        net = make_net(12)
        with pytest.raises(ValueError, match="5 classes"):
            ttvd.TTVD(net, self.sites(net, classes=5))
        with pytest.raises(ValueError, match="7 dimensions"):
            ttvd.TTVD(net, self.sites(net, dim=7))

    def test_without_a_temperature(self) -> None:
        net = make_net(12)
        with pytest.raises(ValueError, match=r"civd@-0.8.*calibrate"):
            ttvd.create("civd", net, sites=self.sites(net))
        assert ttvd.create("civd", net, sites=self.sites(net), tau=0.1)(images()).shape == (4, 3)

    def test_images_that_are_not_square(self) -> None:
        net = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(6), nn.Flatten(), nn.Linear(144, 12)
        )
        with pytest.raises(ValueError, match="square"):
            ttvd.TTVD(net, self.sites(net))(torch.rand(2, 1, 8, 10))

    @pytest.mark.parametrize(("key", "value"), [("structure", "xyz"), ("objective", "xyz"), ("tau", 0.0)])
    def test_impossible_parameters(self, key: str, value: object) -> None:
        net = make_net(12)
        with pytest.raises(ValueError, match=key):
            ttvd.create("ttvd", net, sites=self.sites(net), **{key: value})

    def test_a_head_without_bias_and_a_single_class(self) -> None:
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 4, bias=False))
        out = ttvd.TTVD(net, self.sites(net, classes=1, dim=8), prior=None)(images())
        assert out.shape == (4, 1)
        assert out.isfinite().all()


def test_skipped_layers_do_not_adapt() -> None:
    net = ResNet(3, in_channels=1, widths=(8, 8), blocks=(1, 1))
    sar = ttvd.create("sar", net, skip=("stages.1",))
    assert isinstance(sar, ttvd.GradientAdapter)
    assert len(sar.adapting()) == 6
    assert sar.optimizer.size == 48
