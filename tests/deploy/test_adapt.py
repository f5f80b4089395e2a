"""`ttvd adapt`: what a deployer meets."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ttvd
from tests.helpers.deploy import RUNNER, run_adapt
from ttvd.cli.main import app
from ttvd.nn.views import AggregatedViews


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
    assert table.column_names == ["name", "prediction", "confidence"]
    assert table["name"].to_pylist() == [str(i) for i in range(80)]
    rows = run_adapt(digits / "digits.npy", tmp_path / "out.csv", method="bn")
    assert table["prediction"].to_pylist() == [int(row["prediction"]) for row in rows]
    assert table["confidence"].to_pylist() == pytest.approx([float(row["confidence"]) for row in rows])


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
    monkeypatch.chdir(tmp_path)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
    save_file(net.state_dict(), tmp_path / "weights.safetensors")
    out = tmp_path / "out.csv"
    arguments = ["adapt", str(digits / "digits.npy"), "--model", "mymodels:make", "--method", "source"]
    arguments += ["--weights", str(tmp_path / "weights.safetensors"), "--out", str(out)]
    assert RUNNER.invoke(app, arguments, catch_exceptions=False).exit_code == 0
    images = torch.from_numpy(np.load(digits / "digits.npy"))[:, None].float() / 255
    with out.open(newline="") as file:
        found = [int(row["prediction"]) for row in csv.DictReader(file)]
    assert found == net(images).argmax(1).tolist()


def test_a_label_augmented_model_of_the_users_own(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slamodel.py").write_text(
        "import ttvd\ndef make():\n    return ttvd.load('digits-sla').model\n"
    )
    monkeypatch.chdir(tmp_path)
    source = ttvd.load("digits-sla")
    assert source.sites is not None
    source.sites.save(tmp_path / "sites.safetensors")
    arguments = [
        "adapt",
        str(digits / "digits.npy"),
        "--model",
        "slamodel:make",
        "--sites",
        "sites.safetensors",
    ]
    arguments += ["--method", "tent", "--out", "out.csv"]
    assert RUNNER.invoke(app, arguments, catch_exceptions=False).exit_code == 0
    with (tmp_path / "out.csv").open(newline="") as file:
        assert {int(row["prediction"]) for row in csv.DictReader(file)} == set(range(10))


def test_names_of_classes(digits: Path, tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("\n".join(f"digit {i}" for i in range(10)))
    rows = run_adapt(digits / "digits.npy", tmp_path / "a.csv", "--classes", str(tmp_path / "names.txt"))
    assert all(row["class"] == f"digit {row['prediction']}" for row in rows)
    (tmp_path / "names.txt").write_text("one\ntwo")
    with pytest.raises(ValueError, match="2 names of classes and 10 outputs"):
        run_adapt(digits / "digits.npy", tmp_path / "b.csv", "--classes", str(tmp_path / "names.txt"))


def test_sites_beside_a_checkpoint_are_found(digits: Path, tmp_path: Path) -> None:
    for file in (Path(ttvd.__file__).parent / "models" / "checkpoints").glob("digits-sla.*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    arguments = ["adapt", str(digits / "digits.npy"), "--model", str(tmp_path / "digits-sla.safetensors")]
    result = RUNNER.invoke(app, [*arguments, "--out", str(tmp_path / "out.csv")], catch_exceptions=False)
    assert result.exit_code == 0


def test_an_interrupted_stream_goes_on_where_it_was(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ttvd.deploy import job

    whole = run_adapt(digits / "digits.npy", tmp_path / "whole.csv", "--batch-size", "16")
    once = job.adapt_batch
    calls: list[int] = []

    def interrupted(*arguments: Any) -> None:
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(1)
        once(*arguments)

    options = ["--batch-size", "16", "--save-state", str(tmp_path / "state.safetensors")]
    command = [
        "adapt",
        str(digits / "digits.npy"),
        "--model",
        "digits-sla",
        "--out",
        str(tmp_path / "out.csv"),
    ]
    monkeypatch.setattr(job, "adapt_batch", interrupted)
    assert RUNNER.invoke(app, [*command, *options]).exit_code == 130
    monkeypatch.setattr(job, "adapt_batch", once)
    with pytest.raises(ValueError, match="--resume"):
        RUNNER.invoke(app, [*command, *options], catch_exceptions=False)
    resumed = run_adapt(digits / "digits.npy", tmp_path / "out.csv", *options, "--resume")
    assert resumed == whole
