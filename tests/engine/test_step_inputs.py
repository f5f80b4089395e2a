"""What methods draw on the host: before the step, once for each, and in the order in which it is taken."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from ttvd.engine.step_inputs import Agenda, Plan, send

import ttvd
from ttvd.methods.adapter import Adapter
from ttvd.nn.norms import Statistics
from ttvd.testing import make_world


class Shaky(Adapter):
    """Adds what it has drawn to the logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, statistics=Statistics.source())
        self.plans = 0

    def plan(self, x: Tensor) -> Plan:
        self.plans += 1
        return Plan(self.plans % 2, (torch.full((2,), float(self.plans)), torch.tensor([0.0, 0.5])))

    def adapt(self, x: Tensor) -> Tensor:
        assert self.agenda.way == self.plans % 2
        return self.output(x) + self.agenda.draw() + self.agenda.draw()


def test_a_step_finds_its_plan() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    shaky, x = Shaky(net), torch.rand(3, 1, 2, 2)
    with torch.no_grad():
        plain = net(x)
    for number in (1, 2, 3):
        torch.testing.assert_close(shaky(x), plain + torch.tensor([number, number + 0.5]))
    torch.testing.assert_close(shaky.predict(x), plain)  # predicting plans nothing
    assert shaky.plans == 3


def test_an_agenda_is_not_copied_or_saved() -> None:
    agenda = Agenda()
    agenda.begin(Plan("way", (torch.ones(1),)), (torch.ones(1),))
    for other in (copy.deepcopy(agenda), pickle.loads(pickle.dumps(agenda))):  # noqa: S301
        assert other.way is None
        with pytest.raises(StopIteration):
            other.draw()
    assert agenda.draw().item() == 1.0


def test_draws_are_sent_as_they_are() -> None:
    draws = (torch.tensor([3, 1]), torch.rand(2, 2))
    for sent, draw in zip(send(draws, torch.device("cpu")), draws, strict=True):
        assert sent.dtype == draw.dtype
        assert torch.equal(sent, draw)


@pytest.mark.parametrize("name", [name for name in ttvd.list_methods() if name in ("deyo", "note", "ttt")])
def test_what_is_planned_on_the_host_is_all_that_changes_there(name: str) -> None:
    """A step whose plan is made beforehand leaves random numbers and clocks alone: a recorded one cannot move them."""
    adapter = make_world(name)[1]()
    x = torch.rand(8, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    adapter(x)
    plan = adapter.plan(x)
    kept = {key: t.clone() for key, t in adapter.snapshot().items() if key.split(".")[0] in adapter.planned}
    adapter.agenda.begin(plan, send(plan.draws, x.device))
    adapter._take(x, checked=True)
    after = adapter.snapshot()
    assert kept
    assert all(torch.equal(after[key], value) for key, value in kept.items())


def test_note_never_learns_from_places_that_are_empty() -> None:
    """A batch that is not finite counts, but leaves nothing in the memory."""
    note = make_world("note", period=24, capacity=64)[1]()
    note.validation = "never"
    seen: list[Tensor] = []
    note.model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    stream = torch.rand(3, 8, 1, 16, 16, generator=torch.Generator().manual_seed(0)) + 0.1
    stream[0, 0, 0, 0, 0] = float("nan")
    for x in stream:
        note(x)
    learnt = seen[-1]
    assert len(learnt) == 24
    assert all(image.abs().sum() > 0 for image in learnt)
