import os
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


def launch(folder: Path, name: str, processes: int) -> list[dict[str, torch.Tensor]]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(folder / name)]
    if processes > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [load_file(folder / f"{name}.{rank}") for rank in range(processes)]


@pytest.mark.slow
def test_two_processes_do_what_one_does(tmp_path: Path) -> None:
    [alone] = launch(tmp_path, "one", 1)
    first, second = launch(tmp_path, "two", 2)
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
