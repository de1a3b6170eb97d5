"""STR: Kusupati et al., "Soft Threshold Weight Reparameterization for Learnable Sparsity", ICML 2020."""

from collections.abc import Iterator
from dataclasses import dataclass

from growprune.errors import GrowpruneError
from growprune.plan import Parts, Phase, Rule, method, prune
from growprune.plan.settings import check_counts, check_share, check_sparsity, is_number


@dataclass(frozen=True)
class Str(Rule):
    """Run the model with sign(w) relu(|w| - sigmoid(s)) for its weights w, with a learned s for each layer."""

    s_init: float
    """The initial s of each layer."""
    s_decay: float = 0.0
    """The weight decay of s. It moves s towards 0, and the threshold towards 1/2, unless the loss resists."""
    s_shrink: float = 0.0
    """The share by which s shrinks in each iteration. It has the same purpose, at any learning rate."""

    def __post_init__(self) -> None:
        for name, value in (("s_init", self.s_init), ("s_decay", self.s_decay)):
            if not is_number(value):
                raise GrowpruneError(f"{name} must be a finite number, got {value!r}")
        if self.s_decay < 0:
            raise GrowpruneError(f"s_decay must be >= 0, got {self.s_decay!r}")
        check_share(s_shrink=self.s_shrink)


@method(allocation="global")
def str_(
    S: Parts,
    *,
    sparsity: float,
    iterations: int,
    until: float = 0.75,
    s_init: float = -5.0,
    s_decay: float | None = None,
) -> Iterator[Phase]:
    """Learn a threshold for each layer, below which weights are zero; then prune to the sparsity and fine-tune.

    STR by itself does not reach a given sparsity. It depends on s_init, the decay of s, the learning rate and the size
    of the weights. The authors chose s_init and weight decay for each sparsity; do the same in a fair comparison. The
    history of a run records the sparsity that STR reached, as `rule`. All weights count as live until `until`. If STR
    reached less than `sparsity`, the prune at `until` removes more. If it reached more, some live weights are zero and
    have only the rest of the training to recover. Far beyond the sparsity, the model is damaged by then.

    Args:
        sparsity: the fraction of zeros after `until`.
        iterations: the length of the whole training.
        until: when the thresholds end, as a share of the training.
        s_init: the initial s of each layer, whose threshold is sigmoid(s). The paper's -3200 is for 500,000 iterations.
        s_decay: the weight decay of s, in the paper that of the weights. s is trained by SGD with the learning rate of
            its layer, so that rate matters too. By default, s moves from s_init to s_init (1 - sparsity)^(1/3), evenly
            in its logarithm and at any learning rate, unless the loss resists. On digits, targets of 80, 90 and 95 %
            reached before the prune, with a learning rate of 0.1: 78, 92 and 96 % in 20 epochs, 83, 91 and 94 % in 80.
            With 0.4: 57, 76 and 87 % in 20 epochs, 82, 89 and 92 % in 80. Networks with fewer channels have larger
            weights and reach less: 79 instead of 92 % at half the width. For 90 %, a ResNet-18 of 16 channels reached
            91 % (0.1) and 95 % (0.4) in 564 iterations with a tenth of CIFAR-10.

    Example: str_(S, sparsity=0.8, iterations=8)
    """
    check_sparsity(sparsity)
    check_counts(0, iterations=iterations)
    check_share(until=until)
    last = round(until * iterations)
    if s_decay is None:
        rule = Str(S.whole, s_init=s_init, s_shrink=1 - (1 - sparsity) ** (1 / 3 / max(1, last)))
    else:
        rule = Str(S.whole, s_init=s_init, s_decay=s_decay)
    yield Phase(iterations=last, rule=rule)
    yield Phase(prune(S.whole, to=sparsity), iterations=iterations - last)
