"""Proposition 1 on smooth problems: the average squared gradient over Q rounds of C-GaP, against Q and delta.

The proof is about a relative of C-GaP that is easier to reason about (the paper's Algorithm 3): the part in turn alone
is trained, and a pruned weight is only hidden: it has its old value again when its part grows. Both are run here:

proof      as it is proven
practice   as it is used: all live weights are trained, and what grows starts from zero (`cyclic_gap`)

python experiments/theory/proposition.py
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from common import clock, keep, parser, table, told
from mask_error import mask_error
from torch import Tensor, nn
from torch.func import functional_call

import growprune as gp
from growprune.plan import Action, Part, ScheduledPhase

BATCH = 16


class Blocks(nn.Module):
    """A linear model as a sum over parts of its input, so that it has parts to grow."""

    def __init__(self, num_inputs: int, kappa: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(num_inputs // kappa, 1, bias=False) for _ in range(kappa))

    def forward(self, x: Tensor) -> Tensor:  # (B, num_inputs)
        return sum(part(slice) for part, slice in zip(self.parts, x.chunk(len(self.parts), 1), strict=True))


@dataclass
class Problem:
    """Least squares on fixed samples, so that F and its gradient are known exactly."""

    model: nn.Module
    x: Tensor
    y: Tensor
    smoothness: float
    """L."""

    def loss(self, indices: Tensor) -> Tensor:
        return (self.model(self.x[indices]) - self.y[indices]).square().mean() / 2

    def squared_gradient(self) -> float:
        """||grad F||^2 at the weights as they are: of all weights, dead ones too."""
        weights = {name: p.detach().clone().requires_grad_() for name, p in self.model.named_parameters()}
        loss = (functional_call(self.model, weights, (self.x,)) - self.y).square().mean() / 2
        return sum(float(g.square().sum()) for g in torch.autograd.grad(loss, list(weights.values())))


def linear(kappa: int, tail: float, seed: int, num_inputs: int = 64, num_samples: int = 1024) -> Problem:
    """Convex. The true weights fall as k^-tail: the steeper, the less a pruned model lacks. L is known."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, num_inputs, generator=generator, dtype=torch.float64)
    truth = torch.arange(1.0, num_inputs + 1, dtype=torch.float64).pow(-tail)
    truth = (truth / truth.norm())[torch.randperm(num_inputs, generator=generator)]
    noise = 0.5 * torch.randn(num_samples, 1, generator=generator, dtype=torch.float64)
    largest = float(torch.linalg.eigvalsh(x.T @ x / num_samples)[-1])
    torch.manual_seed(seed)
    return Problem(Blocks(num_inputs, kappa).double(), x, x @ truth[:, None] + noise, largest)


def tanh(kappa: int, tail: float, seed: int, num_samples: int = 512) -> Problem:
    """Not convex: a network that learns another one. L is a guess, since only on bounded sets is it smooth."""
    del kappa, tail  # a part is a layer
    torch.manual_seed(seed)
    teacher, student = (
        nn.Sequential(*(module for a, b in ((16, 32), (32, 32), (32, 1)) for module in (nn.Tanh(), nn.Linear(a, b))))
        for _ in range(2)
    )
    x = torch.randn(num_samples, 16, dtype=torch.float64)
    with torch.no_grad():
        y = 3 * teacher.double()(x) + 0.1 * torch.randn(num_samples, 1, dtype=torch.float64)
    return Problem(student.double(), x, y, smoothness=4.0)


PROBLEMS = {"linear": linear, "tanh": tanh}


class Hidden:
    """The weights as the proof has them: what is pruned is hidden, and comes back when its part grows."""

    def __init__(self, sparse: gp.SparseModel) -> None:
        self._parameters = {name: p for name, p in sparse.model.named_parameters() if name in sparse.masks}
        self.weights = {name: p.detach().clone() for name, p in self._parameters.items()}

    def remember(self, part: Part) -> None:
        for name in self.weights.keys() & part.tensors:
            self.weights[name].copy_(self._parameters[name].detach())

    def put_back(self, part: Part) -> None:
        for name in self.weights.keys() & part.tensors:
            self._parameters[name].data.copy_(self.weights[name])


