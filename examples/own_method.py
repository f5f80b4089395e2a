"""Write a method of your own outside the package, check it, and use it by its name.

    python examples/own_method.py

The method minimises entropy, as Tent does, but leaves out samples that are not confident.
"""

import torch

import ttvd


# A method that takes gradient steps says what it minimises; its base class does the rest.
@ttvd.register(
    "confident-tent",
    summary="Minimises the entropy of confident predictions.",
    paper="examples/own_method.py",
    updates="norm affine",
    forwards=1,
    backwards=1,
)
class ConfidentTent(ttvd.GradientAdapter):
    """Tent on the samples whose largest probability is at least ``threshold``.

    Args:
        model: The classifier.
        threshold: Smallest probability of the predicted class for a sample to be used.
        lr: Learning rate of Adam.
    """

    def __init__(self, model: torch.nn.Module, *, threshold: float = 0.6, lr: float = 1e-3) -> None:
        super().__init__(model, lr=lr, optimizer="adam")
        self.threshold = threshold

    def loss(self, x: torch.Tensor) -> ttvd.Step:
        logits = self.output(x)
        logs = logits.log_softmax(1)
        entropy = -(logs.exp() * logs).sum(1)
        # Weights of 0 and 1, not boolean indexing: shapes do not depend on the data, and nothing waits for a GPU.
        used = (logs.detach().exp().amax(1) >= self.threshold).to(logits.dtype)
        loss = (used * entropy).sum() / used.sum().clamp_min(1)
        return ttvd.Step(logits, loss, used.mean())


torch.manual_seed(0)
source = ttvd.load("digits-plain")
batches = list(torch.rand(4, 16, 1, 28, 28))

# The conformance suite checks what every method promises: reset, state, copies, bounded memory and more.
promises = ttvd.check_adapter(lambda: ttvd.create("confident-tent", source.model), source.model, batches)
print(f"kept {len(promises)} promises: {', '.join(promises)}")

# By its name the method has its parameters checked. `ttvd methods`, `ttvd adapt` and `ttvd bench` find it as well,
# by --method own_method:ConfidentTent.
adapter = ttvd.create("confident-tent", source.model, threshold=0.3)
print(f"logits {tuple(adapter(batches[0]).shape)}, {adapter.kept:.0%} of the batch used")
