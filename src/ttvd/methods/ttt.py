"""TTT: the trunk keeps learning which way up its images are."""

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ttvd.geometry.precision import full_precision, upcast
from ttvd.methods.gradient import GradientAdapter, Step
from ttvd.methods.registry import register
from ttvd.methods.shared.losses import differentiate
from ttvd.methods.shared.random_state import RandomState
from ttvd.nn.augment import crop_and_flip, draw_crops
from ttvd.nn.norms import Statistics, StreamNorm, following_stream
from ttvd.nn.rotation import RotationNet
from ttvd.nn.views import rotate

Mode = Literal["online", "episodic"]
_PIXELS = 2**21  # of all copies that a GPU is given at once
_MOMENTUM = 0.1
"""Momentum of the running averages of batch norm: torch's default, which the authors' code keeps."""


class CopyNorm(StreamNorm):
    """Batch norm in training mode while the stream is followed, in evaluation mode otherwise.

    In training mode the input holds ``copies`` of each image, one image after the other: each is normalised by the
    moments of its own copies, and moves the running averages in its turn, as if it had come alone.
    """

    def __init__(self, layer: StreamNorm, copies: int) -> None:
        super().__init__(layer, layer.statistics)
        self.copies = copies

    def forward(self, input: Tensor) -> Tensor:
        """Normalise; moves the running averages only inside :func:`following_stream`."""
        if not self.following:
            return F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        images = len(input) // self.copies
        # Each image gets channels of its own, (copies, images * c, ...): then one call normalises them apart.
        x = input.unflatten(0, (images, self.copies)).transpose(0, 1).flatten(1, 2)
        self._move_averages(x.detach(), images)
        scale, shift = (None if part is None else part.repeat(images) for part in (self.weight, self.bias))
        x = F.batch_norm(x, None, None, scale, shift, training=True, eps=self.eps)
        out: Tensor = x.unflatten(1, (images, self.num_features)).transpose(0, 1).flatten(0, 1)
        return out

    @torch.no_grad()
    @full_precision
    def _move_averages(self, x: Tensor, images: int) -> None:
        """What ``images`` updates average <- 0.9 average + 0.1 moment leave, one for each image."""
        var, mean = torch.var_mean(upcast(x), [0, *range(2, x.ndim)])
        age = torch.arange(images - 1, -1, -1, device=x.device, dtype=mean.dtype)
        weights = _MOMENTUM * (1.0 - _MOMENTUM) ** age
        for average, moments in ((self.running_mean, mean), (self.running_var, var)):
            assert average is not None
            average.mul_((1.0 - _MOMENTUM) ** images).add_(weights @ moments.view(images, -1))


