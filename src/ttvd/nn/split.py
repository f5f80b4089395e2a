"""A classifier as two parts: features, and the linear head that partitions the feature space.

The geometry needs the head: by the paper's Lemma, its rows are the sites of a power diagram. :func:`split` finds the
head of any ``nn.Module`` and verifies on data that ``head(features(x))`` equals ``model(x)``.
"""

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ttvd.geometry.precision import upcast

M = TypeVar("M", bound=nn.Module)

_COMPILED = "_orig_mod"
"""Where the wrapper of ``torch.compile`` has the original model."""
_HINT = (
    "Pass head='dotted.name' of the last nn.Linear: model = ttvd.split(model, head='dotted.name'). Or wrap the model "
    "so that it returns logits (b, k)."
)


class SplitModel(nn.Module):
    """Features and head of a classifier. The classifier itself is not changed.

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
        """Return features (b, d) and logits (b, k) of one forward pass, in float32 or better."""
        inputs: list[Tensor] = []
        hook = self.linear.register_forward_pre_hook(
            lambda _, args, kwargs: inputs.append(_first_input(args, kwargs)), with_kwargs=True
        )
        try:
            logits = unwrap_output(self.model(x))
        finally:
            hook.remove()
        if not self._verified:
            self._verify(inputs, logits, x)
        z = upcast(inputs[-1])
        if logits.dtype.itemsize < 4:  # compute the logits of a half-precision head again, in full precision
            weight, bias = self.linear.weight, self.linear.bias
            with torch.autocast(z.device.type, enabled=False):
                logits = F.linear(z, upcast(weight), None if bias is None else upcast(bias))
        return z, upcast(logits)

    def features(self, x: Tensor) -> Tensor:
        """Return the input of the head, (b, d)."""
        return self.features_and_logits(x)[0]

    def head(self, z: Tensor) -> Tensor:
        """Return the logits (b, k) of features (b, d)."""
        logits: Tensor = self.linear(z)
        return logits

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images, as the whole classifier computes them."""
        return unwrap_output(self.model(x))

    def upright(self, views: int) -> "SplitModel":
        """Return the k-way classifier inside a label-augmented one of k * views outputs.

        Its head has the columns of the first view. It shares all other tensors with this model. Methods that know
        nothing of rotations use it.
        """
        outputs = self.linear.out_features
        if outputs % views:
            raise ValueError(f"a head of {outputs} outputs does not hold {views} views of each class")
        return shared_copy(self, set())._with_rows(torch.arange(0, outputs, views), head_views=1)

    def augmented(self, views: int = 4) -> "SplitModel":
        """Return a copy whose head has k * views outputs, to be fine-tuned by label augmentation.

        Every joint label starts with the row of its class: before training, the copy predicts the same classes as
        this model, whatever the rotation.

        Example:
            >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
            >>> split(net).augmented()(torch.rand(2, 1, 2, 2)).shape
            torch.Size([2, 12])
        """
        classes = torch.arange(self.linear.out_features)
        return copy.deepcopy(self)._with_rows(classes.repeat_interleave(views), head_views=views)

    def _with_rows(self, rows: Tensor, head_views: int) -> "SplitModel":
        """Replace the head, in place, by one that has the given rows of the old head."""
        old = self.linear
        # skip_init draws no random numbers: the weights come from the old head, and the global generator stays.
        new = nn.utils.skip_init(nn.Linear, old.in_features, len(rows), bias=old.bias is not None)
        new.weight = nn.Parameter(old.weight.detach()[rows.to(old.weight.device)].clone())
        if old.bias is not None:
            new.bias = nn.Parameter(old.bias.detach()[rows.to(old.bias.device)].clone())
        if not self.head_name:
            return SplitModel(nn.Sequential(new), "0")
        names = [name for name, m in self.model.named_modules(remove_duplicate=False) if m is old]
        for name in names:  # a layer may be registered more than once
            self.model.set_submodule(name, new)
        if hasattr(self.model, "head_views"):
            self.model.head_views = head_views  # type: ignore[assignment]  # a plain attribute, not a module
        self._verified = False
        return self

    @torch.no_grad()
    def _verify(self, inputs: list[Tensor], logits: Tensor, x: Tensor) -> None:
        """Raise a ValueError unless the head maps its input to the logits."""
        if logits.ndim != 2:
            raise ValueError(
                f"a classifier must return logits of shape (b, k), got {tuple(logits.shape)}. {_HINT}"
            )
        if not inputs:
            problem = f"layer {self.head_name!r} was not used in the forward pass"
        elif inputs[-1].ndim != 2:
            problem = f"layer {self.head_name!r} does not map features (b, d) to the logits"
        elif not _agree(_apply(self.linear, inputs[-1]), logits):
            problem = (
                f"layer {self.head_name!r} does not map features z to the logits: they differ from W z + b"
            )
        else:
            self._verified = True
            return
        raise ValueError(f"{problem}. {_advise(self.model, x)}")


