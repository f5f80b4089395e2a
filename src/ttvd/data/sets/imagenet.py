"""ImageNet, ImageNet-C and ImageNet-R as their users have them: folders of classes below one folder."""

from __future__ import annotations

from pathlib import Path

from ttvd.data.sets.classmap import read_synsets
from ttvd.data.sets.folder import ImageFolder

CLASS_LISTS = ("classes.txt", "synset_words.txt", "synsets.txt", "LOC_synset_mapping.txt")
"""Files with one class a line, in the order of a model's outputs; the last is in Kaggle's edition of ImageNet."""
_TRAINING, _TESTING = ("train",), ("val", "validation", "test")
_CORRUPTED, _RENDERED = "ImageNet-C", "imagenet-r"
_KINDS = ("", "noise", "blur", "weather", "digital", "extra")  # of corruptions, as the archives are called


def load_imagenet(root: str | Path, split: str = "test") -> ImageFolder:
    """Load the pictures of `root/train`, or of `root/val`; without such folders `root` itself holds the classes.

    Raises:
        FileNotFoundError: The folder is missing, while other parts of ImageNet are there.
    """
    root, places = Path(root), _TRAINING if split == "train" else _TESTING
    found = [root / place for place in places if (root / place).is_dir()]
    if not found:
        _refuse_parts(root, (*_TRAINING, *_TESTING, _CORRUPTED), [root / place for place in places])
    return ImageFolder(found[0] if found else root, name="imagenet")


def load_imagenet_c(root: str | Path, corruption: str, severity: int) -> ImageFolder:
    """Load the released pictures of one corruption; its folder may lie in one of the folders of the archives."""
    root = Path(root)
    home = root / _CORRUPTED if (root / _CORRUPTED).is_dir() else root
    folders = [home / kind / corruption / str(severity) for kind in _KINDS]
    folder = next((folder for folder in folders if folder.is_dir()), folders[0])
    # The released pictures are 224 x 224 already: resizing them once more would blur them.
    return ImageFolder(folder, resize=None, name="imagenet-c")


def load_imagenet_r(root: str | Path) -> ImageFolder:
    """Load ImageNet-R; its classes are a part of ImageNet's, see :func:`find_classes`."""
    inner = Path(root) / _RENDERED
    if not inner.is_dir():
        _refuse_parts(Path(root), (*_TRAINING, *_TESTING, _CORRUPTED), [inner])
    return ImageFolder(inner if inner.is_dir() else root, name="imagenet-r")


def find_classes(root: str | Path) -> tuple[str, ...]:
    """Find the classes of ImageNet in the order of a model's outputs: in one of `CLASS_LISTS`, else as class folders.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as root:
        ...     _ = Path(root, "classes.txt").write_text("n01440764 tench\\nn01443537 goldfish\\n")
        ...     find_classes(root)
        ('n01440764', 'n01443537')

    Raises:
        FileNotFoundError: There is no such file, and no folder of classes.
    """
    root = Path(root)
    places = [root / name for name in CLASS_LISTS if (root / name).is_file()]
    places += [root / name for name in (*_TRAINING, *_TESTING) if (root / name).is_dir()]
    for place in places:
        if classes := read_synsets(place):  # a flat folder of pictures has none
            return classes
    raise FileNotFoundError(
        f"the classes of ImageNet in the order of the model's outputs are not in {root}: neither as folders of train "
        f"or val, nor in a file {' or '.join(CLASS_LISTS)} with one identifier, such as n01440764, a line"
    )


def _refuse_parts(root: Path, parts: tuple[str, ...], wanted: list[Path]) -> None:
    """Raise where the parts of ImageNet would be taken for classes."""
    if there := [name for name in parts if (root / name).is_dir()]:
        raise FileNotFoundError(
            f"{root} has a folder {there[0]}, so its folders are no classes, and there is no "
            f"{' or '.join(str(folder) for folder in wanted)} with a folder for each class"
        )