@register(
    "ttt",
    summary="Trunk and rotation head learn to tell how copies of each image were turned.",
    paper="Sun et al., ICML 2020",
    updates="trunk and rotation head",
    forwards=33,
    backwards=32,
    needs=frozenset({"rotation head"}),
)
class TTT(GradientAdapter):
    """Test-time training on the rotation task that the model was trained with jointly.

    Each image is cropped, mirrored and turned at random into ``copies``; the loss is the cross-entropy of the rotation
    head on them, averaged over copies and images. The part of the network before the fork and the rotation head learn;
    the last stage and the head of the classifier stay. Prediction is by the classifier after the update.

    Works with group norm, which the paper prefers, and batch norm, which here does what the authors' code does: while
    learning it normalises by the moments of the copies of one image, and its running averages follow with momentum 0.1;
    to predict it uses those averages. The last stage of the classifier keeps the averages of the source.

    The paper has one image at a time: that is a batch of one here. For larger ones TTAB's batch form is used: one step
    on the mean loss, while batch norms still see one image after the other. Deviations from the authors' code:
    dropout stays off; they skip images whose rotation is recognised with a probability above a threshold, which they
    set so that none is; a step that is not finite is not taken.

    Args:
        model: A :class:`~ttvd.nn.rotation.RotationNet`, trained with the objective ``"rotation"``.
        mode: ``"online"`` goes on from batch to batch; ``"episodic"`` starts again with each, random numbers
            included, so that a prediction depends on nothing but its batch.
        steps: Gradient steps for each batch; unless given 1 online and 10 episodic, as in the paper.
        copies: Copies of each image in a step; 32 in the paper.
        padding: Pixels by which a crop may move; an eighth of the height unless given, the 4 of 32 of the paper.
        lr: Learning rate; 1e-3 in the paper.
        optimizer: ``"sgd"`` or ``"adam"``.
        momentum: Momentum of SGD (Nesterov's), first beta of Adam; 0 in the paper, 0.9 in TTAB.
        chunk: Images whose copies are forwarded together: for speed and memory, the result is the same. Unless given,
            8 on a CPU, and on a GPU as many as give it two million pixels: 64 images of 32 x 32.
        seed: Seed of the copies.

    Example:
        >>> from ttvd.nn.resnet import ResNet
        >>> net = RotationNet(ResNet(3, widths=(8, 8), blocks=(1, 1)))
        >>> TTT(net, copies=4)(torch.rand(2, 3, 8, 8)).shape
        torch.Size([2, 3])
    """

    model: RotationNet

    def __init__(
        self,
        model: nn.Module,
        *,
        mode: Mode = "online",
        steps: int | None = None,
        copies: int = 32,
        padding: int | None = None,
        lr: float = 1e-3,
        optimizer: str = "sgd",
        momentum: float = 0.0,
        chunk: int | None = None,
        seed: int = 0,
    ) -> None:
        _check_choices(model, mode, copies, padding, chunk)
        super().__init__(
            model,
            lr=lr,
            optimizer=optimizer,
            momentum=momentum,
            steps=(10 if mode == "episodic" else 1) if steps is None else steps,
            statistics=Statistics(momentum=_MOMENTUM),
            parameters="features",
            prediction="after",
        )
        self.mode, self.copies, self.padding, self.chunk = mode, copies, padding, chunk
        self.random_state = RandomState(seed)
        self._prepare_model()

    def _prepare_model(self) -> None:
        """Freeze what rotations do not pass, and give batch norms the copies of one image at a time."""
        learning = {id(parameter) for parameter in self.adapting()}
        for parameter in self.model.parameters():
            parameter.requires_grad_(id(parameter) in learning)
        for name, layer in list(self.model.named_modules()):
            if isinstance(layer, StreamNorm):
                self.model.set_submodule(name, CopyNorm(layer, self.copies))

    def adapting(self) -> list[nn.Parameter]:
        """The parameters that rotations are recognised with."""
        network = self.model.model
        behind = (network.stages[-1], network.bottleneck, network.fc)
        staying = {id(parameter) for part in behind for parameter in part.parameters()}
        return [parameter for parameter in self.model.parameters() if id(parameter) not in staying]

    def branch(self, x: Tensor) -> None:
        """Start again if episodic; all steps take the same branch."""
        if self.mode == "episodic":
            self.reset()

    def loss(self, x: Tensor, crops: Tensor, turns: Tensor) -> Step:
        """Cross-entropy of the rotations of new copies; gradients are summed over chunks of images."""
        parameters = self.adapting()
        total = [torch.zeros_like(parameter) for parameter in parameters]
        loss, out = torch.zeros_like(self.kept), []
        copies, turns = self.make_copies(x, crops, turns)
        chunk = self.chunk or self._choose_chunk(x)
        for images, labels in zip(copies.split(chunk), turns.split(chunk), strict=True):
            with following_stream(self.model):
                out.append(upcast(self.model.forward_rotation(images.flatten(0, 1))))
                part = F.cross_entropy(out[-1], labels.flatten(), reduction="sum") / turns.numel()
            for sum_, gradient in zip(total, differentiate(part, parameters), strict=True):
                if gradient is not None:
                    sum_ += gradient
            loss = loss + part.detach()
            out[-1] = out[-1].detach()
        return Step(torch.cat(out), loss, torch.ones_like(self.kept), total)

    def _choose_chunk(self, x: Tensor) -> int:
        return max(1, _PIXELS // (self.copies * x.shape[-2:].numel())) if x.is_cuda else 8

    def random_inputs(self, x: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Crops (n, 3) of the copies, see :func:`~ttvd.nn.augment.draw_crops`, and their quarter turns (n,)."""
        size, views = len(x) * self.copies, self.model.rotation.fc.out_features
        crops = draw_crops(size, self._choose_padding(x), True, generator)
        return crops, torch.randint(views, (size,), generator=generator)

    def make_copies(self, x: Tensor, crops: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
        """Copies (b, copies, c, h, w) of images, cropped, mirrored and turned as drawn; and the turns (b, copies)."""
        size, views = len(turns), self.model.rotation.fc.out_features
        copies = crop_and_flip(x.repeat_interleave(self.copies, 0), crops, self._choose_padding(x))
        copies = rotate(copies, views).unflatten(0, (views, size))[turns, torch.arange(size, device=x.device)]
        return copies.unflatten(0, (len(x), self.copies)), turns.view(len(x), self.copies)

    def _choose_padding(self, x: Tensor) -> int:
        return x.shape[-2] // 8 if self.padding is None else self.padding


def _check_choices(model: nn.Module, mode: str, copies: int, padding: int | None, chunk: int | None) -> None:
    if not isinstance(model, RotationNet):
        raise ValueError(
            f"ttt needs a model with a rotation head, ttvd.nn.rotation.RotationNet, got {type(model).__name__}"
        )
    if mode not in get_args(Mode):
        raise ValueError(f"mode must be one of {', '.join(get_args(Mode))}, got {mode!r}")
    if copies < 2 or (chunk is not None and chunk < 1) or (padding is not None and padding < 0):
        raise ValueError(
            f"copies must be at least 2, chunk at least 1 and padding at least 0, got {copies}, {chunk} and {padding}"
        )
