"""`ttvd adapt` as the tests call it, and a small adapter with a stream for the function behind it."""

import csv
from pathlib import Path

import torch
from torch import nn

import ttvd
from tests.helpers.cli import check_cli
from ttvd.deploy import Inputs


def run_adapt(
    source: Path, out: Path, *options: object, model: str = "digits-sla", method: str = "bn"
) -> list[dict[str, str]]:
    """Run `ttvd adapt` and return the rows that it wrote."""
    check_cli("adapt", source, "--model", model, "--out", out, "--method", method, *options)
    return read_rows(out)


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def make_adapter() -> ttvd.Adapter:
    """Return an adapter that changes with every batch, always the same one."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    return ttvd.create("tent", net, lr=0.1)


def make_inputs(count: int = 20) -> Inputs:
    images = torch.rand(count, 1, 2, 2, generator=torch.Generator().manual_seed(1))
    return Inputs([f"{number}.png" for number in range(count)], images.__getitem__, f"{count} images")
