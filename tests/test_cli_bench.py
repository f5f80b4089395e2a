"""``ttvd bench`` as people meet it: what it says, its exit codes, and kills of all kinds."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable
from pathlib import Path

import pytest
import typer.testing

from tests.helpers.cli import check_cli, enter_folder, refuse_cli, run_cli, write_method
from tests.helpers.engines import SMALL, PlainEngine, do_here, make_spec, strip
from ttvd.bench.engines import Event, Shared, Started
from ttvd.bench.grid import make_plans
from ttvd.bench.job import execute
from ttvd.bench.plan import plan
from ttvd.bench.recipe import cut_lines, list_entries, read_recipe
from ttvd.bench.resources import Resources
from ttvd.bench.spec import Run, Spec, WorkerConfig
from ttvd.bench.store import Store
from ttvd.cli.bench import read_recipes


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def run_bench(*arguments: object) -> typer.testing.Result:
    return run_cli("bench", *arguments, columns=120)


def do_half(spec: Spec, resources: Resources, progress: Callable[[int, int], None]) -> Run:
    """Do the real run, but for Tent."""
    if spec.method == "tent":
        raise RuntimeError("no [tent] today")
    return execute(spec, resources, progress)


class Impatient(PlainEngine):
    """Somebody presses Ctrl-C in the second run."""

    def run(
        self, specs: Iterable[Spec | None], config: WorkerConfig, shared: Shared | None = None
    ) -> Generator[Event, None, None]:
        for number, event in enumerate(super().run(specs, config, shared)):
            if number and isinstance(event, Started):
                os.kill(os.getpid(), signal.SIGINT)
            yield event


def use(monkeypatch: pytest.MonkeyPatch, engine: PlainEngine) -> None:
    """Have the command use this engine."""
    monkeypatch.setattr("ttvd.cli.bench._make_engine", lambda *arguments: engine)


def test_runs_are_done_shown_and_stored(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, PlainEngine(execute))
    path = tmp_path / "new" / "runs.db"
    result = run_bench(recipe, "--store", path)
    assert result.exit_code == 0, result.output
    assert "2 runs to do\n" in result.output
    assert re.search(
        r"\[1/2\] bn, gaussian noise 5, digits-plain, seed 0: error \d+\.\d %, \d+\.\d s", result.output
    )
    assert "Two methods" in result.output
    assert re.search(r"tent +\d+\.\d +\d+\.\d", result.output)
    assert result.output.endswith(f"2 runs done. The store: {path}\nNext: ttvd report {path}\n")
    with Store(path, readonly=True) as store:
        assert len(store.done()) == 2
    again = run_bench(recipe, "--store", path, "--seeds", "0,1")
    assert "2 runs to do, 2 are in the store already" in again.output


def test_failed_runs_are_listed(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, PlainEngine(do_half))
    result = run_bench(recipe, "--store", tmp_path / "runs.db")
    assert result.exit_code == 1
    assert "1 run done, 1 failed." in result.output
    assert (
        "failed: tent, gaussian noise 5, digits-plain, seed 0: RuntimeError: no [tent] today" in result.output
    )
    [key] = re.findall(r"ttvd runs \S+ ([0-9a-f]{8})$", result.output, re.MULTILINE)
    with Store(tmp_path / "runs.db", readonly=True) as store:
        assert store.failures()[0].key.startswith(key)


def test_figures_are_made_once_and_a_bad_one_is_refused_before_any_work(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, PlainEngine(execute))
    recipe.write_text(SMALL + '\n[[figures]]\nkind = "samples"\ncheckpoint = "digits-sla"\nlimit = 64\n')
    store = tmp_path / "runs.db"
    assert run_bench(recipe, "--store", store).exit_code == 0
    with Store(store, readonly=True) as opened:
        (figure,) = opened.figures("small")
    assert figure.description["kind"] == "samples"
    monkeypatch.setattr("ttvd.bench.figures.make_figure", lambda *_: 1 / 0)
    assert run_bench(recipe, "--store", store).exit_code == 0  # it is there, and not made again
    recipe.write_text(recipe.read_text().replace("limit = 64", "limit = 65"))
    changed = run_bench(recipe, "--store", store)
    assert changed.exit_code == 1
    assert "failed: figure 01-samples of small: ZeroDivisionError" in changed.output
    recipe.write_text(recipe.read_text().replace("samples", "sample"))
    result = run_bench(recipe, "--store", tmp_path / "new.db")
    assert isinstance(result.exception, ValueError)
    assert not (tmp_path / "new.db").exists()


def test_ctrl_c(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Impatient(execute)
    use(monkeypatch, engine)
    result = run_bench(recipe, "--store", tmp_path / "runs.db")
    assert result.exit_code == 130
    assert "the same command continues" in result.output
    assert engine.closed


def test_parameters_of_the_command_line_replace_those_of_the_recipe(recipe: Path) -> None:
    (changed,) = read_recipes([recipe], param=["lr=0.5", "optimizer=sgd"])
    specs = [member.spec for member in plan(changed, Resources(WorkerConfig()))]
    tent = [spec.parameters for spec in specs if spec.method == "tent"]
    assert tent
    assert all((found["lr"], found["optimizer"]) == (0.5, "sgd") for found in tent)


def test_a_parameter_that_no_method_has_is_refused(recipe: Path, tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    assert "lr" in refuse_cli("bench", recipe, "--store", store, "--param", "lrr=0.5")
    assert "NAME=VALUE" in refuse_cli("bench", recipe, "--store", store, "--param", "lr")
    assert not store.exists()


def test_a_dry_run_writes_nothing(recipe: Path, tmp_path: Path) -> None:
    result = run_bench(
        recipe, "--store", tmp_path / "runs.db", "--dry-run", "--seeds", "3,4,5", "--limit", 64
    )
    assert result.exit_code == 0, result.output
    assert re.search(r"tent +digits-plain +3 +0", result.output)
    assert "6 of 6 runs to do; nothing was written." in result.output
    assert list(tmp_path.iterdir()) == [recipe]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--engine", "slurm"], "slurm"),
        (["--data", "/nowhere"], "/nowhere"),
        (["--checkpoints", "/nowhere"], "/nowhere"),
        (["--seeds", "1,x"], "--seeds"),
        (["--seeds", "1,1"], "--seeds"),
        (["--device", "toaster"], "toaster"),
        (["--address", "auto"], "--engine ray"),
        (["--engine", "ray", "--gpus", "1.5"], "share of a GPU"),
        (["--gpus", "0"], "share of a GPU"),
        (["--only", "tnet"], "tent"),
        (["another.toml"], "another.toml"),
        (["small.toml"], "two recipes"),
    ],
)
def test_bad_options_are_refused_before_any_work(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], word: str
) -> None:
    monkeypatch.chdir(recipe.parent)
    assert word in refuse_cli("bench", recipe, "--store", "runs.db", *arguments)
    assert list(recipe.parent.iterdir()) == [recipe]


@pytest.mark.parametrize("change", [("digits-plain", "nowhere"), ("gaussian_noise", "gausian_noise")])
def test_a_recipe_that_cannot_be_run_is_refused_before_any_work(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, change: tuple[str, str]
) -> None:
    use(monkeypatch, PlainEngine(execute))
    recipe.write_text(SMALL.replace(*change))
    assert change[1] in refuse_cli("bench", recipe, "--store", recipe.parent / "runs.db")
    assert list(recipe.parent.iterdir()) == [recipe]


def test_a_store_below_a_file_is_refused(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, PlainEngine(execute))
    assert "folder cannot be created" in refuse_cli("bench", recipe, "--store", recipe / "runs.db")


def test_a_method_of_the_user(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module lies in the current folder, and the workers of the local engine find it too."""
    enter_folder(tmp_path, monkeypatch)
    method = write_method(tmp_path)
    recipe.write_text(SMALL.replace('["bn", "tent"]', f'["source", "{method}"]'))
    result = run_bench(recipe, "--store", "runs.db", "--jobs", 1, "--allow-code")
    assert result.exit_code == 0, result.output
    with Store(Path("runs.db"), readonly=True) as store:
        source, own = store.load(store.done()).values()
    assert source.totals == own.totals
    # A report on the store does not need the module, and does not import it.
    module = method.partition(":")[0]
    del sys.modules[module]
    Path(f"{module}.py").write_text("raise SystemExit('imported')")
    check_cli("report", "runs.db", "--out", "page")
    check_cli("runs", "runs.db", "--pack", "packed")
    check_cli("runs", "packed/small.csv")
    assert method in Path("page/index.html").read_text()
    assert module not in sys.modules


