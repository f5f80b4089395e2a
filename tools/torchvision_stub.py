"""Make `import torchvision`, and with it `import timm`, work beside a CPU-only torch.

The torchvision of the package index is built for CUDA on Linux. Beside a CPU-only torch its extension cannot be loaded,
and `import torchvision` ends in "operator torchvision::nms does not exist", although no model or transform of timm uses
that operator. The best remedy is a CPU build of torchvision, from an index that has one (`make PIP_FLAGS=...`). Where
there is none, this file declares the two missing operators right before torchvision is imported. They have no code:
calling them still raises an error.

    .venv/bin/python tools/torchvision_stub.py

copies this file into the environment, with a .pth file that loads it whenever Python starts. It does so only where the
import fails without it. `make` runs this command after it has installed the packages.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

NAME = "torchvision_stub"
OPERATORS = ("nms", "qnms")
_declared: list[Any] = []  # a declaration ends when nobody refers to it


class Finder(MetaPathFinder):
    """Finds torchvision where it is, and has it loaded by the loader below."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname != "torchvision":
            return None
        spec = PathFinder.find_spec(fullname)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = Loader(fullname, spec.loader.path)
        return spec


class Loader(SourceFileLoader):
    """Declares the operators before torchvision's own code runs."""

    def exec_module(self, module: ModuleType) -> None:
        declare_operators(module.__path__)
        super().exec_module(module)


def declare_operators(folders: Any) -> None:
    """Declare the operators unless the extension in the folders of torchvision brings them."""
    import torch

    extension = PathFinder.find_spec("_C", folders)
    try:
        torch.ops.load_library(extension.origin if extension else "")
    except OSError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in OPERATORS:
            if not hasattr(torch.ops.torchvision, name):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(library)


def main() -> None:
    import subprocess
    import sysconfig
    from pathlib import Path

    tried = subprocess.run(
        [sys.executable, "-c", "import torchvision"], capture_output=True, text=True, check=False
    )
    if "torchvision::nms does not exist" not in tried.stderr:
        return
    folder = Path(sysconfig.get_path("purelib"))
    (folder / f"{NAME}.py").write_text(Path(__file__).read_text())
    (folder / f"{NAME}.pth").write_text(f"import {NAME}\n")
    print(
        f"torchvision's extension does not fit this torch: {NAME}.py in {folder} lets it be imported without it"
    )


if __name__ == "__main__":
    main()
elif __name__ == NAME:  # loaded by the .pth file
    sys.meta_path.insert(0, Finder())
