"""``ttvd.prepare``: sites and calibration in one call, and what it refuses."""

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import ttvd
from ttvd.data.sets import ImageSet
from ttvd.nn.fingerprint import fingerprint
from ttvd.source import calibrate, estimate_sites, fit_temperature
from ttvd.source.distort import KEPT_RIGHT, ImageSample, distort, find_strength


class Signs(nn.Module):
    """Features that tell dark from bright: it needs images around 0."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(20 * x)


def make_patterns(classes: int) -> Tensor:
    return torch.randint(0, 2, (classes, 3, 6, 6), generator=torch.Generator().manual_seed(7)).float()


def make_data(count: int, classes: int = 4, seed: int = 0, noise: float = 0.85) -> tuple[Tensor, Tensor]:
    """Noisy images of fixed binary patterns, one for each class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randperm(count, generator=generator) % classes
    images = (1 - noise) * make_patterns(classes)[labels]
    return images + noise * torch.rand(count, 3, 6, 6, generator=generator), labels


def make_core(classes: int = 4) -> nn.Sequential:
    """A classifier by the nearest pattern, of images that are normalised around 0."""
    head = nn.Linear(108, classes)
    with torch.no_grad():
        head.weight.copy_((2 * make_patterns(classes) - 1).flatten(1) / 10)
        head.bias.zero_()
    return nn.Sequential(Signs(), nn.BatchNorm2d(3), nn.Flatten(), head).eval()


def make_model(classes: int = 4, centre: float = 0.5) -> nn.Sequential:
    return nn.Sequential(ttvd.Normalize(3, (centre,), (centre,)), *make_core(classes)).eval()


def test_prepare_is_sites_and_calibration_in_one_call() -> None:
    model, data, held_out = make_model(), make_data(80), make_data(100, seed=1)
    before = fingerprint(model)
    sites = ttvd.prepare(model, data, held_out)
    expected = calibrate(model, estimate_sites(model, data), held_out)
    assert torch.equal(sites.means, expected.means)
    assert sites.temperatures == expected.temperatures
    assert (sites.accuracy, sites.mirror_gain) == (expected.accuracy, expected.mirror_gain)
    assert expected.accuracy is not None
    assert 0.5 < expected.accuracy < 0.99
    assert fingerprint(model) == before
    ttvd.TTVD(model, sites)(held_out[0][:8])


