import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ttvd.geometry import Diagram, point_scores, view_scores
from ttvd.nn.fingerprint import fingerprint
from ttvd.nn.split import SplitModel, split
from ttvd.nn.views import rotate
from ttvd.source.calibration import calibrate, fit_temperature
from ttvd.source.features import choose_rows
from ttvd.source.sites import estimate_sites
from ttvd.zoo.sites import Sites


def noisy_scores(seed: int, n: int = 200, k: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, k, (n,), generator=generator)
    scores = torch.randn(n, k, generator=generator) + 1.5 * F.one_hot(labels, k)
    return scores, labels


def nll(scores: Tensor, labels: Tensor, tau: float) -> float:
    return F.cross_entropy(scores.double() / tau, labels).item()


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000), exponent=st.integers(-12, 12))
def test_fit_beats_a_fine_grid_at_any_scale(seed: int, exponent: int) -> None:
    scores, labels = noisy_scores(seed)
    scores = scores.double() * 10.0**exponent
    tau = fit_temperature(scores, labels)
    grid = [tau * math.exp(step) for step in torch.linspace(-0.2, 0.2, 81).tolist()]
    values = [nll(scores, labels, value) for value in grid]
    assert nll(scores, labels, tau) <= min(values) + 1e-12
    assert abs(grid[values.index(min(values))] / tau - 1) < 0.006  # the grid's own spacing


def test_fit_scales_with_the_scores_and_ignores_row_shifts() -> None:
    scores, labels = noisy_scores(0)
    tau = fit_temperature(scores, labels)
    assert fit_temperature(scores.double() * 7, labels) == pytest.approx(7 * tau, rel=1e-6)
    assert fit_temperature(scores.double() + 1e3 * torch.rand(200, 1), labels) == pytest.approx(tau, rel=1e-6)
    assert fit_temperature(scores, labels) == tau


def test_fit_recovers_the_temperature_that_made_the_labels() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(20_000, 4, generator=generator)
    labels = torch.multinomial(F.softmax(scores / 0.3, 1), 1, generator=generator)[:, 0]
    assert fit_temperature(scores, labels) == pytest.approx(0.3, rel=0.05)


@pytest.mark.parametrize(("count", "scale"), [(3, 1e-3), (200, 1.0), (200, 50.0)])
def test_where_all_are_right_the_next_may_still_be_wrong(count: int, scale: float) -> None:
    """Rule of succession: n of n right promise (n + 1) / (n + 2) for the next one."""
    labels = torch.arange(count) % 3
    scores = scale * (torch.rand(count, 3) + 1.5 * F.one_hot(labels, 3))
    confidences = F.softmax(scores.double() / fit_temperature(scores, labels), 1).gather(1, labels[:, None])
    assert confidences.mean().item() == pytest.approx((count + 1) / (count + 2), rel=1e-9)


def test_degenerate_scores_are_refused() -> None:
    scores, labels = noisy_scores(0)
    shared = F.one_hot(labels, 5) + F.one_hot((labels + 1) % 5, 5)
    with pytest.raises(ValueError, match="share the highest score with others"):
        fit_temperature(shared.float(), labels)
    for useless in (-F.one_hot(labels, 5).float(), torch.zeros(200, 5)):
        with pytest.raises(ValueError, match="do not favour the true classes"):
            fit_temperature(useless, labels)
    with pytest.raises(ValueError, match="not finite"):
        fit_temperature(scores.where(scores < 1, torch.nan), labels)
    with pytest.raises(
        ValueError, match=r"expected scores \(n, k\) and labels \(n,\), got \(200, 5\) and \(3,\)"
    ):
        fit_temperature(scores, labels[:3])
    with pytest.raises(ValueError, match="labels must run from 0 to 4"):
        fit_temperature(scores, labels + 1)


