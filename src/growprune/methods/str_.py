"""STR: Kusupati et al., "Soft Threshold Weight Reparameterization for Learnable Sparsity", ICML 2020."""

from collections.abc import Iterator
from dataclasses import dataclass

from growprune.errors import GrowpruneError
from growprune.plan import Parts, Phase, Rule, method, prune
from growprune.plan.settings import check_counts, check_share, check_sparsity, is_number


@dataclass(frozen=True)
class Str(Rule):
    """The model is sign(w) relu(|w| - sigmoid(s)), with a learned s for each layer."""

    s_init: float
    """The first s of each layer."""
    s_decay: float = 0.0
    """The weight decay of s: it brings s towards 0, and the threshold towards 1/2, unless the loss resists."""
    s_shrink: float = 0.0
    """The share of s that goes in each iteration, to the same end, whatever the learning rate."""

    def __post_init__(self) -> None:
        for name, value in (("s_init", self.s_init), ("s_decay", self.s_decay)):
            if not is_number(value):
                raise GrowpruneError(f"{name} is {value!r}, but must be a finite number")
        if self.s_decay < 0:
            raise GrowpruneError(f"s_decay is {self.s_decay!r}, but must be 0 or more")
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
    """Learn a threshold for each layer, below which weights are zero; then prune to the sparsity, and train on.

    By itself STR reaches no sparsity that one can set: s_init, the push on s, the learning rate and the size of the
    weights decide it, so its authors chose s_init and weight decay for each sparsity, and so should who compares it.
    The history of a run has what it reached, as `rule`; all weights count as live until then. Where it is less than
    `sparsity`, the prune at `until` takes more. Where it is more, zeros stay among the live weights, and have only what
    is left of the training to come back: far beyond the sparsity the model is spoilt by then.

    Args:
        sparsity: the fraction of zeros after `until`.
        iterations: of the whole training.
        until: when the thresholds end, as a share of the training.
        s_init: the first s of each layer, whose threshold is sigmoid(s). The paper's -3200 is for 500,000 iterations.
        s_decay: the weight decay of s, as in the paper, where it is that of the weights: s is trained by SGD with the
            learning rate of its layer, so that how far s goes depends on that, too. If not given, s goes from s_init to
            s_init (1 - sparsity)^(1/3), evenly in its logarithm and at any learning rate, unless the loss resists. For
            80, 90 and 95 % that reached, before the prune, on digits with a learning rate of 0.1: 78, 92 and 96 % in
            20 epochs, 83, 91 and 94 % in 80; with 0.4: 57, 76 and 87 %, and 82, 89 and 92 %. Networks with fewer
            channels have larger weights, and stay below: at half the width 79 instead of 92 %. For 90 %, a ResNet-18 of
            16 channels came to 91 % (0.1) and 95 % (0.4) in 564 iterations with a tenth of CIFAR-10.

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