class Pairs(Dataset[tuple[Tensor, int]]):
    """A dataset without a list of its labels, which counts how often it is read."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self._pairs, self.reads = [*zip(images, labels.tolist(), strict=True)], 0

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.reads += 1
        return self._pairs[index]


def read_once(images: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    yield from zip(images.split(30), labels.split(30), strict=True)


FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tensors": lambda x, y: (x, y),
    "uint8": lambda x, y: ((255 * x).round().to(torch.uint8), y),
    "set": lambda x, y: ImageSet(
        (255 * x).round().to(torch.uint8), y, tuple(map(str, range(int(y.max()) + 1))), "set"
    ),
    "dataset": TensorDataset,
    "pairs": Pairs,
    "loader": lambda x, y: DataLoader(TensorDataset(x, y), batch_size=30),
    "generator": read_once,
}


@pytest.mark.parametrize("form", FORMS)
def test_one_image_in_five_is_kept_from_the_sites(form: str) -> None:
    images, labels = make_data(200)
    sites = ttvd.prepare(make_model(), FORMS[form](images, labels), views=1)
    counts = sites.counts[:, 0]
    assert counts.min() >= 30
    if form in ("loader", "generator"):  # the labels are not known ahead, so the classes differ by chance
        assert 140 <= counts.sum() <= 180
    else:
        assert counts.tolist() == [40] * 4
    assert {"vd", "pd", "cipd@1"} <= sites.temperatures.keys()


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_of_held_out_data_are_used_whole(form: str) -> None:
    data, (images, labels) = make_data(80), make_data(100, seed=1)
    wanted = ttvd.prepare(make_model(), data, (images, labels), views=1)
    sites = ttvd.prepare(make_model(), data, FORMS[form](images, labels), views=1)
    assert sites.accuracy == wanted.accuracy
    assert sites.temperature("pd") == pytest.approx(wanted.temperature("pd"), rel=0.02)  # 8 bits round


def test_sites_of_a_fraction() -> None:
    sites = ttvd.prepare(make_model(), make_data(200), make_data(50, seed=1), views=1, fraction=0.2)
    assert sites.counts.flatten().tolist() == [10] * 4
    assert sites.fraction == 0.2
    refuse("needs fraction=1", FORMS["loader"](*make_data(40)), fraction=0.5)


def test_a_dataset_is_read_once_for_its_labels() -> None:
    data = Pairs(*make_data(100))
    ttvd.prepare(make_model(), data, views=1, trained_on=False)
    assert data.reads <= 3 * len(data)  # labels, trial, features


@pytest.mark.parametrize("classes", [2, 40])
@pytest.mark.parametrize("each", [1, 2, 3])
def test_few_images_a_class_are_enough(classes: int, each: int) -> None:
    model, data = make_model(classes), make_data(classes * each, classes, noise=0.5)
    sites = ttvd.prepare(model, data, views=1)
    assert sites.num_classes == classes
    assert sites.counts.min() >= 1
    if each == 1:
        assert sites.counts.sum() == classes
    adapter = ttvd.TTVD(model, sites)
    assert adapter(data[0][:2]).shape == (2, classes)


def test_two_classes_and_many() -> None:
    for classes in (2, 500):
        model = make_model(classes)
        sites = ttvd.prepare(model, make_data(2 * classes, classes, noise=0.5), views=1)
        assert sites.means.shape == (classes, 1, 108)


def test_scores_of_many_classes_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ttvd.source.calibration._MAX_SCORES", 120)
    seen: list[int] = []
    sites = estimate_sites(make_model(), make_data(80), views=1)
    calibrate(make_model(), sites, make_data(100, seed=1), progress=seen.append)
    assert seen == [30]


def test_a_label_augmented_head_is_prepared() -> None:
    model, data = make_model(), make_data(100)
    tuned = ttvd.split(model).augmented(4)
    for form in (data, [*zip(data[0].split(50), data[1].split(50), strict=True)]):
        sites = ttvd.prepare(tuned, form)
        assert (sites.num_classes, sites.views) == (4, 4)
        assert sites.rotation_loss is not None


# What is refused


@pytest.mark.parametrize("centre", [None, 127.5])
def test_a_normalisation_outside_of_the_model_is_found_and_the_line_in_the_message_helps(
    centre: float | None,
) -> None:
    data = make_data(200)
    model = make_core() if centre is None else make_model(centre=centre)
    with pytest.raises(ValueError, match=r"right on \d.*first layer: model = torch.nn.Sequential\(") as info:
        ttvd.prepare(model, data)
    line = re.findall(r"model = (torch.nn.Sequential\(.*\))$", str(info.value))[0]
    assert ("1 / 255" in line) == (centre is not None)
    repaired = eval(line, {"torch": torch, "ttvd": ttvd, "model": model})  # noqa: S307 - our own message
    assert ttvd.prepare(repaired, data).num_classes == 4


def test_near_chance_is_refused_whatever_the_form() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(108, 4))
    data = torch.rand(400, 3, 6, 6), torch.arange(400) % 4
    for form in ("tensors", "loader"):
        with pytest.raises(ValueError, match=r"chance is 25.0%.*ttvd.Normalize\(3, mean, std\)"):
            ttvd.prepare(model, FORMS[form](*data))
        with pytest.raises(ValueError, match=r"chance is 25.0%"):
            ttvd.prepare(model, data, FORMS[form](*data))


def refuse(message: str, data: Any, model: nn.Module | None = None, **options: Any) -> None:
    with pytest.raises(ValueError, match=message):
        ttvd.prepare(make_model() if model is None else model, data, **options)


def test_images_and_labels_that_do_not_fit_are_refused_before_any_work() -> None:
    images, labels = make_data(40)
    refuse(r"values from .* to 25\d.*images / 255", (255 * images, labels))
    refuse(r"values from -1 to .*before their normalisation", (2 * images.round() - 1, labels))
    refuse(r"fails on images of 3 x 9 x 9.*interpolate", (torch.rand(8, 3, 9, 9), labels[:8]))
    refuse(r"fails on images of 2 x 6 x 6", (images[:, :2], labels))
    refuse(r"run from 0 to 3, got values from 1 to 4.*labels - 1", (images, labels + 1))
    refuse(r"run from 0 to 3, got values from -1 to 2", (images, labels - 1))
    refuse(r"3 classes and the model's head has 4 outputs", (images[labels < 3], labels[labels < 3]))
    refuse(r"no samples of class 1", (images[labels != 1], labels[labels != 1]))
    refuse(r"40 images and 39 labels", (images, labels[1:]))
    refuse(r"there are no (images|labels)", (images[:0], labels[:0]))
    refuse("there are no images", [])
    refuse(r"batches \(images, labels\).*batch\['image'\]", [{"image": images, "label": labels}])
    refuse("pair .* a Dataset or batches, got a int", 3)
    refuse(r"quarter turns need square", (torch.rand(8, 3, 4, 9), labels[:8]))


def test_sites_of_another_model_are_refused() -> None:
    sites, other = ttvd.prepare(make_model(), make_data(80), views=1), make_model()
    nn.init.ones_(other.get_parameter("4.bias"))
    with pytest.raises(ValueError, match="its weights differ"):
        ttvd.TTVD(other, sites)


def test_models_in_half_precision_are_refused_with_the_line_to_write() -> None:
    refuse(r"bfloat16.*model = model.float\(\)", make_data(20), make_model().bfloat16())


class Unordered(nn.Module):
    """Registers its head first."""

    def __init__(self) -> None:
        super().__init__()
        core = make_model()
        self.classify, self.embed, self.body = core[-1], nn.Linear(108, 108), core[:-1]
        with torch.no_grad():
            self.embed.weight.copy_(torch.eye(108))
            self.embed.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.embed(self.body(x)))  # type: ignore[no-any-return]


def test_a_head_that_cannot_be_found_again_is_to_be_named() -> None:
    with pytest.raises(ValueError, match=r"ttvd.split\(model, head='classify'\)"):
        ttvd.prepare(Unordered(), make_data(80))
    model = ttvd.split(Unordered(), head="classify")
    sites = ttvd.prepare(model, make_data(80))
    assert ttvd.TTVD(model, sites)(make_data(8)[0]).shape == (8, 4)


def test_a_model_in_training_mode_is_used_in_evaluation_mode_and_left_in_training_mode() -> None:
    model = nn.Sequential(*[*make_model()][:-1], nn.Dropout(0.9), make_model()[-1])
    expected = ttvd.prepare(model.eval(), make_data(80))
    found = ttvd.prepare(model.train(), make_data(80))
    assert torch.equal(found.means, expected.means)
    assert found.temperatures == expected.temperatures
    assert all(module.training for module in model.modules())


# Honest temperatures


def test_images_that_the_model_knows_by_heart_get_a_softer_temperature_and_a_warning() -> None:
    model, data, known = make_model(), make_data(80, noise=0.7), make_data(600, seed=1, noise=0.7)
    sharp = ttvd.prepare(model, data, known, trained_on=False)
    with pytest.warns(UserWarning, match=r"100.0% of 600 images .*trained_on=False"):
        honest = ttvd.prepare(model, data, known)
    assert sharp.accuracy == honest.accuracy == 1.0
    for key, tau in sharp.temperatures.items():
        assert honest.temperatures[key] >= tau
    assert honest.temperature("pd") > 1.5 * sharp.temperature("pd")
    assert honest.anchors[1].means.equal(sharp.anchors[1].means)


def test_honest_temperatures_are_those_of_distorted_images() -> None:
    model, data, (images, labels) = make_model(), make_data(80), make_data(100, seed=1)
    found = calibrate(model, estimate_sites(model, data, views=1), (images, labels), trained_on=True)

    def forward(strength: float) -> Tensor:
        with torch.no_grad():
            return model(distort(images, strength, torch.Generator().manual_seed(0)))  # type: ignore[no-any-return]

    def accuracy(strength: float) -> float:
        return (forward(strength).argmax(1) == labels).double().mean().item()

    strength = find_strength(accuracy)
    assert accuracy(strength) <= KEPT_RIGHT * accuracy(0.0) + 0.02
    hard = fit_temperature(forward(strength), labels)
    with torch.no_grad():
        plain = fit_temperature(model(images), labels)
    assert found.temperature("pd") == pytest.approx(max(hard, plain), rel=1e-3)


def test_distortion_is_a_similarity_that_keeps_the_range() -> None:
    images = torch.zeros(50, 1, 16, 32)
    images[:, :, 6:10, 14:18] = 1.0  # a square in the middle stays as wide as high
    moved = distort(images, 1.0, torch.Generator().manual_seed(0))
    assert moved.shape == images.shape
    assert moved.min() >= 0
    assert moved.max() <= 1
    rows, columns = torch.meshgrid(torch.arange(16.0), torch.arange(32.0), indexing="ij")
    mass = moved[:, 0] / moved[:, 0].sum((1, 2), keepdim=True)

    def spread(place: Tensor) -> Tensor:
        mean = (mass * place).sum((1, 2), keepdim=True)
        return (mass * (place - mean) ** 2).sum((1, 2)).sqrt()

    torch.testing.assert_close(spread(rows), spread(columns), rtol=0.1, atol=0.05)
    again = distort(images, 1.0, torch.Generator().manual_seed(0))
    assert torch.equal(moved, again)


def test_the_sample_has_images_of_the_whole_stream() -> None:
    sample = ImageSample(100)
    for start in range(0, 4_000, 10):
        labels = torch.arange(start, start + 10)
        sample.update(labels.view(10, 1, 1, 1).float(), labels)
    assert 25 <= len(sample.labels) <= 100
    assert torch.equal(sample.images.flatten().long(), sample.labels)
    assert sample.labels.min() < 400
    assert sample.labels.max() > 3_600


# What is reported


def test_the_summary_is_logged_and_shown_on_request(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, "ttvd"):
        sites = ttvd.prepare(make_model(), make_data(80), views=1)
    assert f"4 classes, 108 features, accuracy {sites.accuracy:.1%}" in caplog.text
    assert capsys.readouterr().err == ""
    ttvd.prepare(make_model(), make_data(80), views=1, progress=True)
    shown = " ".join(capsys.readouterr().err.split())
    assert "calibration" in shown
    assert "accuracy" in shown


def test_accuracy_is_part_of_what_sites_show() -> None:
    sites = ttvd.prepare(make_model(), make_data(80), views=1)
    assert repr(replace(sites, accuracy=0.91666666)).endswith(", accuracy=0.9167)")
