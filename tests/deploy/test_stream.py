"""`ttvd.deploy.adapt_stream`: what it writes, calls and returns, and what it refuses."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.helpers.deploy import make_adapter, make_inputs, read_rows
from ttvd.deploy import BatchResult, StateFile, adapt_stream
from ttvd.deploy.states import FORMAT, KIND
from ttvd.zoo.tensorfile import write_tensors


def test_batches_are_predicted_written_and_reported(tmp_path: Path) -> None:
    seen: list[BatchResult] = []
    out = tmp_path / "out.csv"

    def check(result: BatchResult) -> None:
        seen.append(result)
        # The rows of a batch are on disk as soon as it is done, so that a kill does not lose them.
        assert len((tmp_path / "out.csv.partial").read_text().splitlines()) == result.position.rows + 1

    summary = adapt_stream(make_adapter(), make_inputs(10), out=out, batch_size=4, callbacks=[check])
    adapter, inputs = make_adapter(), make_inputs(10)
    images = torch.stack([inputs.read(number) for number in range(10)])
    expected = [adapter(batch) for batch in images.split(4)]
    assert [result.index for result in seen] == [0, 1, 2]
    assert [result.position.images for result in seen] == [4, 8, 10]
    assert all(torch.equal(result.logits, logits) for result, logits in zip(seen, expected, strict=True))
    probabilities = torch.cat(expected).softmax(1)
    rows = read_rows(out)
    assert [row["name"] for row in rows] == inputs.names
    assert [int(row["prediction"]) for row in rows] == probabilities.argmax(1).tolist()
    assert [float(row["confidence"]) for row in rows] == pytest.approx(
        probabilities.amax(1).tolist(), abs=1e-6
    )
    assert (summary.images, summary.rows, len(summary.entropies)) == (10, 10, 3)
    assert summary.kept == [1.0, 1.0, 1.0]
    assert summary.moved > 0
    assert [path.name for path in tmp_path.iterdir()] == ["out.csv"]


def test_unreadable_images_are_reported(tmp_path: Path) -> None:
    inputs = make_inputs(6)

    def read(number: int) -> torch.Tensor:
        if number in (2, 3, 5):
            raise OSError("broken")
        return inputs.read(number)

    seen: list[BatchResult] = []
    bad = replace(inputs, read=read)
    summary = adapt_stream(
        make_adapter(),
        bad,
        out=tmp_path / "a.csv",
        batch_size=2,
        on_unreadable="skip",
        callbacks=[seen.append],
    )
    assert [list(result.names) for result in seen] == [["0.png", "1.png"], [], ["4.png"]]
    assert seen[1].logits.shape == (0, 0)
    assert [name for name, _ in summary.unreadable] == ["2.png", "3.png", "5.png"]
    assert len(summary.entropies) == 2
    with pytest.raises(ValueError, match=r"2\.png"):
        adapt_stream(make_adapter(), bad, batch_size=2)


def test_no_journal_without_rows_is_left(tmp_path: Path) -> None:
    def read(number: int) -> torch.Tensor:
        raise OSError("broken")

    def stop(result: BatchResult) -> None:
        raise RuntimeError("enough")

    inputs = replace(make_inputs(), read=read)
    with pytest.raises(RuntimeError, match="enough"):
        adapt_stream(make_adapter(), inputs, out=tmp_path / "a.csv", on_unreadable="skip", callbacks=[stop])
    assert not list(tmp_path.iterdir())


def test_an_exception_in_a_callback_ends_the_stream_after_its_batch(tmp_path: Path) -> None:
    def stop(result: BatchResult) -> None:
        if result.index == 1:
            raise RuntimeError("enough")

    whole, out, state = tmp_path / "whole.csv", tmp_path / "out.csv", StateFile(tmp_path / "state")
    adapt_stream(make_adapter(), make_inputs(), out=whole, batch_size=4)
    with pytest.raises(RuntimeError, match="enough"):
        adapt_stream(make_adapter(), make_inputs(), out=out, batch_size=4, state=state, callbacks=[stop])
    seen: list[BatchResult] = []
    adapt_stream(
        make_adapter(),
        make_inputs(),
        out=out,
        batch_size=4,
        state=state,
        resume=True,
        callbacks=[seen.append],
    )
    assert seen[0].position.images == 12
    assert out.read_bytes() == whole.read_bytes()


def test_files_that_exist_are_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    partial = tmp_path / "out.csv.partial"
    out.write_text("precious")
    with pytest.raises(FileExistsError, match="overwrite"):
        adapt_stream(make_adapter(), make_inputs(), out=out)
    assert out.read_text() == "precious"
    adapt_stream(make_adapter(), make_inputs(), out=out, overwrite=True)
    assert len(read_rows(out)) == 20
    out.unlink()
    partial.write_text("rows")
    with pytest.raises(FileExistsError, match="--resume"):
        adapt_stream(make_adapter(), make_inputs(), out=out)
    adapt_stream(make_adapter(), make_inputs(), out=out, overwrite=True)
    assert not partial.exists()


def test_output_paths_are_checked_before_the_first_batch(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.csv").mkdir()

    def fail(result: BatchResult) -> None:
        raise AssertionError("a batch was processed")

    out = tmp_path / "out.csv"
    for path, state, word in (
        (tmp_path / "folder.csv", None, "folder"),
        (tmp_path / "file" / "out.csv", None, "folder of"),
        (tmp_path / "out.json", None, r"\.csv or \.parquet"),
        (out, tmp_path / "folder.csv", "folder"),
        (out, tmp_path / "file" / "state", "folder of"),
        (out, out, "both"),
        (out, tmp_path / "out.csv.partial", "both"),
    ):
        with pytest.raises((ValueError, OSError), match=word):
            adapt_stream(
                make_adapter(),
                make_inputs(),
                out=path,
                state=None if state is None else StateFile(state),
                callbacks=[fail],
            )
    with pytest.raises(ValueError, match="state was saved to"):
        adapt_stream(make_adapter(), make_inputs(), out=out, resume=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.csv"]


def test_a_folder_without_permission_is_noticed_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(PermissionError, match=r"folder of .*out\.csv"):
        adapt_stream(make_adapter(), make_inputs(), out=tmp_path / "out.csv")
    assert not list(tmp_path.iterdir())


def test_images_that_do_not_fit_the_model_are_explained(tmp_path: Path) -> None:
    inputs = replace(make_inputs(), read=lambda _: torch.rand(3, 2, 2))
    with pytest.raises(ValueError, match=r"size \(3, 2, 2\)"):
        adapt_stream(make_adapter(), inputs, out=tmp_path / "out.csv")
    assert not list(tmp_path.iterdir())


def test_states_belong_to_their_adapter_and_format(tmp_path: Path) -> None:
    state = StateFile(tmp_path / "state", {"method": "tent"})
    state.save(make_adapter())
    state.load(make_adapter())
    with pytest.raises(ValueError, match=r"method tent.*bn"):
        StateFile(state.path, {"method": "bn"}).load(make_adapter())
    old = {"ttvd.kind": KIND, "ttvd.version": "1"}  # as ttvd 0.1.0 wrote it
    save_file(make_adapter().state_dict(), state.path, old)
    with pytest.raises(ValueError, match=r"0\.1\.0.*without a state"):
        state.load(make_adapter())
    write_tensors(state.path, make_adapter().state_dict(), kind=KIND, version=FORMAT + 1)
    with pytest.raises(ValueError, match="upgrade"):
        state.load(make_adapter())
