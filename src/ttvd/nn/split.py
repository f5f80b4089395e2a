"""A classifier seen as two parts: features, and the linear head that partitions their space.

The head of a classifier is what the geometry needs: by the paper's Lemma its rows are the sites of a power
diagram. :func:`split` finds it in any ``nn.Module`` and proves on real data that it was found.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ttvd.geometry.precision import upcast

M = TypeVar("M", bound=nn.Module)

_HINT = "Pass head='dotted.name' of the last nn.Linear, or wrap the model so that it returns logits (b, k)."


class SplitModel(nn.Module):
    """Features and head of a classifier, without changing the classifier.

    Attributes:
        model: The whole classifier.
        head_name: Dotted name of its last linear layer.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> parts = split(net, torch.rand(5, 1, 2, 2))
        >>> parts.head_name, tuple(parts.features(torch.rand(5, 1, 2, 2)).shape)
        ('3', (5, 3))
    """

    def __init__(self, model: nn.Module, head_name: str) -> None:
        super().__init__()
        self.model = model
        self.head_name = head_name
        self._verified = False

    @property
    def linear(self) -> nn.Linear:
        """The last linear layer."""
        head = self.model.get_submodule(self.head_name)
        assert isinstance(head, nn.Linear)
        return head

    def features_and_logits(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What enters the head, (b, d), and what leaves it, (b, k), in one forward pass; float32 or better."""
        seen: list[Tensor] = []
        hook = self.linear.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(args[0] if args else kwargs["input"]), with_kwargs=True
        )
        try:
            logits = self.model(x)
        finally:
            hook.remove()
        if not self._verified:
            self._verify(seen, logits)
        z = upcast(seen[-1])
        if logits.dtype.itemsize < 4:  # what a head computes in half precision is worth a product in full
            weight, bias = self.linear.weight, self.linear.bias
            with torch.autocast(z.device.type, enabled=False):
                logits = F.linear(z, upcast(weight), None if bias is None else upcast(bias))
        return z, upcast(logits)

    def features(self, x: Tensor) -> Tensor:
        """What enters the head, (b, d)."""
        return self.features_and_logits(x)[0]

    def head(self, z: Tensor) -> Tensor:
        """Logits (b, k) of features (b, d)."""
        logits: Tensor = self.linear(z)
        return logits

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images; the same as the whole classifier's."""
        logits: Tensor = self.model(x)
        return logits

    def upright(self, views: int) -> "SplitModel":
        """The k-way classifier inside a label-augmented one of k * views outputs: the columns of the first view.

        The new model shares every tensor but the head's with this one. It is what methods that know nothing of
        rotations see of such a checkpoint.
        """
        outputs = self.linear.out_features
        if outputs % views:
            raise ValueError(f"a head of {outputs} outputs does not hold {views} views of each class")
        return shared_copy(self, set())._with_rows(torch.arange(0, outputs, views))

    def augmented(self, views: int = 4) -> "SplitModel":
        """A copy whose head tells k * views joint labels apart, to be fine-tuned by label augmentation.

        Every joint label starts with the row of its class: before training the classifier says of an image what it
        said before, whatever the rotation.

        Example:
            >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
            >>> split(net).augmented()(torch.rand(2, 1, 2, 2)).shape
            torch.Size([2, 12])
        """
        classes = torch.arange(self.linear.out_features)
        return copy.deepcopy(self)._with_rows(classes.repeat_interleave(views))

    def _with_rows(self, rows: Tensor) -> "SplitModel":
        """This model with a new head, of rows of the old one."""
        old = self.linear
        # Nothing is drawn: the weights come from the old head, and the global generator is not ours to move.
        new = nn.utils.skip_init(nn.Linear, old.in_features, len(rows), bias=old.bias is not None)
        new.weight = nn.Parameter(old.weight.detach()[rows.to(old.weight.device)].clone())
        if old.bias is not None:
            new.bias = nn.Parameter(old.bias.detach()[rows.to(old.bias.device)].clone())
        if not self.head_name:
            return SplitModel(nn.Sequential(new), "0")
        names = [name for name, m in self.model.named_modules(remove_duplicate=False) if m is old]
        for name in names:  # a layer may be registered more than once
            self.model.set_submodule(name, new)
        self._verified = False
        return self

    @torch.no_grad()
    def _verify(self, seen: list[Tensor], logits: object) -> None:
        if not isinstance(logits, Tensor) or logits.ndim != 2:
            shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise ValueError(f"a classifier must return logits of shape (b, k), got {shape}. {_HINT}")
        if not seen:
            raise ValueError(f"layer {self.head_name!r} was not used in the forward pass. {_HINT}")
        z = seen[-1]
        again = self.head(z.to(self.linear.weight.dtype)) if z.ndim == 2 else z
        if z.ndim != 2 or not torch.equal(again.isfinite(), logits.isfinite()):
            raise ValueError(f"layer {self.head_name!r} does not map features (b, d) to the logits. {_HINT}")
        gap = (again.float() - logits.float()).nan_to_num().abs().max().item()
        rounding = max(1e-3, 4 * torch.finfo(logits.dtype).eps)
        if gap > rounding * (1.0 + logits.float().nan_to_num().abs().max().item()):
            raise ValueError(
                f"head(features(x)) differs from model(x) by {gap:.3g}: layer {self.head_name!r} is not the last "
                f"one. {_HINT}"
            )
        self._verified = True


