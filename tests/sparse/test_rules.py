"""Training rules: ADMM worked out by hand on four numbers, its state, and where it does not go."""

from typing import Any

import few_weights
import pytest
import torch
from few_weights import Eight
from plan_cases import frozen, sgd, small_net, train_step

from growprune.errors import GrowpruneError
from growprune.masks.partition import Partition
from growprune.methods import METHODS
from growprune.methods.admm import Admm
from growprune.plan import Part, Phase, prune
from growprune.sparse.cursor import Cursor
from growprune.sparse.model import SparseModel
from growprune.sparse.rules import AdmmRule

ALL = Part("all", ("weight",))


def of_rule(sparse: SparseModel) -> tuple[list[float], list[float]]:
    assert isinstance(sparse.rule, AdmmRule)
    return sparse.rule.Z["weight"][0].tolist(), sparse.rule.U["weight"][0].tolist()


def pass_one(model: Eight, optimizer: torch.optim.Optimizer, gradient: tuple[float, ...]) -> list[float]:
    """One iteration; what the rule added to the gradient."""
    few_weights.pass_one(model, optimizer, list(gradient))
    return (model.weight.grad[0] - torch.tensor(gradient)).tolist()


def ruled(every: int = 1, sparsity: float = 0.5, **settings: Any) -> tuple[Eight, SparseModel, Cursor, Any]:
    model = Eight(4.0, -3.0, 2.0, 1.0)
    sparse = SparseModel(model, sparsity=sparsity, **settings)
    plan = [Phase(iterations=4, rule=Admm(ALL, to=0.5, rho=0.5, every=every)), Phase(prune(ALL, to=0.5), iterations=1)]
    cursor = Cursor(sparse, plan)
    return model, sparse, cursor, cursor.attach(torch.optim.SGD(model.parameters(), lr=0.5))


def test_two_updates_of_admm_by_hand() -> None:
    """Z = project(W + U), U = U + W - Z; the gradient has rho (W - Z + U) added; rho and the learning rate are 1/2."""
    model, sparse, _, optimizer = ruled()
    # W = 4 -3 2 1; Z = 4 -3 0 0, U = 0
    assert pass_one(model, optimizer, (0, 4, 0, 0)) == [0, 0, 1, 0.5]
    assert of_rule(sparse) == ([4, -3, 0, 0], [0, 0, 0, 0])
    assert model.weight.tolist() == [[4, -5, 1.5, 0.75]]
    # W + U = 4 -5 1.5 0.75; Z = 4 -5 0 0, U = 0 0 1.5 0.75; W - Z + U = 0 0 3 1.5
    assert pass_one(model, optimizer, (8, 0, 0, 0)) == [0, 0, 1.5, 0.75]
    assert of_rule(sparse) == ([4, -5, 0, 0], [0, 0, 1.5, 0.75])
    assert model.weight.tolist() == [[0, -5, 0.75, 0.375]]
    # W + U = 0 -5 2.25 1.125; Z = 0 -5 2.25 0, U = 0 0 0 1.125; W - Z + U = 0 0 -1.5 1.5
    assert pass_one(model, optimizer, (0, 0, 0, 0)) == [0, 0, -0.75, 0.75]
    assert of_rule(sparse) == ([0, -5, 2.25, 0], [0, 0, 0, 1.125])
    assert model.weight.tolist() == [[0, -5, 1.125, 0]]


def test_between_updates_z_and_u_stay() -> None:
    model, sparse, _, optimizer = ruled(every=2)
    assert pass_one(model, optimizer, (0, 4, 0, 0)) == [0, 0, 1, 0.5]
    assert pass_one(model, optimizer, (8, 0, 0, 0)) == [0, -1, 0.75, 0.375]  # W = 4 -5 1.5 0.75, Z = 4 -3 0 0, U = 0
    assert of_rule(sparse) == ([4, -3, 0, 0], [0, 0, 0, 0])
    assert model.weight.tolist() == [[0, -4.5, 1.125, 0.5625]]
    pass_one(model, optimizer, (0, 0, 0, 0))
    assert of_rule(sparse) == ([0, -4.5, 1.125, 0], [0, 0, 0, 0.5625])


def test_admm_projects_onto_blocks() -> None:
    model, sparse, _, optimizer = ruled(pattern="1x2")
    pass_one(model, optimizer, (0, 0, 0, 0))
    assert of_rule(sparse)[0] == [4, -3, 0, 0]
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[4.0, 0.0, 3.0, 3.0]]))
    pass_one(model, optimizer, (0, 0, 0, 0))
    assert of_rule(sparse)[0] == [0, 0, 3, 3]


@pytest.mark.parametrize("allocation", ["uniform", "erk", "global"])
def test_a_rule_may_be_of_one_part(allocation: str) -> None:
    model = small_net()
    sparse = SparseModel(model, sparsity=0.5, allocation=allocation)
    part = Partition.per_layer(model)[1]
    cursor = Cursor(sparse, [Phase(iterations=2, rule=Admm(part, to=0.5, every=1))])
    optimizer = cursor.attach(sgd(model.parameters()))
    train_step(model, optimizer, 0)
    assert isinstance(sparse.rule, AdmmRule)
    assert set(sparse.rule.Z) == {"3.weight"}
    alive = int(sparse.rule.Z["3.weight"].count_nonzero())
    assert alive == 576 if allocation == "uniform" else 0 < alive < 1152


def test_a_cursor_that_is_loaded_after_its_end_leaves_no_rule_behind() -> None:
    model, _, cursor, optimizer = ruled()
    for _ in range(5):
        pass_one(model, optimizer, (0, 0, 0, 0))
    over = cursor.state_dict()
    assert over["is_over"]
    _, again, middle, _ = ruled()
    assert again.rule is not None
    middle.load_state_dict(over)
    assert again.rule is None


# Where it does not go


class Relative(torch.optim.SGD):
    """Finds a learning rate by itself, as transformers' Adafactor does: its groups have lr=None."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.param_groups[0]["lr"] = None

    def step(self, closure: Any = None) -> None:
        del closure
        for parameter in self.param_groups[0]["params"]:
            parameter.data.sub_(0.1 * parameter.grad)


@pytest.mark.parametrize(("method", "who"), [("deepr", "DeepR"), ("str", "STR"), ("dpf", None), ("admm", None)])
def test_a_rule_that_goes_by_the_learning_rate_asks_for_one(method: str, who: str | None) -> None:
    model = small_net()
    sparse = SparseModel(model, sparsity=0.5, allocation="global")
    cursor = Cursor(sparse, METHODS[method](Partition.contiguous(model, 1), sparsity=0.5, iterations=4))
    optimizer = cursor.attach(Relative(model.parameters()))
    before = frozen(model.state_dict())
    model(torch.ones(2, 4, 3, 3)).sum().backward()
    if who is None:
        optimizer.step()
        assert cursor.iteration == 1
    else:
        with pytest.raises(GrowpruneError, match=f"^{who} needs the learning rate .* no lr for .*: set one"):
            optimizer.step()
        assert frozen(model.state_dict()) == before
    assert not any(parameter.isnan().any() for parameter in model.parameters())
