"""Whether a stream has changed, and whether it differs from the source, against loops over images and descriptors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ttvd
from ttvd.methods.ttvd.input_drift import InputDrift
from ttvd.nn.descriptors import InputMoments, describe, measure_inputs
from ttvd.nn.resnet import ResNet

NetMaker = Callable[..., ResNet]


def draw(count: int, seed: int, *, scale: float = 1.0, channels: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 0.5 + scale * (torch.rand(count, channels, 12, 12, generator=generator) - 0.5)


def describe_one(image: list[list[float]]) -> list[float]:
    """Descriptors of a grey image, written out."""
    rows, columns = len(image), len(image[0])
    values = [value for row in image for value in row]
    level = sum(values) / len(values)

    def log_mean(squares: list[float]) -> float:
        return math.log(sum(squares) / len(squares) + 1e-4)

    def energy(down: list[float], right: list[float]) -> float:
        return math.log((sum(down) / len(down) + sum(right) / len(right)) / 2 + 1e-4)

    def step(lag: int, every: int | None = None) -> float:
        ys, xs = range(rows - lag), range(columns - lag)
        down = [y for y in ys if every is None or y % every == every - 1]
        right = [x for x in xs if every is None or x % every == every - 1]
        return energy(
            [(image[y + lag][x] - image[y][x]) ** 2 for y in down for x in range(columns)],
            [(image[y][x + lag] - image[y][x]) ** 2 for y in range(rows) for x in right],
        )

    contrast = log_mean([(value - level) ** 2 for value in values])
    one, two, four, grid = step(1), step(2), step(4), step(1, every=8)
    bend = energy(
        [
            (image[y + 2][x] - 2 * image[y + 1][x] + image[y][x]) ** 2
            for y in range(rows - 2)
            for x in range(columns)
        ],
        [
            (image[y][x + 2] - 2 * image[y][x + 1] + image[y][x]) ** 2
            for y in range(rows)
            for x in range(columns - 2)
        ],
    )
    return [level, contrast, one - contrast, two - one, four - two, bend - one, grid - one]


def test_descriptors_are_what_the_loops_say() -> None:
    images = draw(3, 0)
    for image, found in zip(images, describe(images), strict=True):
        assert found.tolist() == pytest.approx(describe_one(image[0].tolist()), rel=1e-4, abs=1e-4)


def test_other_inputs_are_described_by_their_moments() -> None:
    x = torch.tensor([[1.0, 3.0], [2.0, 2.0]])
    assert describe(x)[:, 0].tolist() == [2.0, 2.0]
    assert describe(x)[0, 1].item() == pytest.approx(math.log(1.0001), abs=1e-5)
    assert describe(draw(2, 0, channels=3)).shape[1] == 3 + 1 + 1 + 5, (
        "levels, contrast, colours, five of scales"
    )


def test_the_radius_is_what_classes_explain() -> None:
    """Two classes whose means lie 2 apart, then labels that mean nothing."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(400) % 2
    values = (2.0 * labels - 1.0 + 0.1 * torch.randn(400, generator=generator))[:, None]
    moments = measure_inputs(values, labels)
    assert moments.radii.item() == pytest.approx(2 * math.sqrt(2), rel=0.02), (
        "twice the deviation of the means"
    )
    moments = measure_inputs(values, torch.randint(0, 2, (400,), generator=generator))
    assert moments.radii.item() < 0.35 * moments.deviations.item()


def test_means_of_classes_are_drawn_to_the_mean_of_all_as_far_as_chance_explains_them() -> None:
    """By hand: the share of the variance of a class mean that is not chance; a class without images has the mean."""
    generator = torch.Generator().manual_seed(2)
    labels = torch.tensor([0] * 40 + [1] * 10 + [3] * 4)
    values = (labels.double() + torch.randn(54, generator=generator, dtype=torch.float64))[:, None]
    found = measure_inputs(values, labels, 5).classes
    assert found is not None
    groups = {
        k: [float(v) for v, one in zip(values[:, 0], labels, strict=True) if one == k] for k in (0, 1, 3)
    }
    mean = sum(map(sum, groups.values())) / 54
    own = {k: sum(group) / len(group) for k, group in groups.items()}
    within = sum((v - own[k]) ** 2 for k, group in groups.items() for v in group) / (54 - 3)
    between = sum(len(group) * (own[k] - mean) ** 2 for k, group in groups.items()) / 2
    size = (54 - (40**2 + 10**2 + 4**2) / 54) / 2
    variance = (between - within) / size
    for k in range(5):
        wanted = mean
        if k in groups:
            wanted += variance / (variance + within / len(groups[k])) * (own[k] - mean)
        assert found[k].item() == pytest.approx(wanted, rel=1e-9)
    assert measure_inputs(values[:3], torch.arange(3)).classes is None, "one image a class tells nothing"


