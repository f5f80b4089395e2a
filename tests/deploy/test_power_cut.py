"""Power cuts, full disks and failing operations at any moment: what was reported stays, and resuming completes it."""

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.helpers.deploy import make_adapter, make_inputs
from tests.helpers.disk import Disk, Files, write_files
from ttvd.deploy import BatchResult, StateFile, StreamSummary, adapt_stream
from ttvd.deploy.predictions import PredictionWriter

IMAGES = 10
Report = Callable[[BatchResult], None]
Cuts = dict[frozenset[tuple[str, bytes]], int]
"""What may be left of a folder, and how many rows had been reported as written by then."""


@pytest.fixture(autouse=True)
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sync takes milliseconds, and no power is cut in truth."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(params=[".csv", ".parquet"])
def suffix(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def run(folder: Path, suffix: str, **options: Any) -> StreamSummary:
    """Run the stream of these tests in a folder. The state is saved after every batch."""
    out, state = folder / f"out{suffix}", StateFile(folder / "state", every=1)
    inputs = make_inputs(IMAGES)
    return adapt_stream(make_adapter(), inputs, out=out, state=state, batch_size=4, **options)


def go_on(folder: Path, suffix: str, *callbacks: Report) -> StreamSummary:
    """Do what a user does after an interruption: resume, or begin where there is no state yet."""
    return run(folder, suffix, resume=(folder / "state").exists(), callbacks=callbacks)


def read_files(folder: Path) -> Files:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def check_files(folder: Path, whole: Path) -> None:
    """Check that a folder holds the predictions and the state of an uninterrupted stream, and nothing else."""
    found, expected = read_files(folder), read_files(whole)
    # The order in a header of safetensors differs from call to call. The checksum covers all that is in the file.
    found.pop("state"), expected.pop("state")
    assert found == expected
    checksums = {safe_open(place / "state", "pt").metadata()["ttvd.checksum"] for place in (folder, whole)}
    assert len(checksums) == 1


@pytest.fixture
def whole(tmp_path: Path, suffix: str) -> Path:
    """The folder of an uninterrupted stream."""
    folder = tmp_path / "whole"
    folder.mkdir()
    run(folder, suffix)
    return folder


def interrupt(folder: Path, suffix: str, batches: int) -> Files:
    """Return the files of a stream that a callback has ended."""

    def stop(result: BatchResult) -> None:
        if result.index + 1 == batches:
            raise RuntimeError("enough")

    folder.mkdir()
    with pytest.raises(RuntimeError, match="enough"):
        run(folder, suffix, callbacks=[stop])
    return read_files(folder)


def cut_everywhere(
    place: Path, start: Files, stream: Callable[[Path, Report], object], monkeypatch: pytest.MonkeyPatch
) -> Cuts:
    """Run a stream in a folder with some files, and collect what a power cut before every operation may leave."""
    folder, keep, reported, found = write_files(place / "run", start), place / "keep", [0], Cuts()
    keep.mkdir()

    def cut() -> None:
        for files in disk.cut_power():
            key = frozenset(files.items())
            found[key] = max(found.get(key, 0), reported[0])

    def report(result: BatchResult) -> None:
        reported[0] = result.position.rows  # its state was saved before, as after every batch here

    disk = Disk(folder, keep, cut)
    with monkeypatch.context() as patch:
        disk.watch(patch)
        stream(folder, report)
        cut()
    return found


def check_cuts(place: Path, suffix: str, found: Cuts, whole: Path) -> None:
    for number, (files, reported) in enumerate(found.items()):
        folder = write_files(place / str(number), dict(files))
        summary = go_on(folder, suffix)
        assert (summary.rows, summary.images <= IMAGES - reported) == (IMAGES, True)
        check_files(folder, whole)


def test_power_cuts_of_a_new_stream(
    tmp_path: Path, whole: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = cut_everywhere(tmp_path, {}, lambda folder, report: go_on(folder, suffix, report), monkeypatch)
    assert len(found) >= 40
    assert max(found.values()) == IMAGES
    check_cuts(tmp_path, suffix, found, whole)


def test_power_cuts_of_a_stream_that_is_resumed(
    tmp_path: Path, whole: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was killed in the middle of its second batch, so that there are rows that the state does not count."""
    start = interrupt(tmp_path / "first", suffix, 1)
    tail = interrupt(tmp_path / "second", suffix, 2)[f"out{suffix}.partial"]
    start |= {f"out{suffix}.partial": tail[:-3], ".state.123.tmp": b"half a state"}
    found = cut_everywhere(tmp_path, start, lambda folder, report: go_on(folder, suffix, report), monkeypatch)
    assert len(found) >= 30
    check_cuts(tmp_path, suffix, found, whole)


@pytest.mark.parametrize("batches", [2, None])
def test_power_cuts_of_a_stream_that_replaces_another(
    tmp_path: Path, whole: Path, suffix: str, monkeypatch: pytest.MonkeyPatch, batches: int | None
) -> None:
    """Before its first state is on the disk, the files of the other stream are whole, and that stream can go on."""
    start = read_files(whole) if batches is None else interrupt(tmp_path / "first", suffix, batches)

    def replace(folder: Path, report: Report) -> None:
        run(folder, suffix, overwrite=True, callbacks=[report])

    found = cut_everywhere(tmp_path, start, replace, monkeypatch)
    # Rows that were reported of the second stream may be left as the equal rows of the first.
    check_cuts(tmp_path, suffix, found, whole)


@pytest.mark.parametrize(
    "mistake", ["rows are not synced", "rows are written anew at resume", "no first state"]
)
def test_a_mistake_in_the_order_is_found(
    tmp_path: Path, whole: Path, suffix: str, monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    """The disk of these tests notices what 0.1.0 did."""
    start = interrupt(tmp_path / "first", suffix, 2)
    with monkeypatch.context() as patch:  # and then the right order again, still on a fast disk
        if mistake == "rows are not synced":
            patch.setattr(PredictionWriter, "sync", lambda _: None)
        elif mistake == "no first state":
            patch.setattr(StateFile, "save", _save_late(StateFile.save))
            start = {}
        else:
            patch.setattr(PredictionWriter, "begin", _rewrite(PredictionWriter.begin))
        found = cut_everywhere(tmp_path, start, lambda folder, report: go_on(folder, suffix, report), patch)
    with pytest.raises((ValueError, OSError)):
        check_cuts(tmp_path, suffix, found, whole)


def _save_late(save: Callable[..., None]) -> Callable[..., None]:
    return lambda state, adapter, position, stream: (
        save(state, adapter, position, stream) if position.images else None
    )


def _rewrite(begin: Callable[[PredictionWriter], None]) -> Callable[[PredictionWriter], None]:
    def rewrite(writer: PredictionWriter) -> None:
        assert writer._file is not None
        content = writer.partial.read_bytes()[: writer.size]
        os.ftruncate(writer._file, 0)
        os.write(writer._file, content)
        begin(writer)

    return rewrite


def find_rows(error: BaseException) -> int:
    """Return how many rows a note of an error promises."""
    return int(getattr(error, "__notes__", ["0"])[0].split()[0])


def fail_and_resume(place: Path, suffix: str, whole: Path, disk: Disk, patch: pytest.MonkeyPatch) -> bool:
    """Run on a disk that fails, then resume. Returns whether it failed."""
    folder, error = place, None
    with patch.context() as patched:
        disk.watch(patched)
        try:
            go_on(folder, suffix)
        except OSError as caught:
            error = caught
    if error is not None:
        assert error.errno == errno.ENOSPC
        assert go_on(folder, suffix).images <= IMAGES - find_rows(error)
    check_files(folder, whole)
    return error is not None


@pytest.mark.parametrize("start", ["new", "resumed"])
def test_a_full_disk_at_any_byte(
    tmp_path: Path, whole: Path, suffix: str, monkeypatch: pytest.MonkeyPatch, start: str
) -> None:
    files = {} if start == "new" else interrupt(tmp_path / "first", suffix, 1)
    rng, space, failed = random.Random(0), 0, True
    while failed:
        place = tmp_path / str(space)
        (keep := tmp_path / f"{space}-keep").mkdir()
        disk = Disk(write_files(place, files), keep, space=space)
        failed = fail_and_resume(place, suffix, whole, disk, monkeypatch)
        space += rng.choice((1, 7, 60, 200))
    assert space > 2000


@pytest.mark.parametrize("start", ["new", "resumed"])
def test_any_operation_that_fails(
    tmp_path: Path, whole: Path, suffix: str, monkeypatch: pytest.MonkeyPatch, start: str
) -> None:
    """From some operation on all fail, also those that clean up, as when a disk is taken out."""
    files = {} if start == "new" else interrupt(tmp_path / "first", suffix, 1)
    number, failed = 0, True
    while failed:
        place, left = tmp_path / str(number), [number]

        def fail(left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        (keep := tmp_path / f"{number}-keep").mkdir()
        failed = fail_and_resume(
            place, suffix, whole, Disk(write_files(place, files), keep, fail), monkeypatch
        )
        number += 1
    assert number > 15


def test_without_a_state_whole_rows_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as the error says."""
    for space in range(0, 208, 13):
        folder, keep = write_files(tmp_path / str(space), {}), tmp_path / f"{space}-keep"
        keep.mkdir()
        with monkeypatch.context() as patch:
            Disk(folder, keep, space=space).watch(patch)
            with pytest.raises(OSError, match="No space") as caught:
                adapt_stream(make_adapter(), make_inputs(IMAGES), out=folder / "out.csv", batch_size=4)
        lines = (folder / "out.csv.partial").read_bytes().split(b"\n")[1:-1] if any(folder.iterdir()) else []
        assert len(lines) == find_rows(caught.value) == max(0, (space - 28) // 72 * 4)
        assert "out.csv.partial" in str(caught.value)
