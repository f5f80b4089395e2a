"""TTVD as it is without any option, against loops over images, views, cells and pairs that follow the formulas."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ttvd
from ttvd.nn.resnet import ResNet

TOLERANCE = 1e-8
CLASSES = 3


class TrackedNorm(nn.Module):
    """Batch norm whose averages start at the source, worth 16 images, and never are worth more than 512.

    The value is that of the averages, the batch included; the gradient is that of batch norm on the batch.
    """

    def __init__(self, norm: Any, views: int = 4) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(p.detach().clone()) for p in (norm.weight, norm.bias))
        self.mean, self.var, self.eps = norm.running_mean.clone(), norm.running_var.clone(), norm.eps
        self.views, self.rows, self.mode = views, 0, "look"

    def forward(self, x: Tensor) -> Tensor:
        columns = x.movedim(1, -1).reshape(-1, x.shape[1])
        batch_mean = columns.sum(0) / len(columns)
        batch_var = ((columns - batch_mean) ** 2).sum(0) / len(columns)
        mean, var = self.mean, self.var
        if self.mode != "settled":
            worth = min(16 * self.views + self.rows, 512 * self.views)
            share = len(x) / (len(x) + worth)
            mean = (1 - share) * mean + share * batch_mean.detach()
            var = (1 - share) * var + share * batch_var.detach()
        if self.mode == "follow":
            self.mean, self.var, self.rows = mean, var, self.rows + len(x)
        scale = ((batch_var.detach() + self.eps) / (var + self.eps)) ** 0.5
        shift = (batch_mean.detach() - mean) / (var + self.eps) ** 0.5
        columns = (columns - batch_mean) / (batch_var + self.eps) ** 0.5 * scale + shift
        affine: Tensor = columns * self.weight + self.bias
        return affine.reshape(x.movedim(1, -1).shape).movedim(-1, 1)


class Naive:
    """The default in full; ``reference_batch_size`` and the optimizer are what an optimizer's name stands for."""

    def __init__(self, net: ResNet, means: Tensor, tau: float, optimizer: str, lr: float) -> None:
        self.twin: Any = copy.deepcopy(net).requires_grad_(False)
        self.norms = {name: TrackedNorm(m) for name, m in net.named_modules() if "BatchNorm" in str(type(m))}
        for name, norm in self.norms.items():
            self.twin.set_submodule(name, norm)
        self.means, self.tau, self.rotations = means, tau, net.fc.out_features // CLASSES
        self.excess, self.images, self.earlier = 0.0, 0, [0.0] * CLASSES
        self.sharpness, self.information = 1.0, 64.0
        leaves = [p for norm in self.norms.values() for p in norm.parameters()]
        self.full = {"sgd": 64, "adam": 1}[optimizer]
        adam = optimizer == "adam"
        self.descent: Any = (
            torch.optim.Adam(leaves, lr, (0.9, 0.999)) if adam else torch.optim.SGD(leaves, lr)
        )
        self.corrected = self.dropped = 0

    def adapt(self, x: Tensor, steps: int, after: bool) -> tuple[Tensor, float]:
        """Answer (b, k) as probabilities, and the share of the batch that took part."""
        answer, share = x, 0.0
        for step in range(steps):
            answer, share, scores, cells = self.take_step(x, "settled" if step else "follow")
            if not step:
                self.count_pairs(scores)
                self.weigh_rotations(cells)
        return (self.answer(self.look(x, "settled")[2]), share) if after else (answer, share)

    def look(self, x: Tensor, mode: str) -> tuple[list[list[Tensor]], list[int], list[list[float]]]:
        """Joint probabilities by image and view, which images are kept, and softened scores."""
        for norm in self.norms.values():
            norm.mode = mode
        z = self.twin.forward_features(torch.cat([torch.rot90(x, a, (2, 3)) for a in range(4)]))
        b, judged = len(x), 4 if self.rotations > 1 else 1
        kept, scores, cells = [], [], []
        for i in range(b):
            logits = [self.twin.fc(z[a * b + i]) for a in range(judged)]
            power = [
                sum(logits[a].tolist()[k * self.rotations + a] for a in range(judged)) for k in range(CLASSES)
            ]
            apart = [
                sum(math.dist(z[a * b + i].tolist(), self.means[k, a].tolist()) for a in range(4))
                for k in range(CLASSES)
            ]
            if self.rotations > 1 or power.index(max(power)) == apart.index(min(apart)):
                kept.append(i)
            scores.append([value / self.tau * self.sharpness**0.7 for value in power])
            cells.append(
                [row.exp() / row.exp().sum() for row in (row - row.max().detach() for row in logits)]
            )
        return cells, kept, scores

    def take_step(self, x: Tensor, mode: str) -> tuple[Tensor, float, list[list[float]], list[list[Tensor]]]:
        cells, kept, scores = self.look(x, mode)
        answer, loss = self.answer(scores), torch.zeros((), dtype=torch.float64)
        for i in kept:
            said = int(answer[i].argmax())
            self.corrected += said != scores[i].index(max(scores[i]))
            for a, p in enumerate(cells[i]):
                cost = -p[said * self.rotations + a].log()
                ratio = -(p * (p / (1 - p)).log()).sum()
                loss = loss + (cost + 0.3 * ratio) / len(cells[i]) / len(kept)
        if self.rotations > 1:
            for views in cells:
                for a, p in enumerate(views):
                    loss = loss - p[a :: self.rotations].sum().log() / len(views) / len(x)
        # The same scores at the temperature of the source: how confident answers are is not learnt from.
        spoken = [torch.stack([self.sum_views(views, k) for k in range(CLASSES)]) for views in cells]
        mean = sum((row.exp() / row.exp().sum() for row in spoken), torch.zeros(())) / len(x)
        loss = loss + (mean * mean.log()).sum() * (len(x) - 1) / len(x)
        self.dropped += len(x) - len(kept)
        if kept:
            self.descent.zero_grad()
            (loss * min(len(x), self.full) / self.full).backward()
            self.descent.step()
        return answer, len(kept) / len(x), scores, cells

    def sum_views(self, views: list[Tensor], k: int) -> Tensor:
        """Score of a class, with its gradient: up to what an image's classes share, the sum of its logits."""
        return torch.stack([p[k * self.rotations + a].log() for a, p in enumerate(views)]).sum() / self.tau

    def answer(self, scores: list[list[float]]) -> Tensor:
        """Posteriors under the shares that three rounds find, with A imagined images."""
        p = [softmax(row) for row in scores]
        imagined = 1 / min(max(self.excess, 1e-4), 1 / 1.01) - 1
        shares = [1 / CLASSES] * CLASSES
        for _ in range(3):
            posteriors = [reweigh(row, shares) for row in p]
            shares = [
                (imagined / CLASSES + sum(row[k] for row in posteriors)) / (imagined + len(p))
                for k in range(CLASSES)
            ]
        return torch.tensor([reweigh(row, shares) for row in p], dtype=torch.float64)

    def count_pairs(self, scores: list[list[float]]) -> None:
        p, b = [softmax(row) for row in scores], len(scores)
        total = [sum(row[k] for row in p) for k in range(CLASSES)]
        if b > 1 and self.images:
            pairs = [sum(map(float.__mul__, p[i], p[j])) for i in range(b) for j in range(b) if i != j]
            base = sum(map(float.__mul__, total, self.earlier)) / (b * self.images)
            found = (sum(pairs) / len(pairs) - base) / max(1 - base, 0.05)
            worth = min(64 + self.images, 1024)
            self.excess = (worth * self.excess + b * found) / (worth + b)
        self.earlier = [old + new for old, new in zip(self.earlier, total, strict=True)]
        self.images += b

    def weigh_rotations(self, cells: list[list[Tensor]]) -> None:
        """One step of Fisher scoring towards the temperature at which the rotations are most likely."""
        if self.rotations == 1:
            return
        slopes, spreads, b = [], [], len(cells)
        for views in cells:
            for a, p in enumerate(views):
                logs = [math.log(sum(p.tolist()[r :: self.rotations])) for r in range(self.rotations)]
                weights = softmax([self.sharpness * log for log in logs])
                mean = sum(map(float.__mul__, weights, logs))
                slopes.append(mean - logs[a])
                spreads.append(sum(w * (log - mean) ** 2 for w, log in zip(weights, logs, strict=True)))
        self.information = 64.0 + (self.information - 64.0) * (512 - min(b, 512)) / 512
        self.information += b * sum(spreads) / len(spreads)
        moved = self.sharpness - b * sum(slopes) / len(slopes) / self.information
        self.sharpness = min(max(moved, 0.25), 2.0)


