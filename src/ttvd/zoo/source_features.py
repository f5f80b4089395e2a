"""Source features: labelled features of source samples, the initial memory of nearest-neighbour methods."""

import os
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ttvd.nn.fingerprint import fingerprint as find_fingerprint
from ttvd.nn.split import SplitModel
from ttvd.zoo.tensorfile import read_tensors, write_tensors

KIND = "ttvd.source_features"
FORMAT_VERSION = 2
_REMEDY = "collect the features again with ttvd.source.collect_features"
# Rounding of float32 norms, with a margin for features that were computed in half precision.
_TOLERANCE = 1e-3


@dataclass(frozen=True, eq=False)
class SourceFeatures:
    """Normalised features of source samples, their labels, and the model that computed them.

    Args:
        features: Features (n, d), float32, of Euclidean norm 1 (or 0 for a sample without any active feature).
        labels: Classes (n,), int64.
        fingerprint: :func:`~ttvd.nn.fingerprint.fingerprint` of the model.

    Example:
        >>> memory = SourceFeatures(torch.eye(3), torch.tensor([0, 1, 1]), "abc")
        >>> memory
        SourceFeatures(samples=3, dim=3, classes=2)
    """

    features: Tensor
    labels: Tensor
    fingerprint: str

    def __post_init__(self) -> None:
        z, labels = self.features, self.labels
        if z.ndim != 2 or z.dtype != torch.float32 or z.numel() == 0:
            raise ValueError(f"features must be float32 (n, d), got {z.dtype} {tuple(z.shape)}")
        if labels.shape != z.shape[:1] or labels.dtype != torch.int64:
            raise ValueError(f"labels must be int64 ({len(z)},), got {labels.dtype} {tuple(labels.shape)}")
        if int(labels.min()) < 0:
            raise ValueError(f"labels must run from 0, the smallest is {int(labels.min())}")
        norms = torch.linalg.vector_norm(z, dim=1)
        if not bool((((norms - 1).abs() <= _TOLERANCE) | (norms == 0)).all()):
            raise ValueError(
                "features must be finite and of norm 1; use torch.nn.functional.normalize(features)"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return f"SourceFeatures(samples={len(self)}, dim={self.dim}, classes={len(self.labels.unique())})"

    @property
    def dim(self) -> int:
        """Dimension of the features, d."""
        return self.features.shape[1]

    def check(self, model: nn.Module) -> None:
        """Raise a ValueError unless these features were computed by this model.

        Args:
            model: The model. The sizes of a ``SplitModel`` are compared first, for a clearer message.
        """
        if isinstance(model, SplitModel):
            linear = model.linear
            if linear.in_features != self.dim:
                raise ValueError(
                    f"the source features have {self.dim} dimensions, the model's {linear.in_features}"
                )
            if linear.out_features <= int(self.labels.max()):
                raise ValueError(
                    f"the source features have labels up to {int(self.labels.max())}, "
                    f"the model's head has {linear.out_features} outputs"
                )
        found = find_fingerprint(model)
        if found != self.fingerprint:
            raise ValueError(
                f"the source features belong to a model of fingerprint {self.fingerprint}, this model's is {found}: "
                "its weights differ; collect them again with ttvd.source.collect_features"
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file atomically."""
        tensors = {"features": self.features, "labels": self.labels}
        metadata = {"fingerprint": self.fingerprint}
        write_tensors(path, tensors, kind=KIND, version=FORMAT_VERSION, metadata=metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "SourceFeatures":
        """Read a file that :meth:`save` wrote; a ValueError says what is wrong with any other file."""
        tensors, metadata = read_tensors(path, kind=KIND, version=FORMAT_VERSION, remedy=_REMEDY)
        try:
            return cls(tensors["features"], tensors["labels"], metadata["fingerprint"])
        except (KeyError, ValueError) as error:
            raise ValueError(f"{path} is not a valid {KIND} file: {error}") from error