@pytest.mark.parametrize("wrong", ["nan", "float32", "shape", "rank"])
def test_means_of_classes_that_cannot_be_are_refused(wrong: str) -> None:
    one, means = torch.ones(3, dtype=torch.float64), torch.ones(4, 3, dtype=torch.float64)
    bad = {"nan": means * math.nan, "float32": means.float(), "shape": means[:, :2], "rank": one}[wrong]
    with pytest.raises(ValueError, match="classes of inputs must be"):
        InputMoments(one, one, one, bad)


@pytest.mark.parametrize("wrong", ["nan", "zero", "float32", "shape"])
def test_moments_that_cannot_be_are_refused(wrong: str) -> None:
    one = torch.ones(3, dtype=torch.float64)
    bad = {"nan": one * math.nan, "zero": 0 * one, "float32": one.float(), "shape": one[:2]}[wrong]
    with pytest.raises(ValueError, match="deviations of inputs must be"):
        InputMoments(one, bad, one)


def make_drift(size: int = 1, radius: float = 1.0) -> InputDrift:
    one = torch.ones(size, dtype=torch.float64)
    return InputDrift(InputMoments(0 * one, one, radius * one), torch.zeros(()))


class Loop:
    """The windows of one descriptor, image by image where that is possible."""

    def __init__(self, radius: float) -> None:
        self.radius, self.long, self.recent = radius, (0.0, 0.0, 0.0), (0.0, 0.0)

    def look(self, values: list[float], tolerance: float) -> tuple[bool, float]:
        size, mean = len(values), sum(values) / len(values)
        square = sum(v * v for v in values) / size
        m, s, n = self.long
        r, k = self.recent
        kept = min(k, max(0, 32 - size))
        r, k = (r * kept + mean * size) / (kept + size), kept + size
        spread = math.sqrt(max(1.0, s - m * m))
        chance = 2.5 * spread * math.sqrt(1 / k + 1 / max(n, 1))
        changed = n > 0 and (abs(r - m) - chance) / self.radius > tolerance
        if changed:
            n, r, k = 0.0, mean, size
        n = min(n, 256)
        self.long = ((m * n + mean * size) / (n + size), (s * n + square * size) / (n + size), n + size)
        self.recent = (r, k)
        m, s, n = self.long
        spread = math.sqrt(max(1.0, s - m * m))
        away = (abs(m) - 2.5 * spread / math.sqrt(n)) / self.radius
        wide = (spread - 2.5 / math.sqrt(n)) / 1.3
        return changed, min(1.0, max(0.0, (max(away, wide) - 1) / 0.25))


