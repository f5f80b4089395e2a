"""`ttvd adapt`: what a deployer meets."""

import csv
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import ttvd
from ttvd.cli.main import app
from ttvd.data.digits import split_digits
from ttvd.deploy.inputs import iterate_batches, open_inputs
from ttvd.models.views import AggregatedViews

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eighty real digits as an array and as pictures."""
    place = tmp_path_factory.mktemp("digits")
    images = (split_digits()[2][:80, 0] * 255).byte().numpy()
    np.save(place / "digits.npy", images)
    (place / "pictures" / "deep").mkdir(parents=True)
    for number, image in enumerate(images):
        folder = place / "pictures" / ("deep" if number % 2 else ".")
        Image.fromarray(image).save(folder / f"{number:03}.png")
    return place


def run_adapt(source: Path, out: Path, *options: str, method: str = "ttvd") -> list[dict[str, str]]:
    arguments = [
        "adapt",
        str(source),
        "--model",
        "digits-sla",
        "--out",
        str(out),
        "--method",
        method,
        *options,
    ]
    result = RUNNER.invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    with out.open(newline="") as file:
        return list(csv.DictReader(file))


def test_predictions_are_those_of_the_library_in_input_order(digits: Path, tmp_path: Path) -> None:
    rows = run_adapt(digits / "digits.npy", tmp_path / "out.csv", "--batch-size", "32", "--set", "lr=0.01")
    source = ttvd.load("digits-sla")
    assert source.sites is not None
    adapter = ttvd.TTVD(source.model, source.sites, lr=0.01)
    images = torch.from_numpy(np.load(digits / "digits.npy"))[:, None].float() / 255
    probs = torch.cat([adapter(batch).softmax(1) for batch in images.split(32)])
    assert [int(row["prediction"]) for row in rows] == probs.argmax(1).tolist()
    assert [float(row["confidence"]) for row in rows] == pytest.approx(probs.amax(1).tolist(), abs=1e-5)
    assert [row["name"] for row in rows] == [str(i) for i in range(80)]
    assert not list(tmp_path.glob("*.partial"))


def test_folder_and_list_of_files(digits: Path, tmp_path: Path) -> None:
    rows = run_adapt(digits / "pictures", tmp_path / "a.csv", "--gray", method="source")
    assert len(rows) == 80
    assert {int(row["prediction"]) for row in rows} == set(range(10))
    assert rows[0]["name"] == "000.png"
    assert rows[-1]["name"] == str(Path("deep") / "079.png")
    names = tmp_path / "list.txt"
    names.write_text("\n".join(str(digits / "pictures" / row["name"]) for row in rows[:5]))
    again = run_adapt(names, tmp_path / "b.csv", "--gray", method="source")
    assert [row["prediction"] for row in again] == [row["prediction"] for row in rows[:5]]


def test_views_are_aggregated_around_methods_that_know_none(digits: Path, tmp_path: Path) -> None:
    rows = run_adapt(digits / "digits.npy", tmp_path / "out.csv", "--views", "4", method="source")
    source = ttvd.load("digits-sla")
    images = torch.from_numpy(np.load(digits / "digits.npy"))[:, None].float() / 255
    expected = AggregatedViews(source.model)(images).argmax(1).tolist()
    assert [int(row["prediction"]) for row in rows] == expected
    with pytest.raises(ValueError, match="takes no views"):
        run_adapt(digits / "digits.npy", tmp_path / "b.csv", "--views", "4", method="ttvd")


def test_state_continues_the_stream(digits: Path, tmp_path: Path) -> None:
    images = np.load(digits / "digits.npy")
    whole = run_adapt(digits / "digits.npy", tmp_path / "whole.csv", "--batch-size", "20")
    for part in (0, 1):
        np.save(tmp_path / f"{part}.npy", images[40 * part : 40 * part + 40])
    state = tmp_path / "state.safetensors"
    first = run_adapt(
        tmp_path / "0.npy", tmp_path / "0.csv", "--batch-size", "20", "--save-state", str(state)
    )
    second = run_adapt(tmp_path / "1.npy", tmp_path / "1.csv", "--batch-size", "20", "--state", str(state))
    joined = [row["confidence"] for row in first + second]
    assert joined == [row["confidence"] for row in whole]


def test_parquet(digits: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    out = tmp_path / "out.parquet"
    arguments = [
        "adapt",
        str(digits / "digits.npy"),
        "--model",
        "digits-sla",
        "--out",
        str(out),
        "--method",
        "bn",
    ]
    assert RUNNER.invoke(app, arguments, catch_exceptions=False).exit_code == 0
    table = parquet.read_table(out)
    assert table.column_names == ["name", "prediction", "class", "confidence"]
    assert table.num_rows == 80


def test_unreadable_images_stop_or_are_left_out(digits: Path, tmp_path: Path) -> None:
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for number in range(4):
        (pictures / f"{number}.png").write_bytes((digits / "pictures" / "000.png").read_bytes())
    (pictures / "1.png").write_bytes((digits / "pictures" / "000.png").read_bytes()[:60])
    rows = run_adapt(pictures, tmp_path / "out.csv", "--gray", "--unreadable", "skip", method="bn")
    assert [row["name"] for row in rows] == ["0.png", "2.png", "3.png"]
    with pytest.raises(ValueError, match=r"1\.png"):
        run_adapt(pictures, tmp_path / "stop.csv", "--gray", method="bn")
    assert not (tmp_path / "stop.csv").exists()


def test_a_model_of_the_users_own(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import save_file

    code = "from torch import nn\ndef make():\n    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))\n"
    (tmp_path / "mymodels.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    import mymodels  # type: ignore[import-not-found]

    net = mymodels.make()
    save_file(net.state_dict(), tmp_path / "weights.safetensors")
    out = tmp_path / "out.csv"
    arguments = ["adapt", str(digits / "digits.npy"), "--model", "mymodels:make", "--method", "source"]
    arguments += ["--weights", str(tmp_path / "weights.safetensors"), "--out", str(out)]
    assert RUNNER.invoke(app, arguments, catch_exceptions=False).exit_code == 0
    images = torch.from_numpy(np.load(digits / "digits.npy"))[:, None].float() / 255
    with out.open(newline="") as file:
        found = [int(row["prediction"]) for row in csv.DictReader(file)]
    assert found == net(images).argmax(1).tolist()


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
    ],
)
def test_bad_input_is_refused_before_any_work(
    digits: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    out = ["--out", str(tmp_path / "out.csv")] if "--out" not in options else []
    with pytest.raises((ValueError, FileNotFoundError), match=message):
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
        (np.array([{"a": 1}], dtype=object), "without running code"),
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
import ttvd.deploy.job as job
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