def softmax(row: list[float]) -> list[float]:
    powers = [math.exp(value - max(row)) for value in row]
    return [power / sum(powers) for power in powers]


def reweigh(row: list[float], shares: list[float]) -> list[float]:
    joint = [p * share for p, share in zip(row, shares, strict=True)]
    return [value / sum(joint) for value in joint]


def plant(adapter: ttvd.TTVD, naive: Naive) -> None:
    """Put both far along a stream of like images: the most that averages are worth is all but reached."""
    state = {name: value.clone() for name, value in adapter.state_dict().items()}
    for name, value in state.items():
        if name.endswith("rows_followed"):
            value.fill_(4 * (512 - 16) - 40)
    state["label_shift.excess"].fill_(0.995)
    state["label_shift.images"].fill_(1024 - 64 - 4)
    if naive.rotations > 1:
        naive.sharpness, naive.information = 0.6, 7.0
        state["online_temperature.sharpness"].fill_(0.6)
        state["online_temperature.information"].fill_(7.0)
    adapter.load_state_dict(state)
    naive.excess, naive.images = 0.995, 1024 - 64 - 4
    naive.earlier = [naive.images / CLASSES] * CLASSES
    for norm in naive.norms.values():
        norm.rows = 4 * (512 - 16) - 40


def assert_same_state(adapter: ttvd.TTVD, naive: Naive) -> None:
    """All that changes is there, and is what the loops made of it."""
    found = dict(adapter.state_dict())
    wanted: dict[str, Any] = {"label_shift.excess": naive.excess, "label_shift.images": naive.images}
    if naive.images:
        wanted["label_shift.mean"] = [value / naive.images for value in naive.earlier]
    else:
        wanted["label_shift.mean"] = 1 / CLASSES
    if naive.rotations > 1:
        wanted |= {
            "online_temperature.sharpness": naive.sharpness,
            "online_temperature.information": naive.information,
        }
    for name, norm in naive.norms.items():
        leaves: dict[str, Any] = {"weight": norm.weight.detach(), "bias": norm.bias.detach()}
        leaves |= {"running_mean": norm.mean, "running_var": norm.var, "rows_followed": norm.rows}
        wanted |= {f"model.model.{name}.{leaf}": value for leaf, value in leaves.items()}
    assert {name for name in found if not name.startswith("optimizer.")} == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(
            found[name],
            torch.as_tensor(value, dtype=found[name].dtype).expand_as(found[name]),
            rtol=TOLERANCE,
            atol=TOLERANCE,
            msg=name,
        )


VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "two steps": {"steps": 2},
    "after": {"prediction": "after"},
    "adam": {"optimizer": "adam", "lr": 0.001},
}


@pytest.mark.parametrize("late", [False, True], ids=["from the source on", "late in a stream"])
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("outputs", [12, 3], ids=["joint head", "plain head"])
def test_the_default_is_what_the_loops_say(
    outputs: int,
    options: dict[str, Any],
    late: bool,
    make_net: Callable[..., ResNet],
    make_sites: Callable[..., ttvd.Sites],
    make_stream: Callable[..., list[Tensor]],
) -> None:
    """Batches of 1, of fewer images than a full step has, and of more."""
    net = make_net(outputs)
    start = {name: value.clone() for name, value in net.state_dict().items()}
    sites = make_sites(net)
    adapter = ttvd.TTVD(net, sites, **options)
    naive = Naive(net, sites.means, 3.0, options.get("optimizer", "sgd"), options.get("lr", 0.05))
    if late:
        plant(adapter, naive)
    for x in make_stream(8, 1, 66, 24, seed=6):
        quiet = naive.answer(naive.look(x, "look")[2])
        torch.testing.assert_close(adapter.predict(x).softmax(1), quiet, rtol=TOLERANCE, atol=TOLERANCE)
        assert_same_state(adapter, naive)
        wanted, share = naive.adapt(x, options.get("steps", 1), options.get("prediction") == "after")
        torch.testing.assert_close(adapter(x).softmax(1), wanted, rtol=TOLERANCE, atol=TOLERANCE)
        assert float(adapter.kept) == pytest.approx(share)
        assert_same_state(adapter, naive)
    moved = max(
        float((n.weight.detach() - start[f"{name}.weight"]).abs().max()) for name, n in naive.norms.items()
    )
    assert moved > 1e-3, f"nothing moved by more than {moved:.1e}: this shows nothing"
    assert (naive.dropped > 0) == (outputs == 3), (
        "a filter where the head knows the classes alone, and there only"
    )
    start_at = 0.6 if late and outputs == 12 else 1.0
    assert (abs(naive.sharpness - start_at) > 0.02) == (outputs == 12), (
        "the rotations were weighed where known"
    )
    if late:
        assert naive.corrected, "no answer was another for the shares: this shows nothing"
    assert all(torch.equal(value, start[name]) for name, value in net.state_dict().items())
