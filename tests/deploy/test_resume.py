"""Streams that are stopped on the way: what is saved is whole, and only the same stream is resumed."""

import os
import signal
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.cli import refuse_cli, run_cli
from tests.helpers.deploy import make_adapter, make_inputs, run_adapt
from ttvd.deploy import BatchResult, StateFile, adapt_stream, stream
from ttvd.deploy.inputs import Batch, iterate_batches


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("signals", "expected"), [(1, [12, 16, 20]), (2, [4, 8, 12, 16, 20])])
def test_a_signal_waits_for_the_end_of_the_batch(
    tmp_path: Path, number: signal.Signals, signals: int, expected: list[int]
) -> None:
    """A second signal does not wait, and its batch is not saved: the state before the first batch is still there."""
    whole, out, state = tmp_path / "whole.csv", tmp_path / "out.csv", StateFile(tmp_path / "state")
    adapt_stream(make_adapter(), make_inputs(), out=whole, batch_size=4)
    handler, adapter, calls = signal.getsignal(number), make_adapter(), [0]

    def interrupt(*arguments: object) -> None:
        calls[0] += 1
        if calls[0] == 2:  # the adapter has changed, its logits are not there yet
            for _ in range(signals):
                os.kill(os.getpid(), number)

    adapter.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        adapt_stream(adapter, make_inputs(), out=out, batch_size=4, state=state)
    assert signal.getsignal(number) == handler
    assert not out.exists()
    seen: list[BatchResult] = []
    summary = adapt_stream(
        make_adapter(),
        make_inputs(),
        out=out,
        batch_size=4,
        state=state,
        resume=True,
        callbacks=[seen.append],
    )
    assert [result.position.images for result in seen] == expected
    assert (summary.rows, summary.images) == (20, 4 * len(expected))
    assert out.read_bytes() == whole.read_bytes()


def test_states_are_saved_on_the_way(tmp_path: Path) -> None:
    state, saved = StateFile(tmp_path / "state", every=2), list[bytes]()
    read = [lambda _: saved.append(state.path.read_bytes())]
    adapt_stream(make_adapter(), make_inputs(), batch_size=4, state=state, callbacks=read)
    assert [saved.index(content) for content in saved] == [0, 1, 1, 3, 3]
    assert state.path.read_bytes() not in saved


def interrupt_after(monkeypatch: pytest.MonkeyPatch, batches: int) -> None:
    """Send SIGINT while a batch of the next stream is at work."""
    original = iterate_batches

    def interrupted(*arguments: Any, **options: Any) -> Generator[Batch, None, None]:
        for number, batch in enumerate(original(*arguments, **options), 1):
            if number == batches:
                os.kill(os.getpid(), signal.SIGINT)
            yield batch

    monkeypatch.setattr(stream, "iterate_batches", interrupted)


@pytest.mark.parametrize("batches", [2, 5])  # in the middle, and at the end
def test_an_interrupted_command_is_resumed_byte_by_byte(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batches: int
) -> None:
    pictures, whole, out = digits / "pictures", tmp_path / "whole.csv", tmp_path / "out.csv"
    options = ("--gray", "--batch-size", 16)
    run_adapt(pictures, whole, *options, method="ttvd")
    saved = ("--save-state", tmp_path / "state")
    interrupt_after(monkeypatch, batches)
    command = ("adapt", pictures, "--model", "digits-sla", "--out", out, *options, *saved)
    result = run_cli(*command)
    monkeypatch.undo()
    assert result.exit_code == 130
    assert f"{16 * batches} rows" in result.output
    assert "--resume" in result.output
    assert "--resume" in refuse_cli(*command)
    run_adapt(pictures, out, *options, *saved, "--resume", method="ttvd")
    assert out.read_bytes() == whole.read_bytes()