def make_world(
    outputs: int = 12, bias: bool = True, views: int = 4
) -> tuple[SplitModel, Sites, tuple[Tensor, Tensor]]:
    """A linear classifier of noisy patterns, imperfect in every structure."""
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, outputs, bias=bias))
    for parameter in net.parameters():
        nn.init.normal_(parameter, 0, 0.5, generator=generator)
    model = split(net)
    labels = torch.arange(240) % 3
    patterns = torch.rand(3, 1, 4, 4, generator=generator)
    images = 0.35 * patterns[labels] + 0.65 * torch.rand(240, 1, 4, 4, generator=generator)
    sites = estimate_sites(model, (images[:120], labels[:120]), views=views)
    head = sites.means.reshape(-1, 6).float() if outputs == 3 * views else sites.means[:, 0].float()
    with (
        torch.no_grad()
    ):  # a head that knows the classes, but not so well that a temperature cannot be fitted
        model.linear.weight.copy_(4 * head + 0.1 * torch.randn(head.shape, generator=generator))
    return (
        model,
        estimate_sites(model, (images[:120], labels[:120]), views=views),
        (images[120:], labels[120:]),
    )


@pytest.mark.parametrize("bias", [True, False])
def test_calibrate_fits_every_structure(bias: bool) -> None:
    model, sites, (images, labels) = make_world(bias=bias)
    found = calibrate(model, sites, (images, labels), gammas=(-0.8, 1.0), batch_size=50)
    assert set(found.temperatures) == {"vd", "pd", "civd@-0.8", "civd@1", "cipd@-0.8", "cipd@1"}
    with torch.no_grad():
        z = model.features(rotate(images, 4)).view(4, len(images), -1)
        weight, offset = model.linear.weight, model.linear.bias if bias else None
        joint = Diagram.from_linear(weight, offset, views=4)
        upright = model.head(z[0])[:, ::4]
    expected = {
        "vd": point_scores(z[0], sites.diagram(1), 1.0),
        "pd": upright,  # by the Lemma the head's power diagram is its softmax
        "civd@-0.8": view_scores(z, sites.diagram(), -0.8),
        "cipd@-0.8": view_scores(z, joint, -0.8),
    }
    for key, scores in expected.items():
        assert found.temperatures[key] == pytest.approx(fit_temperature(scores, labels), rel=1e-3), key
    assert torch.equal(found.means, sites.means)
    assert dict(sites.temperatures) == {}


def test_a_plain_head_knows_the_upright_view_alone() -> None:
    model, sites, (images, labels) = make_world(outputs=3)
    found = calibrate(model, sites, (images, labels), structures=("pd", "cipd"), gammas=(1.0,))
    with torch.no_grad():
        tau = fit_temperature(model(images), labels)
    assert found.temperature("pd") == pytest.approx(tau, rel=1e-3)
    assert found.temperature("cipd", 1.0) == pytest.approx(tau, rel=1e-3)


def test_one_view_makes_the_cluster_diagram_the_plain_one() -> None:
    model, sites, data = make_world(outputs=3, views=1)
    found = calibrate(model, sites, data, structures=("vd", "civd"), gammas=(1.0,))
    assert found.temperature("civd", 1.0) == pytest.approx(found.temperature("vd"), rel=1e-6)


def test_calibrate_keeps_what_was_there_and_says_what_fails() -> None:
    model, sites, data = make_world()
    known = sites.with_temperatures({"pd": 9.0})
    found = calibrate(model, known, data, structures=("vd",))
    assert found.temperature("pd") == 9.0
    with pytest.raises(ValueError, match="structure must be one of"):
        calibrate(model, sites, data, structures=("svm",))
    with pytest.raises(ValueError, match="its weights differ"):
        calibrate(model, replace(sites, fingerprint="x"), data)
    with pytest.raises(ValueError, match="no images to calibrate on"):
        calibrate(model, sites, [])
    wrong = (data[0], (data[1] + 1) % 3)
    with pytest.raises(ValueError, match="cannot calibrate 'vd': no temperature fits"):
        calibrate(model, sites, wrong, structures=("vd",))


def test_a_structure_that_no_temperature_fits_does_not_cost_the_others() -> None:
    """Sites that lie elsewhere say nothing about the classes, while the head knows them."""
    model, sites, data = make_world()
    lost = replace(sites, means=sites.means.roll(1, 0))
    with pytest.warns(UserWarning, match="cannot calibrate 'vd': .*; the other temperatures are kept"):
        found = calibrate(model, lost, data, structures=("vd", "pd"))
    assert found.temperatures == calibrate(model, sites, data, structures=("pd",)).temperatures