TRAP = "import pathlib\npathlib.Path('ran').touch()\n\n\ndef make():\n    raise SystemExit('ran')\n"
FIGURE = '\nfigures = [{kind = "samples", checkpoint = "digits-sla", methods = {bn = "MODULE:Class"}}]\n'


@pytest.mark.parametrize("options", [[], ["--dry-run"], ["--only", "bn"]])
@pytest.mark.parametrize(
    ("old", "new", "entry"),
    [
        ('"tent"', '"MODULE:Class"', "[[methods]] name 'MODULE:Class'"),
        ('"digits-plain"', '"MODULE:make"', "[checkpoints] plain 'MODULE:make'"),
        (
            '{name = ["bn", "tent"]}',
            '{name = "bn", checkpoint = "MODULE:make"}',
            "[[methods]] checkpoint 'MODULE:make'",
        ),
        ('{name = ["bn", "tent"]}]', f'{{name = "bn"}}]{FIGURE}', "[[figures]] methods 'MODULE:Class'"),
    ],
)
def test_code_in_a_recipe_is_not_imported_unless_it_is_allowed(
    old: str, new: str, entry: str, options: list[str], recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter_folder(recipe.parent, monkeypatch)
    Path("trap.py").write_text(TRAP)
    recipe.write_text(SMALL.replace(old, new).replace("MODULE", "trap"))
    message = refuse_cli("bench", recipe, "--store", "runs.db", *options)
    assert entry.replace("MODULE", "trap") in message
    assert "--allow-code" in message
    assert sorted(path.name for path in Path().iterdir()) == ["small.toml", "trap.py"]
    assert "trap" not in sys.modules


def test_python_refuses_code_too(recipe: Path, tmp_path: Path) -> None:
    recipe.write_text(SMALL.replace('"digits-plain"', '"trap:make"'))
    read = read_recipe(recipe)
    resources = Resources(WorkerConfig())
    for refused in (
        lambda: make_plans([read], WorkerConfig()),
        lambda: plan(read, resources),
        lambda: list_entries(read),
        lambda: cut_lines(read, ["bn"]),
        lambda: resources.source("trap:make"),
        lambda: resources.method("trap:Class"),
        lambda: execute(make_spec(method="trap:Class"), resources),
    ):
        with pytest.raises(ValueError, match="allow_code=True"):
            refused()


# Real processes.


class Command:
    """``ttvd bench`` in a session of its own, as in a terminal."""

    def __init__(self, recipe: Path, store: Path) -> None:
        code = "import sys; from ttvd.cli import main; main()"
        arguments = ["bench", recipe, "--store", store, "--jobs", 1, "--seeds", ",".join(map(str, range(12)))]
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def wait_for_a_run(self) -> list[int]:
        """All its processes, once a run is done."""
        assert self.process.stdout is not None
        seen = ""
        while not (line := self.process.stdout.readline()).startswith("["):
            assert line, seen
            seen += line
        return members_of(self.process.pid)

    def end(self) -> tuple[int, str]:
        text, _ = self.process.communicate(timeout=60)
        return self.process.returncode, text

    def leftovers(self) -> list[int]:
        """Processes that are there seconds after its end."""
        end = time.monotonic() + 5
        while members_of(self.process.pid) and time.monotonic() < end:
            time.sleep(0.05)
        return members_of(self.process.pid)


def members_of(session: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(entry.name))
    return found


def count_done(text: str) -> int:
    [number] = re.findall(r"^(\d+) runs? done", text, re.MULTILINE)
    return int(number)


@pytest.mark.parametrize("seconds", [0.5, 1.2])
def test_sigterm_in_the_first_moments(recipe: Path, tmp_path: Path, seconds: float) -> None:
    command = Command(recipe, tmp_path / "runs.db")
    time.sleep(seconds)  # it imports libraries, or makes its plan
    os.kill(command.process.pid, signal.SIGTERM)
    code, text = command.end()
    assert code == 130, text
    assert "interrupted" in text.lower()
    assert "Traceback" not in text
    assert command.leftovers() == []


@pytest.mark.slow
def test_it_continues_after_ctrl_c_and_kill_and_two_can_share_the_work(recipe: Path, tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    stopped, killed = (Command(recipe, path) for _ in range(2))
    assert len(stopped.wait_for_a_run()) >= 2  # driver and worker
    os.killpg(stopped.process.pid, signal.SIGINT)
    killed.wait_for_a_run()
    os.kill(killed.process.pid, signal.SIGKILL)
    code, text = stopped.end()
    assert code == 130
    assert "the same command continues" in text
    assert "Traceback" not in text
    assert stopped.leftovers() == []
    killed.end()
    assert killed.leftovers() == []  # its worker has noticed

    with Store(path, readonly=True) as store:
        before = store.done()
        assert 2 <= len(before) < 24
    both = [Command(recipe, path) for _ in range(2)]
    results = [command.end() for command in both]
    assert [code for code, _ in results] == [0, 0], results
    assert sum(count_done(text) for _, text in results) == 24 - len(before)
    with Store(path, readonly=True) as store:
        runs = store.load(store.done())
        specs = [member.spec for member in store.members("small")]
    alone = do_here(specs)
    assert {key: strip(run) for key, run in runs.items()} == {key: strip(run) for key, run in alone.items()}