def test_another_stream_is_not_resumed(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, state, other = tmp_path / "out.csv", tmp_path / "state", tmp_path / "other.npy"
    options = ("--model", "digits-sla", "--method", "bn", "--out", out, "--save-state", state)
    command = ("adapt", digits / "digits.npy", *options, "--batch-size", 16)
    interrupt_after(monkeypatch, 1)
    assert run_cli(*command).exit_code == 130
    monkeypatch.undo()
    partial = tmp_path / "out.csv.partial"
    kept = partial.read_bytes(), state.read_bytes()
    images = np.load(digits / "digits.npy")
    np.save(other, images[:40])
    assert "has 40 images" in refuse_cli("adapt", other, *options, "--resume", "--batch-size", 16)
    np.save(other, images[::-1])
    assert "saved with input" in refuse_cli("adapt", other, *options, "--resume", "--batch-size", 16)
    assert "saved with input" in refuse_cli(*command, "--resume", "--crop", 20)
    assert "saved with batch size 16" in refuse_cli(*command, "--resume", "--batch-size", 8)
    names = tmp_path / "names.txt"
    names.write_text("\n".join("abcdefghij"))
    assert "--classes" in refuse_cli(*command, "--resume", "--classes", names)
    assert (partial.read_bytes(), state.read_bytes()) == kept
    partial.write_text("name,prediction,confidence\n")
    assert "0 rows" in refuse_cli(*command, "--resume")
    partial.unlink()
    assert "no " in refuse_cli(*command, "--resume")
    # A new stream may begin with the state of another one.
    np.save(other, images[:40])
    assert len(run_adapt(other, tmp_path / "new.csv", "--state", state)) == 40


def test_a_bad_image_on_the_way_loses_nothing(digits: Path, tmp_path: Path) -> None:
    images = np.load(digits / "digits.npy").astype(np.float32) / 255
    images[40, 3, 3] = np.nan
    source, whole, out = tmp_path / "images.npy", tmp_path / "whole.csv", tmp_path / "out.csv"
    np.save(source, images)
    assert len(run_adapt(source, whole, "--batch-size", 16, "--unreadable", "skip")) == 79
    options = ("--method", "bn", "--batch-size", 16, "--save-state", tmp_path / "state")
    command = ("adapt", source, "--model", "digits-sla", "--out", out, *options)
    result = run_cli(*command)
    assert "--unreadable skip" in str(result.exception)
    assert "32 rows" in result.output
    output = " ".join(run_cli(*command, "--unreadable", "skip", "--resume").output.split())
    assert "79 predictions" in output
    assert "32 of them from before" in output
    assert out.read_bytes() == whole.read_bytes()


def stop(result: BatchResult) -> None:
    if result.index == 1:
        raise RuntimeError("enough")


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_stream_that_has_ended_is_resumed_by_doing_nothing(tmp_path: Path, suffix: str) -> None:
    out, state = tmp_path / f"out{suffix}", StateFile(tmp_path / "state")
    adapt_stream(make_adapter(), make_inputs(), out=out, state=state)
    content = out.read_bytes()
    for _ in range(2):
        summary = adapt_stream(make_adapter(), make_inputs(), out=out, state=state, resume=True)
        assert (summary.rows, summary.images, out.read_bytes()) == (20, 0, content)
    assert sorted(path.name for path in tmp_path.iterdir()) == [out.name, "state"]
    out.write_bytes(b"other")
    with pytest.raises(FileNotFoundError, match="to continue"):
        adapt_stream(make_adapter(), make_inputs(), out=out, state=state, resume=True)
    assert out.read_bytes() == b"other"


def test_rows_of_another_run_are_not_continued(tmp_path: Path) -> None:
    """They are as many and as long; only their checksum tells."""
    out, state = tmp_path / "out.csv", StateFile(tmp_path / "state")
    with pytest.raises(RuntimeError, match="enough"):
        adapt_stream(make_adapter(), make_inputs(), out=out, batch_size=4, state=state, callbacks=[stop])
    partial = tmp_path / "out.csv.partial"
    content = partial.read_bytes()
    partial.write_bytes(content.replace(b"1.png", b"7.png"))
    with pytest.raises(ValueError, match="not those of the run"):
        adapt_stream(make_adapter(), make_inputs(), out=out, batch_size=4, state=state, resume=True)
    partial.write_bytes(content + b"a tail that the state does not count")
    adapt_stream(make_adapter(), make_inputs(), out=out, batch_size=4, state=state, resume=True)
    assert out.read_bytes().startswith(content)


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    out, state = tmp_path / "out.csv", StateFile(tmp_path / "state")

    def again(result: BatchResult) -> None:
        for options in ({"resume": True}, {"overwrite": True}):
            with pytest.raises(BlockingIOError, match="another process"):
                adapt_stream(make_adapter(), make_inputs(), out=out, state=state, **options)  # type: ignore[arg-type]

    assert adapt_stream(make_adapter(), make_inputs(), out=out, state=state, callbacks=[again]).rows == 20


def test_images_that_were_left_out_stay_left_out(tmp_path: Path) -> None:
    inputs, out, state = make_inputs(), tmp_path / "out.csv", StateFile(tmp_path / "state")

    def read(number: int) -> torch.Tensor:
        if number == 2:
            raise OSError("broken")
        return inputs.read(number)

    options: Any = {"out": out, "batch_size": 4, "state": state}
    with pytest.raises(RuntimeError, match="enough"):
        adapt_stream(
            make_adapter(), replace(inputs, read=read), **options, on_unreadable="skip", callbacks=[stop]
        )
    with pytest.raises(ValueError, match="--unreadable skip"):
        adapt_stream(make_adapter(), inputs, **options, resume=True)
    assert adapt_stream(make_adapter(), inputs, **options, on_unreadable="skip", resume=True).rows == 19


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--method", "tent"], "--method"),
        (["--param", "count=8"], "--param"),
        (["--model", "digits-plain"], "--model"),
        (["--views", "4"], "--views"),
        (["--batch-size", "8"], "--batch-size"),
        (["--gray"], "--gray"),
        (["--interpolation", "bicubic"], "--interpolation"),
        (["--classes", "other.txt"], "--classes"),
        (["--out", "out.parquet"], "--out"),
    ],
)
def test_other_options_are_named(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], word: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("names.txt").write_text("\n".join("abcdefghij"))
    Path("other.txt").write_text("\n".join("abcdefghik"))
    given = ["--method", "bn", "--batch-size", "16", "--classes", "names.txt", "--out", "out.csv"]
    command = ("adapt", digits / "digits.npy", "--model", "digits-sla", *given, "--save-state", "state")
    interrupt_after(monkeypatch, 1)
    assert run_cli(*command).exit_code == 130
    monkeypatch.setattr(stream, "iterate_batches", iterate_batches)
    kept = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert word in refuse_cli(*command, "--resume", *options)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == kept
    without = [part for part in command if part not in ("--classes", "names.txt")]
    assert "--classes" in refuse_cli(*without, "--resume")
