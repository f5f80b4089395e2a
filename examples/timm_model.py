"""Adapt a model of timm, and compare several methods on the same stream.

    pip install 'ttvd[timm,demo]'
    python examples/timm_model.py

A narrow ResNet-18 learns clean digits here, so that the example needs no download. With weights of your own, take
`timm.create_model(name, pretrained=True)` and leave the training out.
"""

import timm
import torch
import torch.nn.functional as F

import ttvd
from ttvd.data import split_digits
from ttvd.data.corruptions import corrupt

torch.manual_seed(0)
images, labels, new_images, new_labels = split_digits()
held_out = torch.arange(len(images)) % 5 == 0
model = timm.create_model("resnet18", num_classes=10, in_chans=1, channels=(16, 32, 64, 128))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for _ in range(5):
    for rows in (~held_out).nonzero()[:, 0].split(32):
        optimizer.zero_grad()
        F.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()
model.eval()

# ttvd finds the head by itself. If your images have to be normalised, put that in front of the model, as
# torch.nn.Sequential(ttvd.Normalize(3, mean, std), model): the adapter turns images, and expects pixels from 0 to 1.
sites = ttvd.prepare(model, (images[~held_out], labels[~held_out]), (images[held_out], labels[held_out]))

# Every method is built by its name. `ttvd.list_methods()` has them all, with what they update and need.
stream = corrupt(new_images, "contrast", severity=3)
for name in ("source", "bn", "tent", "ttvd"):
    needed = {"sites": sites} if "sites" in ttvd.list_methods()[name].needs else {}
    adapter = ttvd.create(name, model, **needed)
    pairs = zip(stream.split(64), new_labels.split(64), strict=True)
    wrong = sum(int((adapter(x).argmax(1) != y).sum()) for x, y in pairs)
    print(f"{name:8} {100 * wrong / len(stream):5.1f} % errors")
