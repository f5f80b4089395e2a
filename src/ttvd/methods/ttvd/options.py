"""What the options of TTVD may be; what may not is refused before the first batch."""

import math

from ttvd.geometry.prior import check_count


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """A word must be one of those allowed."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def check_terms(known: float, ratio: float, diversity: float, rotations: int) -> None:
    """Weights of terms are numbers of at least 0, and known rotations need a head that knows ``rotations`` > 1."""
    for name, weight in (("rotation_weight", known), ("slr_weight", ratio), ("diversity_weight", diversity)):
        if not 0.0 <= weight < math.inf:
            raise ValueError(f"{name} must be a finite weight of at least 0, got {weight}")
    if known and rotations == 1:
        raise ValueError(
            "known needs a head that tells rotations apart, and this one knows the classes alone: leave it at 0, or "
            "train the model with label augmentation"
        )


def check_answer(prior: float | str | None, output_temperature: float | str, rotations: int) -> None:
    """What is done to answers: a number of imagined images, ``"stream"`` or None; a factor above 0 or ``"stream"``."""
    if isinstance(prior, str) and prior != "stream":
        raise ValueError(f"prior must be 'stream', a number of imagined images or None, got {prior!r}")
    if prior is not None and not isinstance(prior, str):
        check_count("prior", prior)
    if isinstance(output_temperature, str):
        if output_temperature != "stream":
            raise ValueError(
                f"output_temperature must be 'stream' or a positive number, got {output_temperature!r}"
            )
        if rotations == 1:
            raise ValueError(
                "output_temperature='stream' needs a head that tells rotations apart, and this one knows the classes alone: give a "
                "number, or train the model with label augmentation"
            )
    elif not 0.0 < output_temperature < math.inf:
        raise ValueError(f"output_temperature must be positive and finite, got {output_temperature}")


def check_reference_batch_size(reference_batch_size: int | None, optimizer: str) -> None:
    """A number of images, and if it is more than 1 an optimizer whose steps grow with the loss."""
    if reference_batch_size is None or reference_batch_size == 1:
        return
    if not reference_batch_size >= 1:
        raise ValueError(f"reference_batch_size must be at least 1 image, got {reference_batch_size}")
    if optimizer != "sgd":
        raise ValueError(
            f"reference_batch_size scales the loss, and steps of {optimizer} do not depend on its scale: use optimizer='sgd', or "
            "leave reference_batch_size at None"
        )


def choose_step_scale(adaptive_step: bool | None, usual: float | None, optimizer: str) -> float | None:
    """The loss of rotations on source data that steps are measured by; None where all are full.

    Args:
        adaptive_step: What the user asks for, or None.
        usual: The loss, where it is known and can be compared.
        optimizer: Its steps must grow with the loss.
    """
    if not isinstance(adaptive_step, bool | None):
        raise ValueError(f"adaptive_step must be True, False or None, got {adaptive_step!r}")
    possible = usual is not None and optimizer == "sgd"
    if adaptive_step and not possible:
        raise ValueError(
            "adaptive_step=True needs SGD, a structure of several views, a head that tells rotations apart, and sites with a "
            "rotation_loss: ttvd.calibrate measures it on held-out source data"
        )
    return usual if possible and adaptive_step is not False else None
