"""COME: Tent, EATA and SAR with the entropy of an opinion, which leaves room for not knowing."""

from torch import Tensor

from ttvd.methods.eata import EATA
from ttvd.methods.registry import register
from ttvd.methods.sar import SAR
from ttvd.methods.shared.losses import opinion_entropy
from ttvd.methods.tent import Tent

_PAPER = "Zhang et al., ICLR 2025"


class _Conservative:
    """Takes the entropy of the opinion in place of that of the softmax."""

    def uncertainty(self, logits: Tensor) -> Tensor:
        """Entropy of beliefs and uncertainty, for each sample (b,)."""
        return opinion_entropy(logits)


@register(
    "come",
    summary="Tent with the entropy of an opinion: beliefs in the classes, and the uncertainty that is left.",
    paper=_PAPER,
    updates="norm affine",
    forwards=1,
    backwards=1,
)
class COME(_Conservative, Tent):
    """Minimises the mean entropy of an opinion: of beliefs b_i = e^x_i / (S + k) and the uncertainty u = k / (S + k).

    S is the sum of all e^x_j. Entropy minimisation makes the model sure of a class for every sample in the end. Here a
    sample can have a high uncertainty instead: with u near 1 the entropy is low as well. The logits x are scaled to
    their own length, which is held constant, so that steps turn them and do not make them longer. The output is the
    model's, as in Tent.

    Works where Tent works, with any number of classes k of two or more. ``eata-come`` and ``sar-come`` have the same
    loss.

    Deviations from the authors' code: k is the number of classes (theirs is 1000 for every model); the entropy is exact
    (theirs adds 1e-7 to the probabilities); logits that are all 0 get no gradient (theirs become NaN); dropout stays
    off. The authors use plain momentum SGD with a learning rate of 2.5e-4 for ResNet-50 and 1e-3 for ViT-B; the
    defaults are Tent's.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> net = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, 2))
        >>> COME(net, lr=1e-3)(torch.rand(8, 1, 2, 2)).shape
        torch.Size([8, 2])
    """


@register(
    "eata-come",
    summary="EATA with the entropy of an opinion, which selects and weighs the samples too.",
    paper=_PAPER,
    updates="norm affine",
    forwards=1,
    backwards=1,
    needs=frozenset({"fisher"}),
)
class ConservativeEATA(_Conservative, EATA):
    """:class:`~ttvd.methods.eata.EATA` with the loss of :class:`COME`.

    As in the authors' code, the entropy of the opinion also decides which samples are confident, and how much they
    weigh. It lies in [0, ln(k + 1)]; the threshold stays margin * ln k. With few classes it is well above the entropy
    of the softmax unless the logits are large, so that fewer samples are kept. Works where EATA works; deviations are
    those of EATA and COME.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> net, one = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, 2)), torch.ones(1)
        >>> ConservativeEATA(net, {"0.weight": one, "0.bias": one})(torch.rand(8, 1, 2, 2)).shape
        torch.Size([8, 2])
    """


@register(
    "sar-come",
    summary="SAR with the entropy of an opinion, which selects the samples too.",
    paper=_PAPER,
    updates="norm affine",
    forwards=2,
    backwards=2,
)
class ConservativeSAR(_Conservative, SAR):
    """:class:`~ttvd.methods.sar.SAR` with the loss of :class:`COME`.

    As in the authors' code, the entropy of the opinion also decides which samples are confident, and its running mean
    when to start again; both thresholds stay those of SAR. Works where SAR works; deviations are those of SAR and COME.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> net = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, 2))
        >>> ConservativeSAR(net)(torch.rand(8, 1, 2, 2)).shape
        torch.Size([8, 2])
    """
