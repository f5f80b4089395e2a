"""What runs are made of: source models, images of a domain, and what methods need of the source data.

One object for each process; everything that several runs share is made once.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ttvd.bench.fingerprints import count_anchored_views, hash_sites
from ttvd.bench.reuse import Adapters
from ttvd.bench.spec import CLEAN, Domain, Spec
from ttvd.bench.worker_config import WorkerConfig
from ttvd.data.corruptions import corrupt
from ttvd.data.sets import ClassMap, ImageFolder, ImageSet, find_classes, load_set
from ttvd.methods import Method
from ttvd.methods.registry import prepare_model
from ttvd.nn.fingerprint import fingerprint
from ttvd.source import calibrate, collect_features, estimate_fisher, estimate_sites
from ttvd.source.held_out import is_held_out
from ttvd.zoo.catalog import Source
from ttvd.zoo.find import find_sites, find_source
from ttvd.zoo.sites import Sites

OFFICIAL = "official"
# Sets that come corrupted, and sets that show a part of the classes, with the set that they are made from.
CORRUPTED = {
    "cifar10-c": "cifar10", "cifar100-c": "cifar100", "imagenet-c": "imagenet", "mnist-c": "mnist", "stack": "stack",
}  # fmt: skip
PARTIAL = {"imagenet-r": "imagenet"}
INGREDIENTS = frozenset({"sites", "features", "fisher"})
"""What methods need that is made from the training images of a data set."""
_ROOM = 2**30  # bytes for the images of domains; those of a run are kept in any case
Images = ImageSet | ImageFolder


class Resources:
    """Source models, images and requirements for runs.

    Args:
        setting: Where things are and on what device they are wanted.
        shared: Test sets that another process has loaded already, by name.

    Attributes:
        adapters: What runs can share.
    """

    def __init__(self, setting: WorkerConfig, shared: Mapping[str, ImageSet] | None = None) -> None:
        self.setting = setting
        self.device = torch.device(setting.device)
        self._sets: dict[str, Images] = dict(shared or {})
        self._sources: dict[str, Source] = {}
        self._weights: dict[str, str] = {}
        self._made: dict[tuple[Any, ...], Any] = {}
        self._domains: OrderedDict[tuple[Any, ...], ImageSet] = OrderedDict()
        self.adapters = Adapters(self.device)

    def source(self, name: str) -> Source:
        """A source model, on the device."""
        if name not in self._sources:
            found = find_source(name, folder=self.setting.checkpoints)
            self._weights[name] = fingerprint(found.model)
            self._sources[name] = Source(found.model.to(self.device), found.sites, found.card)
        return self._sources[name]

    def weights(self, name: str, method: Method, share: float, parameters: Mapping[str, Any]) -> str:
        """The fingerprint of a source model; for those who use them, with that of the sites that come with it.

        Args:
            name: Of the source model.
            method: Which uses it.
            share: Of the source data, for the sites.
            parameters: Of the method; they tell what of the sites matters.
        """
        self.source(name)
        sites = self._sites(name, share) if "sites" in method.needs else None
        if sites is None:
            return self._weights[name]
        views = count_anchored_views(sites, parameters)
        adaptive_step = parameters.get("adaptive_step", False) in (None, True)
        key = ("sites hash", name, share, views, adaptive_step)
        if key not in self._made:
            self._made[key] = hash_sites(sites, views, adaptive_step)
        return f"{self._weights[name]}+{self._made[key]}"

    def _sites(self, name: str, share: float) -> Sites | None:
        """Those that lie beside a source model, estimated from a share of the source data; None if there are none."""
        if share == 1.0:
            return self.source(name).sites
        key = ("sites beside", name, share)
        if key not in self._made:
            self._made[key] = find_sites(name, share, self.setting.checkpoints)
        found: Sites | None = self._made[key]
        if found is not None:
            found.check(self.source(name).model)
        return found

    def base(self, data: str, domain: Domain = Domain()) -> Images:  # noqa: B008 (it is frozen)
        """The whole test set: clean, or as it comes for a set of corrupted images."""
        place = f"{data}/{domain.corruption}/{domain.severity}" if data in CORRUPTED else data
        if place not in self._sets:
            how: dict[str, Any] = {}
            if data in CORRUPTED:
                how = {"corruption": domain.corruption, "severity": domain.severity}
            self._sets[place] = load_set(data, self._root(), **how)
        return self._sets[place]

    def shared(self) -> dict[str, ImageSet]:
        """The test sets that are in memory, for the supplies of other processes."""
        return {name: images for name, images in self._sets.items() if isinstance(images, ImageSet)}

    def content(self, data: str, domains: Sequence[Domain]) -> str:
        """The fingerprint of the images and labels that domains start from."""
        found: dict[str, None] = {}
        for domain in domains:
            key = ("content", data, domain if data in CORRUPTED else None)
            if key not in self._made:
                self._made[key] = self.base(data, domain).fingerprint()[:16]
            found[self._made[key]] = None
        return "+".join(found)

    def rows(self, spec: Spec) -> Tensor:
        """Which images of the set the run uses: all, or a fixed random choice of ``limit`` in the set's order."""
        count = len(self.base(spec.data, spec.domains[0]))
        key = ("rows", count, spec.limit)
        if key not in self._made:
            chosen = np.arange(count)
            if spec.limit is not None and spec.limit < count:
                chosen = np.sort(np.random.default_rng(0).permutation(count)[: spec.limit])
            self._made[key] = torch.from_numpy(chosen)
        rows: Tensor = self._made[key]
        return rows

    def labels(self, spec: Spec) -> Tensor:
        """The labels of those images, the same in all domains of a stream."""
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
        """Have the images of a run where they are needed; returns where :meth:`batch` expects an index to be."""
        bases = {domain: self.base(spec.data, domain) for domain in spec.domains}
        if not all(isinstance(base, ImageSet) for base in bases.values()):
            return torch.device("cpu")  # they stay on disk, and are read batch by batch
        for domain, base in bases.items():
            assert isinstance(base, ImageSet)
            self._corrupted(spec, domain, base)
        return self.device

    def keeps_all(self, specs: Sequence[Spec]) -> bool:
        """Whether the images of all these runs can be kept at once, so that their order does not matter."""
        sizes: dict[tuple[Any, ...], int] = {}
        for spec in specs:
            for domain in spec.domains:
                base = self.base(spec.data, domain)
                if not isinstance(base, ImageSet):
                    return False
                share = len(self.rows(spec)) / len(base)
                sizes[_domain_key(spec, domain)] = round(share * (base.images.nbytes + base.labels.nbytes))
        return sum(sizes.values()) <= _ROOM

    def batch(self, spec: Spec, domain: Domain, index: Tensor) -> Tensor:
        """Float images of a domain on the device; ``index`` counts within :meth:`rows`."""
        base = self.base(spec.data, domain)
        if isinstance(base, ImageSet):
            images = self._corrupted(spec, domain, base)
            return images.floats(index.to(images.images.device))
        rows = self.rows(spec)[index]
        return self.apply(spec, domain, base.floats(rows).to(self.device), rows)

    def _corrupted(self, spec: Spec, domain: Domain, base: ImageSet) -> ImageSet:
        key = _domain_key(spec, domain)
        if key not in self._domains:
            rows = self.rows(spec)
            pixels = base.images[rows].to(self.device)
            changed = self.apply(spec, domain, pixels.float().div_(255), rows)
            if domain.corruption != CLEAN and spec.constants != OFFICIAL:
                pixels = changed.mul_(255).round_().to(torch.uint8)
            self._domains[key] = ImageSet(pixels, base.labels[rows].to(self.device), base.classes, base.name)
            while len(self._domains) > len(spec.domains) and self._taken() > _ROOM:
                self._domains.popitem(last=False)
        self._domains.move_to_end(key)
        return self._domains[key]

    def _taken(self) -> int:
        return sum(kept.images.nbytes + kept.labels.nbytes for kept in self._domains.values())

    def apply(self, spec: Spec, domain: Domain, images: Tensor, rows: Tensor) -> Tensor:
        """Corrupt clean images of a set, whose places there are ``rows``, as a domain wants them."""
        if domain.corruption == CLEAN or spec.constants == OFFICIAL:
            return images
        # A released set is one set: the seed of a run decides its order, never its pictures.
        table: Any = spec.constants
        return corrupt(images, domain.corruption, domain.severity, constants=table, seed=0, index=rows)

    def restriction(self, data: str) -> ClassMap | None:
        """For a set that shows a part of the model's classes: which outputs count."""
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

    def requirements(
        self, method: Method, name: str, data: str, share: float, views: int = 1
    ) -> dict[str, Any]:
        """The sites, features and Fisher information that a method needs of a source model.

        Args:
            method: Which needs them.
            name: Of the source model.
            data: The set that it is tested on; they are made from its training images.
            share: Of those, for the sites.
            views: That are aggregated around the method; features and Fisher information are those of the model
                as it sees it.
        """
        made: dict[str, Any] = {}
        for need in sorted(INGREDIENTS & method.needs):
            key = (need, name, data, *((share,) if need == "sites" else ("sites" in method.needs, views)))
            if key not in self._made:
                self._made[key] = self._make(need, method, name, data, share, views)
            made[need] = self._made[key]
        return made

    def _make(self, need: str, method: Method, name: str, data: str, share: float, views: int) -> Any:
        source = self.source(name)
        if need == "sites" and (beside := self._sites(name, share)) is not None:
            return beside
        training = self._training(data)
        held = is_held_out(len(training))
        used, kept = (training.subset(mask.nonzero()[:, 0]) for mask in (~held, held))
        if need == "features":
            return collect_features(prepare_model(source, method, views), used)
        if need == "fisher":
            return estimate_fisher(prepare_model(source, method, views), used)
        return calibrate(source.model, estimate_sites(source.model, used, fraction=share), kept)

    def _root(self) -> Path:
        return self.setting.data or Path()

    def _training(self, data: str) -> Images:
        name = {**CORRUPTED, **PARTIAL}.get(data, data)
        if name == "imagenet" and not (self._root() / "train").is_dir():
            raise FileNotFoundError(
                f"this needs ImageNet's training pictures in {self._root() / 'train'}, a folder for each class"
            )
        if ("training", name) not in self._made:
            self._made["training", name] = load_set(name, self._root(), "train")
        found: Images = self._made["training", name]
        return found


def _domain_key(spec: Spec, domain: Domain) -> tuple[Any, ...]:
    """Of all that decides the images of a domain."""
    return spec.data, domain, spec.constants, spec.limit
