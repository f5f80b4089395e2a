"""Many tensors as one vector, where they lie side by side and where they do not."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ttvd.engine.flat import Copies, all_finite, find_runs, join_runs, keep_where, lay_together

KINDS = [torch.float32, torch.float64, torch.int64]


def draw_tensors(sizes: list[int], kinds: list[int]) -> list[Tensor]:
    numbers = torch.arange(100.0)
    return [
        numbers[7 * i : 7 * i + size].clone().to(KINDS[kind])
        for i, (size, kind) in enumerate(zip(sizes, kinds, strict=False))
    ]


def copy_all(tensors: list[Tensor], by_runs: bool = True) -> list[Tensor]:
    """Copies of tensors of several types."""
    copied: dict[int, Tensor] = {}
    for kind in KINDS:
        if group := [tensor for tensor in tensors if tensor.dtype == kind]:
            copied |= zip(map(id, group), Copies(group, by_runs).tensors(), strict=True)
    return [copied[id(tensor)] for tensor in tensors]


many = st.lists(st.integers(1, 8), min_size=1, max_size=8)


@given(
    sizes=many,
    kinds=st.lists(st.integers(0, 2), min_size=8, max_size=8),
    order=st.randoms(),
    by_runs=st.booleans(),
)
def test_laid_together_or_not_tensors_are_copied_and_put_back(
    sizes: list[int], kinds: list[int], order: object, by_runs: bool
) -> None:
    tensors = draw_tensors(sizes, kinds)
    before = [tensor.clone() for tensor in tensors]
    lay_together(tensors)
    order.shuffle(tensors_and_values := list(zip(tensors, before, strict=True)))  # type: ignore[attr-defined]
    tensors, before = ([pair[i] for pair in tensors_and_values] for i in (0, 1))
    assert all(torch.equal(one, other) for one, other in zip(tensors, before, strict=True))
    copies = copy_all(tensors, by_runs)
    for tensor in tensors:
        tensor.add_(1)
    keep_where(torch.tensor(True), tensors, copies)
    assert all(torch.equal(one, other + 1) for one, other in zip(tensors, before, strict=True))
    keep_where(torch.tensor(False), tensors, copies)
    assert all(torch.equal(one, other) for one, other in zip(tensors, before, strict=True))


@given(sizes=many)
def test_what_was_laid_together_is_one_run_in_that_order(sizes: list[int]) -> None:
    tensors = [torch.full((4 * size,), float(size)) for size in sizes]
    assert len(find_runs(tensors)) == len(sizes)
    lay_together(tensors)
    (run,) = find_runs(tensors)
    assert join_runs([run]).data_ptr() == run.data_ptr()
    assert torch.equal(run, torch.cat(tensors))
    run.zero_()
    assert not any(tensor.any() for tensor in tensors), "it is a view of them"


def test_only_neighbours_of_one_type_are_joined() -> None:
    whole, other = torch.arange(12.0), torch.arange(12.0)
    parts = [whole[:4], whole[4:8], other[8:], whole[8:].double(), whole[8:], whole[:8:2], whole[:0]]
    assert [run.tolist() for run in find_runs(parts)] == [
        *(list(range(8)), [8.0, 9.0, 10.0, 11.0], [8.0, 9.0, 10.0, 11.0], [8.0, 9.0, 10.0, 11.0]),
        *([0.0, 2.0, 4.0, 6.0], []),
    ]


def test_strides_and_types_part_what_seems_to_follow() -> None:
    whole = torch.arange(12.0)
    assert len(find_runs([whole[:4], whole[4:12:2]])) == 2
    assert len(find_runs([whole[0:8:2], whole[4:8]])) == 2, "four numbers, but they end at the seventh"
    assert len(find_runs([whole[:4], whole.view(torch.int32)[4:8]])) == 2
    assert not any(run.requires_grad for run in find_runs([nn.Parameter(whole), whole]))


def test_what_lies_together_is_one_run_in_any_order() -> None:
    tensors = [torch.full((8,), float(i)) for i in range(4)]
    lay_together(tensors)
    copies = Copies(tensors[::-1], by_runs=True).tensors()[::-1]
    assert len(find_runs(copies)) == 1
    assert [copy[0].item() for copy in copies] == [0.0, 1.0, 2.0, 3.0]


def test_other_devices_stay_apart_and_untouched() -> None:
    here, there = torch.ones(4), torch.ones(4, device="meta")
    assert not lay_together([here, there])
    keep_where(torch.tensor(False), [there, here], [torch.zeros(4, device="meta"), torch.zeros(4)])
    assert here.tolist() == [0.0] * 4
    assert there.device.type == "meta"


def test_nothing_moves_twice() -> None:
    tensors = [torch.rand(4), torch.rand(8)]
    assert lay_together(tensors)
    assert not lay_together(tensors)


@pytest.mark.parametrize("size", [2, 6, 3])
def test_only_whole_blocks_of_16_bytes_are_moved(size: int) -> None:
    odd = torch.rand(size)
    place = odd.data_ptr()
    lay_together([torch.rand(4), odd, torch.rand(4)])
    assert odd.data_ptr() == place


def test_parameters_keep_their_names_and_gradients() -> None:
    norm, odd = nn.BatchNorm2d(8), nn.BatchNorm2d(3)
    parameters = [*norm.parameters(), *odd.parameters()]
    lay_together(parameters)
    assert [len(run) for run in find_runs(parameters)] == [16, 3, 3], (
        "three numbers would put the next out of line"
    )
    norm(torch.rand(4, 8, 2, 2)).square().sum().backward()
    assert norm.weight.grad is not None
    assert isinstance(norm.weight, nn.Parameter)


def test_what_is_not_contiguous_is_written_where_it_lies() -> None:
    tensors = [torch.rand(2, 4, 3, 3).to(memory_format=torch.channels_last), torch.rand(4)]
    before = [tensor.clone() for tensor in tensors]
    copies = copy_all(tensors)
    for tensor in tensors:
        tensor.zero_()
    keep_where(torch.tensor(False), tensors, copies)
    assert all(torch.equal(one, other) for one, other in zip(tensors, before, strict=True))


@pytest.mark.parametrize("size", [(2, 8), ()])
def test_what_has_another_shape_stays_where_it_is(size: tuple[int, ...]) -> None:
    tensor = torch.ones(size)
    place = tensor.data_ptr()
    lay_together([tensor, torch.ones(4)])
    assert tensor.data_ptr() == place


def test_values_are_broadcast_and_other_devices_stay_as_they_are() -> None:
    image, count, far = torch.ones(2, 3), torch.tensor([5]), torch.ones(2, device="meta")
    keep_where(torch.tensor(False), [image, count, far], [torch.zeros(2, 1), torch.tensor([4]), far])
    assert image.sum() == 0
    assert count.item() == 4
    assert not all_finite(torch.tensor([float("-inf"), 0.0]))
