"""`ttvd adapt`: from images to predictions on the command line."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import ttvd
from tests.helpers.cli import check_cli, enter_folder, refuse_cli, write_method
from tests.helpers.deploy import read_rows, run_adapt
from ttvd.nn.views import AggregatedViews
from ttvd.zoo.catalog import checkpoint_folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    enter_folder(tmp_path, monkeypatch)
    return tmp_path


def load_digits(digits: Path) -> torch.Tensor:
    return torch.from_numpy(np.load(digits / "digits.npy"))[:, None].float() / 255


def test_predictions_are_those_of_the_library_in_input_order(digits: Path, tmp_path: Path) -> None:
    options = ("--batch-size", 32, "--param", "lr=0.01", "--param", "statistics=track:64:512")
    rows = run_adapt(digits / "digits.npy", tmp_path / "out.csv", *options, method="ttvd")
    source = ttvd.load("digits-sla")
    assert source.sites is not None
    statistics = ttvd.Statistics.parse("track:64:512")
    adapter = ttvd.TTVD(source.model, source.sites, lr=0.01, statistics=statistics)
    probs = torch.cat([adapter(batch).softmax(1) for batch in load_digits(digits).split(32)])
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


def test_views_are_aggregated_for_methods_that_know_none(digits: Path, tmp_path: Path) -> None:
    rows = run_adapt(digits / "digits.npy", tmp_path / "out.csv", "--views", 4, method="source")
    expected = AggregatedViews(ttvd.load("digits-sla").model)(load_digits(digits)).argmax(1).tolist()
    assert [int(row["prediction"]) for row in rows] == expected
    with pytest.raises(ValueError, match="takes no views"):
        run_adapt(digits / "digits.npy", tmp_path / "b.csv", "--views", 4, method="ttvd")


def test_a_state_continues_in_another_stream(digits: Path, tmp_path: Path) -> None:
    images, options = np.load(digits / "digits.npy"), ("--batch-size", 20)
    whole = run_adapt(digits / "digits.npy", tmp_path / "whole.csv", *options, method="ttvd")
    np.save(tmp_path / "0.npy", images[:40])
    np.save(tmp_path / "1.npy", images[40:])
    state: tuple[object, ...] = ("--save-state", tmp_path / "state")
    first = run_adapt(tmp_path / "0.npy", tmp_path / "0.csv", *options, *state, method="ttvd")
    # The state may be replaced by the run that begins with it.
    state = ("--state", tmp_path / "state", *state)
    second = run_adapt(tmp_path / "1.npy", tmp_path / "1.csv", *options, *state, method="ttvd")
    assert [row["confidence"] for row in first + second] == [row["confidence"] for row in whole]


def test_a_state_of_another_method_or_parameter_is_refused(digits: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    run_adapt(digits / "digits.npy", tmp_path / "a.csv", "--save-state", state, method="tent")
    command = (
        "adapt",
        digits / "digits.npy",
        "--model",
        "digits-sla",
        "--out",
        tmp_path / "b.csv",
        "--state",
        state,
    )
    assert "method tent" in refuse_cli(*command, "--method", "shot")
    assert "parameters" in refuse_cli(*command, "--method", "tent", "--param", "lr=1")
    other = ("--model", "digits-plain", "--method", "tent")
    assert "model" in refuse_cli(*command, *other)


def test_parquet(digits: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    out = tmp_path / "out.parquet"
    check_cli("adapt", digits / "digits.npy", "--model", "digits-sla", "--out", out, "--method", "bn")
    table = parquet.read_table(out)
    assert table.column_names == ["name", "prediction", "confidence"]
    assert table["name"].to_pylist() == [str(i) for i in range(80)]
    rows = run_adapt(digits / "digits.npy", tmp_path / "out.csv")
    assert table["prediction"].to_pylist() == [int(row["prediction"]) for row in rows]
    assert table["confidence"].to_pylist() == pytest.approx([float(row["confidence"]) for row in rows])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.csv", "out.parquet"]


def test_names_of_classes(digits: Path, tmp_path: Path) -> None:
    names = tmp_path / "names.txt"
    names.write_text("\n".join(f"digit {i}" for i in range(10)))
    rows = run_adapt(digits / "digits.npy", tmp_path / "a.csv", "--classes", names)
    assert all(row["class"] == f"digit {row['prediction']}" for row in rows)
    names.write_text("one\ntwo")
    with pytest.raises(ValueError, match=r"2 names of classes.*10 outputs"):
        run_adapt(digits / "digits.npy", tmp_path / "b.csv", "--classes", names)


def test_a_model_of_the_user(digits: Path, here: Path) -> None:
    from safetensors.torch import save_file

    code = "from torch import nn\ndef make():\n    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))\n"
    (here / "mymodels.py").write_text(code)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
    save_file(net.state_dict(), here / "weights.safetensors")
    options = ("--weights", here / "weights.safetensors")
    rows = run_adapt(
        digits / "digits.npy", here / "out.csv", *options, model="mymodels:make", method="source"
    )
    assert [int(row["prediction"]) for row in rows] == net(load_digits(digits)).argmax(1).tolist()


def test_a_label_augmented_model_of_the_user(digits: Path, here: Path) -> None:
    (here / "slamodel.py").write_text("import ttvd\ndef make():\n    return ttvd.load('digits-sla').model\n")
    source = ttvd.load("digits-sla")
    assert source.sites is not None
    source.sites.save(here / "sites.safetensors")
    options = ("--sites", "sites.safetensors")
    rows = run_adapt(digits / "digits.npy", here / "out.csv", *options, model="slamodel:make", method="tent")
    assert {int(row["prediction"]) for row in rows} == set(range(10))


def test_a_method_of_the_user(digits: Path, here: Path) -> None:
    method = write_method(here)
    rows = run_adapt(digits / "digits.npy", here / "a.csv", method=method)
    assert rows == run_adapt(digits / "digits.npy", here / "b.csv", method="source")
    sharp = run_adapt(digits / "digits.npy", here / "c.csv", "--param", "factor=2.0", method=method)
    assert sum(float(row["confidence"]) for row in sharp) > sum(float(row["confidence"]) for row in rows)
    command = ("adapt", digits / "digits.npy", "--model", "digits-sla", "--out", here / "d.csv", "--method")
    assert "factor" in refuse_cli(*command, method, "--param", "faktor=1")
    assert "Nothing" in refuse_cli(*command, method.replace("Scaled", "Nothing"))
    assert "nowhere" in refuse_cli(*command, "nowhere:Scaled")


def test_sites_beside_a_checkpoint_are_found(digits: Path, tmp_path: Path) -> None:
    for file in checkpoint_folder(None).glob("digits-sla.*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    model = str(tmp_path / "digits-sla.safetensors")
    assert run_adapt(digits / "digits.npy", tmp_path / "out.csv", model=model, method="ttvd")


def test_images_that_cannot_be_used_stop_the_stream_or_are_left_out(digits: Path, tmp_path: Path) -> None:
    """Names that look like markup are printed as they are."""
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for number, size in enumerate((28, 28, 36, 28)):
        Image.new("L", (size, size)).save(pictures / f"{number}.png")
    (pictures / "9.png").symlink_to(tmp_path / "nowhere.png")
    (pictures / "[").mkdir()
    (pictures / "[/b].png").write_bytes((digits / "pictures" / "000.png").read_bytes()[:60])
    command = (
        "adapt",
        pictures,
        "--model",
        "digits-sla",
        "--method",
        "bn",
        "--gray",
        "--batch-size",
        1,
        "--out",
    )
    output = check_cli(*command, tmp_path / "[b]out.csv", "--unreadable", "skip")
    assert [row["name"] for row in read_rows(tmp_path / "[b]out.csv")] == ["0.png", "1.png", "3.png"]
    assert "[/b].png" in output
    assert "[b]out.csv" in "".join(output.split())
    assert "2.png" in refuse_cli(*command, tmp_path / "stop.csv", "--batch-size", 64)
    assert not (tmp_path / "stop.csv").exists()
    images = np.zeros((3, 28, 28), np.float32)
    images[1, 0, 0] = np.nan
    np.save(tmp_path / "a.npy", images)
    rows = run_adapt(tmp_path / "a.npy", tmp_path / "nan.csv", "--unreadable", "skip")
    assert [row["name"] for row in rows] == ["0", "2"]


def test_no_readable_image_is_a_failure(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.full((2, 28, 28), np.nan, np.float32))
    command = ("adapt", tmp_path / "a.npy", "--model", "digits-sla", "--out", tmp_path / "o.csv")
    check_cli(*command, "--unreadable", "skip", code=1)


def test_pictures_have_the_size_of_the_card_and_other_files_are_counted(digits: Path, tmp_path: Path) -> None:
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    Image.open(digits / "pictures" / "000.png").resize((60, 56)).save(pictures / "a.png")
    for name in ("notes.pdf", "more.pdf", "README"):
        (pictures / name).touch()
    options = ("--method", "source", "--gray", "--out")
    command = ("adapt", pictures, "--model", "digits-sla", *options)
    assert "(1, 28, 28), a.png has (1, 56, 60)" in refuse_cli(*command, tmp_path / "a.csv")
    output = check_cli(*command, tmp_path / "b.csv", "--size", 28)
    assert "2 .pdf" in output
    check_cli(*command, tmp_path / "c.csv", "--resize", 28, "--crop", 28)
    assert (tmp_path / "b.csv").read_bytes() == (tmp_path / "c.csv").read_bytes()
    assert not (tmp_path / "a.csv").exists()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--model", "digits-slaa"], "digits-sla"),
        (["--model", "no.such:thing"], "thing"),
        (["--method", "tnet"], "tent"),
        (["--param", "lr"], "NAME=VALUE"),
        (["--param", "rate=1"], "'rate'"),
        (["--param", "gama=1"], "gamma"),
        (["--param", "lr=abc"], "number"),
        (["--param", "lr=true"], "number"),
        (["--param", "lr=1", "--param", "lr=2"], "twice"),
        (["--param", "statistics=sometimes"], "batch, source"),
        (["--out", "x.json"], ".csv or .parquet"),
        (["--unreadable", "maybe"], "skip"),
        (["--weights", "w.safetensors"], "weights"),
        (["--state", "missing.safetensors"], "missing.safetensors"),
        (["--device", "nonsense"], "no device"),
        (["--method", "eata"], "fisher"),
        (["--resume"], "--save-state"),
        (["--size", "28", "--crop", "28"], "--size"),
        (["--save-state", "/proc/nowhere/state"], "nowhere"),
    ],
)
def test_bad_input_is_refused_before_any_work(
    digits: Path, tmp_path: Path, options: list[str], word: str
) -> None:
    command = ("adapt", digits / "digits.npy", "--model", "digits-sla", "--out", tmp_path / "out.csv")
    assert word in refuse_cli(*command, *options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--out", "out.csv", "--save-state", "out.csv"], ["both"]),
        (["--out", "out.csv", "--save-state", "out.csv.partial"], ["both"]),
        (["--out", "out.csv", "--save-state", "link.csv"], ["both"]),
        (["--out", "out.csv", "--save-state", "images.npy"], ["--save-state", "SOURCE"]),
        (["--out", "link.npy"], [".csv or .parquet"]),
        (["--out", "names.csv", "--classes", "names.csv"], ["--out", "--classes"]),
        (["--out", "out.csv", "--state", "out.csv"], ["--out", "--state"]),
        (["--out", "out.csv", "--model", "m.st", "--save-state", "m.st"], ["--save-state", "--model"]),
        (["--out", "folder.csv"], ["folder"]),
        (["--out", "journal.csv"], ["journal.csv.partial", "folder"]),
        (["--out", "fifo.csv"], ["ordinary file"]),
        (["--out", "images.npy/out.csv"], ["folder of"]),
        (["--out", f"{'x' * 250}.csv"], ["too long"]),
    ],
)
def test_output_paths_are_checked_before_any_work(
    digits: Path, here: Path, options: list[str], words: list[str]
) -> None:
    """Even with --overwrite no input is replaced."""
    np.save("images.npy", np.load(digits / "digits.npy"))
    for name in ("names.csv", "out.csv", "m.st"):
        Path(name).write_text("precious")
    Path("link.csv").symlink_to("out.csv")
    Path("folder.csv").mkdir()
    Path("journal.csv.partial").mkdir()
    os.mkfifo("fifo.csv")
    before = {path.name: path.stat().st_mtime_ns for path in here.iterdir()}
    given = options if "--model" in options else ["--model", "digits-sla", *options]
    message = refuse_cli("adapt", "images.npy", *given, "--overwrite", "--method", "bn")
    assert all(word in message for word in words), message
    assert {path.name: path.stat().st_mtime_ns for path in here.iterdir()} == before


@pytest.mark.parametrize("name", ["out.csv", "state"])
def test_output_that_exists_is_replaced_only_on_request(digits: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("precious")
    options = ("--out", tmp_path / "out.csv", "--save-state", tmp_path / "state", "--method", "bn")
    command = ("adapt", digits / "digits.npy", "--model", "digits-sla", *options)
    assert "--overwrite" in refuse_cli(*command)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "precious")]
    check_cli(*command, "--overwrite")
    assert len(read_rows(tmp_path / "out.csv")) == 80


COLLAPSING = """
import torch
import ttvd


