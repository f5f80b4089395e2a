"""Adapt an image classifier of Hugging Face transformers.

    pip install ttvd transformers
    python examples/huggingface_model.py

The model has random weights here, so that the example needs no download. With weights of your own, take
`AutoModelForImageClassification.from_pretrained(name)`, and put the normalisation of its processor in front:
`torch.nn.Sequential(ttvd.Normalize(3, processor.image_mean, processor.image_std), model)` takes images in [0, 1].
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

# Tent needs nothing but the model. TTVD needs temperatures too: `ttvd.prepare` makes sites and temperatures in one
# call, as in own_model.py. It refuses a model with random weights, whose answers say nothing about the labels.
adapter = ttvd.create("tent", model, lr=1e-3)
for batch in images.split(50):
    logits = adapter(batch)  # a tensor (b, classes), whatever the model returns
print(f"logits of the last batch: {tuple(logits.shape)}, {adapter.kept:.0%} of it used")