class Follower:
    """Trains a problem by C-GaP with plain SGD, and looks at its gradient at the start of each round.

    Args:
        is_proof: as the paper proves it, not as it is used.
        rate: the learning rate is rate / (L T sqrt(Q)); in the proof, rate is 1 / (4 kappa).
    """

    def __init__(
        self, problem: Problem, sparsity: float, rounds: int, iterations: int, *, is_proof: bool, rate: float, seed: int
    ) -> None:
        self.problem, self.is_proof = problem, is_proof
        self.sparse = gp.SparseModel(problem.model, sparsity=sparsity, seed=seed)
        S = gp.Partition.per_layer(problem.model)
        self.kappa, self.whole = len(S), S.whole
        steps = {"steps": rounds * self.kappa, "epochs": iterations, "finetune": 0, "restart": False}
        hooks = {"on_enter": self._enter, "on_leave": self._leave}
        plan = gp.methods.cyclic_gap(S, sparsity=sparsity, **steps)
        self.cursor = gp.Cursor(self.sparse, plan, iterations_per_epoch=1, **hooks)
        self.hidden = Hidden(self.sparse)
        self.generator = torch.Generator().manual_seed(seed)
        self.lr = rate / (problem.smoothness * iterations * rounds**0.5)
        self.gradients: list[float] = []
        self.errors: list[float] = []
        self.norms: list[float] = []

    def follow(self) -> dict[str, float]:
        """Averages over the rounds: of the squared gradient, of delta^2, and of sum_i ||Theta^(i)||^2."""
        optimizer = self.cursor.attach(torch.optim.SGD(self.problem.model.parameters(), lr=self.lr))
        while not self.cursor.is_over:
            optimizer.zero_grad()
            self.problem.loss(torch.randint(len(self.problem.x), (BATCH,), generator=self.generator)).backward()
            if self.is_proof:
                self._keep_gradients_of(self._grown(self.cursor.current))
            optimizer.step()
        rounds = len(self.gradients)
        averages = {"gradient": sum(self.gradients) / rounds, "delta2": sum(self.errors) / len(self.errors)}
        return {**averages, "norm": sum(self.norms) / rounds, "last": self.gradients[-1]}

    def _enter(self, scheduled: ScheduledPhase) -> None:
        grown = self._grown(scheduled)
        if grown is None:
            return
        if self.is_proof:
            self.hidden.put_back(grown)
        self.errors.append(mask_error(self.hidden.weights, self.sparse.masks))
        self.norms.append(sum(float(w.square().sum()) for w in self.hidden.weights.values()))
        if (scheduled.stage - 1) % self.kappa == 0:
            self.gradients.append(self.problem.squared_gradient())

    def _leave(self, scheduled: ScheduledPhase) -> None:
        grown = self._grown(scheduled)
        for part in self._remembered(grown):
            self.hidden.remember(part)

    def _remembered(self, grown: Part | None) -> tuple[Part, ...]:
        """In practice all weights are as they are just before the pruning, and nothing hidden comes back."""
        if grown is None:
            return ()
        return (grown,) if self.is_proof else (self.whole,)

    def _keep_gradients_of(self, part: Part | None) -> None:
        for name, parameter in self.problem.model.named_parameters():
            if part is not None and name not in part.tensors:
                parameter.grad = None

    @staticmethod
    def _grown(scheduled: ScheduledPhase | None) -> Part | None:
        edits = () if scheduled is None else scheduled.phase.edits
        return next((edit.part for edit in edits if edit.action is Action.GROW), None)


def fit(rounds: list[int], values: list[float]) -> tuple[float, float, float]:
    """floor + c / sqrt(Q) by least squares: the floor, c, and the share of the variance that it explains."""
    q = torch.tensor(rounds, dtype=torch.float64)
    y = torch.tensor(values, dtype=torch.float64)
    design = torch.stack([torch.ones_like(q), q.rsqrt()], 1)
    floor, c = torch.linalg.lstsq(design, y[:, None]).solution[:, 0].tolist()
    left = (y - design @ torch.tensor([floor, c], dtype=torch.float64)).square().sum()
    return floor, c, 1 - float(left / (y - y.mean()).square().sum())