def split(model: nn.Module, example: Tensor | None = None, *, head: str | None = None) -> SplitModel:
    """Find the head of a classifier.

    A model may return the logits themselves, or an object that :func:`unwrap_output` can unwrap. A model with several
    heads on the same features raises a warning that names them; pass ``head`` to choose one.

    Args:
        model: Any classifier that ends in an ``nn.Linear``; its weights, flags and hooks stay as they are.
        example: A few inputs. With them, the head is the linear layer whose output the model returns, and it is
            verified at once. Without them, the head is the layer that timm's ``get_classifier`` names, else the last
            registered ``nn.Linear``, and it is verified at its first use.
        head: Dotted name of the last linear layer, if the search cannot find it.

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
        raise ValueError(f"no nn.Linear found in {type(model).__name__}. {_advise_without(model, example)}")
    else:
        name = _named_classifier(model, linears) or _find_head(model, linears, example)
    found = SplitModel(model, name)
    if example is not None:
        with evaluating(model), torch.no_grad():
            found.features_and_logits(example)
    return found


def _named_classifier(model: nn.Module, linears: Mapping[str, nn.Linear]) -> str | None:
    """Return the name of the layer that timm's ``get_classifier`` returns, if there is one."""
    get_classifier: Any = getattr(model, "get_classifier", None)
    layer = get_classifier() if callable(get_classifier) else None
    return next((name for name, m in linears.items() if m is layer), None)


def _find_head(model: nn.Module, linears: Mapping[str, nn.Linear], example: Tensor | None) -> str:
    """Return the linear layer whose output the model returns for an example, else the last registered one."""
    if example is None:
        return list(linears)[-1]
    calls, logits = _record_calls(model, linears, example)
    if not calls:
        raise ValueError(
            f"no nn.Linear was used in the forward pass of {type(model).__name__}. {_advise(model, example)}"
        )
    ordered = [*reversed(calls.items())]
    same = [name for name, (_, output) in ordered if output is logits]
    equal = [name for name, (_, output) in ordered if _agree(output, logits)]
    head = (same or equal or [ordered[0][0]])[0]
    others = [name for name, (z, _) in calls.items() if z is calls[head][0] and name != head]
    if others:
        warnings.warn(
            f"{type(model).__name__} has several heads on the same features: {head!r} is used, because the model "
            f"returns its output, and {', '.join(map(repr, others))} is not. Pass head={head!r} to "
            f"say that this is right, or wrap the model so that it returns the output of {others[0]!r} and pass "
            f"head={others[0]!r}",
            stacklevel=3,
        )
    return head


Calls = dict[str, tuple[Tensor, Tensor]]
"""Input and output of the last call of each layer, by name, in the order of these calls."""


