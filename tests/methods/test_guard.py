"""The guard: its test for a shift, what it notices, what it does, and that its state is complete."""

import math
from abc import ABC
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ttvd
from tests.helpers.engine import RerunRecorder, make_batches
from ttvd.engine import step_runner
from ttvd.engine.step_runner import StepRunner
from ttvd.methods import Adapter
from ttvd.methods.policies import ResetEvery
from ttvd.methods.shared.guard import BatchClock, EntropyTest, GuardMonitor, rank_entropies
from ttvd.testing import make_world

YES = torch.tensor(True)
QUANTILES = torch.linspace(0.0, 1.0, 65)


def draw(generator: torch.Generator, size: int = 32) -> Tensor:
    return torch.rand(size, generator=generator)


def find_alarm(test: EntropyTest, looks: int, generator: torch.Generator, power: float = 1.0) -> int | None:
    """The first look at which the test fires; entropies are u ** power, u uniform."""
    for number in range(1, looks + 1):
        test.update(draw(generator) ** power, YES)
        if bool(test.is_shifted()):
            return number
    return None


def test_false_alarms_of_the_test_are_as_rare_as_promised() -> None:
    """On source entropies the mean time to an alarm is at least 1 / alpha: at most alpha * looks fire within looks."""
    generator, alpha, looks, runs = torch.Generator().manual_seed(0), 0.01, 50, 60
    for tolerance in (0.0, 0.05):
        tests = [EntropyTest(QUANTILES, tolerance=tolerance, alpha=alpha) for _ in range(runs)]
        fired = sum(find_alarm(test, looks, generator) is not None for test in tests)
        assert fired <= alpha * looks * runs
    exact = [EntropyTest(QUANTILES, tolerance=0.0, alpha=0.2) for _ in range(runs)]
    fired = sum(find_alarm(test, looks, generator) is not None for test in exact)
    assert fired > 0, "the test is not empty: a loose one fires"


@pytest.mark.parametrize("power", [0.4, 2.5])
def test_a_shift_is_found_within_few_looks(power: float) -> None:
    generator = torch.Generator().manual_seed(0)
    delays = [find_alarm(EntropyTest(QUANTILES), 50, generator, power) for _ in range(20)]
    assert max(delay or math.inf for delay in delays) <= 8


def test_the_test_comes_back_after_a_shift() -> None:
    generator, test = torch.Generator().manual_seed(0), EntropyTest(QUANTILES)
    assert find_alarm(test, 40, generator, power=0.4) is not None
    for _ in range(40):
        test.update(draw(generator), YES)
    assert not bool(test.is_shifted())


def test_ranks_have_mean_one_half_also_with_equal_entropies() -> None:
    entropies = torch.cat([torch.zeros(400), torch.rand(600, generator=torch.Generator().manual_seed(0))])
    quantiles = entropies.quantile(torch.linspace(0, 1, 65))
    assert float(rank_entropies(quantiles, entropies).mean()) == pytest.approx(0.5, abs=0.01)
    assert rank_entropies(quantiles, torch.tensor([-1.0, 2.0])).tolist() == [0.0, 1.0]


def test_what_is_not_finite_changes_nothing() -> None:
    test = EntropyTest(QUANTILES)
    test.update(torch.full((4,), 0.9), YES)
    before = {name: tensor.clone() for name, tensor in test.state_dict().items()}
    test.update(torch.full((4,), math.nan), torch.tensor(False))
    assert all(torch.equal(tensor, before[name]) for name, tensor in test.state_dict().items())


def test_looks_are_chosen_by_the_number_of_the_batch() -> None:
    clock = BatchClock(20)
    assert [number for number in range(1, 101) if clock.advance()] == [*range(2, 41, 2), 60, 80, 100]
    clock = BatchClock(4)
    assert [number for number in range(1, 17) if clock.advance()] == [*range(1, 9), 12, 16]


CLASSES, SAMPLE = 10, 32
PICTURES = torch.rand(SAMPLE, 1, 4, 4, generator=torch.Generator().manual_seed(0)).repeat_interleave(4, 2)
PICTURES = PICTURES.repeat_interleave(4, 3)
"""Pictures of large squares."""


