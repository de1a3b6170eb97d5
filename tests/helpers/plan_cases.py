"""Plans of every method, going through one phase by phase, and a plain training loop around a small model."""

import copy
import inspect
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from growprune import methods
from growprune.engine.state import Place, returned_by
from growprune.masks.bits import Snapshot
from growprune.masks.partition import Partition
from growprune.methods import METHODS
from growprune.plan import Part, Parts, Plan, ScheduledPhase, Stage
from growprune.sparse.model import SparseModel

Optimize = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def options_of(name: str) -> dict[str, Any]:
    """The options of the example in a method's docstring."""
    return plan_of(name, Partition(tuple(Part(f"S{i}", (f"{i}.weight",)) for i in range(4)))).options


def plan_of(name: str, S: Parts, **changes: Any) -> Plan:
    """The plan that a method's docstring has as its example, with some options changed."""
    example = re.search(r"Example: (\w+\(S, .*\))", METHODS[name].__doc__ or "")
    assert example, f"the docstring of {name} has no line 'Example: {name}(S, ...)'"
    plan: Plan = eval(example[1], {"S": S, **vars(methods)})
    known = inspect.signature(METHODS[name].__wrapped__).parameters  # type: ignore[attr-defined]
    return METHODS[name](S, **{**plan.options, **{k: v for k, v in changes.items() if k in known}})


class ForkCursor(Place):
    """A cursor that trains the branches of forks one after another, as the loop of the engine does."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.base: Snapshot | None = None
        self.returned: Snapshot = {}
        self.merged: list[Snapshot] = []
        """What the branches of each fork have returned."""

    def _enter_next(self, start: int | None = None) -> ScheduledPhase | None:
        if self.current is not None:
            if self.current.returns is not None:
                self.returned |= returned_by(self.current, self.schedule, self.sparse)
            self._merge_after(self.current)
        if self.position + 1 < len(self.schedule) and self.schedule[self.position + 1].branch is not None:
            if self.base is None:
                self.base = self.sparse.snapshot()
            self._is_fresh = True
            self.sparse.restore(self.base)
        self._is_fresh |= self.position >= 0 and self.schedule[self.position].branch is not None
        return super()._enter_next(start)

    def _merge_after(self, scheduled: ScheduledPhase) -> None:
        if scheduled.is_last_branch and self.base is not None:
            self.merged.append(self.returned)
            self.sparse.restore(self.base | self.returned)
            self.base, self.returned = None, {}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "base": self.base, "returned": dict(self.returned)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.base, self.returned = state["base"], dict(state["returned"])


def phases_of(sparse: SparseModel, plan: Plan | Sequence[Stage], **settings: Any) -> Iterator[ScheduledPhase]:
    """Each phase of a plan, its edits done."""
    cursor = ForkCursor(sparse, plan, **settings)
    for _ in cursor:
        assert cursor.current is not None
        yield cursor.current


# A plain loop


def small_net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """A convolution and two linear layers, whose inputs are multiples of four."""
    torch.manual_seed(0)
    layers = nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(72, 16), nn.Tanh(), nn.Linear(16, 4)
    return nn.Sequential(*layers).to(dtype)


def loss_of(model: nn.Module, number: int) -> Tensor:
    """The loss of a batch that its number decides."""
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randn(4, 4, 3, 3, generator=generator), torch.randint(4, (4,), generator=generator)
    return nn.functional.cross_entropy(model(x.to(next(model.parameters()).dtype)), y)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, iteration: int, *, batches: int = 1, clip: float | None = None
) -> None:
    optimizer.zero_grad()
    for number in range(batches):
        (loss_of(model, 1000 * number + iteration) / batches).backward()
    if clip is not None:
        # by the largest, since the sum of squares is rounded otherwise where zeros are left out
        nn.utils.clip_grad_norm_(model.parameters(), clip, norm_type=float("inf"))
    optimizer.step()


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def frozen(*states: Any) -> bytes:
    """States as they would be on a disk."""
    file = io.BytesIO()
    torch.save(states, file)
    return file.getvalue()


def thawed(states: bytes) -> Any:
    return torch.load(io.BytesIO(states), weights_only=True)


def check_same_bits(ours: Any, theirs: Any, where: str = "") -> None:
    """The same values all the way down, tensors by their bits."""
    assert type(ours) is type(theirs), where
    if isinstance(ours, Tensor):
        assert ours.dtype == theirs.dtype, where
        assert ours.shape == theirs.shape, where
        raw = [t.detach().contiguous().view(-1).view(torch.uint8) for t in (ours, theirs)]
        assert torch.equal(*raw), where
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), where
        for key in ours:
            check_same_bits(ours[key], theirs[key], f"{where}.{key}")
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs), where
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            check_same_bits(a, b, f"{where}[{i}]")
    else:
        assert ours == theirs, where


def all_of(sparse: SparseModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A copy of weights, masks and the optimizer's state, in one form for all storages."""
    states = dict(sparse.model.state_dict()), sparse.masks, sparse.live_state(optimizer)
    return dict(zip(("model", "masks", "optimizer"), copy.deepcopy(states), strict=True))