def case(problem: str, kappa: int, tail: float, sparsity: float) -> dict[str, Any]:
    return {"problem": problem, "kappa": kappa, "tail": tail, "sparsity": sparsity}


CASES = [
    case("linear", 4, 0.0, 0.0),
    *(case("linear", 4, tail, sparsity) for sparsity, tail in product((0.5, 0.875), (1.0, 0.0))),
    *(case("linear", kappa, 1.0, 0.875) for kappa in (2, 8)),
    *(case("tanh", 3, 0.0, sparsity) for sparsity in (0.0, 0.5, 0.9)),
]


def measure(case: dict[str, Any], is_proof: bool, rounds: int, seed: int, rate: float = 0.5) -> dict[str, float]:
    """One run of one iteration a step (T = 1)."""
    problem = PROBLEMS[case["problem"]](case["kappa"], case["tail"], seed)
    return Follower(problem, case["sparsity"], rounds, 1, is_proof=is_proof, rate=rate, seed=seed).follow()


def bound(one: dict[str, Any], rounds: int, seed: int) -> tuple[float, float]:
    """With the proof's own learning rate: the average squared gradient, and what the theorem allows.

    The theorem's sigma^2 / sqrt(Q) is left out, so it allows a little more.
    """
    problem = PROBLEMS[one["problem"]](one["kappa"], one["tail"], seed)
    with torch.no_grad():
        first = float(problem.loss(torch.arange(len(problem.x))))
    found = measure(one, True, rounds, seed, rate=1 / (4 * one["kappa"]))
    noise_free = 96 * one["kappa"] * problem.smoothness * first / rounds**0.5
    return found["gradient"], noise_free + 10 * problem.smoothness**2 * found["delta2"] * found["norm"]


def name(case: dict[str, Any]) -> str:
    tail = {0.0: ", even", 1.0: ", steep"}[case["tail"]] if case["problem"] == "linear" else ""
    return f"{case['problem']}{tail}, {case['sparsity']:.3g}, kappa {case['kappa']}"


def main() -> None:
    options = parser(__doc__ or "", "proposition")
    options.set_defaults(seeds=2)
    options.add_argument("--rounds", type=int, nargs="+", default=[8, 32, 128, 512], help="Q")
    options.add_argument("--bound", action="store_true", help="compare with the theorem's bound instead; keeps nothing")
    arguments, seconds = options.parse_args(), clock()
    if arguments.bound:
        bounds = [(name(one), *bound(one, arguments.rounds[-1], seed=0)) for one in CASES if one["problem"] == "linear"]
        print(table(["", "measured", "allowed"], [(one, f"{is_:.2f}", f"{may:.0f}") for one, is_, may in bounds]))
        return
    rows, figures = [], []
    for is_proof, one in product((True, False), CASES):
        found = [
            [measure(one, is_proof, rounds, seed) for seed in range(arguments.seeds)] for rounds in arguments.rounds
        ]
        gradients = [sum(run["gradient"] for run in runs) / len(runs) for runs in found]
        floor, c, explained = fit(arguments.rounds, gradients)
        delta2 = [run["delta2"] for run in found[-1]]
        way = "proof" if is_proof else "practice"
        cells = [f"{value:.3f}" for value in gradients]
        rows.append([f"{way}: {name(one)}", *cells, f"{floor:.3f}", f"{c:.2f}", f"{explained:.3f}", told(delta2, 3)])
        figures.append({"way": way, **one, "runs": found, "floor": floor, "c": c, "explained": explained})
        print(rows[-1][0], flush=True)
    heads = ["mean squared gradient, Q =", *map(str, arguments.rounds), "floor", "c", "R²"]
    print(table([*heads, f"delta² at Q = {arguments.rounds[-1]}"], rows))
    keep(arguments.out, seconds(), rounds=arguments.rounds, rows=figures)


if __name__ == "__main__":
    main()