def make_normed_world(views: int = 4) -> tuple[SplitModel, Sites, tuple[Tensor, Tensor]]:
    """The same with norms, whose stored statistics are not those of the data."""
    model, _, (images, labels) = make_world(3 * views, views=views)
    layers = [nn.BatchNorm2d(1), *model.model.children()]
    layers[3:3] = [nn.BatchNorm1d(6), nn.BatchNorm1d(6, affine=False)]
    normed = split(nn.Sequential(*layers))
    return normed, estimate_sites(normed, (images, labels), views=views), (images, labels)


@pytest.mark.parametrize("form", ["tensors", "dataset", "batches"])
@pytest.mark.parametrize("views", [1, 4])
def test_calibrate_measures_what_enters_the_norms(form: str, views: int) -> None:
    model, sites, (images, labels) = make_normed_world(views)
    forms: dict[str, Any] = {"tensors": (images, labels), "dataset": TensorDataset(images, labels)}
    forms["batches"] = [*zip(images.split(50), labels.split(50), strict=True)]
    entered: list[Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _, inputs, __: entered.append(inputs[0]))
        for layer in (model.model[0], model.model[3])  # type: ignore[index]
    ]
    with torch.no_grad():
        model.eval()(torch.cat([torch.rot90(images, turn, (2, 3)) for turn in range(views)]))
    for hook in hooks:
        hook.remove()
    columns = [x.double().movedim(1, -1).flatten(0, -2) for x in entered]
    model.train()
    before = fingerprint(model)
    found = calibrate(model, sites, forms[form], structures=("vd",), batch_size=37)
    assert set(found.anchors) == {1, views}
    for count, anchors in found.anchors.items():
        seen = [x[: len(x) * count // views] for x in columns]  # the upright images are forwarded first
        means = torch.cat([x.mean(0) for x in seen])
        torch.testing.assert_close(anchors.means, means, rtol=1e-5, atol=1e-6)
        variances = torch.cat([x.var(0, correction=0) for x in seen])
        torch.testing.assert_close(anchors.variances, variances, rtol=1e-5, atol=1e-7)
    assert sites.anchors == {}
    assert fingerprint(model) == before
    assert all(layer.training and not layer._forward_pre_hooks for layer in model.modules())


def test_calibrate_measures_anchors_anew_and_of_the_images_it_uses() -> None:
    model, sites, (images, labels) = make_normed_world()
    batches = [*zip(images.split(60), labels.split(60), strict=True)]
    first = calibrate(model, sites, batches[:1], structures=("vd",))
    again = calibrate(model, first, batches, structures=("vd",), limit=60)
    other = calibrate(model, again, batches[1:], structures=())
    for views in (1, 4):
        assert torch.equal(again.anchors[views].means, first.anchors[views].means)
        assert not torch.equal(other.anchors[views].means, first.anchors[views].means)
    assert other.temperatures == again.temperatures


def test_a_model_without_norms_has_no_anchors() -> None:
    model, sites, data = make_world()
    assert calibrate(model, sites, data, structures=("vd",)).anchors == {}


def lose_rotations(model: SplitModel, images: Tensor, views: int = 4) -> float:
    """The mean of -log p(rotation a) of the views a, one view of one image at a time."""
    total = 0.0
    for image in images:
        for a in range(views):
            with torch.no_grad():
                row = model(torch.rot90(image, a * 4 // views, (1, 2))[None])[0].double().exp().tolist()
            total -= math.log(sum(row[a::views]) / sum(row))
    return total / (views * len(images))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("views", [2, 4])
def test_calibrate_measures_the_loss_of_rotations(views: int, bias: bool) -> None:
    """Whatever else it is asked for, and however the images are cut into batches; it keeps no graph of them."""
    model, sites, (images, labels) = make_world(3 * views, bias, views)
    wanted = lose_rotations(model, images, views)
    saved: list[Tensor] = []
    for size in (1, 37, 256):
        with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda _: torch.zeros(0)):
            found = calibrate(model, sites, (images, labels), structures=(), batch_size=size)
        assert found.rotation_loss == pytest.approx(wanted, rel=1e-5)
        assert type(found.rotation_loss) is float
    batches = [*zip(images.split(50), labels.split(50), strict=True)]
    assert calibrate(model, sites, batches, structures=("vd",)).rotation_loss == pytest.approx(
        wanted, rel=1e-5
    )
    assert sites.rotation_loss is None
    assert saved == []


def test_the_loss_of_rotations_is_measured_anew_and_of_the_images_that_are_used() -> None:
    model, sites, (images, labels) = make_world()
    batches = [*zip(images.split(30), labels.split(30), strict=True)]
    old = replace(sites, rotation_loss=9.0)
    first = calibrate(model, old, batches, structures=(), limit=30)
    assert first.rotation_loss == pytest.approx(lose_rotations(model, images[:30]), rel=1e-5)
    assert first.rotation_loss != pytest.approx(lose_rotations(model, images), rel=1e-3)
    rows = choose_rows((images, labels), 1.0, 33, 0, 3)
    assert rows is not None
    assert len(rows) == 33
    some = calibrate(model, first, (images, labels), structures=(), limit=33, batch_size=8)
    assert some.rotation_loss == pytest.approx(lose_rotations(model, images[rows]), rel=1e-5)
    assert some.with_temperatures({"vd": 1.0}).rotation_loss == some.rotation_loss


@pytest.mark.parametrize("views", [1, 4])
def test_a_plain_head_has_no_loss_of_rotations(views: int) -> None:
    model, sites, data = make_world(outputs=3, views=views)
    found = calibrate(model, replace(sites, rotation_loss=0.5), data, structures=("vd",))
    assert found.rotation_loss is None


def test_the_rotation_loss_of_a_head_that_is_sure_is_nothing_and_not_less() -> None:
    """Rounding makes a sum of probabilities a little more than 1."""
    torch.manual_seed(0)
    head = nn.Linear(64, 12)
    net, places = nn.Sequential(nn.Flatten(), head), [0, 56, 63, 7]  # where turns take the first pixel
    with torch.no_grad():
        head.weight.normal_(0, 0.3)
        head.bias.zero_()
        for turn, place in enumerate(places):
            head.weight[:, place] = 0.0
            head.weight[turn::4, place] = 60.0
    images = torch.rand(300, 1, 8, 8)
    images.flatten(1)[:, places] = torch.tensor([1.0, 0.0, 0.0, 0.0])
    data = images, net(images)[:, ::4].argmax(1)
    found = calibrate(net, estimate_sites(net, data), data, structures=())
    assert found.rotation_loss == 0.0


@pytest.mark.parametrize("outputs", [3, 12])
@pytest.mark.parametrize("size", [1, 37, 256])
def test_calibrate_measures_accuracy_and_what_mirrored_images_add(outputs: int, size: int) -> None:
    model, sites, (images, labels) = make_world(outputs)
    found = calibrate(model, sites, (images, labels), structures=("pd",), batch_size=size)
    with torch.no_grad():
        upright = model(images)[:, :: outputs // 3]
        averaged = (upright + model(images.flip(3))[:, :: outputs // 3]) / 2
    right, right_averaged = (
        (scores.argmax(1) == labels).double().mean().item() for scores in (upright, averaged)
    )
    assert found.accuracy == pytest.approx(right, abs=1e-12)
    assert found.mirror_gain == pytest.approx(right_averaged - right, abs=1e-12)
    assert found.mirror_gain != 0
    assert (sites.accuracy, sites.mirror_gain) == (None, None)
    if outputs == 3:
        assert found.temperatures["pd+mirror"] == pytest.approx(fit_temperature(averaged, labels), rel=1e-5)
    else:
        assert set(found.temperatures) == {"pd"}


def test_mirrored_images_do_not_enter_the_anchors() -> None:
    """Images that are darker on one side show their norms other means when they are mirrored."""
    net = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()
    images = torch.tensor([[0.9, 0.1, 0.8, 0.0], [0.1, 0.7, 0.3, 0.2]]).view(2, 1, 2, 2).repeat(8, 1, 1, 1)
    data = images, torch.arange(16) % 2
    sites = estimate_sites(net, data, views=1)
    found = calibrate(net, sites, data, structures=())
    torch.testing.assert_close(found.anchors[1].means, images.flatten(1).mean(0).double())
