"""Adapt an image classifier of Hugging Face transformers.

    pip install ttvd transformers
    python examples/huggingface_model.py

The model has random weights here, so that the example needs no download. With weights of your own, take
`AutoModelForImageClassification.from_pretrained(name)` and images as its processor gives them.
"""

import torch
from transformers import ResNetConfig, ResNetForImageClassification

import ttvd

torch.manual_seed(0)
config = ResNetConfig(
    embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=5
)
model = ResNetForImageClassification(config).eval()
images, labels = torch.rand(200, 3, 32, 32), torch.arange(200) % 5

# The model returns an object with the attribute `logits`. Adapters and sites read the logits from it.
sites = ttvd.estimate_sites(model, (images, labels))
print(f"sites: {tuple(sites.means.shape)} (classes, rotations, features)")

# Tent needs nothing but the model. TTVD needs temperatures too: `ttvd.calibrate` fits them on held-out images with
# labels, as in own_model.py. A model with random weights has none, because its answers say nothing about the labels.
adapter = ttvd.create("tent", model, lr=1e-3)
for batch in images.split(50):
    logits = adapter(batch)  # a tensor (b, classes), whatever the model returns
print(f"logits of the last batch: {tuple(logits.shape)}, {adapter.kept:.0%} of it used")
