"""State files: what an adapter has learnt, the run that it belongs to, and how far that run had come."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import nn

from ttvd.methods import Adapter
from ttvd.nn.fingerprint import fingerprint
from ttvd.zoo.tensorfile import read_tensors, write_tensors

KIND = "ttvd.state"
FORMAT = 3
_REMEDY = "begin again without a state"
_OPTIONS = {
    "method": "--method",
    "method revision": "version of ttvd",
    "parameters": "--param",
    "model": "--model and --weights",
    "sites": "--sites",
    "views": "--views",
    "guard": "--guard or --no-guard",
    "input": "images, in the same preparation (--size, --resize, --crop, --interpolation, --gray, "
    "--ignore-orientation)",
    "batch size": "--batch-size",
    "classes": "--classes",
    "output": "suffix of --out",
}
"""What to give again, by the key of the metadata that differs."""


@dataclass(frozen=True)
class Position:
    """How far a stream had come when its state was saved.

    Attributes:
        images: Number of images that the stream had passed, unreadable ones included.
        rows: Number of predictions that it had written.
        size: Number of bytes of the journal of these predictions; 0 before the journal was begun. See
            :class:`ttvd.deploy.predictions.PredictionWriter`.
        checksum: CRC-32 of these bytes.
    """

    images: int = 0
    rows: int = 0
    size: int = 0
    checksum: int = 0


def identify(method: str, parameters: Mapping[str, Any], model: nn.Module) -> dict[str, str]:
    """Describe an adapter so that the state of another one can be refused.

    Args:
        method: Name of the method.
        parameters: Parameters that were passed to it.
        model: The model as it was passed to the method, before it adapts.

    Example:
        >>> identify("tent", {"lr": 0.1}, nn.Linear(2, 2))["parameters"]
        '{"lr": 0.1}'
    """
    settings = json.dumps(dict(parameters), sort_keys=True, default=repr)
    return {"method": method, "parameters": settings, "model": fingerprint(model)}


@dataclass(frozen=True)
class StateFile:
    """The state of an adapter in a safetensors file.

    Args:
        path: Path of the file.
        identity: What the state belongs to, for example :func:`identify`. A file with another identity is refused.
        every: Number of batches between two states that :func:`ttvd.deploy.adapt_stream` saves.

    Example:
        >>> import tempfile, ttvd
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
        >>> tent = ttvd.create("tent", net)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = StateFile(Path(folder, "tent.state"), identify("tent", {}, net))
        ...     file.save(tent)
        ...     file.load(ttvd.create("tent", net))
    """

    path: Path
    identity: Mapping[str, str] = field(default_factory=dict)
    every: int = 100

    def save(
        self, adapter: Adapter, position: Position | None = None, stream: Mapping[str, str] | None = None
    ) -> None:
        """Write the state. The file is replaced atomically.

        Args:
            adapter: Adapter whose state is saved.
            position: How far the stream has come.
            stream: Description of the stream, which :meth:`resume` compares.
        """
        numbers = {key: str(value) for key, value in asdict(position or Position()).items()}
        metadata = {**self.identity, **(stream or {}), **numbers}
        try:
            write_tensors(self.path, adapter.state_dict(), kind=KIND, version=FORMAT, metadata=metadata)
        except OSError as error:
            error.filename = error.filename or str(self.path)  # a full disk does not say where
            raise

    def load(self, adapter: Adapter) -> None:
        """Load the state into an adapter that begins a new stream.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file is damaged, has another format, or belongs to another adapter.
        """
        self._load(adapter, {})

    def resume(self, adapter: Adapter, stream: Mapping[str, str]) -> Position:
        """Load the state into an adapter that continues the same stream.

        Args:
            adapter: Adapter that gets the state.
            stream: Description of the stream; that in the file must be equal.

        Returns:
            How far the stream had come.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: As for :meth:`load`, or the state belongs to another stream.
        """
        metadata = self._load(adapter, stream)
        numbers = {field.name: metadata.get(field.name, "") for field in fields(Position)}
        if not all(text.isdecimal() for text in numbers.values()):
            raise ValueError(f"{self.path} does not say how far its stream had come; {_REMEDY}")
        return Position(**{name: int(text) for name, text in numbers.items()})

    def _load(self, adapter: Adapter, stream: Mapping[str, str]) -> dict[str, str]:
        if not self.path.exists():
            raise FileNotFoundError(
                f"there is no state at {self.path}; leave --resume or --state out to begin without"
            )
        tensors, metadata = read_tensors(self.path, kind=KIND, version=FORMAT, remedy=_REMEDY)
        for key, expected in {**self.identity, **stream}.items():
            if metadata.get(key) != expected:
                advice = (
                    "; to begin a new stream with this state, use --state instead of --resume"
                    if key in stream
                    else ""
                )
                raise ValueError(
                    f"{self.path} was saved with {key} {metadata.get(key)}, this run has {expected}; "
                    f"use the same {_OPTIONS.get(key, key)}{advice}"
                )
        try:
            adapter.load_state_dict(tensors)
        except ValueError as error:
            raise ValueError(f"{self.path} cannot be loaded: {error}") from error
        return metadata
