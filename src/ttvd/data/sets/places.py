"""Where a set may lie below the folder that a user names."""

from collections.abc import Mapping, Sequence
from pathlib import Path


def find_folder(root: str | Path, places: Mapping[str, Sequence[str]], hint: str) -> Path:
    """Return the first folder that holds a set: below `root` at one of the places, or `root` itself.

    Args:
        root: What the user named.
        places: For each relative folder, the files that make the set up.
        hint: Command that gets the set.

    Raises:
        FileNotFoundError: No place has any of its files, or the first that has some lacks others.
    """
    root = Path(root)
    if not root.is_dir():
        raise FileNotFoundError(f"no folder {root}; `{hint}` makes it")
    partial: list[str] = []
    for place, names in places.items():
        for folder in (root / place, root):
            missing = [name for name in names if not (folder / name).is_file()]
            if not missing:
                return folder
            if len(missing) < len(names):
                partial.append(f"{folder} lacks {', '.join(missing[:3])}")
    tried = " or ".join(str(root / place) for place in places)
    reason = f" ({partial[0]})" if partial else ""
    raise FileNotFoundError(f"the set is not in {tried}{reason}; `{hint}` gets it")
