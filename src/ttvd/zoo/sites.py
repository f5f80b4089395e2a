"""Sites: class means of source features per view, with what calibration measured, and the model they belong to."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ttvd.nn.anchors import Anchors
from ttvd.nn.descriptors import InputMoments
from ttvd.nn.fingerprint import fingerprint as fingerprint
from ttvd.nn.split import SplitModel, split
from ttvd.zoo.tensorfile import read_tensors, write_tensors

if TYPE_CHECKING:
    from ttvd.geometry import Diagram

KIND = "ttvd.sites"
FORMAT_VERSION = 2
_REMEDY = "estimate the sites again with ttvd.estimate_sites and ttvd.calibrate"
STRUCTURES = ("vd", "civd", "pd", "cipd")
"""The diagrams of the paper: Voronoi, cluster-induced Voronoi, power, cluster-induced power."""
MIRROR_KEY = "pd+mirror"
"""Name of the temperature of a plain head's logits, averaged over the upright and the mirrored image."""


def temperature_key(structure: str, gamma: float | None = None) -> str:
    """Return the name under which the temperature of a structure is stored.

    ``vd`` and ``pd`` have no exponent; ``civd@g`` and ``cipd@g`` have the exponent g.

    Example:
        >>> temperature_key("civd", -0.8), temperature_key("pd")
        ('civd@-0.8', 'pd')
    """
    if structure not in STRUCTURES:
        raise ValueError(f"structure must be one of {', '.join(STRUCTURES)}, got {structure!r}")
    if structure in ("vd", "pd"):
        return structure
    if gamma is None:
        raise ValueError(f"the temperature of {structure!r} depends on the exponent: give gamma")
    return f"{structure}@{gamma:g}"


