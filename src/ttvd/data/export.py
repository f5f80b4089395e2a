"""From a clean set to its "-C" version on disk: seeded, resumable, with a manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import ttvd
from ttvd.data.corruptions.checks import check_choice
from ttvd.data.export.lock import lock_folder
from ttvd.data.export.manifest import Ledger
from ttvd.data.export.plan import Plan as Plan
from ttvd.data.export.plan import read_names as read_names
from ttvd.data.export.plan import read_severities as read_severities
from ttvd.data.export.source import Advance as Advance
from ttvd.data.export.stacks import write_stacks
from ttvd.data.export.trees import Format as Format
from ttvd.data.export.trees import write_trees
from ttvd.data.sets import ImageFolder, LabelledImages
from ttvd.data.sets.pictures import require_pillow

Layout = Literal["cifar", "folder"]


def export_set(
    source: LabelledImages,
    out: str | Path,
    plan: Plan | None = None,
    *,
    layout: Layout = "cifar",
    image_format: Format = "jpeg",
    workers: int = 2,
    advance: Advance | None = None,
) -> Path:
    """Write the corrupted versions of a clean set.

    A killed run leaves whole files only; the same call goes on where it stopped and gives the same result.

    Args:
        source: An `ImageSet` or an `ImageFolder`.
        out: Folder of the result: new, empty, or of an earlier run with the same settings, to which corruptions
            are added. Anything else is refused, and so is a second run at the same time.
        plan: Corruptions, severities, seed and constants; the 15 usual ones at all severities unless given.
        layout: "cifar" writes one .npy file for each corruption with the severities stacked, and labels.npy;
            "folder" writes pictures as corruption/severity/class/picture.
        image_format: Of pictures; "jpeg" (quality 85) as in ImageNet-C, or "png" without loss.
        workers: Processes that decode pictures and threads that encode them.
        advance: Told what is being made and how many images were finished just now.

    Returns:
        The folder of the result.

    Example:
        >>> import tempfile, torch
        >>> from ttvd.data.sets import from_arrays
        >>> clean = from_arrays(torch.rand(3, 3, 8, 8), [0, 1, 1])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     out = export_set(clean, folder, Plan(("contrast",), (1, 5)))
        ...     sorted(path.name for path in out.iterdir())
        ['SHA256SUMS', 'contrast.npy', 'labels.npy', 'manifest.json']
    """
    check_choice(layout, ("cifar", "folder"), "layout")
    check_choice(image_format, ("jpeg", "png"), "format of pictures")
    plan = plan or Plan()
    _check_pillow(source, plan, layout)
    settings = {
        "ttvd": ttvd.__version__,
        "layout": layout,
        **({"image_format": image_format} if layout == "folder" else {}),
        "source": {"name": source.name, "images": len(source), "sha256": source.fingerprint()},
        "classes": source.classes,
        **plan.describe(),
    }
    report = advance or (lambda name, count: None)
    with lock_folder(Path(out)):
        ledger = Ledger(Path(out), settings)
        if layout == "cifar":
            write_stacks(source, Path(out), plan, ledger, report, workers=workers)
        else:
            write_trees(source, Path(out), plan, ledger, report, image_format=image_format, workers=workers)
    return Path(out)


def _check_pillow(source: LabelledImages, plan: Plan, layout: Layout) -> None:
    """Raise before work begins, not hours later when the first picture is reached."""
    needs = {
        "reading pictures": isinstance(source, ImageFolder),
        "writing pictures": layout == "folder",
        "jpeg_compression": "jpeg_compression" in plan.corruptions,
        "frost from pictures": plan.frost == "pictures" and "frost" in plan.corruptions,
    }
    for purpose in (purpose for purpose, needed in needs.items() if needed):
        require_pillow(purpose)
