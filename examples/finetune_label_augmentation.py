"""Teach a classifier the rotations of its images, so that TTVD can use them at test time.

    python examples/finetune_label_augmentation.py

A plain classifier of k classes gets a head of 4 k outputs: one for each class and rotation. A few epochs of
self-supervised label augmentation (SLA) teach it to tell them apart. TTVD then compares four rotations of each image.
Measure whether that pays on your data, as is done here: it does on photographs, and not on these digits, where a
turned 6 is a 9.
"""

import torch
from torch import nn

import ttvd
import ttvd.source
from ttvd.data import split_digits
from ttvd.data.corruptions import corrupt

torch.manual_seed(0)
images, labels, new_images, new_labels = split_digits()
held_out = torch.arange(len(images)) % 5 == 0
known = (images[~held_out], labels[~held_out])

# Your classifier. It is trained already; this one learns clean digits first.
plain = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
    *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
    *(nn.Flatten(), nn.Linear(32 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, 10)),
)
config = ttvd.source.TrainingConfig(
    "plain", epochs=5, batch_size=64, optimizer="adamw", lr=2e-3, schedule="onecycle", padding=2, flip=False
)
ttvd.source.train(plain, *known, config)

# All four outputs of a class start as copies of its old output, so that the classes are known from the start. A
# mirrored digit is no digit: flip=True is for photographs.
model = ttvd.source.finetune(plain, known, flip=False, padding=2, epochs=5, batch_size=64)

# Both models adapt to digits in fog.
for name, classifier in (("plain classifier", plain), ("after label augmentation", model)):
    sites = ttvd.prepare(classifier, known, (images[held_out], labels[held_out]))
    adapter = ttvd.TTVD(classifier, sites)
    stream = zip(corrupt(new_images, "fog", severity=4).split(64), new_labels.split(64), strict=True)
    wrong = sum(int((adapter(x).argmax(1) != y).sum()) for x, y in stream)
    print(f"TTVD, {name}: {100 * wrong / len(new_labels):.1f} % errors")
