"""Odd files of every kind are read as they were written or refused with a message that names them.

`make fuzz` tries many more. A case that fails here is `python tools/fuzz.py --target NAME --seed CASE --cases 1`.
"""

from collections import Counter

import pytest

from tests.helpers.fuzz import TARGETS, FuzzError, open_fuzzer
from ttvd.bench.packed import PackedRuns
from ttvd.zoo.sites import Sites

CASES = {"recipe": 300, "store": 400, "store, edited": 150}
"""Cases of targets that deserve another number than 80."""


@pytest.mark.parametrize("name", TARGETS)
def test_odd_files_are_read_or_refused(name: str) -> None:
    outcomes: Counter[str] = Counter()
    with open_fuzzer(name) as fuzzer:
        for seed in range(CASES.get(name, 80)):
            try:
                outcomes[fuzzer.run(fuzzer.make(seed))] += 1
            except FuzzError as error:
                raise AssertionError(f"case {seed}: {error}") from error.__cause__
    assert outcomes["refused"] > 0.2 * outcomes.total()  # else the cases are not odd


def test_the_fuzzer_notices_other_values_and_other_exceptions(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_fuzzer("sites") as fuzzer:
        monkeypatch.setattr(Sites, "load", lambda path: 1 / 0)
        with pytest.raises(FuzzError, match="ZeroDivisionError"):
            fuzzer.run(b"")
    with open_fuzzer("packed runs") as fuzzer:
        monkeypatch.setattr(PackedRuns, "done", lambda runs: set())
        with pytest.raises(FuzzError, match="other values"):
            fuzzer.run(fuzzer._content)


@pytest.mark.parametrize("name", TARGETS)
def test_folders_and_empty_files_are_refused(name: str) -> None:
    with open_fuzzer(name) as fuzzer:
        assert fuzzer.run(b"") == "refused"
        path = fuzzer._valid / fuzzer._file
        path.unlink()
        path.mkdir()
        with pytest.raises((ValueError, OSError), match=path.stem):
            fuzzer.target.read(path)