@dataclass(frozen=True, eq=False)
class Sites:
    """Class means of source features per view, and the model that computed the features.

    ``ttvd.prepare`` makes them, in two parts: ``ttvd.estimate_sites``, and ``ttvd.calibrate``, which adds what is
    measured on held-out images.

    Args:
        means: Class means (k, v, d), float64.
        counts: Number of images behind each mean (k, v), int64, all positive.
        fingerprint: :func:`~ttvd.nn.fingerprint.fingerprint` of the model.
        fraction: Fraction of the source data that was used, in (0, 1].
        temperatures: Softmax temperatures fitted on held-out source data, by :func:`temperature_key`.
        anchors: Input moments of the model's norms on held-out source data, by the number of views that are
            forwarded together: 1 and v. Empty before calibration.
        rotation_loss: Mean of -log p(rotation a) over the views a of held-out source data. None before calibration
            and for a head that does not tell rotations apart.
        mirror_gain: What mirrored images (flipped left to right) add on held-out source data: the accuracy of the mean
            logits of the upright and the mirrored image minus ``accuracy``. None before calibration. Where mirroring
            changes the class, as with letters and digits, it is negative.
        accuracy: Accuracy on held-out source data, of upright images. None before calibration.
        inputs: Moments of the descriptors of held-out source images, with which a stream is compared. None before
            calibration.
        agreement_exponent: r of accuracy = agreement^r: how often the mean logits of the upright and the mirrored image
            are right, from how often the two agree on a class. None before calibration.
        entropies: Sorted quantiles (65,) of the entropy of the predictions on held-out source images, by the key of the
            temperature: the guard compares the entropies on a stream with them. Empty before calibration, and for
            images that the model was trained on, because new images of the source have other entropies.

    Example:
        >>> sites = Sites(torch.eye(3).double()[:, None], torch.ones(3, 1).long(), "abc")
        >>> sites.num_classes, sites.views, sites.dim
        (3, 1, 3)
        >>> sites
        Sites(classes=3, views=1, dim=3, fraction=1, temperatures=[], anchors=[], rotation_loss=None)
    """

    means: Tensor
    counts: Tensor
    fingerprint: str
    fraction: float = 1.0
    temperatures: Mapping[str, float] = field(default_factory=dict)
    anchors: Mapping[int, Anchors] = field(default_factory=dict)
    rotation_loss: float | None = None
    mirror_gain: float | None = None
    accuracy: float | None = None
    inputs: InputMoments | None = None
    agreement_exponent: float | None = None
    entropies: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.means.ndim != 3 or self.means.dtype != torch.float64:
            raise ValueError(
                f"means must be float64 (k, v, d), got {self.means.dtype} {tuple(self.means.shape)}"
            )
        if self.counts.shape != self.means.shape[:2] or self.counts.dtype != torch.int64:
            want, got = tuple(self.means.shape[:2]), tuple(self.counts.shape)
            raise ValueError(f"counts must be int64 {want}, got {self.counts.dtype} {got}")
        if not bool(self.means.isfinite().all()) or not bool((self.counts > 0).all()):
            raise ValueError("means must be finite and counts positive: a class without samples has no site")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction must be in (0, 1], got {self.fraction}")
        if wrong := sorted(set(self.anchors) - {1, self.views}):
            raise ValueError(f"anchors are those of 1 or of all {self.views} views, not of {wrong[0]}")
        if bad := {key: tau for key, tau in self.temperatures.items() if not 0 < tau < math.inf}:
            raise ValueError(f"temperatures must be positive and finite, got {bad}")
        described = None if self.inputs is None else self.inputs.classes
        if described is not None and len(described) != self.num_classes:
            raise ValueError(
                f"inputs describe {len(described)} classes, the sites are of {self.num_classes}: calibrate them again"
            )
        for name in ("rotation_loss", "agreement_exponent"):
            value = getattr(self, name)
            if value is not None and not (type(value) in (float, int) and 0 <= value < math.inf):
                raise ValueError(f"{name} must be a number, finite and at least 0, got {value!r}")
        for name, low in (("mirror_gain", -1), ("accuracy", 0)):
            value = getattr(self, name)
            if value is not None and not (type(value) in (float, int) and low <= value <= 1):
                raise ValueError(f"{name} must be a number from {low} to 1, got {value!r}")
        _check_entropies(self.entropies)

    def __repr__(self) -> str:
        return (
            f"Sites(classes={self.num_classes}, views={self.views}, dim={self.dim}, fraction={self.fraction:g}, "
            f"temperatures=[{', '.join(self.temperatures)}], anchors={sorted(self.anchors)}, "
            f"rotation_loss={self.rotation_loss}"
            f"{'' if self.accuracy is None else f', accuracy={self.accuracy:.4g}'})"
        )

    @property
    def num_classes(self) -> int:
        """Number of classes, k."""
        return self.means.shape[0]

    @property
    def views(self) -> int:
        """Number of views, v."""
        return self.means.shape[1]

    @property
    def dim(self) -> int:
        """Dimension of the features, d."""
        return self.means.shape[2]

    def diagram(self, views: int | None = None) -> "Diagram":
        """Return the Voronoi diagram of the sites in float32: plain for one view, cluster-induced for several.

        Args:
            views: Number of views to use, a divisor of the number of views of the sites: 1 is the upright view, 2
                are 0 and 180 degrees. All views unless given.
        """
        from ttvd.geometry import Diagram

        count = self.views if views is None else views
        if count < 1 or self.views % count:
            raise ValueError(f"views must divide the {self.views} views of the sites, got {views}")
        means = self.means[:, :: self.views // count].float()
        return Diagram.from_means(means[:, 0] if count == 1 else means)

    def temperature(self, structure: str, gamma: float | None = None) -> float:
        """Return the fitted temperature of a structure.

        Raises:
            ValueError: The sites are not calibrated for it; the message says how to do that.
        """
        key = temperature_key(structure, gamma)
        if key not in self.temperatures:
            known = ", ".join(sorted(self.temperatures)) or "none"
            if self.temperatures:
                more = "" if gamma is None else f", gammas=({gamma:g},)"
                call = f"ttvd.calibrate(model, sites, held_out, structures=({structure!r},){more})"
            else:
                call = "ttvd.calibrate(model, sites, held_out)"
            raise ValueError(
                f"the sites hold no temperature {key!r} (they hold: {known}). Distances to the sites become "
                "probabilities by a softmax, and its temperature must be fitted on labelled source images that the "
                f"model was not trained on. Write sites = {call} after ttvd.estimate_sites, or pass tau=..."
            )
        return self.temperatures[key]

    def with_temperatures(self, temperatures: Mapping[str, float]) -> "Sites":
        """Return a copy with these temperatures added."""
        return replace(self, temperatures={**self.temperatures, **temperatures})

    def check(self, model: nn.Module) -> None:
        """Raise a ValueError unless these sites were estimated with this model.

        Args:
            model: The model whose features will be compared with the sites. The sizes of a ``SplitModel`` are
                compared first, for a clearer message.
        """
        if isinstance(model, SplitModel):
            linear = model.linear
            if linear.in_features != self.dim:
                raise ValueError(
                    f"the sites have {self.dim} dimensions, the model's features {linear.in_features}"
                )
            if linear.out_features not in (self.num_classes, self.num_classes * self.views):
                raise ValueError(
                    f"the sites have {self.num_classes} classes and {self.views} views, "
                    f"the model's head has {linear.out_features} outputs"
                )
        found = fingerprint(model)
        if found != self.fingerprint:
            raise ValueError(
                f"the sites belong to a model of fingerprint {self.fingerprint}, this model's is {found}: "
                "its weights differ; estimate the sites again with ttvd.estimate_sites"
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file atomically."""
        metadata = {
            **{f"norms.{views}": json.dumps(anchors.norms) for views, anchors in self.anchors.items()},
            "fingerprint": self.fingerprint,
            "fraction": repr(self.fraction),
            "temperatures": json.dumps(dict(self.temperatures), sort_keys=True),
            "rotation_loss": json.dumps(self.rotation_loss),
            "mirror_gain": json.dumps(self.mirror_gain),
            "accuracy": json.dumps(self.accuracy),
            "agreement_exponent": json.dumps(self.agreement_exponent),
        }
        tensors = {"means": self.means, "counts": self.counts}
        for views, anchors in self.anchors.items():
            tensors[f"norm_means.{views}"] = anchors.means.clone()  # safetensors refuses shared memory
            tensors[f"norm_variances.{views}"] = anchors.variances.clone()
        if self.inputs is not None:
            tensors["inputs"] = torch.stack([self.inputs.means, self.inputs.deviations, self.inputs.radii])
            if self.inputs.classes is not None:
                tensors["input_classes"] = self.inputs.classes
        tensors |= {f"entropies.{key}": quantiles for key, quantiles in self.entropies.items()}
        write_tensors(path, tensors, kind=KIND, version=FORMAT_VERSION, metadata=metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Sites":
        """Read a file that :meth:`save` wrote; a ValueError says what is wrong with any other file."""
        tensors, metadata = read_tensors(path, kind=KIND, version=FORMAT_VERSION, remedy=_REMEDY)
        try:
            temperatures = {str(key): float(tau) for key, tau in json.loads(metadata["temperatures"]).items()}
            fraction = float(metadata["fraction"])
            kinds = {name.partition(".")[2] for name in tensors if name.startswith("norm_")}
            anchors = {
                int(views): Anchors(
                    tensors[f"norm_means.{views}"],
                    tensors[f"norm_variances.{views}"],
                    tuple((str(name), int(size)) for name, size in json.loads(metadata[f"norms.{views}"])),
                )
                for views in sorted(kinds)
            }
            means, counts = tensors["means"], tensors["counts"]
            loss = _read_number(metadata["rotation_loss"])
            # Files of version 0.1 lack these three, inputs and entropies.
            gain, accuracy, ratio = (
                _read_number(metadata.get(name, "null"))
                for name in ("mirror_gain", "accuracy", "agreement_exponent")
            )
            name = metadata["fingerprint"]
            inputs = None
            if "inputs" in tensors:
                middle, deviations, radii = tensors["inputs"]
                inputs = InputMoments(middle, deviations, radii, tensors.get("input_classes"))
            entropies = {
                key.removeprefix("entropies."): tensors[key]
                for key in sorted(tensors)
                if key.startswith("entropies.")
            }
            return cls(
                means,
                counts,
                name,
                fraction,
                temperatures,
                anchors,
                loss,
                gain,
                accuracy,
                inputs,
                ratio,
                entropies,
            )
        except (KeyError, AttributeError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ValueError(f"{path} is not a valid {KIND} file: {error}") from error


def find_upright(model: nn.Module, sites: Sites) -> SplitModel:
    """Return the k-way classifier of upright images in a model that has sites.

    Args:
        model: The classifier; its head has k outputs, or k * v with label augmentation.
        sites: Its sites, which are checked.
    """
    parts = split(model)
    sites.check(parts)
    plain = parts.linear.out_features == sites.num_classes
    return parts if plain else parts.upright(sites.views)


def _read_number(text: str) -> float | None:
    value = json.loads(text)
    return None if value is None else float(value)


def _check_entropies(entropies: Mapping[str, Tensor]) -> None:
    for key, quantiles in entropies.items():
        if quantiles.ndim != 1 or len(quantiles) < 2 or quantiles.dtype != torch.float64:
            raise ValueError(f"entropies of {key!r} must be two or more float64 quantiles in a row")
        if not bool(quantiles.isfinite().all()) or bool((quantiles.diff() < 0).any()):
            raise ValueError(f"entropies of {key!r} must be finite and sorted")