def _record_calls(model: nn.Module, layers: Mapping[str, nn.Module], x: Tensor) -> tuple[Calls, Tensor]:
    """Forward images, and return the calls of some layers and the logits."""
    calls: Calls = {}

    def record(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        calls.pop(name, None)  # the order is that of the last calls
        calls[name] = _first_input(args, kwargs), output

    hooks = [
        layer.register_forward_hook(lambda _, a, k, out, n=name: record(n, a, k, out), with_kwargs=True)
        for name, layer in layers.items()
    ]
    try:
        with evaluating(model), torch.no_grad():
            logits = unwrap_output(model(x))
    finally:
        for hook in hooks:
            hook.remove()
    return calls, logits


def _apply(layer: nn.Linear, z: Tensor) -> Tensor:
    """Return W z + b, whatever the layer itself does."""
    with torch.autocast(z.device.type, enabled=False):
        return F.linear(z.to(layer.weight.dtype), layer.weight, layer.bias)


def _agree(found: Tensor, logits: Tensor) -> bool:
    """Return whether two tensors are equal but for rounding."""
    if found.shape != logits.shape or not torch.equal(found.isfinite(), logits.isfinite()):
        return False
    gap = (found.float() - logits.float()).nan_to_num().abs().max().item()
    coarse = torch.is_autocast_enabled(logits.device.type)
    rounding = max(1e-3, 4 * torch.finfo(torch.bfloat16 if coarse else logits.dtype).eps)
    # Not relative to 1: heads that were just initialised have tiny logits.
    return bool(gap <= rounding * (0.01 + logits.float().nan_to_num().abs().max().item()))


def _advise(model: nn.Module, x: Tensor) -> str:
    """Say what to write for a model whose head is not what was thought, judged by the calls of its layers."""
    kinds = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    calls, logits = _record_calls(model, kinds, x)
    heads: list[str] = []
    for name, (z, output) in reversed(calls.items()):
        layer = kinds[name]
        if isinstance(layer, nn.Conv2d):
            if _is_pointwise(layer) and _agree(output.mean((-2, -1)), logits):
                return (
                    f"The head {name!r} is a 1 x 1 convolution. Write from ttvd.nn import with_linear_head; "
                    f"model = with_linear_head(model, {name!r}, images[:2])"
                )
            continue
        if z.ndim != 2 or layer.out_features != logits.shape[1]:
            continue
        if _agree(_apply(layer, z), logits):
            return f"The head is {name!r}. Write model = ttvd.split(model, head={name!r})."
        cosines = F.linear(F.normalize(z), F.normalize(layer.weight))
        scale = ((cosines * logits).sum() / cosines.square().sum().clamp_min(1e-12)).item()
        if _agree(scale * cosines, logits) and scale > 0:
            return (
                f"The head {name!r} is a cosine head of scale {scale:.6g}. Write from ttvd.nn import cosine_head; "
                f"model.set_submodule({name!r}, cosine_head(model.get_submodule({name!r}).weight, {scale:.6g}))"
            )
        heads.append(name)
    names = [name for name in calls if isinstance(kinds[name], nn.Linear)]
    if len(heads) > 1:
        return (
            f"{' and '.join(map(repr, reversed(heads)))} have as many outputs as the model, which returns a mix of "
            "them. Wrap the model so that it returns the output of one of them."
        )
    return f"{_HINT} The last linear layers are: {', '.join(names[-5:]) or 'none'}."


def _advise_without(model: nn.Module, example: Tensor | None) -> str:
    """Say what to write for a model that has no linear layer."""
    if example is not None:
        return _advise(model, example)
    convs = [name for name, m in model.named_modules() if isinstance(m, nn.Conv2d) and _is_pointwise(m)]
    if not convs:
        return _HINT
    return (
        f"If the 1 x 1 convolution {convs[-1]!r} is the head, write from ttvd.nn import with_linear_head; "
        f"model = with_linear_head(model, {convs[-1]!r}, images[:2])"
    )


def _is_pointwise(layer: nn.Conv2d) -> bool:
    return set(layer.kernel_size) == {1} and set(layer.stride) == {1} and layer.groups == 1


@torch.no_grad()
def with_linear_head(model: nn.Module, head: str, example: Tensor) -> nn.Module:
    """Return a copy of a classifier whose head, a 1 x 1 convolution, is a linear layer of pooled features.

    A 1 x 1 convolution is the same linear map at every position. So it does not matter whether positions are averaged
    before or after it, and the copy computes the same logits.

    Args:
        model: The classifier. It averages over positions before or after its head, and does nothing else there.
        head: Dotted name of the 1 x 1 convolution.
        example: A few images, to compare the copy with the model.

    Raises:
        ValueError: The layer is no 1 x 1 convolution, or the copy computes something else.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        >>> same = with_linear_head(net, "1", torch.rand(2, 1, 6, 6))
        >>> split(same).head_name, split(same).features(torch.rand(2, 1, 6, 6)).shape
        ('1.2', torch.Size([2, 4]))
    """
    conv = model.get_submodule(head)
    if not (isinstance(conv, nn.Conv2d) and _is_pointwise(conv)):
        raise ValueError(f"layer {head!r} is no 1 x 1 convolution: {conv}")
    linear = nn.utils.skip_init(nn.Linear, conv.in_channels, conv.out_channels, bias=conv.bias is not None)
    linear.weight = nn.Parameter(conv.weight.detach().flatten(1).clone())
    if conv.bias is not None:
        linear.bias = nn.Parameter(conv.bias.detach().clone())
    outputs = nn.Unflatten(1, (conv.out_channels, 1, 1))
    twin = copy.deepcopy(model)
    twin.set_submodule(head, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), linear, outputs))
    with evaluating(model), evaluating(twin):
        if not _agree(unwrap_output(twin(example)), unwrap_output(model(example))):
            raise ValueError(
                f"with {head!r} as a linear layer of pooled features, the model computes something else: it does "
                "more than averaging over positions before or after this layer"
            )
    return twin


