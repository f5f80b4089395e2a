"""The unpickler of CIFAR's python batches: what it reads, and what tries to get through it."""

import copyreg
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ttvd.data.sets.unpickle import read_batch


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_batches_that_python_3_wrote_are_read_too(protocol: int, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    pixels, labels = generator.integers(0, 256, (12, 3072), np.uint8), generator.integers(0, 10, 12)
    path = tmp_path / "batch"
    path.write_bytes(pickle.dumps({"data": pixels, "labels": labels.tolist()}, protocol))
    batch = read_batch(path)
    assert np.array_equal(batch["data"], pixels)
    assert batch["labels"] == labels.tolist()


class Smuggler:
    """Pickles into a call of any function."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self._call


MARKER = "smuggled"
PAYLOADS: dict[str, Any] = {
    "system": Smuggler(os.system, f"touch {MARKER}"),
    "exec": Smuggler(exec, f"open({MARKER!r}, 'w')"),
    "getattr": Smuggler(getattr, "", "join"),
    "open": Smuggler(open, MARKER, "w"),
    "numpy load": Smuggler(np.load, MARKER),
    "bytearray": Smuggler(bytearray, 10),
    "object array": np.array([Smuggler(os.system, f"touch {MARKER}")], object),
    "float array": np.ones(3),
    "wide integers": np.ones(3, np.int64),
    "complex number": 1j,
    "nested": {"data": [Smuggler(os.system, f"touch {MARKER}")]},
}


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
@pytest.mark.parametrize("name", PAYLOADS)
def test_pickles_that_ask_for_more_are_refused(
    name: str, protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("batch").write_bytes(pickle.dumps({"data": PAYLOADS[name]}, protocol))
    with pytest.raises(ValueError, match="is refused as a batch"):
        read_batch("batch")
    assert not Path(MARKER).exists()


RAW = {
    "global by dotted name": b"\x80\x04\x8c\x05numpy\x8c\x0fos.path.os.popen\x93.",
    "call of ndarray": b"\x80\x02cnumpy\nndarray\nK\x0a\x85R.",
    "instance of a stand-in": b"\x80\x02cnumpy\ndtype\n)\x81.",
    "change of a stand-in": b"\x80\x02cnumpy\ndtype\n}X\x01\x00\x00\x00aK\x01sb.",
    "slots of a stand-in": b"\x80\x02c_codecs\nencode\nN}X\x09\x00\x00\x00_functionNs\x86b.",
    "persistent identifier": b"\x80\x02K\x01Q.",
    "old-style instance": b"(cos\nsystem\nX\x04\x00\x00\x00trueo.",
    "array longer than its bytes": (
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n)R(K\x01K\x09\x85cnumpy\ndtype\nU\x02u1\x85R\x89U\x02abtb."
    ),
    "dtype of objects by its state": b"\x80\x02cnumpy\ndtype\nU\x02u1\x85R(K\x03U\x01|NU\x01xNtb.",
    "foreign codec": b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00rot13\x86R.",
    "empty": b"",
    "no dictionary": b"\x80\x02].",
    "no pickle": b"hello",
}


@pytest.mark.parametrize("name", RAW)
def test_hand_made_pickles_are_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "batch"
    path.write_bytes(RAW[name])
    with pytest.raises(ValueError, match="is refused as a batch"):
        read_batch(path)


def test_extension_codes_do_not_get_past_the_names(tmp_path: Path) -> None:
    copyreg.add_extension("os", "getcwd", 240)
    try:
        content = pickle.dumps(os.getcwd, 2)
        assert pickle.loads(content) is os.getcwd  # noqa: S301 (fills the cache that the attack relies on)
        path = tmp_path / "batch"
        path.write_bytes(b"\x80\x02}X\x01\x00\x00\x00a\x82\xf0)Rs.")
        with pytest.raises(ValueError, match="is refused as a batch"):
            read_batch(path)
    finally:
        copyreg.remove_extension("os", "getcwd", 240)
        copyreg.clear_extension_cache()
