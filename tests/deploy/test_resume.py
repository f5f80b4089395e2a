"""`ttvd adapt` that is stopped on the way: what is saved is whole, and only the same stream is continued."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.deploy import RUNNER, run_adapt
from ttvd.cli.main import app
from ttvd.deploy import job


def list_options(folder: Path, *more: str) -> list[str]:
    return ["--batch-size", "16", "--save-state", str(folder / "state.safetensors"), *more]


def adapt(source: Path, out: Path, *options: str) -> Any:
    arguments = ["adapt", str(source), "--model", "digits-sla", "--out", str(out), *options]
    return RUNNER.invoke(app, arguments)


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("signals", "again"), [(1, 2), (2, 5)])
def test_an_interruption_never_saves_half_a_batch(
    digits: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stop: signal.Signals,
    signals: int,
    again: int,
) -> None:
    """One signal waits for the end of the third of five batches; a second one does not, and the batch is not saved."""
    whole = run_adapt(digits / "digits.npy", tmp_path / "whole.csv", "--batch-size", "16")
    once, calls, handlers = job.adapt_batch, [0], signal.getsignal(stop)

    def interrupted(adapter: Any, *arguments: Any) -> None:
        calls[0] += 1
        if calls[0] == 3:
            adapter(arguments[0].images)  # the adapter has changed when the signals come
            for _ in range(signals):
                os.kill(os.getpid(), stop)
            adapter.load_state_dict(before)
        before.update({name: value.clone() for name, value in adapter.state_dict().items()})
        once(adapter, *arguments)
        before.update({name: value.clone() for name, value in adapter.state_dict().items()})

    before: dict[str, Any] = {}
    monkeypatch.setattr(job, "adapt_batch", interrupted)
    result = adapt(digits / "digits.npy", tmp_path / "out.csv", *list_options(tmp_path))
    assert result.exit_code == 130
    assert "--resume goes on" in result.output
    assert signal.getsignal(stop) == handlers
    calls[0] = 10
    resumed = run_adapt(digits / "digits.npy", tmp_path / "out.csv", *list_options(tmp_path), "--resume")
    assert resumed == whole
    assert calls[0] - 10 == again


def test_a_stream_that_was_stopped_at_its_end_is_finished(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_adapt(digits / "digits.npy", tmp_path / "whole.csv", "--batch-size", "16")
    once, calls = job.adapt_batch, [0]

    def interrupted(*arguments: Any) -> None:
        calls[0] += 1
        if calls[0] == 5:
            os.kill(os.getpid(), signal.SIGINT)
        once(*arguments)

    monkeypatch.setattr(job, "adapt_batch", interrupted)
    assert adapt(digits / "digits.npy", tmp_path / "out.csv", *list_options(tmp_path)).exit_code == 130
    assert (
        run_adapt(digits / "digits.npy", tmp_path / "out.csv", *list_options(tmp_path), "--resume") == whole
    )
    assert calls[0] == 5


def test_another_stream_is_not_continued(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = job.adapt_batch

    def interrupted(*arguments: Any) -> None:
        once(*arguments)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(job, "adapt_batch", interrupted)
    options = list_options(tmp_path)
    assert adapt(digits / "digits.npy", tmp_path / "out.csv", *options).exit_code == 130
    monkeypatch.setattr(job, "adapt_batch", once)
    rows, state = (tmp_path / name for name in ("out.csv.partial", "state.safetensors"))
    kept = rows.read_bytes(), state.read_bytes()
    images = np.load(digits / "digits.npy")
    for other, message in (
        (images[:40], "was saved with input 80 images, .*, this run has 40 images, "),
        (images[::-1], "was saved with input 80 images, .*, this run has 80 images, "),
    ):
        np.save(tmp_path / "other.npy", other)
        result = adapt(tmp_path / "other.npy", tmp_path / "out.csv", *options, "--resume")
        assert isinstance(result.exception, ValueError)
        with pytest.raises(ValueError, match=message):
            raise result.exception
    result = adapt(digits / "digits.npy", tmp_path / "out.csv", *options, "--resume", "--batch-size", "8")
    assert "was saved with batch size 16, this run has 8" in str(result.exception)
    assert (rows.read_bytes(), state.read_bytes()) == kept
    run_adapt(digits / "digits.npy", tmp_path / "out.csv", *options, "--resume")
    # A new stream may begin with the state of another one.
    np.save(tmp_path / "other.npy", images[:40])
    assert len(run_adapt(tmp_path / "other.npy", tmp_path / "new.csv", "--state", str(state))) == 40


def test_a_bad_image_on_the_way_costs_nothing_that_was_done(digits: Path, tmp_path: Path) -> None:
    images = np.load(digits / "digits.npy").astype(np.float32) / 255
    images[40, 3, 3] = np.nan
    np.save(tmp_path / "images.npy", images)
    whole = run_adapt(
        tmp_path / "images.npy", tmp_path / "whole.csv", "--batch-size", "16", "--unreadable", "skip"
    )
    result = adapt(tmp_path / "images.npy", tmp_path / "out.csv", *list_options(tmp_path))
    assert "--unreadable skip leaves such images out" in str(result.exception)
    assert "32 rows are in" in result.output
    options = list_options(tmp_path, "--unreadable", "skip", "--resume")
    result = adapt(tmp_path / "images.npy", tmp_path / "out.csv", *options)
    assert result.exit_code == 0
    assert "79 predictions in" in result.output
    assert "(32 of them from before)" in " ".join(result.output.split())
    assert (tmp_path / "out.csv").read_text() == (tmp_path / "whole.csv").read_text()
    assert len(whole) == 79
