"""The data sets that can be downloaded: addresses, checksums and contents.

The MD5 sums of the archives are those that the publishers list (Zenodo, the CIFAR page, the Fashion-MNIST and MNIST
pages). The SHA-256 sums are those of the files inside CIFAR-10's archive. The sizes of files follow from the published
shapes, the numbers of images from the descriptions of the sets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ttvd.data.checks import check_choice
from ttvd.data.corruptions import EVERY


@dataclass(frozen=True)
class Download:
    """One file to download.

    Attributes:
        file: Name of the file.
        urls: Addresses, in the order in which they are tried.
        md5: Checksum of the file.
        members: Patterns of the files that are taken from an archive; empty if the file itself is wanted.
    """

    file: str
    urls: tuple[str, ...]
    md5: str
    members: tuple[str, ...] = ()

    @property
    def products(self) -> tuple[str, ...]:
        """The file, or the folders that the archive makes, below the folder of the set."""
        return tuple(dict.fromkeys(pattern.split("/")[0] for pattern in self.members)) or (self.file,)


@dataclass(frozen=True)
class PublishedSet:
    """A data set that can be downloaded.

    Attributes:
        name: Name of the set, as in `load_set`.
        page: Web page of the publisher.
        size: Approximate size of the downloads, for people.
        downloads: Files to download.
        home: Folder of the set below the user's root.
    """

    name: str
    page: str
    size: str
    downloads: tuple[Download, ...]
    home: str = "."


def _archive(url: str, md5: str, *members: str) -> tuple[Download, ...]:
    return (Download(url.split("?")[0].rsplit("/", 1)[1], (url,), md5, members),)


def _zenodo(record: int, file: str, md5: str, *members: str) -> tuple[Download, ...]:
    return _archive(f"https://zenodo.org/records/{record}/files/{file}?download=1", md5, *members)


def _imagenet_c(file: str, md5: str, corruptions: str) -> tuple[Download, ...]:
    return _zenodo(2235448, file, md5, *(f"{name}/[1-5]/n*/*.JPEG" for name in corruptions.split()))


def _idx_files(mirrors: Sequence[str], *sums: str) -> tuple[Download, ...]:
    files = [f"{name}-ubyte.gz" for name in _IDX_NAMES]
    return tuple(
        Download(file, tuple(mirror + file for mirror in mirrors), md5)
        for file, md5 in zip(files, sums, strict=True)
    )


_CIFAR = "https://www.cs.toronto.edu/~kriz"
_CIFAR10 = _archive(
    f"{_CIFAR}/cifar-10-binary.tar.gz",
    "c32a1d4ab5d03f1284b67883e8d87530",
    "cifar-10-batches-bin/*_batch*.bin",
)
_CIFAR100 = _archive(
    f"{_CIFAR}/cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8", "cifar-100-binary/t*.bin"
)
_CIFAR10_C = _zenodo(2535967, "CIFAR-10-C.tar", "56bf5dcef84df0e2308c6dcbcbbd8499", "CIFAR-10-C/*.npy")
_CIFAR100_C = _zenodo(3555552, "CIFAR-100-C.tar", "11f0ed0f1191edbf9fa23466ae6021d3", "CIFAR-100-C/*.npy")
_IDX_NAMES = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
_MNIST = _idx_files(
    ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
    "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "d53e105ee54ea40749a09fcbcd1e9432",
    "9fb629c4189551a2d022fa330f9573f3",
    "ec29112dd5afa0611ce80d1b7f02629c",
)
_FASHION_MNIST = _idx_files(
    (
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    ),
    "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "25c81989df183df01b3e8a0aad5dffbe",
    "bef4ecab320f06d8554ea6380940ec79",
    "bb300cfdad3c16e7a12a480ee83cd310",
)
_MNIST_C = _zenodo(
    3239543,
    "mnist_c.zip",
    "4b34b33045869ee6d424616cd3a65da3",
    "mnist_c/*/*_images.npy",
    "mnist_c/*/*_labels.npy",
)
_IMAGENET_C = (
    *_imagenet_c("noise.tar", "e80562d7f6c3f8834afb1ecf27252745", "gaussian_noise shot_noise impulse_noise"),
    *_imagenet_c(
        "blur.tar", "2d8e81fdd8e07fef67b9334fa635e45c", "defocus_blur glass_blur motion_blur zoom_blur"
    ),
    *_imagenet_c("weather.tar", "33ffea4db4d93fe4a428c40a6ce0c25d", "frost snow fog brightness"),
    *_imagenet_c(
        "digital.tar",
        "89157860d7b10d5797849337ca2e5c03",
        "contrast elastic_transform pixelate jpeg_compression",
    ),
    *_imagenet_c(
        "extra.tar", "d492dfba5fc162d8ec2c3cd8ee672984", "speckle_noise spatter gaussian_blur saturate"
    ),
)
_IMAGENET_R = _archive(
    "https://people.eecs.berkeley.edu/~hendrycks/imagenet-r.tar",
    "a61312130a589d0ca1a8fca1f2bd3337",
    "imagenet-r/n*/*.jpg",
)
_ZENODO = "https://zenodo.org/records"
_FASHION_PAGE = "https://github.com/zalandoresearch/fashion-mnist"
_SETS: Final = (
    PublishedSet("cifar10", f"{_CIFAR}/cifar.html", "162 MB", _CIFAR10),
    PublishedSet("cifar100", f"{_CIFAR}/cifar.html", "161 MB", _CIFAR100),
    PublishedSet("cifar10-c", f"{_ZENODO}/2535967", "2.9 GB", _CIFAR10_C),
    PublishedSet("cifar100-c", f"{_ZENODO}/3555552", "2.9 GB", _CIFAR100_C),
    PublishedSet("mnist", "https://yann.lecun.com/exdb/mnist", "12 MB", _MNIST, home="mnist"),
    PublishedSet("fashion-mnist", _FASHION_PAGE, "31 MB", _FASHION_MNIST, home="fashion-mnist"),
    PublishedSet("mnist-c", f"{_ZENODO}/3239543", "0.3 GB", _MNIST_C),
    PublishedSet("imagenet-c", f"{_ZENODO}/2235448", "66 GB", _IMAGENET_C, home="ImageNet-C"),
    PublishedSet("imagenet-r", "https://github.com/hendrycks/imagenet-r", "2 GB", _IMAGENET_R),
)
PUBLISHED: Final[dict[str, PublishedSet]] = {published.name: published for published in _SETS}
"""The data sets that can be downloaded, by name."""

CIFAR10_SHA256: Final = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}

_MNIST_CORRUPTIONS = """
identity brightness canny_edges dotted_line fog glass_blur impulse_noise motion_blur rotate scale shear shot_noise
spatter stripe translate zigzag
"""
_CIFAR_C_SIZES = {"labels.npy": 50_000} | {f"{name}.npy": 50_000 * 32 * 32 * 3 for name in EVERY}
_MNIST_C_SIZES = {
    f"{name}/{split}_{kind}.npy": count * each
    for name in _MNIST_CORRUPTIONS.split()
    for split, count in (("train", 60_000), ("test", 10_000))
    for kind, each in (("images", 28 * 28), ("labels", 1))
}
SIZES: Final[dict[str, Mapping[str, int]]] = {
    "cifar-10-batches-bin": dict.fromkeys(CIFAR10_SHA256, 10_000 * 3073),
    "cifar-100-binary": {"train.bin": 50_000 * 3074, "test.bin": 10_000 * 3074},
    "CIFAR-10-C": _CIFAR_C_SIZES,
    "CIFAR-100-C": _CIFAR_C_SIZES,
    "mnist_c": _MNIST_C_SIZES,
}
"""Bytes of each file of a folder; for .npy files without their header, and with labels of one byte."""

COUNTS: Final[dict[str, Mapping[str, int]]] = {
    "imagenet-r": {"n*/*.jpg": 30_000},
    **{name: {f"{severity}/n*/*.JPEG": 50_000 for severity in range(1, 6)} for name in EVERY},
}
"""Number of images of each pattern in a folder."""


def find_published(name: str) -> PublishedSet:
    """Return a set that can be downloaded; raise an error with the nearest name, or with what to do by hand."""
    if name == "imagenet":
        raise ValueError(
            "ImageNet cannot be downloaded by ttvd: its terms require everybody to register at https://image-net.org. "
            "Put its images into ROOT/train/CLASS and ROOT/val/CLASS, with WordNet identifiers such as n01440764 as "
            "classes"
        )
    check_choice(name, tuple(PUBLISHED), "data set to download")
    return PUBLISHED[name]