def split(model: nn.Module, example: Tensor | None = None, *, head: str | None = None) -> SplitModel:
    """Find the head of a classifier.

    Args:
        model: Any classifier that ends in an ``nn.Linear``; its weights, flags and hooks are left as they are.
        example: A few inputs. With them the head is found by watching the model run, and checked at once; without
            them it is the layer that timm's ``get_classifier`` names, else the last ``nn.Linear`` registered, and
            it is checked at the first use.
        head: Dotted name of the last linear layer, where the search cannot find it.

    Raises:
        ValueError: No head was found, or ``head(features(x))`` is not ``model(x)``. The message says what to pass.
    """
    if isinstance(model, SplitModel):
        return model
    model = unwrap(model)
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    if head is not None:
        if head not in linears:
            raise ValueError(
                f"no nn.Linear is called {head!r}; this model has: {', '.join(linears) or 'none'}"
            )
        name = head
    elif not linears:
        raise ValueError(f"no nn.Linear found in {type(model).__name__}. {_HINT}")
    else:
        name = _named_classifier(model, linears) or _last_used(model, linears, example)
    found = SplitModel(model, name)
    if example is not None:
        with evaluating(model), torch.no_grad():
            found.features_and_logits(example)
    return found


def _named_classifier(model: nn.Module, linears: dict[str, nn.Linear]) -> str | None:
    """The name of the layer that timm's convention points at."""
    get_classifier: Any = getattr(model, "get_classifier", None)
    layer = get_classifier() if callable(get_classifier) else None
    return next((name for name, m in linears.items() if m is layer), None)


def _last_used(model: nn.Module, linears: dict[str, nn.Linear], example: Tensor | None) -> str:
    """The linear layer that ran last on the example, else the one registered last."""
    if example is None:
        return list(linears)[-1]
    calls: list[str] = []
    hooks = [m.register_forward_hook(lambda *_, n=name: calls.append(n)) for name, m in linears.items()]
    try:
        with evaluating(model), torch.no_grad():
            model(example)
    finally:
        for hook in hooks:
            hook.remove()
    if not calls:
        raise ValueError(f"no nn.Linear was used in the forward pass of {type(model).__name__}. {_HINT}")
    return calls[-1]


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside of a data-parallel wrapper, whose buckets and hooks are for training."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"expected a model, a torch.nn.Module, as the first argument; got {type(model).__name__}"
        )
    parallel = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    return model.module if isinstance(model, parallel) else model


def count_classes(model: nn.Module) -> int:
    """Number of classes that a classifier tells apart: its own ``num_classes``, else the outputs of its head."""
    told = getattr(model, "num_classes", None)
    return told if isinstance(told, int) else split(model).linear.out_features


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode and give every module its own flag back afterwards."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag


def shared_copy(module: M, owned: set[str]) -> M:
    """A structural copy that owns its buffers and the parameters in ``owned``; other parameters are shared, frozen.

    The copy can be adapted and rearranged without the original noticing, at the memory cost of what it owns.
    """
    memo: dict[int, Any] = {}
    for name, parameter in module.named_parameters():
        data = parameter.detach().clone() if name in owned else parameter.detach()
        memo[id(parameter)] = nn.Parameter(data, requires_grad=name in owned)
    for buffer in module.buffers():  # a forward pass may write to them
        memo[id(buffer)] = buffer.detach().clone()
    try:
        return copy.deepcopy(module, memo)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"this {type(module).__name__} cannot be copied: {str(error).splitlines()[0]}. Remove what hangs on it "
            "besides its weights (old-style weight_norm, hooks with state) or pass a fresh instance"
        ) from error
