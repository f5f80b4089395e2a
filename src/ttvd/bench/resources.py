"""What runs share within a process: source models, images, statistics of the source data, and built adapters."""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ttvd.bench.spec import CLEAN, OFFICIAL, Domain, Spec, WorkerConfig, is_own_code
from ttvd.data.corruptions import corrupt
from ttvd.data.sets import ClassMap, ImageFolder, ImageSet, find_classes, load_set
from ttvd.methods import Adapter, Method, find_method
from ttvd.methods.registry import prepare_model
from ttvd.nn.fingerprint import fingerprint
from ttvd.source import calibrate, collect_features, estimate_fisher, estimate_sites
from ttvd.source.features import is_held_out
from ttvd.zoo.catalog import Source, find_sites, is_function, load_source
from ttvd.zoo.sites import Sites

CORRUPTED = {
    "cifar10-c": "cifar10", "cifar100-c": "cifar100", "imagenet-c": "imagenet", "mnist-c": "mnist", "stack": "stack",
}  # fmt: skip
"""Sets whose images come corrupted, with the set that has their training images."""
PARTIAL = {"imagenet-r": "imagenet"}
"""Sets that show a part of the classes, with the set that has all of them."""
SOURCE_STATISTICS = frozenset({"sites", "features", "fisher"})
"""Entries of ``Method.needs`` that are computed from the training images of a data set."""
MAX_ADAPTERS = 4
"""Number of adapters that are kept between runs; the least recently used one is dropped."""
_IMAGE_BYTES = 2**30  # for the images of domains; those of the present run are kept in any case
Images = ImageSet | ImageFolder


