import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ttvd.nn.views import AggregatedViews, aggregate, join_labels, log_rotations, rotate, rotation_nll

VIEWS = [1, 2, 4]


@pytest.mark.parametrize("views", VIEWS)
def test_rotate_is_view_major(views: int) -> None:
    x = torch.rand(3, 2, 5, 5)
    turned = rotate(x, views)
    assert turned.shape == (views * 3, 2, 5, 5)
    for a in range(views):
        for i in range(3):
            expected = torch.rot90(x[i], a * 4 // views, (-2, -1))
            assert torch.equal(turned[a * 3 + i], expected)


def test_rotate_leaves_its_input_alone_and_passes_gradients() -> None:
    x = torch.rand(2, 1, 3, 3, requires_grad=True)
    before = x.detach().clone()
    rotate(x, 4).sum().backward()
    assert torch.equal(x.detach(), before)
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, 4.0))


def test_rotate_needs_square_images_for_quarter_turns_only() -> None:
    x = torch.rand(2, 3, 4, 6)
    with pytest.raises(ValueError, match="square images, got height 4 and width 6"):
        rotate(x, 4)
    assert torch.equal(rotate(x, 2)[2:], x.flip(-1, -2))


@pytest.mark.parametrize("views", [0, 3, 8, -1])
def test_views_must_be_one_two_or_four(views: int) -> None:
    with pytest.raises(ValueError, match="views must be 1, 2 or 4"):
        rotate(torch.rand(1, 1, 2, 2), views)


def test_rotate_needs_a_batch() -> None:
    with pytest.raises(ValueError, match=r"\(b, c, h, w\), got a tensor of shape \(3, 4, 4\)"):
        rotate(torch.rand(3, 4, 4), 4)


@given(labels=st.lists(st.integers(0, 20), min_size=1, max_size=8), views=st.sampled_from(VIEWS))
def test_join_labels_matches_a_loop(labels: list[int], views: int) -> None:
    expected = [label * views + a for a in range(views) for label in labels]
    assert join_labels(torch.tensor(labels), views).tolist() == expected


@pytest.mark.parametrize(("views", "head_views"), [(1, 1), (1, 4), (2, 4), (4, 4), (2, 2)])
def test_aggregate_matches_a_loop(views: int, head_views: int) -> None:
    b, k = 3, 5
    logits = torch.rand(views * b, k * head_views, dtype=torch.float64)
    expected = torch.zeros(b, k, dtype=torch.float64)
    for i in range(b):
        for c in range(k):
            for a in range(views):
                column = c * head_views + a * head_views // views
                expected[i, c] += logits[a * b + i, column] / views
    torch.testing.assert_close(aggregate(logits, views, head_views), expected)


def test_aggregate_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"views=4 and head_views=4, got \(6, 8\)"):
        aggregate(torch.rand(6, 8), 4)
    with pytest.raises(ValueError, match="trained on 1 views cannot judge 4"):
        aggregate(torch.rand(4, 8), 4, 1)


class Spy(nn.Module):
    """Remembers the images and returns numbered columns."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x
        return torch.arange(12.0).expand(len(x), 12)


def test_one_view_uses_the_upright_image_and_its_columns() -> None:
    spy, x = Spy(), torch.rand(2, 1, 4, 4)
    logits = AggregatedViews(spy, views=1)(x)
    assert torch.equal(spy.seen, x)
    assert logits.tolist() == [[0.0, 4.0, 8.0]] * 2


def test_four_views_average_the_matching_columns() -> None:
    spy, x = Spy(), torch.rand(2, 1, 4, 4)
    logits = AggregatedViews(spy, views=4)(x)
    assert torch.equal(spy.seen, rotate(x, 4))
    assert logits.tolist() == [[1.5, 5.5, 9.5]] * 2


def test_aggregated_views_refuses_more_views_than_the_head_knows() -> None:
    with pytest.raises(ValueError, match="trained on 2 views cannot judge 4"):
        AggregatedViews(Spy(), views=4, head_views=2)


def test_aggregated_views_unwrap_the_output_of_the_model() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 12)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.fc(x.flatten(1))}

    net, x = Wrapped(), torch.rand(5, 1, 2, 2)
    plain = nn.Sequential(nn.Flatten(), net.fc)
    assert torch.equal(AggregatedViews(net)(x), AggregatedViews(plain)(x))


def test_the_loss_of_rotations_matches_a_loop() -> None:
    log_probs = torch.randn(4, 6, 3 * 4, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    found = rotation_nll(log_rotations(log_probs, 4))
    for image in range(6):
        for view in range(4):
            own = log_probs[view, image].exp().view(3, 4)[:, view].sum()
            assert found[image, view].item() == pytest.approx(-own.log().item(), rel=1e-5)
