"""STR: Kusupati et al., "Soft Threshold Weight Reparameterization for Learnable Sparsity", ICML 2020."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Real

from growprune.errors import GrowpruneError
from growprune.plan import Parts, Phase, Rule, check_counts, check_share, method, prune


@dataclass(frozen=True)
class Str(Rule):
    """The model is sign(w) relu(|w| - sigmoid(s)), with a learned s for each layer."""

    s_init: float
    """The first s of each layer."""
    s_decay: float
    """The weight decay of s: it brings s towards 0, and the threshold towards 1/2, unless the loss resists."""

    def __post_init__(self) -> None:
        for name, value in (("s_init", self.s_init), ("s_decay", self.s_decay)):
            if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
                raise GrowpruneError(f"{name} is {value!r}, but must be a finite number")
        if self.s_decay < 0:
            raise GrowpruneError(f"s_decay is {self.s_decay!r}, but must be 0 or more")


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

    By itself STR reaches no sparsity that one can set: `s_init`, `s_decay` and the learning rate decide it. The
    history of a run has what it reached, as `rule`. Where that is less than `sparsity`, the prune at `until` takes
    more; where it is more, zeros stay among the live weights, and can be trained again. All weights live until then.

    Args:
        sparsity: the fraction of zeros after `until`.
        iterations: of the whole training.
        until: when the thresholds end, as a share of the training.
        s_init: the first s of each layer, whose threshold is sigmoid(s). The paper's -3200 is for 500,000 iterations.
        s_decay: the weight decay of s, which is trained by SGD with the learning rate of its layer. If not given, 16 /
            iterations: on digits (SGD, learning rate 0.1) that reached 87 to 89 % in 20, 40 and 80 epochs alike, and
            25 / iterations 94 to 95 %. Where learning rates are lower, as with Adam, it takes more.

    Example: str_(S, sparsity=0.8, iterations=8)
    """
    check_counts(0, iterations=iterations)
    check_share(until=until)
    s_decay = 16 / max(1, iterations) if s_decay is None else s_decay
    last = round(until * iterations)
    yield Phase(iterations=last, rule=Str(S.whole, s_init=s_init, s_decay=s_decay))
    yield Phase(prune(S.whole, to=sparsity), iterations=iterations - last)