class Resources:
    """Source models, images, statistics of the source data and adapters. Each is loaded or computed once.

    Args:
        config: Where files are found, and the device.
        shared: Test sets that another process has loaded already, by name.

    Attributes:
        adapters: Adapters that runs share.
    """

    def __init__(self, config: WorkerConfig, shared: Mapping[str, ImageSet] | None = None) -> None:
        self.config = config
        self.device = torch.device(config.device)
        self.adapters = AdapterCache(self.device)
        self._sets: dict[str, Images] = dict(shared or {})
        self._sources: dict[str, Source] = {}
        self._weights: dict[str, str] = {}
        self._cache: dict[tuple[Any, ...], Any] = {}
        self._domains: OrderedDict[tuple[Any, ...], ImageSet] = OrderedDict()

    # Methods and source models

    def method(self, name: str) -> Method:
        """Return a method. One of the user's own code is imported only where the configuration allows it."""
        if is_own_code(name):
            self._check_code(name)
        return find_method(name)

    def _check_code(self, name: str) -> None:
        if not self.config.allow_code:
            raise ValueError(
                f"{name} is code that would be imported and run; if you trust it, give --allow-code (in Python: "
                "WorkerConfig(allow_code=True))"
            )

    def source(self, checkpoint: str) -> Source:
        """Return a source model, on the device. A function is called only where the configuration allows it."""
        if checkpoint not in self._sources:
            if is_function(checkpoint):
                self._check_code(checkpoint)
            found = load_source(checkpoint, folder=self.config.checkpoints)
            self._weights[checkpoint] = fingerprint(found.model)
            self._sources[checkpoint] = Source(found.model.to(self.device), found.sites, found.card)
        return self._sources[checkpoint]

    def weights(self, checkpoint: str, method: Method, fraction: float, parameters: Mapping[str, Any]) -> str:
        """Return the fingerprint of a source model, and of its sites if the method uses sites.

        A method declares by ``Adapter.site_parts(sites, parameters)`` which parts of the sites its results depend on
        beside class means and temperatures: ``"anchors/V"`` for the anchors of V views, ``"rotation_loss"``. The
        results of a method without this declaration are taken to depend on all parts.

        Args:
            checkpoint: Name of the source model.
            method: The method that uses it.
            fraction: Fraction of the source data from which the sites were estimated.
            parameters: Parameters of the method, as a spec holds them.
        """
        self.source(checkpoint)
        sites = self.sites_beside(checkpoint, fraction) if "sites" in method.needs else None
        if sites is None:
            return self._weights[checkpoint]
        declare = getattr(method.adapter, "site_parts", None)
        parts = list_site_parts(sites) if declare is None else declare(sites, parameters)
        return self.weights_with_sites(checkpoint, fraction, parts)

    def weights_with_sites(self, checkpoint: str, fraction: float, parts: frozenset[str]) -> str:
        """Return the fingerprint of a source model and of some parts of the sites beside it, if it has sites."""
        self.source(checkpoint)
        sites = self.sites_beside(checkpoint, fraction)
        if sites is None:
            return self._weights[checkpoint]
        key = ("hash of sites", checkpoint, fraction, parts)
        if key not in self._cache:
            self._cache[key] = hash_sites(sites, parts)
        return f"{self._weights[checkpoint]}+{self._cache[key]}"

    def sites_beside(self, checkpoint: str, fraction: float) -> Sites | None:
        """Return the sites that lie beside a source model, of a fraction of the source data; None if there are none."""
        if fraction == 1.0:
            return self.source(checkpoint).sites
        key = ("sites beside", checkpoint, fraction)
        if key not in self._cache:
            self._cache[key] = find_sites(checkpoint, fraction, self.config.checkpoints)
        found: Sites | None = self._cache[key]
        if found is not None:
            found.check(self.source(checkpoint).model)
        return found

    # Statistics of the source data

    def source_statistics(
        self, method: Method, checkpoint: str, data: str, fraction: float, views: int = 1
    ) -> dict[str, Any]:
        """Return the sites, features and Fisher information that a method needs, as arguments of ``ttvd.create``.

        Args:
            method: The method.
            checkpoint: Name of the source model.
            data: Set that the model is tested on. Statistics are computed from its training images.
            fraction: Fraction of these images that is used for the sites.
            views: Number of views that are aggregated around the method. Features and Fisher information are those of
                the model as the method sees it.
        """
        return {
            need: self._source_statistic(need, method, checkpoint, data, fraction, views)
            for need in sorted(SOURCE_STATISTICS & method.needs)
        }

    def sites(self, checkpoint: str, data: str) -> Sites:
        """Return the sites beside a source model, or estimate them from the training images of a set."""
        if (beside := self.sites_beside(checkpoint, 1.0)) is not None:
            return beside
        return self._estimate_sites(checkpoint, data, 1.0)

    def check_training(self, data: str) -> None:
        """Raise unless the training images of a set can be read.

        Raises:
            ValueError: The set has no training images, or they are not where they are looked for.
        """
        if ("training checked", data) in self._cache:
            return
        try:
            if _training_set(data) == "imagenet":  # to list a million files takes long
                self._find_imagenet_train()
            else:
                load_set(_training_set(data), self._root(), "train")
        except (ValueError, OSError) as error:
            raise ValueError(f"the training images of {data} cannot be read: {error}") from error
        self._cache["training checked", data] = True

    def _source_statistic(
        self, need: str, method: Method, checkpoint: str, data: str, fraction: float, views: int
    ) -> Any:
        if need == "sites":
            beside = self.sites_beside(checkpoint, fraction)
            return self._estimate_sites(checkpoint, data, fraction) if beside is None else beside
        key = (need, checkpoint, data, "sites" in method.needs, views)
        if key not in self._cache:
            model = prepare_model(self.source(checkpoint), method, views)
            used, _ = self._split_training(data)
            self._cache[key] = (collect_features if need == "features" else estimate_fisher)(model, used)
        return self._cache[key]

    def _estimate_sites(self, checkpoint: str, data: str, fraction: float) -> Sites:
        key = ("sites", checkpoint, data, fraction)
        if key not in self._cache:
            model = self.source(checkpoint).model
            used, held_out = self._split_training(data)
            self._cache[key] = calibrate(model, estimate_sites(model, used, fraction=fraction), held_out)
        found: Sites = self._cache[key]
        return found

    def _split_training(self, data: str) -> tuple[Images, Images]:
        """Training images of a set, and those that are held out for calibration."""
        training = self._training(data)
        held = is_held_out(len(training))
        used, held_out = (training.subset(mask.nonzero()[:, 0]) for mask in (~held, held))
        return used, held_out

    def _training(self, data: str) -> Images:
        name = _training_set(data)
        if name == "imagenet":
            self._find_imagenet_train()
        if ("training", name) not in self._cache:
            self._cache["training", name] = load_set(name, self._root(), "train")
        found: Images = self._cache["training", name]
        return found

    def _find_imagenet_train(self) -> None:
        folder = self._root() / "train"
        if not folder.is_dir():
            raise FileNotFoundError(
                f"this needs ImageNet's training pictures in {folder}, a folder for each class"
            )

    def _root(self) -> Path:
        return self.config.data or Path()

    # Test images

    def base(self, data: str, domain: Domain = Domain()) -> Images:  # noqa: B008 (it is frozen)
        """Return the whole test set: clean, or of the domain for a set that comes corrupted."""
        place = f"{data}/{domain.corruption}/{domain.severity}" if data in CORRUPTED else data
        if place not in self._sets:
            how: dict[str, Any] = {}
            if data in CORRUPTED:
                how = {"corruption": domain.corruption, "severity": domain.severity}
            self._sets[place] = load_set(data, self._root(), **how)
        return self._sets[place]

    def shared(self) -> dict[str, ImageSet]:
        """Return the test sets in memory, for the resources of other processes."""
        return {name: images for name, images in self._sets.items() if isinstance(images, ImageSet)}

    def content(self, data: str, domains: Sequence[Domain]) -> str:
        """Return the fingerprint of the images and labels from which domains are made."""
        found: dict[str, None] = {}
        for domain in domains:
            key = ("content", data, domain if data in CORRUPTED else None)
            if key not in self._cache:
                self._cache[key] = self.base(data, domain).fingerprint()[:16]
            found[self._cache[key]] = None
        return "+".join(found)

    def rows(self, spec: Spec) -> Tensor:
        """Return the indices of the images that a run uses: all, or a fixed random choice of ``limit`` images."""
        count = len(self.base(spec.data, spec.domains[0]))
        key = ("rows", count, spec.limit)
        if key not in self._cache:
            chosen = np.arange(count)
            if spec.limit is not None and spec.limit < count:
                chosen = np.sort(np.random.default_rng(0).permutation(count)[: spec.limit])
            self._cache[key] = torch.from_numpy(chosen)
        rows: Tensor = self._cache[key]
        return rows

    def labels(self, spec: Spec) -> Tensor:
        """Return the labels of those images. They are the same in all domains of a stream.

        Raises:
            ValueError: The domains of a set that comes corrupted show different images.
        """
        labels = self.base(spec.data, spec.domains[0]).labels.cpu()
        for domain in spec.domains[1:] if spec.data in CORRUPTED else ():
            others = self.base(spec.data, domain).labels.cpu()
            if not torch.equal(labels, others):
                raise ValueError(
                    f"{spec.data} does not show the same images in {spec.domains[0].label} ({len(labels)}) and in "
                    f"{domain.label} ({len(others)}), so they cannot be domains of one stream: files are missing"
                )
        return labels[self.rows(spec)]

    def prepare(self, spec: Spec) -> torch.device:
        """Load the images of a run, and return the device on which :meth:`batch` expects its index."""
        bases = {domain: self.base(spec.data, domain) for domain in spec.domains}
        if not all(isinstance(base, ImageSet) for base in bases.values()):
            return torch.device("cpu")  # they stay on disk, and are read batch by batch
        for domain, base in bases.items():
            assert isinstance(base, ImageSet)
            self._corrupted(spec, domain, base)
        return self.device

    def keeps_all(self, specs: Sequence[Spec]) -> bool:
        """Return whether the images of all these runs can be kept at once, so that their order does not matter."""
        sizes: dict[tuple[Any, ...], int] = {}
        for spec in specs:
            for domain in spec.domains:
                base = self.base(spec.data, domain)
                if not isinstance(base, ImageSet):
                    return False
                fraction = len(self.rows(spec)) / len(base)
                sizes[_domain_key(spec, domain)] = round(fraction * (base.images.nbytes + base.labels.nbytes))
        return sum(sizes.values()) <= _IMAGE_BYTES

    def batch(self, spec: Spec, domain: Domain, index: Tensor) -> Tensor:
        """Return float images of a domain, on the device; ``index`` counts within :meth:`rows`."""
        base = self.base(spec.data, domain)
        if isinstance(base, ImageSet):
            images = self._corrupted(spec, domain, base)
            return images.floats(index.to(images.images.device))
        rows = self.rows(spec)[index]
        return self.apply(spec, domain, base.floats(rows).to(self.device), rows)

    def apply(self, spec: Spec, domain: Domain, images: Tensor, rows: Tensor) -> Tensor:
        """Corrupt clean images, whose indices in the set are ``rows``; images that come corrupted stay as they are."""
        if domain.corruption == CLEAN or spec.constants == OFFICIAL:
            return images
        # A released set is one set: the seed of a run decides its order, never its pictures.
        table: Any = spec.constants
        return corrupt(images, domain.corruption, domain.severity, constants=table, seed=0, index=rows)

    def restriction(self, data: str) -> ClassMap | None:
        """Return the outputs of the model that count for a set that shows a part of its classes; None for others."""
        if data not in PARTIAL:
            return None
        shown = self.base(data).classes
        if shown is None:
            raise ValueError(f"{data} must name its classes, to be matched")
        try:
            return ClassMap.match(shown, find_classes(self._root()))
        except (ValueError, OSError) as error:
            raise ValueError(
                f"{data} shows a part of the classes of {PARTIAL[data]}, and their class folders, which tell the "
                f"outputs of the model, are not in {self._root()}: {error}"
            ) from error

    def _corrupted(self, spec: Spec, domain: Domain, base: ImageSet) -> ImageSet:
        key = _domain_key(spec, domain)
        if key not in self._domains:
            rows = self.rows(spec)
            pixels = base.images[rows].to(self.device)
            changed = self.apply(spec, domain, pixels.float().div_(255), rows)
            if domain.corruption != CLEAN and spec.constants != OFFICIAL:
                pixels = changed.mul_(255).round_().to(torch.uint8)
            self._domains[key] = ImageSet(pixels, base.labels[rows].to(self.device), base.classes, base.name)
            while len(self._domains) > len(spec.domains) and self._count_bytes() > _IMAGE_BYTES:
                self._domains.popitem(last=False)
        self._domains.move_to_end(key)
        return self._domains[key]

    def _count_bytes(self) -> int:
        return sum(kept.images.nbytes + kept.labels.nbytes for kept in self._domains.values())