@pytest.mark.parametrize("tolerance", [1.0, 2.0])
def test_windows_are_what_the_loop_says(tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ttvd.methods.ttvd.input_drift.describe", lambda x: x)
    drift, loop, generator = make_drift(radius=0.7), Loop(0.7), torch.Generator().manual_seed(1)
    changes = 0
    for batch, shift in (
        (64, 0.0),
        (1, 0.0),
        (8, 0.1),
        (40, 1.5),
        (8, 1.5),
        (64, -1.0),
        (300, -1.0),
        (8, 4.0),
    ):
        for _ in range(3):
            x = shift + torch.randn(batch, 1, generator=generator)
            windows, changed = drift.look(x, tolerance)
            drift.write(windows)
            wanted = loop.look(x[:, 0].tolist(), tolerance)
            assert bool(changed) == wanted[0]
            assert drift.evidence(drift.windows()).item() == pytest.approx(wanted[1], abs=1e-4)
            changes += bool(changed)
    assert 1 <= changes <= 6


CLASS_MEANS = (-1.0, 1.0)
"""Where two classes lie, in deviations of the source; one radius is 1.4, and accuracy 0.9 makes it 0.42."""


def make_explained() -> InputDrift:
    one = torch.ones(1, dtype=torch.float64)
    moments = InputMoments(0 * one, one, 1.4 * one, torch.tensor(CLASS_MEANS, dtype=torch.float64)[:, None])
    return InputDrift(moments, torch.zeros(()), accuracy=0.9)


class ExplainedLoop:
    """What the classes do not explain, for one descriptor; the windows are lists of batches with their weights."""

    def __init__(self) -> None:
        self.long: list[tuple[float, float, float, float]] = []  # weight, value, square, explained
        self.recent: list[tuple[float, float, float, float]] = []
        self.residual, self.known = 0.0, 0.0

    @staticmethod
    def add(window: list[Any], limit: float, size: float, batch: tuple[float, float, float]) -> list[Any]:
        held = sum(row[0] for row in window)
        factor = min(held, limit) / held if held else 0.0
        return [(row[0] * factor, *row[1:]) for row in window if row[0] * factor > 0] + [(size, *batch)]

    @staticmethod
    def mean(window: list[Any], column: int) -> float:
        total: float = sum(row[0] for row in window)
        return sum(float(row[0] * row[column]) for row in window) / total

    def see(self, values: list[float], share: float) -> tuple[float, bool]:
        """The evidence for this batch, and whether the next one begins anew; ``share`` is that of the second class."""
        size = len(values)
        value, square = sum(values) / size, sum(v * v for v in values) / size
        batch = (value, square, CLASS_MEANS[0] * (1 - share) + CLASS_MEANS[1] * share)
        self.long = self.add(self.long, 256, size, batch)
        self.recent = self.add(self.recent, max(0.0, 32 - size), size, batch)
        n, k = sum(row[0] for row in self.long), sum(row[0] for row in self.recent)
        spread = math.sqrt(max(1.0, self.mean(self.long, 2) - self.mean(self.long, 1) ** 2))

        def unexplained(residual: float, images: float) -> float:
            if images == 0:
                return 0.0
            return min(1.0, max(0.0, ((abs(residual) - 2.5 * spread / math.sqrt(images)) / 0.42 - 1) / 0.25))

        away = (abs(self.mean(self.long, 1)) - 2.5 * spread / math.sqrt(n)) / 1.4
        wide = (spread - 2.5 / math.sqrt(n)) / 1.3
        evidence = min(1.0, max(0.0, (max(away, wide) - 1) / 0.25))
        before = unexplained(self.residual, self.known)
        evidence = max(evidence, before)
        now = self.mean(self.recent, 1) - self.mean(self.recent, 3)
        after = unexplained(now, k)
        chance = 2.5 * spread * math.sqrt(1 / k + (1 / self.known if self.known else 0.0))
        left = (abs(now - self.residual) - chance) / 0.42 > 1.0
        left = left and ((evidence < 1 and after == 1.0) or (before == 1.0 and after == 0.0))
        if left:
            self.long = list(self.recent)
        self.residual = self.mean(self.long, 1) - self.mean(self.long, 3)
        self.known = sum(row[0] for row in self.long)
        return evidence, left


def test_what_classes_explain_is_what_the_loop_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sorted and mixed batches of the source, a shift within one radius, and the source again."""
    monkeypatch.setattr("ttvd.methods.ttvd.input_drift.describe", lambda x: x)
    drift, loop, generator = make_explained(), ExplainedLoop(), torch.Generator().manual_seed(3)
    drift.following = True
    moments: dict[float, list[float]] = {0.0: [], 0.9: []}
    begun = 0
    for size, share, shift in (
        (64, 0.0, 0.0),
        (64, 1.0, 0.0),
        (8, 0.5, 0.0),
        (40, 0.5, 0.9),
        (8, 1.0, 0.9),
        (64, 0.0, 0.9),
        (64, 1.0, 0.0),
        (8, 0.0, 0.0),
    ):
        for _ in range(5):
            labels = (torch.arange(size) < round(share * size)).long()
            x = torch.tensor(CLASS_MEANS)[labels][:, None] + shift
            x = x + 0.5 * torch.randn(size, 1, generator=generator)
            pending = bool(drift.pending)
            windows, changed = drift.look(x, 99.0)  # jumps as such are tested above
            assert bool(changed) == pending
            drift.write(windows)
            evidence = drift.evidence(drift.windows()).item()
            drift.explain(99.0 * torch.nn.functional.one_hot(labels, 2).float())
            wanted, left = loop.see(x[:, 0].tolist(), float(labels.float().mean()))
            assert evidence == pytest.approx(wanted, abs=1e-4)
            assert bool(drift.pending) == left
            begun += left
            moments[shift].append(evidence)
    assert begun == 2, "the shift comes and goes"
    assert sum(moments[0.0][:15]) == 0.0, "the order of the classes is no shift"
    assert moments[0.9][2:] == [1.0] * len(moments[0.9][2:])


@pytest.mark.parametrize("size", [64, 16])
@pytest.mark.parametrize("order", ["shuffled", "sorted"])
def test_a_shift_within_one_radius_is_seen_at_once_where_classes_are_mixed(
    size: int, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins with the fifth group of 64 images and ends with the ninth. Without it, the order is no change."""
    monkeypatch.setattr("ttvd.methods.ttvd.input_drift.describe", lambda x: x)
    drift, generator, found = make_explained(), torch.Generator().manual_seed(4), []
    drift.following, mixed = True, order == "shuffled"
    for group in range(12):
        for _ in range(64 // size):
            share = 0.5 if mixed else float(group % 2)
            labels = (torch.arange(size) < round(share * size)).long()
            x = torch.tensor(CLASS_MEANS)[labels][:, None] + (1.3 if mixed and 4 <= group < 8 else 0.0)
            x = x + 0.3 * torch.randn(size, 1, generator=generator)
            windows, changed = drift.look(x, 1.0 if mixed else 2.0)
            found += [group] if bool(changed) else []
            drift.write(windows)
            drift.explain(99.0 * torch.nn.functional.one_hot(labels, 2).float())
    assert found == ([4, 8] if mixed else [])


def test_without_the_classes_nothing_is_explained() -> None:
    drift = make_drift(7)
    drift.following = True
    drift.write(drift.look(draw(8, 0))[0])
    drift.explain(torch.ones(8, 2))
    assert drift.windows().residual_images.item() == 0


def test_a_shift_smaller_than_the_classes_is_adapted_to(make_net: NetMaker) -> None:
    """One class is dark and smooth, one is bright and noisy; with the shift, both are noisier."""

    def render(labels: Tensor, factor: float, seed: int) -> Tensor:
        bright = labels[:, None, None, None]
        noise = torch.randn(len(labels), 1, 12, 12, generator=torch.Generator().manual_seed(seed))
        return (0.3 + 0.3 * bright + factor * (0.02 + 0.06 * bright) * noise).clamp(0, 1)

    class ByLight(torch.nn.Module):
        """Tells light from dark."""

        def __init__(self) -> None:
            super().__init__()
            self.norm: torch.nn.Module = torch.nn.BatchNorm2d(1)
            self.head: torch.nn.Linear = torch.nn.Linear(1, 2)
            with torch.no_grad():
                self.head.weight.copy_(torch.tensor([[-60.0], [60.0]]))
                self.head.bias.copy_(torch.tensor([27.0, -27.0]))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.norm(x).mean((2, 3)))
            return out

    net, labels = ByLight().eval(), torch.arange(400) % 2
    data = (render(labels, 1.0, 0), labels)
    sites = ttvd.calibrate(net, ttvd.estimate_sites(net, data, views=1), data)
    adapter = ttvd.TTVD(net, sites, guard=False)
    assert adapter.drift is not None
    found = []
    for number, factor in enumerate([1.0] * 4 + [3.0] * 4 + [1.0] * 4):
        images = render(labels[:64], factor, 10 + number)
        predicted = adapter.predict(images)
        torch.testing.assert_close(adapter(images), predicted, msg=f"batch {number}")
        found.append(adapter.drift.evidence(adapter.drift.windows()).item())
    assert found[:4] == [0.0] * 4
    assert found[5:8] == [1.0] * 3, "from the second batch on"
    assert found[9:] == [0.0] * 3
    assert sites.inputs is not None
    coarse = replace(sites, inputs=replace(sites.inputs, classes=None))
    blind = ttvd.TTVD(net, coarse, guard=False)
    assert blind.drift is not None
    for number in range(4):
        blind(render(labels[:64], 3.0, 10 + number))
    assert blind.drift.evidence(blind.drift.windows()).item() == 0.0


def test_values_that_are_not_finite_change_nothing() -> None:
    drift = make_drift(7)
    drift.write(drift.look(draw(8, 0))[0])
    before = [part.clone() for part in drift.windows()]
    drift.write(drift.look(torch.full((4, 1, 12, 12), math.nan))[0])
    assert all(torch.equal(a, b) for a, b in zip(before, drift.windows(), strict=True))


@pytest.fixture
def prepared(make_net: NetMaker) -> tuple[ResNet, ttvd.Sites]:
    net = make_net(12).float()
    x = 0.5 + 0.5 * (torch.rand(200, 1, 12, 12, generator=torch.Generator().manual_seed(5)) - 0.5)
    labels = torch.arange(200) % 3
    sites = ttvd.estimate_sites(net, (x, labels), num_classes=3)
    return net, ttvd.calibrate(net, replace(sites), (x, labels), structures=())


def images(kind: str, seed: int) -> Tensor:
    return draw(64, seed, scale={"clean": 0.5, "shifted": 1.0}[kind])


def make(prepared: tuple[ResNet, ttvd.Sites], **options: Any) -> ttvd.TTVD:
    return ttvd.TTVD(*prepared, tau=1.0, **options)


def test_a_change_starts_the_adapter_again(prepared: tuple[ResNet, ttvd.Sites]) -> None:
    """From there on it does what a new one does; so does predict() on the first batch already."""
    adapter, fresh = make(prepared, guard=False), make(prepared, guard=False)
    for seed in range(4):
        adapter(images("clean", seed))
    shifted = images("shifted", 9)
    torch.testing.assert_close(adapter.predict(shifted), fresh.predict(shifted))
    for seed in range(10, 13):
        torch.testing.assert_close(adapter(images("shifted", seed)), fresh(images("shifted", seed)))
    back, new = images("clean", 20), make(prepared, guard=False)
    torch.testing.assert_close(adapter.predict(back), new.predict(back))


def test_without_detection_history_counts(prepared: tuple[ResNet, ttvd.Sites]) -> None:
    adapter, fresh = make(prepared, detect_changes=False), make(prepared, detect_changes=False)
    for seed in range(4):
        adapter(images("clean", seed))
    assert not torch.allclose(adapter(images("shifted", 9)), fresh(images("shifted", 9)), atol=1e-3)


def test_on_clean_images_the_norms_are_those_of_the_source(prepared: tuple[ResNet, ttvd.Sites]) -> None:
    adapter = make(prepared, prior=None, output_temperature=1.0, guard=False)
    still = make(prepared, prior=None, output_temperature=1.0, statistics=ttvd.Statistics.source())
    x = images("clean", 30)
    torch.testing.assert_close(adapter.predict(x), still.predict(x), rtol=1e-4, atol=1e-4)


def test_a_state_in_the_middle_of_a_stream_goes_on(prepared: tuple[ResNet, ttvd.Sites]) -> None:
    one, other = make(prepared), make(prepared)
    stream = [images("clean", 1), images("shifted", 2), images("shifted", 3), images("clean", 4)]
    for x in stream[:2]:
        one(x)
    other.load_state_dict(one.state_dict())
    for x in stream[2:]:
        assert torch.equal(one(x), other(x))


class NoReading(TorchDispatchMode):
    """Refuses to bring a value of a tensor to the host, which would wait for an accelerator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise AssertionError("a value was read on the host")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("outputs", [12, 3], ids=["joint head", "plain head"])
def test_a_step_reads_no_value_on_the_host(outputs: int, make_net: NetMaker) -> None:
    """So it can be recorded as a CUDA graph: loss, and the answer of the initial state that the guard compares."""
    net = make_net(outputs).float()
    x, labels = draw(60, 3), torch.arange(60) % 3
    sites = ttvd.estimate_sites(net, (x, labels), num_classes=3)
    sites = ttvd.calibrate(net, sites, (x, labels), structures=())
    adapter = ttvd.TTVD(net, replace(sites, mirror_gain=0.0), tau=1.0)
    adapter(x[:8])  # the first call settles what a recording finds
    with NoReading(), torch.enable_grad():
        adapter.loss(x[:8])
        adapter.initial_output(x[:8])
    with pytest.raises(AssertionError, match="read on the host"), NoReading():
        adapter.predictor(x[:8])


def test_a_smaller_scale_finds_smaller_shifts_down_to_the_least_radius() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(400, 3, generator=generator, dtype=torch.float64)
    ones = torch.ones(3, dtype=torch.float64)
    source = InputMoments(values.mean(0), ones, torch.tensor([1.5, 0.2, 0.1], dtype=torch.float64))
    drift = InputDrift(source, torch.zeros(()))
    assert drift.scaled_radius(0.5).tolist() == pytest.approx([0.75, 0.2, 0.1])
    assert drift.scaled_radius(0.01).tolist() == pytest.approx([0.2, 0.2, 0.1])
    assert drift.scaled_radius(1.0).tolist() == pytest.approx([1.5, 0.2, 0.1])
    windows = drift.windows()._replace(
        mean=torch.tensor([1.0, 0.0, 0.0]), square=torch.tensor([2.0, 1.0, 1.0]), images=torch.tensor(1e6)
    )
    assert drift.evidence(windows).item() == 0.0
    assert drift.evidence(windows, 0.5).item() == 1.0
