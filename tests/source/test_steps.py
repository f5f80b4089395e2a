"""Steps of training that are recorded or compiled do what steps do that run as they are written."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.source import make_net, make_stripes
from ttvd.nn.rotation import RotationNet
from ttvd.source.config import Epoch, TrainingConfig, TrainingState
from ttvd.source.produce import evaluate
from ttvd.source.steps import make_optimizer
from ttvd.source.train import train

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SGD = {"optimizer": "sgd", "lr": 0.05, "schedule": "cosine"}
ADAMW = {"optimizer": "adamw", "lr": 0.01, "schedule": "onecycle"}


def make_network(objective: str, device: str, norm: str = "batch") -> nn.Module:
    net = make_net(12 if objective == "sla" else 3, norm=norm)
    with torch.random.fork_rng():
        torch.manual_seed(0)  # the second head draws its weights
        return (RotationNet(net) if objective == "rotation" else net).to(device)


def compare(a: nn.Module, b: nn.Module, start: nn.Module, tolerance: float) -> None:
    """The weights have come to the same place, but for a share of the way that they went."""
    first, second, origin = (torch.cat([p.flatten() for p in net.parameters()]) for net in (a, b, start))
    assert (first - second).norm() <= tolerance * (first - origin).norm()
    for name, buffer in a.named_buffers():
        torch.testing.assert_close(buffer, b.get_buffer(name), rtol=0.05, atol=0.05, msg=name)


def test_compiled_training_gives_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []
    whole = torch.compile

    def count(graph: torch.fx.GraphModule, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(
        torch, "compile", lambda loss, **options: whole(loss, backend=count, fullgraph=True, **options)
    )
    config = TrainingConfig("sla", epochs=2, batch_size=32, padding=1, **SGD)  # type: ignore[arg-type]
    nets = [make_network("sla", "cpu") for _ in range(2)]
    history = [
        train(net, *make_stripes(100), config, compile=fast)
        for net, fast in zip(nets, (False, True), strict=True)
    ]
    assert len(graphs) == 1  # all steps of both epochs are one shape
    compare(nets[0], nets[1], make_network("sla", "cpu"), tolerance=1e-5)
    losses = [[epoch.loss for epoch in told.epochs] for told in history]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_no_gradients_are_left_behind() -> None:
    net = make_network("plain", "cpu")
    train(net, *make_stripes(64), TrainingConfig("plain", epochs=1, batch_size=32, padding=0))
    assert all(parameter.grad is None for parameter in net.parameters())


@needs_cuda
@pytest.mark.parametrize("norm", ["batch", "instance-aware"])
@pytest.mark.parametrize("options", [SGD, SGD | {"nesterov": True}, ADAMW])
@pytest.mark.parametrize("objective", ["sla", "plain", "rotation"])
def test_recorded_training_is_the_written_one(
    objective: str, options: dict[str, Any], norm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)  # two trainings differ otherwise
    config = TrainingConfig(objective, epochs=3, batch_size=32, padding=1, **options)
    nets = [make_network(objective, "cuda", norm) for _ in range(2)]
    recorded = train(nets[0], *make_stripes(200), config)
    written = train(nets[1], *make_stripes(200), config, capture="never")
    for mine, theirs in zip(recorded.epochs, written.epochs, strict=True):
        assert mine.loss == pytest.approx(theirs.loss, rel=5e-3)
        assert mine.lr == theirs.lr
    compare(nets[0], nets[1], make_network(objective, "cuda", norm), tolerance=0.05)


@needs_cuda
def test_recorded_training_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    config = TrainingConfig("sla", epochs=4, batch_size=32, padding=1, channels_last=True, **SGD)  # type: ignore[arg-type]
    whole, parts = (make_network("sla", "cuda") for _ in range(2))
    train(whole, *make_stripes(200), config)

    def stop(epoch: Any) -> None:
        if epoch.number == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(parts, *make_stripes(200), config, checkpoint=tmp_path / "state", progress=stop)
    again = make_network("sla", "cuda")
    history = train(again, *make_stripes(200), config, checkpoint=tmp_path / "state")
    assert len(history.epochs) == 4
    compare(whole, again, make_network("sla", "cuda"), tolerance=0.05)


@needs_cuda
def test_fewer_steps_than_a_recording_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    config = TrainingConfig("plain", epochs=3, batch_size=32, padding=0)
    nets = [make_network("plain", "cuda") for _ in range(2)]
    train(nets[0], *make_stripes(64), config)
    train(nets[1], *make_stripes(64), config, capture="never")
    compare(nets[0], nets[1], make_network("plain", "cuda"), tolerance=0.05)


@needs_cuda
def test_a_model_that_waits_for_the_device_is_trained_as_it_is_written() -> None:
    net = make_network("plain", "cuda")
    net.register_forward_pre_hook(lambda _, inputs: float(inputs[0].sum()) and None)
    config = TrainingConfig("plain", epochs=2, batch_size=32, padding=0)
    assert len(train(net, *make_stripes(200), config).epochs) == 2

    class Waiting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_network("plain", "cuda")

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) * float(x.sum().isfinite())  # type: ignore[no-any-return]

    with pytest.warns(UserWarning, match="one kernel at a time"):
        assert len(train(Waiting(), *make_stripes(200), config).epochs) == 2


@needs_cuda
def test_a_model_that_was_moved_meanwhile_goes_on_learning() -> None:
    net = make_network("plain", "cuda")
    config = TrainingConfig("plain", epochs=6, batch_size=32, padding=0, **SGD)  # type: ignore[arg-type]

    def move(_: Epoch) -> None:
        net.cpu().cuda()

    history = train(net, *make_stripes(200), config, progress=move)
    assert history.epochs[-1].loss < 0.9 * history.epochs[0].loss
    assert evaluate(net, *make_stripes(96, seed=1)) > 0.5


def test_slots_come_back_in_the_layout_of_their_parameters(tmp_path: Path) -> None:
    net = make_network("plain", "cpu").to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    config = TrainingConfig("plain", epochs=2, batch_size=32, padding=0, channels_last=True, **SGD)  # type: ignore[arg-type]
    first = TrainingState(net, make_optimizer(net, config), config, "data")
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    first.optimizer.step()
    first.save(tmp_path / "state", [])
    second = TrainingState(net, make_optimizer(net, config), config, "data")
    second.resume(tmp_path / "state")
    for parameter, slots in second.optimizer.state.items():
        assert slots["momentum_buffer"].stride() == parameter.stride()
        assert torch.equal(slots["momentum_buffer"], first.optimizer.state[parameter]["momentum_buffer"])