class Collapsing(ttvd.methods.Tent):
    guard_by_default, guard_period = True, 1

    def adapt(self, x, *inputs):
        out = super().adapt(x, *inputs)
        return torch.where(torch.arange(out.shape[1]) == 0, 9.0, 0.0).expand_as(out)
"""
"""A method that answers one class, whatever state it is in."""


def test_the_guard_is_heard(digits: Path, here: Path) -> None:
    (here / "collapsing.py").write_text(COLLAPSING)
    np.save(here / "long.npy", np.concatenate([np.load(digits / "digits.npy")] * 4))
    command = ("adapt", here / "long.npy", "--model", "digits-sla", "--batch-size", 8)
    method = ("--method", "collapsing:Collapsing")
    printed = check_cli(*command, *method, "--out", here / "a.csv", code=3)
    assert "guard: source, 1 rollbacks, 1 returns to the source" in printed
    assert "tell less" in printed
    assert len(read_rows(here / "a.csv")) == 320, "the predictions are there all the same"
    assert "guard:" not in check_cli(*command, *method, "--no-guard", "--out", here / "b.csv")
    usual = ("--method", "tent", "--guard", "--out", here / "c.csv")
    assert "guard: adapting, never acted" in check_cli(*command, *usual)


def test_a_state_with_a_guard_needs_one(digits: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    run_adapt(digits / "digits.npy", tmp_path / "a.csv", "--save-state", state, method="ttvd")
    command = ("adapt", digits / "digits.npy", "--model", "digits-sla", "--out", tmp_path / "b.csv")
    assert "--no-guard" in refuse_cli(*command, "--state", state, "--no-guard")
