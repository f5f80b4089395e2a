import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

SCRIPT = """
import os
import sys

import torch
from safetensors.torch import save_file

from ttvd.nn.resnet import ResNet
from ttvd.nn.split import split
from ttvd.source import TrainingConfig, estimate_sites, train

torch.set_num_threads(1)
out = sys.argv[1]
generator = torch.Generator().manual_seed(0)
images, labels = torch.rand(72, 1, 6, 6, generator=generator), torch.arange(72) % 3
images[labels == 1, :, :3] *= 0.3
rank = int(os.environ.get("RANK", "0"))
start = torch.Generator().manual_seed(rank)  # every process its own; the first one's weights count
model = ResNet(12, in_channels=1, widths=(8, 16), blocks=(1, 1), norm="group", generator=start)
config = TrainingConfig(epochs=3, batch_size=16, lr=0.05, padding=1, schedule="cosine", nesterov=True)
fixed = ResNet(12, in_channels=1, widths=(8, 16), blocks=(1, 1), generator=generator)
sites = estimate_sites(split(fixed), (images, labels), batch_size=10)
few = estimate_sites(split(fixed), (images[:9], labels[:9]), batch_size=10)
history = train(model, images, labels, config, checkpoint=out + ".state")
loss = torch.tensor([epoch.loss for epoch in history.epochs])
exact = {"means": sites.means, "counts": sites.counts, "few": few.means}
save_file({**exact, "loss": loss, **model.state_dict()}, f"{out}.{rank}")
"""


def run_here(script: Path) -> dict[str, torch.Tensor]:
    """Run the script in this process, without the environment of torchrun."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(script), str(script.with_name("one"))])
        try:
            runpy.run_path(str(script))
        finally:
            torch.set_num_threads(threads)
    return load_file(script.with_name("one.0"))


def run_in_two(script: Path) -> list[dict[str, torch.Tensor]]:
    """Run the script in two processes with the environment that torchrun gives them; torchrun itself is slow."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(script.with_name("two"))]
    workers = [
        subprocess.Popen(
            command,
            env={**os.environ, **group, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for worker in workers:
        _, errors = worker.communicate(timeout=100)
        assert worker.returncode == 0, errors[-3000:]
    return [load_file(script.with_name(f"two.{rank}")) for rank in range(2)]


@pytest.mark.slow
def test_two_processes_do_what_one_does(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    alone = run_here(script)
    first, second = run_in_two(script)
    assert set(alone) == set(first)
    for name in alone:
        assert torch.equal(first[name], second[name]), name
    for name in ("means", "counts", "few"):
        torch.testing.assert_close(first.pop(name), alone.pop(name), rtol=0, atol=1e-12)
    for name in alone:  # sums of gradients are rounded in another order
        torch.testing.assert_close(first[name], alone[name], rtol=1e-3, atol=1e-4)
    states = [load_file(tmp_path / f"{name}.state") for name in ("one", "two")]
    assert states[0].keys() == states[1].keys()
    assert any(name.startswith("optimizer.") for name in states[0])