class UnitLength(nn.Module):
    """Scales features (b, d) to one length.

    Args:
        length: Length of the result.
    """

    def __init__(self, length: float = 1.0) -> None:
        super().__init__()
        self.length = length

    def forward(self, z: Tensor) -> Tensor:
        """Return features (b, d) of this length."""
        return self.length * F.normalize(z)


def cosine_head(weight: Tensor, scale: float) -> nn.Sequential:
    """Return a cosine head as a linear layer of features that have one length: ``scale * cos(weight, z)``.

    Args:
        weight: Weights (k, d) of the classes.
        scale: Factor of the cosines.

    Example:
        >>> head = cosine_head(torch.tensor([[3.0, 4.0]]), scale=10.0)
        >>> round(head(torch.tensor([[4.0, 3.0]])).item(), 4)  # 10 * 24 / 25
        9.6
    """
    linear = nn.utils.skip_init(nn.Linear, weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(F.normalize(weight.detach()))
    return nn.Sequential(UnitLength(scale), linear)


def _first_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the input of a linear layer from the arguments that a hook gets."""
    value: Tensor = args[0] if args else kwargs["input"]
    return value


def unwrap_output(output: object) -> Tensor:
    """Return the logits in what a classifier returned.

    Args:
        output: A tensor; an object or a dictionary with ``logits`` (Hugging Face); or a tuple or list whose first
            element is a tensor (logits first, as torchvision and timm have it).

    Raises:
        ValueError: It is ambiguous or unknown where the logits are.

    Example:
        >>> unwrap_output({"loss": None, "logits": torch.zeros(2, 3)}).shape
        torch.Size([2, 3])
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        found, place = output.get("logits"), f"a {type(output).__name__} with {', '.join(map(repr, output))}"
    else:
        found, place = getattr(output, "logits", None), f"a {type(output).__name__}"
        if found is None and isinstance(output, Sequence) and len(output) > 0:
            found = output[0]
    if isinstance(found, Tensor):
        return found
    raise ValueError(
        f"a classifier must return logits (b, k), got {place}. Wrap the model: class Logits(torch.nn.Module) with "
        "def __init__(self, model): super().__init__(); self.model = model and "
        "def forward(self, x): return self.model(x)[...], where [...] selects the logits"
    )


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside of wrappers: data-parallel ones, which serve training, and that of ``torch.compile``.

    The wrapper of a compiled model calls the original, not a copy of it. ``Adapter.accelerate`` compiles steps.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"expected a model, a torch.nn.Module, as the first argument; got {type(model).__name__}"
        )
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return unwrap(model.module)
    compiled = model._modules.get(_COMPILED)
    return model if compiled is None else unwrap(compiled)