class Stage:
    """A monitor of one tensor, which gets made-up answers."""

    def __init__(self, **settings: int) -> None:
        self.weight, self.initial = torch.ones(3), torch.zeros(3)
        guard = ttvd.methods.Guard(**settings)  # type: ignore[arg-type]
        self.monitor = GuardMonitor(guard, CLASSES, 1, {"weight": self.weight})
        self.generator = torch.Generator().manual_seed(0)

    def look(self, answers: Tensor, reference: Tensor, images: Tensor = PICTURES) -> str:
        self.monitor.count_batch()
        self.monitor.look(images, answers, reference)
        self.monitor.settle(YES, lambda: ({"weight": self.weight}, {"weight": self.initial}))
        return self.monitor.describe().state

    def labels(self) -> Tensor:
        return torch.randint(CLASSES, (SAMPLE,), generator=self.generator)

    def answer(self, labels: Tensor, right: float = 1.0, sure: float = 6.0) -> Tensor:
        """Logits of a classifier that is right this often."""
        kept = torch.rand(len(labels), generator=self.generator) < right
        chosen = torch.where(kept, labels, self.labels()[: len(labels)])
        return sure * nn.functional.one_hot(chosen, CLASSES).float()


def test_a_useful_adapter_is_left_alone() -> None:
    """The source is right in 3 of 10 images, the adapter in 9."""
    stage = Stage()
    for _ in range(60):
        labels = stage.labels()
        assert stage.look(stage.answer(labels, 0.9), stage.answer(labels, 0.3, 3.0)) == "adapting"
    assert stage.monitor.describe().reason == ""


