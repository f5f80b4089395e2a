"""What `ttvd adapt` does with inputs that are not as they should be."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.helpers.deploy import RUNNER, run_adapt
from ttvd.cli.main import app
from ttvd.deploy.inputs import iterate_batches, open_inputs


def test_images_that_do_not_fit_the_model_are_explained(digits: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot take images of size \(3, 28, 28\)"):
        run_adapt(digits / "pictures", tmp_path / "out.csv")
    assert not list(tmp_path.glob("out.csv*"))


def test_odd_sizes_and_bad_values_are_left_out(tmp_path: Path) -> None:
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for number, size in enumerate((28, 28, 36, 28)):
        Image.new("L", (size, size)).save(pictures / f"{number}.png")
    (pictures / "9.png").symlink_to(tmp_path / "nowhere.png")
    rows = run_adapt(
        pictures, tmp_path / "out.csv", "--gray", "--unreadable", "skip", "--batch-size", "1", method="bn"
    )
    assert [row["name"] for row in rows] == ["0.png", "1.png", "3.png"]
    images = np.zeros((3, 28, 28), np.float32)
    images[1, 0, 0] = np.nan
    np.save(tmp_path / "a.npy", images)
    rows = run_adapt(tmp_path / "a.npy", tmp_path / "nan.csv", "--unreadable", "skip", method="bn")
    assert [row["name"] for row in rows] == ["0", "2"]


def test_nothing_usable_is_no_success(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.full((2, 28, 28), np.nan, np.float32))
    command = ["adapt", str(tmp_path / "a.npy"), "--model", "digits-sla", "--out", str(tmp_path / "o.csv")]
    assert RUNNER.invoke(app, [*command, "--unreadable", "skip"]).exit_code == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "digits-slaa"], "did you mean 'digits-sla'"),
        (["--model", "no.such:thing"], "cannot find 'thing'"),
        (["--model", "digits-sla", "--set", "lr"], "NAME=VALUE"),
        (["--model", "digits-sla", "--set", "rate=1"], "no parameter 'rate'"),
        (["--model", "digits-sla", "--out", "x.json"], r"\.csv or \.parquet"),
        (["--model", "digits-sla", "--unreadable", "maybe"], "stop or skip"),
        (["--model", "digits-sla", "--weights", "w.safetensors"], "weights go with"),
        (["--model", "digits-sla", "--state", "missing.safetensors"], "no ttvd.state file"),
        (["--model", "digits-sla", "--device", "nonsense"], "no device is called"),
        (["--model", "digits-sla", "--set", "lr=abc"], "lr is a number"),
        (["--model", "digits-sla", "--set", "statistics=sometimes"], "statistics are batch, source"),
        (["--model", "digits-sla", "--method", "eata"], "needs fisher of the source data"),
        (["--model", "digits-sla", "--resume"], "--resume goes with --save-state"),
        (["--model", "digits-sla", "--save-state", "/proc/nowhere/state"], "nowhere"),
    ],
)
def test_bad_input_is_refused_before_any_work(
    digits: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    out = ["--out", str(tmp_path / "out.csv")] if "--out" not in options else []
    with pytest.raises((ValueError, OSError), match=message):
        RUNNER.invoke(app, ["adapt", str(digits / "digits.npy"), *out, *options], catch_exceptions=False)
    assert not list(tmp_path.iterdir())


def test_a_state_of_another_method_is_refused(digits: Path, tmp_path: Path) -> None:
    state = str(tmp_path / "state.safetensors")
    run_adapt(digits / "digits.npy", tmp_path / "a.csv", "--save-state", state)
    with pytest.raises(ValueError, match="saved with method ttvd"):
        run_adapt(digits / "digits.npy", tmp_path / "b.csv", "--state", state, method="vd")
    with pytest.raises(ValueError, match="saved with parameters"):
        run_adapt(digits / "digits.npy", tmp_path / "b.csv", "--state", state, "--set", "lr=1")


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([{"a": 1}], dtype=object), "pickled objects"),
        (np.zeros((4, 4), np.uint8), "must hold images"),
        (np.zeros((4, 8, 8), np.int32), "bytes or floats"),
    ],
)
def test_arrays_that_are_no_images(tmp_path: Path, array: np.ndarray, message: str) -> None:
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(ValueError, match=message):
        open_inputs(tmp_path / "a.npy")


def test_batches_keep_the_order_and_the_last_one_is_short(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(23, dtype=np.uint8)[:, None, None].repeat(2, 1).repeat(2, 2))
    batches = list(iterate_batches(open_inputs(tmp_path / "a.npy"), 5))
    assert [len(batch.positions) for batch in batches] == [5, 5, 5, 5, 3]
    values = torch.cat([batch.images for batch in batches if batch.images is not None])[:, 0, 0, 0] * 255
    assert values.round().tolist() == list(range(23))


def test_a_killed_stream_leaves_its_rows(digits: Path, tmp_path: Path) -> None:
    code = f"""
import os
import ttvd.deploy.stream as job
from ttvd.cli.main import app
once = job.adapt_batch
def killed(*args):
    once(*args)
    os._exit(9)
job.adapt_batch = killed
app(["adapt", {str(digits / "digits.npy")!r}, "--model", "digits-sla", "--method", "bn", "--batch-size", "16",
     "--out", {str(tmp_path / "out.csv")!r}])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 9
    assert not (tmp_path / "out.csv").exists()
    assert len((tmp_path / "out.csv.partial").read_text().splitlines()) == 17
