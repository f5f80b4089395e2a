"""What the options of TTVD may be; what may not is refused before the first batch."""

import math

from ttvd.geometry.prior import check_count


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """A word must be one of those allowed."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def check_terms(known: float, ratio: float, diversity: float, rotations: int) -> None:
    """Weights of terms are numbers of at least 0, and known rotations need a head that knows ``rotations`` > 1."""
    for name, weight in (("known", known), ("ratio", ratio), ("diversity", diversity)):
        if not 0.0 <= weight < math.inf:
            raise ValueError(f"{name} must be a finite weight of at least 0, got {weight}")
    if known and rotations == 1:
        raise ValueError(
            "known needs a head that tells rotations apart, and this one knows the classes alone: leave it at 0, or "
            "train the model with label augmentation"
        )


def check_answer(prior: float | str | None, soften: float | str, rotations: int) -> None:
    """What is done to answers: a number of imagined images, ``"stream"`` or None; a factor above 0 or ``"stream"``."""
    if isinstance(prior, str) and prior != "stream":
        raise ValueError(f"prior must be 'stream', a number of imagined images or None, got {prior!r}")
    if prior is not None and not isinstance(prior, str):
        check_count("prior", prior)
    if isinstance(soften, str):
        if soften != "stream":
            raise ValueError(f"soften must be 'stream' or a positive number, got {soften!r}")
        if rotations == 1:
            raise ValueError(
                "soften='stream' needs a head that tells rotations apart, and this one knows the classes alone: give a "
                "number, or train the model with label augmentation"
            )
    elif not 0.0 < soften < math.inf:
        raise ValueError(f"soften must be positive and finite, got {soften}")


def check_full_step(full_step: int | None, optimizer: str) -> None:
    """A number of images, and if it is more than 1 an optimizer whose steps grow with the loss."""
    if full_step is None or full_step == 1:
        return
    if not full_step >= 1:
        raise ValueError(f"full_step must be at least 1 image, got {full_step}")
    if optimizer != "sgd":
        raise ValueError(
            f"full_step scales the loss, and steps of {optimizer} do not depend on its scale: use optimizer='sgd', or "
            "leave full_step at None"
        )


def choose_need(by_need: bool | None, usual: float | None, optimizer: str) -> float | None:
    """The loss of rotations on source data that steps are measured by; None where all are full.

    Args:
        by_need: What the user asks for, or None.
        usual: The loss, where it is known and can be compared.
        optimizer: Its steps must grow with the loss.
    """
    if not isinstance(by_need, bool | None):
        raise ValueError(f"by_need must be True, False or None, got {by_need!r}")
    possible = usual is not None and optimizer == "sgd"
    if by_need and not possible:
        raise ValueError(
            "by_need=True needs SGD, a structure of several views, a head that tells rotations apart, and sites with a "
            "rotation_loss: ttvd.calibrate measures it on held-out source data"
        )
    return usual if possible and by_need is not False else None
