"""Adapt a classifier of your own to images that have changed since its training.

    python examples/own_model.py

The classifier is a small network for digits. It is trained on clean digits, and then sees digits in fog.
"""

import torch
import torch.nn.functional as F
from torch import nn

import ttvd
from ttvd.data import split_digits
from ttvd.data.corruptions import corrupt

torch.manual_seed(0)
images, labels, new_images, new_labels = split_digits()
held_out = torch.arange(len(images)) % 5 == 0

# 1. Your model: any nn.Module that takes images and ends in an nn.Linear. Yours is trained already.
model = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
    *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
    *(nn.Flatten(), nn.Linear(32 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, 10)),
)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for _ in range(3):
    for rows in (~held_out).nonzero()[:, 0].split(64):  # split_digits has shuffled them
        optimizer.zero_grad()
        F.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()
model.eval()

# 2. Before deployment, with training images at hand: one site (mean of the features) for each class and rotation,
#    and temperatures that are fitted on images which the model was not trained on. Without such images, leave the
#    last argument out.
sites = ttvd.prepare(model, (images[~held_out], labels[~held_out]), (images[held_out], labels[held_out]))
print(sites)  # accuracy is that of the held-out images
sites.save("own_model.sites.safetensors")  # Sites.load reads this file again

# 3. In deployment, without labels: call the adapter where you called the model. It learns from every batch.
adapter = ttvd.TTVD(model, sites)
stream = corrupt(new_images, "fog", severity=4)
before, after = 0, 0
for x, y in zip(stream.split(64), new_labels.split(64), strict=True):
    with torch.no_grad():
        before += int((model(x).argmax(1) != y).sum())
    after += int((adapter(x).argmax(1) != y).sum())
print(f"errors: {100 * before / len(stream):.1f} % before, {100 * after / len(stream):.1f} % with TTVD")