def _training_set(data: str) -> str:
    """Name of the set that has the training images of a set."""
    return {**CORRUPTED, **PARTIAL}.get(data, data)


def _domain_key(spec: Spec, domain: Domain) -> tuple[Any, ...]:
    """Everything that decides the images of a domain."""
    return spec.data, domain, spec.constants, spec.limit


_NUMBERS = ("rotation_loss", "mirror_gain", "agreement_exponent", "accuracy")


def list_site_parts(sites: Sites) -> frozenset[str]:
    """Return the names of all parts of sites that :func:`hash_sites` can include."""
    return frozenset({*(f"anchors/{views}" for views in sites.anchors), *_NUMBERS, "inputs", "entropies"})


def hash_sites(sites: Sites, parts: frozenset[str]) -> str:
    """Return a short hash of class means and temperatures, and of further parts of the sites.

    Args:
        sites: Sites of a model.
        parts: Names of further parts: ``"anchors/V"`` for the anchors of V views, or names of fields: numbers, and
            ``"inputs"`` and ``"entropies"``. A part that the sites do not have changes nothing.
    """
    digest = hashlib.sha256(repr(tuple(sites.means.shape)).encode())
    digest.update(sites.means.cpu().contiguous().numpy().data)
    digest.update(json.dumps(dict(sites.temperatures), sort_keys=True).encode())
    for views, anchors in sorted(sites.anchors.items()):
        if f"anchors/{views}" in parts:
            for moments in (anchors.means, anchors.variances):
                digest.update(moments.cpu().contiguous().numpy().data)
    for name in _NUMBERS:
        if name in parts and getattr(sites, name) is not None:
            digest.update(repr(getattr(sites, name)).encode())
    if "inputs" in parts and sites.inputs is not None:
        for moments in filter(torch.is_tensor, vars(sites.inputs).values()):
            digest.update(moments.cpu().contiguous().numpy().data)
    if "entropies" in parts:
        for key, quantiles in sorted(sites.entropies.items()):
            digest.update(key.encode())
            digest.update(quantiles.cpu().contiguous().numpy().data)
    return digest.hexdigest()[:16]


