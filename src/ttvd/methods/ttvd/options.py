"""The options of TTVD in groups, their defaults, and which values are allowed."""

import math
from typing import Literal, TypedDict, get_args

from ttvd.geometry.prior import check_count
from ttvd.methods.gradient import StepOptions
from ttvd.zoo.sites import Sites

Structure = Literal["vd", "civd", "pd", "cipd"]
Objective = Literal["entropy", "joint", "consensus"]


class DiagramOptions(TypedDict, total=False):
    """The diagram that predicts, and its influence."""

    structure: Structure | None
    mirror: bool | None
    gamma: float
    tau: float | None
    shift: float | None


class LossOptions(TypedDict, total=False):
    """The terms of the loss."""

    objective: Objective
    agreement_filter: bool | None
    diversity_weight: float
    rotation_weight: float | None
    slr_weight: float | None


class AnswerOptions(TypedDict, total=False):
    """From class scores to answers."""

    prior: float | Literal["stream"] | None
    output_temperature: float | Literal["stream"] | None


class ScaledStepOptions(StepOptions, total=False):
    """The gradient step, and how large it is."""

    reference_batch_size: int | None
    adaptive_step: bool | None
    detect_changes: bool


class TTVDOptions(DiagramOptions, LossOptions, AnswerOptions, ScaledStepOptions, total=False):
    """All options of :class:`~ttvd.methods.ttvd.method.TTVD`, which explains them."""


DEFAULTS: TTVDOptions = {
    "structure": None,
    "mirror": None,
    "objective": "consensus",
    "gamma": 1.0,
    "tau": None,
    "shift": None,
    "agreement_filter": None,
    "diversity_weight": 1.0,
    "rotation_weight": None,
    "slr_weight": None,
    "prior": "stream",
    "output_temperature": None,
    "reference_batch_size": None,
    "adaptive_step": None,
    "detect_changes": True,
    "lr": None,  # type: ignore[typeddict-item]  # depends on the model, see choose_lr
    "optimizer": "sgd",
    "momentum": None,  # type: ignore[typeddict-item]  # 0 with SGD, 0.9 with Adam
    "steps": 1,
    "statistics": None,
    "prediction": "before",
}


def check_choices(structure: str, objective: str) -> None:
    """Refuse a structure or an objective that does not exist."""
    for name, value, allowed in (
        ("structure", structure, get_args(Structure)),
        ("objective", objective, get_args(Objective)),
    ):
        if value not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def choose_mirror(mirror: bool | None, gain: float | None, structure: str) -> bool:
    """Whether the mirrored image is a second view: what the user asks for, else where that does no harm."""
    if mirror and structure != "pd":
        raise ValueError(f"mirror=True needs structure='pd', got {structure!r}")
    return mirror if mirror is not None else structure == "pd" and gain is not None and gain >= -0.002


MANY, THOUSANDS = 50, 500
"""Classes from which on plain heads take larger steps; and from which on the accuracy is at least proportional to the
agreement of views."""


def takes_large_steps(head_views: int, batch_norm: bool) -> bool:
    """Whether steps are large, and the soft likelihood ratio is part of the loss.

    A head that tells rotations apart has labels that are true, and batch norms that follow the stream hold the
    features. Other networks have neither.
    """
    return head_views > 1 or batch_norm


def choose_lr(lr: float | None, head_views: int, batch_norm: bool, classes: int) -> float:
    """The learning rate: the user's, else one that suits the model."""
    if lr is not None:
        if isinstance(lr, bool) or not isinstance(lr, int | float):
            raise ValueError(f"lr must be a number, got {lr!r}")
        return lr
    if not takes_large_steps(head_views, batch_norm):
        return 0.01
    return 0.1 if head_views == 1 and classes >= MANY else 0.05


def choose_agreement_ratio(sites: Sites) -> float:
    """Accuracy divided by agreement of two views on source images; 0 for fewer classes, where it is not needed."""
    if sites.num_classes < THOUSANDS or not sites.accuracy or not sites.agreement_exponent:
        return 0.0
    return float(sites.accuracy ** (1.0 - 1.0 / sites.agreement_exponent))


def choose_tau(tau: float | None, fitted: float | None) -> float:
    """The temperature of the scores: the user's, else the one that was fitted on held-out source data."""
    chosen = fitted if tau is None else tau
    if chosen is None or not chosen > 0.0:
        raise ValueError(f"tau must be positive, got {chosen}")
    return chosen


def check_weights(rotation: float, slr: float, diversity: float, head_views: int) -> None:
    """Refuse weights below 0, and a rotation term for a head that does not tell rotations apart."""
    for name, weight in (("rotation", rotation), ("slr", slr), ("diversity", diversity)):
        if not 0.0 <= weight < math.inf:
            raise ValueError(f"{name}_weight must be a finite weight of at least 0, got {weight}")
    if rotation and head_views == 1:
        raise ValueError(
            "rotation_weight needs a head that tells rotations apart, and this one knows the classes alone: leave it "
            "at 0, or train the model with label augmentation"
        )


def check_answer(prior: float | str | None, output_temperature: float | str, *, known: bool) -> None:
    """Refuse a prior or an output temperature that cannot be meant, or that this head cannot give."""
    if isinstance(prior, str) and prior != "stream":
        raise ValueError(f"prior must be 'stream', a number of pseudo-images or None, got {prior!r}")
    if prior is not None and not isinstance(prior, str):
        check_count("prior", prior)
    if isinstance(output_temperature, str):
        if output_temperature != "stream":
            raise ValueError(
                f"output_temperature must be 'stream' or a positive number, got {output_temperature!r}"
            )
        if not known:
            raise ValueError(
                "output_temperature='stream' needs several views: a head that tells rotations apart, or mirrored "
                "images (mirror=True) on a head that knows the classes alone; otherwise give a number"
            )
    elif not 0.0 < output_temperature < math.inf:
        raise ValueError(f"output_temperature must be positive and finite, got {output_temperature}")


def choose_reference_batch_size(size: int | None, optimizer: str) -> int:
    """The number of images from which on a step is full: 64 with SGD unless given, else 1."""
    if size is None:
        return 64 if optimizer == "sgd" else 1
    if not size >= 1:
        raise ValueError(f"reference_batch_size must be at least 1 image, got {size}")
    if size > 1 and optimizer != "sgd":
        raise ValueError(
            f"reference_batch_size scales the loss, and steps of {optimizer} do not depend on its scale: use "
            "optimizer='sgd', or leave reference_batch_size at None"
        )
    return size


def choose_source_loss(adaptive_step: bool | None, source_loss: float | None, optimizer: str) -> float | None:
    """The rotation loss on source data that steps are scaled by; None where all steps are full.

    Args:
        adaptive_step: What the user asks for, or None.
        source_loss: The loss, where it is known and can be compared.
        optimizer: The name of the optimizer; its steps must grow with the loss.
    """
    if not isinstance(adaptive_step, bool | None):
        raise ValueError(f"adaptive_step must be True, False or None, got {adaptive_step!r}")
    possible = source_loss is not None and optimizer == "sgd"
    if adaptive_step and not possible:
        raise ValueError(
            "adaptive_step=True needs SGD, a structure of several views, a head that tells rotations apart, and sites "
            "with a rotation_loss: ttvd.calibrate measures it on held-out source data"
        )
    return source_loss if possible and adaptive_step is not False else None