def count_classes(model: nn.Module) -> int:
    """Return the number of classes of a classifier: its own ``num_classes``, else the outputs of its head."""
    told = getattr(model, "num_classes", None)
    return told if isinstance(told, int) else split(model).linear.out_features


def check_input_shape(model: nn.Module, shape: Sequence[int]) -> None:
    """Raise a ValueError if images have another shape than those that the model was trained on.

    A model that was loaded from a checkpoint has the attribute ``trained_input_shape``, from the checkpoint's card. A
    model without this attribute takes images of any shape.

    Args:
        model: The model, or a wrapper of this library around it.
        shape: Shape of one image (c, h, w) or of a batch (b, c, h, w).

    Example:
        >>> net = nn.Conv2d(3, 8, 3)
        >>> net.trained_input_shape = (3, 32, 32)
        >>> check_input_shape(net, (64, 3, 32, 32))
    """
    inner: Any = model
    while not hasattr(inner, "trained_input_shape") and isinstance(getattr(inner, "model", None), nn.Module):
        inner = inner.model
    expected = getattr(inner, "trained_input_shape", None)
    if expected is not None and tuple(shape[-3:]) != tuple(expected):
        raise ValueError(
            f"the model was trained on images of shape (c, h, w) = {tuple(expected)}, got {tuple(shape[-3:])}. Resize "
            "or convert the images, or set model.trained_input_shape = None if this is intended"
        )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode and restore the flag of every module afterwards."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag


class exchanged:  # noqa: N801 (used like a function)
    """Let a module use other tensors in place of some of its parameters and buffers, inside of a block.

    ``torch.func.functional_call`` does the same, but leaves wrong tensors behind in a module that has two names.

    Args:
        module: The module. It gets its own tensors back.
        tensors: The other tensors, by the names of ``named_parameters`` and ``named_buffers``.

    Example:
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> with exchanged(layer, {"weight": torch.tensor([[3.0]])}):
        ...     layer(torch.tensor([2.0]))
        tensor([6.])
    """

    def __init__(self, module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        known = dict(module.named_parameters()) | dict(module.named_buffers())
        others = {known[name]: tensor for name, tensor in tensors.items()}
        tables: list[dict[str, Any]] = [
            table for part in module.modules() for table in (part._parameters, part._buffers)
        ]
        self._places = [
            (table, key, own, others[own])
            for table in tables
            for key, own in table.items()
            if own is not None and own in others
        ]

    def __enter__(self) -> None:
        for table, key, _, other in self._places:
            table[key] = other

    def __exit__(self, *_: object) -> None:
        for table, key, own, _other in self._places:
            table[key] = own


def shared_copy(module: M, owned: set[str]) -> M:
    """Copy a module; the copy owns its buffers and the parameters in ``owned`` and shares all others, frozen.

    The copy can be adapted and rearranged without an effect on the original. It costs the memory of what it owns.
    """
    for name, part in module.named_modules():
        if _COMPILED in part._modules:
            raise ValueError(
                f"{name or 'the model'} was compiled by torch.compile, and its copy would call the original. Pass the "
                "model as it was before; adapter.accelerate(compile=True) compiles steps"
            )
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
            f"this {type(module).__name__} cannot be copied: {str(error).splitlines()[0]}. Remove what is attached to "
            "it besides its weights (old-style weight_norm, hooks with state) or pass a new instance"
        ) from error