class CachedAdapter:
    """An adapter that several runs use, one after the other.

    Attributes:
        adapter: The adapter, as if just built.
    """

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self._peaks: dict[int, int] = {}

    def correct_peak(self, batch_size: int, measured: int | None) -> int | None:
        """Return the peak memory of a run, including memory that an earlier run has left allocated.

        Recorded steps keep their memory between runs, so only the run that records them shows how much it is.
        """
        if not self.adapter.kept.is_cuda:
            return measured
        if measured is not None:
            self._peaks[batch_size] = max(measured, self._peaks.get(batch_size, 0))
        return self._peaks.get(batch_size)


class AdapterCache:
    """Keeps a few built adapters between runs, with their recorded CUDA graphs.

    Args:
        device: Device of the adapters. On CUDA none is kept while more than half of its memory is taken.

    Example:
        >>> import ttvd
        >>> from torch import nn
        >>> cache = AdapterCache(torch.device("cpu"))
        >>> for _ in range(2):
        ...     with cache.use("net", lambda: print("built") or ttvd.create("bn", nn.Linear(2, 2))) as cached:
        ...         adapter = cached.adapter
        built
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: OrderedDict[Hashable, CachedAdapter] = OrderedDict()

    @contextmanager
    def use(self, key: Hashable, build: Callable[[], Adapter]) -> Iterator[CachedAdapter]:
        """Provide an adapter as if just built. If the block raises, the adapter is not used again.

        Args:
            key: Everything that decides what is built.
            build: Function that builds a fresh adapter.
        """
        cached = self._kept.pop(key, None)
        if cached is None:
            self._shrink(MAX_ADAPTERS - 1)  # before, so that there is room for the new one
            cached = CachedAdapter(build())
        else:
            cached.adapter.renew()
        yield cached
        self._kept[key] = cached
        self._shrink(MAX_ADAPTERS)

    def clear(self) -> None:
        """Drop all adapters."""
        self._drop_until(0)

    def _shrink(self, count: int) -> None:
        self._drop_until(0 if self._is_crowded() else count)

    def _drop_until(self, count: int) -> None:
        while len(self._kept) > count:
            # Not left to the garbage collector: adapters are in reference cycles, and their graphs hold much memory.
            self._kept.popitem(last=False)[1].adapter.release()

    def _is_crowded(self) -> bool:
        if self._device.type != "cuda":
            return False
        free, total = torch.cuda.mem_get_info(self._device)
        unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return free + unused < total / 2
