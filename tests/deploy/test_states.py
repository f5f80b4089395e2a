"""Files of states: a damaged, cut or foreign one is refused in one sentence that names it and says what to do."""

import random
from pathlib import Path

import pytest
import torch

from tests.helpers.damage import damage
from tests.helpers.deploy import make_adapter
from ttvd.deploy import StateFile
from ttvd.deploy.states import FORMAT, KIND, Position
from ttvd.zoo.tensorfile import write_tensors

STREAM = {"input": "20 images"}


@pytest.fixture
def state(tmp_path: Path) -> StateFile:
    file = StateFile(tmp_path / "my.state", {"method": "tent", "model": "0123"})
    file.save(make_adapter(), Position(8, 7, 99, 1234), STREAM)
    return file


def test_a_position_comes_back(state: StateFile) -> None:
    assert state.resume(make_adapter(), STREAM) == Position(8, 7, 99, 1234)


def test_damaged_files_are_refused(state: StateFile) -> None:
    content, rng, adapter = state.path.read_bytes(), random.Random(0), make_adapter()
    before = {name: tensor.clone() for name, tensor in adapter.state_dict().items()}
    whole = 0
    for number in range(600):
        damaged = content[:number] if number < 100 else damage(content, rng)
        state.path.write_bytes(damaged)
        try:
            state.resume(adapter, STREAM)
            whole += 1  # some bytes of a header may be spaces that mean nothing
        except ValueError as error:
            text = str(error)
            assert "my.state" in text, damaged
            assert "\n" not in text
    assert whole == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in adapter.state_dict().items())


def test_foreign_files_are_refused(state: StateFile, tmp_path: Path) -> None:
    for content in (b"", b"name,prediction\n", b"\x80\x04\x95" + bytes(50), bytes(100), b"\xff" * 100):
        state.path.write_bytes(content)
        with pytest.raises(ValueError, match=r"my\.state.*begin again"):
            state.load(make_adapter())
    tensors = make_adapter().state_dict()
    write_tensors(state.path, tensors, kind="ttvd.sites", version=FORMAT)
    with pytest.raises(ValueError, match=r"my\.state is not a ttvd.state"):
        state.load(make_adapter())
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(OSError, match=str(path)):
            StateFile(path).load(make_adapter())


def test_tensors_of_another_adapter_are_refused(state: StateFile) -> None:
    def write(**changes: torch.Tensor) -> None:
        tensors = make_adapter().state_dict() | changes
        write_tensors(state.path, tensors, kind=KIND, version=FORMAT, metadata=dict(state.identity))

    name, tensor = next(iter(make_adapter().state_dict().items()))
    for changes, word in (
        ({name: tensor.double()}, "float64"),
        ({name: tensor[:-1]}, "shape"),
        ({"more": tensor}, "more"),
        ({name: tensor * torch.nan}, "NaN"),
    ):
        write(**changes)
        with pytest.raises(ValueError, match=rf"my\.state.*{word}"):
            state.load(make_adapter())
    write()
    state.load(make_adapter())
    with pytest.raises(ValueError, match=r"my\.state does not say how far"):
        state.resume(make_adapter(), {})
