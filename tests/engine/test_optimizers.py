import pytest
import torch

from ttvd.engine.optimizers import build_optimizer


@pytest.mark.parametrize(("name", "momentum"), [("sgd", 0.9), ("sgd", 0.0), ("adam", 0.9), ("adam", 0.5)])
def test_equals_torch_optim(name: str, momentum: float) -> None:
    generator = torch.Generator().manual_seed(0)
    ours = [torch.randn(3, 2, generator=generator).double(), torch.randn(4, generator=generator).double()]
    theirs = [p.clone().requires_grad_() for p in ours]
    reference: torch.optim.Optimizer
    if name == "sgd":
        reference = torch.optim.SGD(theirs, 0.1, momentum=momentum, nesterov=momentum > 0)
    else:
        reference = torch.optim.Adam(theirs, 0.1, betas=(momentum, 0.999))
    optimizer = build_optimizer(name, ours, 0.1, momentum)
    for _ in range(6):
        gradients = [torch.randn(p.shape, generator=generator).double() for p in ours]
        for p, g in zip(theirs, gradients, strict=True):
            p.grad = g.clone()
        reference.step()
        optimizer.step(ours, gradients, torch.ones(()))
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, other, atol=1e-12)


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_a_closed_gate_changes_nothing_even_with_bad_gradients(name: str) -> None:
    parameters = [torch.ones(3)]
    optimizer = build_optimizer(name, parameters, 0.1, 0.9)
    optimizer.step(parameters, [torch.ones(3)], torch.ones(()))
    before = parameters[0].clone(), {n: b.clone() for n, b in optimizer.named_buffers()}
    optimizer.step(parameters, [torch.full((3,), float("nan"))], torch.zeros(()))
    assert torch.equal(parameters[0], before[0])
    assert all(torch.equal(b, before[1][n]) for n, b in optimizer.named_buffers())


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_half_precision_parameters_have_full_precision_slots(name: str) -> None:
    parameters = [torch.ones(3, dtype=torch.bfloat16)]
    optimizer = build_optimizer(name, parameters, 0.1, 0.9)
    optimizer.step(parameters, [torch.tensor([0.0, 1e-3, 1.0], dtype=torch.bfloat16)], torch.ones(()))
    assert parameters[0].dtype == torch.bfloat16
    assert parameters[0].isfinite().all()
    assert all(slot.dtype == torch.float32 for _, slot in optimizer.named_buffers())


def test_a_parameter_without_gradient_keeps_its_place() -> None:
    parameters = [torch.ones(2), torch.ones(2)]
    optimizer = build_optimizer("sgd", parameters, 0.5, 0.0)
    optimizer.step(parameters, [None, torch.ones(2)], torch.ones(()))
    assert torch.equal(parameters[0], torch.ones(2))
    assert torch.equal(parameters[1], torch.full((2,), 0.5))


def test_bad_settings_are_refused() -> None:
    one = [torch.ones(1)]
    with pytest.raises(ValueError, match="'sgd' or 'adam'"):
        build_optimizer("lbfgs", one, 0.1, 0.9)
    with pytest.raises(ValueError, match="lr"):
        build_optimizer("sgd", one, -1.0, 0.9)
    with pytest.raises(ValueError, match="momentum"):
        build_optimizer("sgd", one, 0.1, 1.0)
    with pytest.raises(ValueError, match="one dtype"):
        build_optimizer("sgd", [torch.ones(1), torch.ones(1).double()], 0.1, 0.9)