def test_a_sorted_stream_is_no_collapse() -> None:
    """Each batch holds one class; the source confuses it with others, and the adapter does not."""
    stage = Stage()
    for number in range(60):
        labels = torch.full((SAMPLE,), number // 2 % CLASSES)
        assert stage.look(stage.answer(labels, 0.95), stage.answer(labels, 0.4)) in ("adapting", "slowed")
    assert stage.monitor.describe().rollbacks == 0


def test_an_adapter_that_loses_the_classes_of_a_sorted_stream_goes_back_to_the_source() -> None:
    """The source sees one class after another, at 70 %; the adapter gives every batch all classes alike."""
    stage = Stage()
    states = []
    for number in range(40):
        labels = torch.full((SAMPLE,), number // 4 % CLASSES)
        states.append(stage.look(stage.answer(stage.labels()), stage.answer(labels, 0.7)))
    status = stage.monitor.describe()
    assert states[3] == "adapting", "one class does not tell a sorted stream from a biased source"
    assert set(states[4:36]) == {"source"}, "it is held for 32 looks"
    assert states[36] == "adapting", "then it tries again"
    assert "tells batches of different classes apart" in status.reason
    assert status.returns == 1
    assert status.rollbacks == 0
    assert stage.weight.tolist() == [0.0, 0.0, 0.0], "the initial state"


def test_a_biased_source_does_not_look_like_a_sorted_stream() -> None:
    """The source gives most images of every batch one class, and the adapter is right."""
    stage = Stage()
    for _ in range(60):
        labels = stage.labels()
        biased = stage.answer(torch.where(torch.rand(SAMPLE, generator=stage.generator) < 0.8, 3, labels))
        assert stage.look(stage.answer(labels, 0.7), biased) == "adapting"


def test_a_good_adapter_on_batches_of_few_classes_is_left_alone() -> None:
    """It tells the two classes of a batch apart. The source gives most images one of three classes."""
    stage = Stage()
    for number in range(60):
        pair = torch.tensor([number % CLASSES, (3 * number + 1) % CLASSES])
        labels = pair[torch.arange(SAMPLE) % 2]
        biased = torch.randint(3, (SAMPLE,), generator=stage.generator)
        assert stage.look(stage.answer(labels, 0.9), stage.answer(biased, 0.95)) == "adapting"


def test_a_collapse_leads_back_to_the_good_state_and_then_to_the_source() -> None:
    stage = Stage(snapshot_every=2, hold=8)
    for _ in range(8):
        labels = stage.labels()
        stage.look(stage.answer(labels), stage.answer(labels))
    stage.weight.fill_(5.0)
    states = []
    for _ in range(11):
        labels = stage.labels()
        states.append(stage.look(stage.answer(torch.zeros_like(labels)), stage.answer(labels)))
        if states[-1] == "rolled back" and "rolled back" not in states[:-1]:
            assert stage.weight.tolist() == [1.0] * 3
    assert "rolled back" in states
    assert states[-1] == "source", "the good state is no better"
    assert stage.weight.tolist() == [0.0] * 3
    status = stage.monitor.describe()
    assert (status.rollbacks, status.returns) == (1, 1)
    assert "tell less" in status.reason
    assert not bool(stage.monitor.is_open())


def test_answers_that_change_alone_are_guesses() -> None:
    """The adapter answers one class after the other, the source does not follow."""
    stage = Stage()
    states = []
    for number in range(40):
        labels = stage.labels()
        alone = torch.full_like(labels, number % CLASSES)
        states.append(stage.look(stage.answer(alone, 0.8), stage.answer(labels, 0.9)))
    assert "rolled back" in states
    assert "differ" in stage.monitor.describe().reason


def test_a_stopped_adapter_tries_again_when_the_stream_changes() -> None:
    stage = Stage(hold=1000)
    for _ in range(10):
        labels = stage.labels()
        stage.look(stage.answer(torch.zeros_like(labels)), stage.answer(labels, 0.5, 2.0))
    assert stage.monitor.describe().state in ("rolled back", "source")
    labels = stage.labels()
    assert stage.look(stage.answer(labels), stage.answer(labels)) == "adapting"


@pytest.mark.parametrize(
    ("images", "reason"),
    [
        (torch.zeros(SAMPLE, 1, 16, 16), "constant"),
        (PICTURES[:1].expand_as(PICTURES), "the same"),
        (torch.rand(SAMPLE, 1, 16, 16, generator=torch.Generator().manual_seed(0)), "noise"),
        (PICTURES, "same answer"),
    ],
)
def test_images_that_teach_nothing_freeze_the_adapter(images: Tensor, reason: str) -> None:
    stage = Stage()
    labels = stage.labels()
    answers = stage.answer(labels)
    reference = torch.zeros_like(answers) if reason == "same answer" else answers
    assert stage.look(answers, reference, images) == "frozen"
    assert reason in stage.monitor.describe().reason
    assert stage.look(answers, reference, images) == "frozen"
    assert stage.look(answers, answers) == "adapting"
    assert stage.monitor.describe().freezes == 1


def test_contradiction_of_the_source_on_source_images() -> None:
    """The test for a shift is quiet, and the adapter disagrees with the source."""
    stage = Stage()
    guard = ttvd.methods.Guard(entropy_quantiles=torch.linspace(0.0, math.log(CLASSES), 65))
    stage.monitor = GuardMonitor(guard, CLASSES, 1, {"weight": stage.weight})
    for _ in range(6):
        labels = stage.labels()
        scale = torch.rand(SAMPLE, 1, generator=stage.generator) * 6
        state = stage.look(stage.answer((labels + 1) % CLASSES), stage.answer(labels) / 6 * scale)
    assert state in ("rolled back", "source")
    assert "contradict" in stage.monitor.describe().reason
    assert stage.monitor.describe().wealth is not None


def test_impossible_settings() -> None:
    net = make_world("tent")[0]
    wrong: list[dict[str, Any]] = [
        {"period": 0},
        {"sample": -1},
        {"window": 1.5},
        {"alpha": 0.0},
        {"tolerance": 0.5},
    ]
    for settings in wrong:
        with pytest.raises(ValueError, match=next(iter(settings))):
            ttvd.methods.Guard(**settings)
    for quantiles in (torch.zeros(1), torch.tensor([1.0, 0.0]), torch.tensor([0.0, math.inf])):
        with pytest.raises(ValueError, match="entropy_quantiles"):
            ttvd.methods.Guard(entropy_quantiles=quantiles)
    with pytest.raises(TypeError, match="guard must be"):
        ttvd.create("tent", net, guard="yes")


@pytest.mark.parametrize("name", ["tent", "t3a", "note", "roid", "ttvd", "sar"])
def test_conformance_with_a_guard(name: str) -> None:
    net, _ = make_world(name)
    _, make = make_world(name, guard=ttvd.methods.Guard(period=2, entropy_quantiles=QUANTILES))
    assert make().guard is not None
    ttvd.check_adapter(make, net, make_batches())


def test_every_adapter_takes_the_option() -> None:
    net = make_world("tent")[0]

    class Mixed(ttvd.methods.Tent, ABC):
        """A class with an abstract base class."""

    assert ttvd.methods.Tent(net).guard is None
    assert ttvd.methods.Tent(net).status is None
    assert ttvd.methods.Tent(net, guard=True).guard is not None
    assert Mixed(net, guard=True).guard is not None
    assert ttvd.create("bn", net, guard=True).status is not None
    assert make_world("ttvd")[1]().guard is not None
    assert make_world("ttvd", guard=False)[1]().guard is None
    policy = ResetEvery(ttvd.methods.Tent(net), 2, guard=True)  # type: ignore[call-arg]
    assert policy.adapter.guard is not None
    assert policy.status is not None


def make_pictures(count: int, size: int = 16) -> list[Tensor]:
    """Batches of blurred noise, in which neighbouring pixels are related."""
    return [nn.functional.avg_pool2d(x, 3, 1, 1) for x in make_batches(count, size, 16)]


def collapse(adapter: Adapter) -> None:
    """Make an adapter answer one class."""
    with torch.no_grad():
        for parameter in adapter.model.parameters():
            if parameter.requires_grad:
                parameter.zero_()


def make_guarded(lr: float = 1e-3) -> Adapter:
    settings = ttvd.methods.Guard(period=2, window=32, snapshot_every=1, hold=4)
    return make_world("tent", guard=settings, lr=lr)[1]()


def test_a_collapsed_adapter_is_mended_and_stopped() -> None:
    tent, stream = make_guarded(lr=0.0), make_pictures(30, 16)
    for x in stream[:4]:
        tent(x)
    before = tent.predict(stream[0])
    collapse(tent)
    for x in stream:
        tent(x)
        assert tent.status is not None
        if tent.status.rollbacks:
            break
    assert torch.equal(tent.predict(stream[0]), before)
    assert tent.status is not None
    assert tent.status.state == "rolled back"
    saved = tent.snapshot()
    tent.optimizer.lr = 0.1  # type: ignore[union-attr]
    tent(stream[1])
    after = tent.snapshot()
    own = [name for name in saved if not name.startswith("guard.")]
    assert all(torch.equal(saved[name], after[name]) for name in own), "a stopped adapter learns nothing"
    assert float(tent.kept) == 0.0


def test_a_quiet_guard_changes_no_answer() -> None:
    guarded, plain = make_guarded(), make_world("tent")[1]()
    for x in make_pictures(9, 16):
        assert torch.equal(guarded(x), plain(x))


def test_a_state_is_continued_while_the_adapter_is_stopped() -> None:
    stream = make_pictures(24, 16)
    one, other = make_guarded(lr=0.0), make_guarded(lr=0.0)
    one(stream[0])
    collapse(one)
    for x in stream[:10]:
        one(x)
    assert one.status is not None
    assert one.status.rollbacks + one.status.returns + one.status.freezes > 0
    other.load_state_dict(one.state_dict())
    assert other.status == one.status
    for x in stream[10:]:
        assert torch.equal(one(x), other(x))
    assert other.status == one.status
    other.reset()
    assert other.status is not None
    assert (other.status.state, other.status.batches) == ("adapting", 0)


def test_damaged_states_are_refused() -> None:
    tent = make_guarded()
    for name, value in (("mode", 9), ("reason", -1), ("pace", 0)):
        state = tent.state_dict()
        state[f"guard.{name}"].fill_(value)
        with pytest.raises(ValueError, match=name):
            tent.load_state_dict(state)


@pytest.mark.parametrize("name", ["tent", "ttvd", "t3a", "sar"])
def test_recorded_steps_with_a_guard_are_the_eager_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, through an alarm; the recorder refuses steps that wait for the device."""
    recorder = RerunRecorder()
    monkeypatch.setattr(StepRunner, "recorder", recorder)
    monkeypatch.setattr(step_runner, "can_wait", lambda _: False)
    settings = ttvd.methods.Guard(period=2, window=16, snapshot_every=1, hold=2, entropy_quantiles=QUANTILES)
    make = make_world(name, guard=settings)[1]
    recorded, eager = make(), make()
    eager.capture, recorded.validation, eager.validation = "never", "never", "never"
    stream = make_pictures(16, 8)
    stream[3][0, 0, 0, 0] = math.nan
    stream[6:9] = [torch.zeros_like(stream[0])] * 3
    for number, x in enumerate(stream):
        assert torch.equal(recorded(x), eager(x))
        assert recorded.status == eager.status
        if number == 9:
            collapse(recorded)
            collapse(eager)
    theirs = eager.snapshot()
    for key, tensor in recorded.snapshot().items():
        assert torch.equal(tensor, theirs[key]), key
    assert any(entry.startswith("replay") for entry in recorder.log)
    assert eager.status is not None
    assert eager.status.freezes == 1
