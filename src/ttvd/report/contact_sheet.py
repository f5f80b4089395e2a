"""Contact sheet: one image under every corruption at every severity."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from ttvd.data.corruptions import CORRUPTIONS, EXTRA, corrupt
from ttvd.files import open_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def contact_sheet(
    image: Tensor,
    path: str | Path | None = None,
    *,
    names: tuple[str, ...] = (*CORRUPTIONS, *EXTRA),
    constants: Literal["cifar", "imagenet"] = "imagenet",
    seed: int = 0,
    frost: Literal["procedural", "pictures"] = "procedural",
) -> Figure:
    """Draw one image under corruptions (columns) at the severities 1 to 5 (rows).

    Args:
        image: Float image (c, h, w) in [0, 1] with 1 or 3 channels.
        path: File for the figure, in the format of its suffix such as .png or .pdf; None saves nothing.
        names: Corruptions to draw, in order.
        constants: Published table of constants.
        seed: Seed of the random parts.
        frost: Source of the frost pictures.

    Example:
        >>> import torch
        >>> figure = contact_sheet(torch.full((1, 8, 8), 0.5), names=("contrast", "brightness"))
        >>> len(figure.axes)
        10
    """
    from matplotlib.figure import Figure

    if image.ndim != 3:
        raise ValueError(
            f"image must have shape (c, h, w), got {tuple(image.shape)}; pass one image, not a batch"
        )
    kind = None if path is None else _read_kind(Path(path))
    figure = Figure(figsize=(len(names) * 1.1 + 0.4, 6.0), dpi=150)
    axes = figure.subplots(5, len(names), squeeze=False, gridspec_kw={"wspace": 0.04, "hspace": 0.04})
    for column, name in enumerate(names):
        axes[0, column].set_title(name.replace("_", "\n"), fontsize=8)
        for row in range(5):
            changed = corrupt(image[None], name, row + 1, constants=constants, seed=seed, frost=frost)
            draw_image(axes[row, column], changed[0])
    for row in range(5):
        axes[row, 0].set_ylabel(str(row + 1), fontsize=8, rotation=0, labelpad=8, va="center")
    figure.subplots_adjust(left=0.25 / len(names), right=0.998, bottom=0.005, top=0.92)
    if path is not None:
        with open_atomic(path) as file:
            figure.savefig(file, format=kind)
    return figure


def _read_kind(path: Path) -> str:
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    kind = path.suffix[1:].lower()
    if kind not in known:
        raise ValueError(
            f"the suffix of {path} must be that of a picture, such as .png, .pdf or .svg, got {path.suffix!r}; "
            f"known: {', '.join(sorted(known))}"
        )
    return kind


def draw_image(ax: Axes, image: Tensor) -> Axes:
    """Show an image (c, h, w) without ticks; grey images range from black to white."""
    pixels = image.detach().cpu().permute(1, 2, 0).numpy()
    ax.imshow(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels, cmap="gray", vmin=0, vmax=1)
    ax.set(xticks=[], yticks=[])
    return ax
