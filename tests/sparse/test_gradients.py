"""What edits see of gradients: SNIP and GraSP on a few numbers by hand, moving averages, and what a state holds."""

import copy
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from few_weights import Eight, alive, still
from plan_cases import check_same_bits, frozen, sgd, small_net, thawed, train_step
from torch import Tensor, nn

import growprune as gp
from growprune.errors import GrowpruneError
from growprune.masks.ranking import magnitude_keys
from growprune.plan import By, Part, Phase, grow, prune
from growprune.sparse.cursor import Cursor
from growprune.sparse.model import SparseModel

ALL = Part("all", ("weight",))
every_storage = pytest.mark.parametrize("storage", ["masked", "compact"])


class Few(Eight):
    """A few weights in one row."""

    def linear(self, *gradient: float) -> Callable[[], Tensor]:
        """A loss with this gradient."""
        return lambda: (self.weight * torch.tensor([gradient])).sum()

    def quadratic(self, A: list[list[float]]) -> Callable[[], Tensor]:
        """w A w / 2, whose gradient is A w and whose Hessian is A."""
        return lambda: 0.5 * self.weight[0] @ torch.tensor(A) @ self.weight[0]


def pass_one(model: nn.Module, optimizer: torch.optim.Optimizer, *losses: Callable[[], Tensor]) -> None:
    optimizer.zero_grad()
    for loss in losses:
        loss().backward()
    optimizer.step()


# SNIP


@every_storage
@pytest.mark.parametrize(
    ("weights", "losses", "options", "expected"),
    [
        # |w g| is 7, 8, 9, 4; neither factor alone would choose so
        ((1, -2, 3, 4), [(7, 4, -3, 1)], {"sparsity": 0.5}, [0, 1, 1, 0]),
        # in all 5, 6, 4, 0; the first counted twice would make 10, 7, 8, 4 of it
        ((1, 1, 1, 1), [(5, 1, 4, 4), (0, 5, 0, -4)], {"sparsity": 0.75}, [0, 1, 0, 0]),
        # blocks of 9 and 7, though 5 - 4 < 3 + 4
        ((1, 1, 1, 1), [(5, -4, 3, 4)], {"sparsity": 0.5, "pattern": "1x2"}, [1, 1, 0, 0]),
        (
            (1, 1, 1, 1, 2, 2, 2, 2),
            [(4, -5, 1, 2, 9, 8, -7, 6)],
            {"sparsity": 0.5, "pattern": "2:4"},
            [1, 1, 0, 0, 1, 1, 0, 0],
        ),
    ],
)
def test_snip_keeps_the_largest_products_of_weight_and_gradient(
    weights: Any, losses: Any, options: Any, expected: list[int], storage: str
) -> None:
    model = Few(*map(float, weights))
    sparse = SparseModel(model, storage=storage, **options)
    sparse.score(By.SNIP, [model.linear(*loss) for loss in losses])
    sparse.prune(by=By.SNIP)
    assert alive(sparse) == expected
    assert model.weight.flatten().tolist() == [w * kept for w, kept in zip(weights, expected, strict=True)]


@every_storage
def test_a_score_leaves_no_gradient_and_sees_none_that_was_there(storage: str) -> None:
    model = Few(1.0, 1.0, 1.0, 1.0)
    sparse = SparseModel(model, sparsity=0.5, storage=storage)
    sparse.attach(still(model))
    model.linear(100, 0, 0, 0)().backward()
    sparse.score(By.GRADIENT, [model.linear(1, 4, 3, 2)])
    assert all(parameter.grad is None for parameter in model.parameters())
    sparse.prune(by=By.GRADIENT)
    assert alive(sparse) == [0, 1, 1, 0]


# GraSP


A = [[2.0, 1, 0, 0], [1, 2, 0, 0], [0, 0, 1, 0], [0, 0, 0, 3]]
W = 4.0, -2.0, 1.0, 0.5
"""g = A w = 6, 0, 1, 1.5; H g = A g = 12, 6, 1, 4.5; w (H g) = 48, -12, 1, 2.25."""


HALVES = (
    [[1.0, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0.5, 0], [0, 0, 0, 2]],
    [[1.0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0.5, 0], [0, 0, 0, 1]],
)
"""Of A."""


@pytest.mark.parametrize("matrices", [(A,), HALVES], ids=["one loss", "two losses"])
def test_grasp_keeps_the_largest_products_of_weight_and_hessian_gradient(matrices: Any) -> None:
    model = Few(*W)
    sparse = SparseModel(model, sparsity=0.5)
    sparse.score(By.GRASP, [model.quadratic(matrix) for matrix in matrices])
    assert sparse.gradients.scores(By.GRASP, "weight").tolist() == [[48, -12, 1, 2.25]]
    sparse.prune(by=By.GRASP)
    assert alive(sparse) == [1, 0, 0, 1]  # by magnitude, -12 would stay


def test_what_replicas_score_is_added_up_so_that_all_choose_by_the_same_bits() -> None:
    model = Few(*W)
    sparse = SparseModel(model, sparsity=0.5)
    sparse.gradients.add_up = lambda mine: mine + torch.tensor([[0.0, 10, 0, 0]])  # of the other replica
    sparse.score(By.GRASP, [model.quadratic(A)])
    assert sparse.gradients.scores(By.GRASP, "weight").tolist() == [[48, -32, 1, 2.25]]
    sparse.score(By.SNIP, [model.quadratic(A)])
    assert sparse.gradients.scores(By.SNIP, "weight").tolist() == [[24, -20, 1, 0.75]]


def test_grasp_looks_through_attention_whose_fast_kernels_have_no_second_derivative() -> None:
    torch.manual_seed(0)
    attention, x = nn.MultiheadAttention(8, 2), torch.randn(3, 2, 8)
    sparse = SparseModel(attention, sparsity=0.5)
    scores = []
    for need_weights in (False, True):  # only with the weights it is computed step by step
        sparse.score(By.GRASP, [lambda n=need_weights: attention(x, x, x, need_weights=n)[0].square().mean()])
        scores.append(sparse.gradients.scores(By.GRASP, "in_proj_weight"))
    torch.testing.assert_close(*scores)


def test_grasp_of_blocks_adds_signed_scores_up() -> None:
    # A couples the first and the third: A^2 has 5 and 4 there, and the scores are 48, 0.25 | -12, 2.25 | 1, 4
    coupled = [[float(i == j) for j in range(6)] for i in range(6)]
    coupled[0][0] = coupled[2][2] = 2.0
    coupled[0][2] = coupled[2][0] = 1.0
    model = Few(4.0, 0.5, -2.0, 1.5, 1.0, 2.0)
    sparse = SparseModel(model, sparsity=0.34, pattern="1x2")
    sparse.score(By.GRASP, [model.quadratic(coupled)])
    assert sparse.gradients.scores(By.GRASP, "weight").tolist() == [[48, 0.25, -12, 2.25, 1, 4]]
    sparse.prune(by=By.GRASP)
    assert alive(sparse) == [1, 1, 0, 0, 1, 1]  # 48.25, -9.75, 5; of magnitudes, 14.25 would beat 5


def test_grasp_passes_a_frozen_layer_over() -> None:
    model = small_net()
    model[0].requires_grad_(False)
    sparse = SparseModel(model, sparsity=0.5, allocation="global")
    sparse.score(By.GRASP, [lambda: model(torch.ones(1, 4, 3, 3)).square().sum()])
    assert int(sparse.gradients.scores(By.GRASP, "0.weight").count_nonzero()) == 0
    assert int(sparse.gradients.scores(By.GRASP, "5.weight").count_nonzero()) > 0


def test_a_hessian_is_no_gradient_and_is_forgotten_where_gradients_come_in() -> None:
    model = Few(*W)
    sparse = SparseModel(model, sparsity=0.5)
    cursor = Cursor(sparse, [Phase(iterations=1), Phase(prune(ALL, to=0.5, by=By.GRADIENT), iterations=1)])
    optimizer = cursor.attach(still(model))
    sparse.score(By.GRASP, [model.quadratic(A)])
    assert not sparse.gradients.are_seen(By.GRADIENT)
    cursor.advance(0)  # watch again
    pass_one(model, optimizer, model.linear(1, 2, 3, 4))
    assert alive(sparse) == [0, 0, 1, 1]  # H g is 12, 6, 1, 4.5
    sparse.score(By.GRASP, [model.quadratic(A)])
    sparse.gradients.watch(By.GRADIENT)
    pass_one(model, optimizer, model.linear(1, 2, 3, 4))
    assert not sparse.gradients.are_seen(By.GRASP)


def test_a_score_goes_with_the_state() -> None:
    for by in (By.SNIP, By.GRASP, By.GRADIENT, By.MOMENTUM):
        model = Few(*W)
        sparse = SparseModel(model, sparsity=0.5)
        sparse.score(by, [model.quadratic(A)])
        resumed = SparseModel(Few(*W), sparsity=0.5)
        resumed.load_state_dict(thawed(frozen(sparse.state_dict()))[0])
        sparse.prune(by=by)
        resumed.prune(by=by)
        assert alive(resumed) == alive(sparse)


# Moving averages


GRADIENTS = [(10, 0, 0, -1), (0, 0, 5, 1), (0, -8, 1, 0)]
"""The average after them is 0.081, 0.09 and 0.1 of each: 0.81, -0.8, 0.55, 0.009."""
BY_MOMENTUM = [Phase(iterations=3), Phase(prune(ALL, to=0.5, by=By.MOMENTUM), iterations=1)]


def test_momentum_by_hand_over_three_iterations() -> None:
    model = Few(1.0, 1.0, 1.0, 1.0)
    sparse = SparseModel(model, sparsity=0.5)
    cursor = Cursor(sparse, BY_MOMENTUM)
    optimizer = cursor.attach(still(model))
    for i, gradient in enumerate(GRADIENTS):
        if i == 2:
            seen = sparse.gradients.scores(By.MOMENTUM, "weight").flatten().tolist()
            assert seen == pytest.approx([0.9, 0, 0.5, 0.01])
        pass_one(model, optimizer, model.linear(*gradient))
    assert alive(sparse) == [1, 1, 0, 0]  # by the last gradient it would be 0 1 1 0, by the sum 1 1 0 0


def test_momentum_counts_what_does_not_live_too() -> None:
    model = Few(1.0, 1.0, 0.1, 0.1)
    sparse = SparseModel(model, sparsity=0.5)
    sparse.prune()
    cursor = Cursor(sparse, [Phase(iterations=3), Phase(grow(ALL, to=0.25, by=By.MOMENTUM), iterations=1)])
    optimizer = cursor.attach(still(model))
    for gradient in GRADIENTS:
        pass_one(model, optimizer, model.linear(*gradient))
    assert alive(sparse) == [1, 1, 1, 0]  # 0.55 to 0.009; the first gradient alone would have grown the last


def test_the_moving_average_goes_with_the_state() -> None:
    model = Few(1.0, 1.0, 1.0, 1.0)
    sparse = SparseModel(model, sparsity=0.5)
    cursor = Cursor(sparse, BY_MOMENTUM)
    optimizer = cursor.attach(still(model))
    for gradient in GRADIENTS[:2]:
        pass_one(model, optimizer, model.linear(*gradient))
    states = sparse.state_dict(), cursor.state_dict()
    on_disk = frozen(*states)
    pass_one(model, optimizer, model.linear(*GRADIENTS[2]))
    assert frozen(*states) == on_disk  # a state that was taken does not change

    other = Few(1.0, 1.0, 1.0, 1.0)
    resumed = SparseModel(other, sparsity=0.5)
    cursor = Cursor(resumed, BY_MOMENTUM)
    resumed.load_state_dict(states[0])
    cursor.load_state_dict(states[1])
    pass_one(other, cursor.attach(still(other)), other.linear(*GRADIENTS[2]))
    assert alive(resumed) == alive(sparse) == [1, 1, 0, 0]
    assert frozen(*states) == on_disk  # neither does one that was loaded


def test_an_edit_by_gradient_beside_one_by_momentum_sees_the_last_iteration() -> None:
    halves = Part("a", ("a.weight",)), Part("b", ("b.weight",))
    model = nn.ModuleDict({"a": Few(1.0, 1.0, 1.0, 1.0), "b": Few(1.0, 1.0, 1.0, 1.0)})
    sparse = SparseModel(model, sparsity=0.5)
    edits = prune(halves[0], to=0.5, by=By.GRADIENT), prune(halves[1], to=0.5, by=By.MOMENTUM)
    cursor = Cursor(sparse, [Phase(iterations=3), Phase(*edits, iterations=1)])
    optimizer = cursor.attach(still(model))
    for gradient in GRADIENTS:
        pass_one(model, optimizer, model["a"].linear(*gradient), model["b"].linear(*gradient))
    assert sparse.masks["a.weight"].int().tolist() == [[0, 1, 1, 0]]
    assert sparse.masks["b.weight"].int().tolist() == [[1, 1, 0, 0]]


# What is seen of an iteration


@every_storage
def test_an_edit_by_gradient_sees_the_iteration_before_it_alone(storage: str) -> None:
    model = Few(1.0, 1.0, 1.0, 1.0)
    sparse = SparseModel(model, sparsity=0.5, storage=storage)
    cursor = Cursor(sparse, [Phase(iterations=2), Phase(prune(ALL, to=0.5, by=By.GRADIENT), iterations=1)])
    optimizer = cursor.attach(still(model))
    pass_one(model, optimizer, model.linear(9, 9, 0, 0))
    pass_one(model, optimizer, model.linear(1, 2, 4, 3))
    assert alive(sparse) == [0, 0, 1, 1]


@every_storage
@pytest.mark.parametrize("is_sparse", [False, True])
def test_the_batches_of_an_iteration_add_up(storage: str, is_sparse: bool) -> None:
    model = Few(3.0, 2.0, 0.2, 0.1)
    sparse = SparseModel(model, sparsity=0.5, storage=storage)
    if is_sparse:
        sparse.prune()
        edit = grow(ALL, to=0.25, by=By.GRADIENT)  # 5 - 4 to 0 + 2; the first twice, or alone, would take the third
    else:
        edit = prune(ALL, to=0.75, by=By.GRADIENT)
    cursor = Cursor(sparse, [Phase(iterations=1), Phase(edit, iterations=1)])
    optimizer = cursor.attach(still(model))
    pass_one(model, optimizer, model.linear(5, 1, 5, 0), model.linear(0, 6, -4, 2))
    assert alive(sparse) == ([1, 1, 0, 1] if is_sparse else [0, 1, 0, 0])


def test_replicas_add_their_gradients_up_once_an_iteration() -> None:
    model = Few(1.0, 1.0, 1.0, 1.0)
    sparse = SparseModel(model, sparsity=0.5)
    others = torch.tensor([[0.0, 0.0, 9.0, 9.0]])  # of the other replica
    sparse.gradients.add_up = lambda total: total + others
    cursor = Cursor(sparse, [Phase(iterations=1), Phase(prune(ALL, to=0.5, by=By.GRADIENT), iterations=1)])
    pass_one(model, cursor.attach(still(model)), model.linear(1, 2, -9, 0))
    assert alive(sparse) == [0, 1, 0, 1]


@every_storage
def test_a_layer_that_took_no_part_has_no_gradient(storage: str) -> None:
    model = nn.ModuleDict({"a": Few(1.0, 1.0, 1.0, 1.0), "b": Few(9.0, 9.0, 9.0, 9.0)})
    sparse = SparseModel(model, sparsity=0.5, allocation="global", storage=storage)
    sparse.score(By.SNIP, [model["a"].linear(1, 1, 1, 1)])
    with pytest.warns(UserWarning, match=r"layer b.weight was pruned to zero weights"):
        sparse.prune(by=By.SNIP)
    assert sparse.masks["a.weight"].all()


@every_storage
def test_a_clone_sees_gradients_of_its_own(storage: str) -> None:
    model = Few(4.0, 3.0, 0.2, 0.1)
    sparse = SparseModel(model, sparsity=0.5, storage=storage)
    sparse.prune()
    plan = [Phase(iterations=1), Phase(grow(ALL, to=0.25, by=By.GRADIENT), iterations=1)]
    cursor = Cursor(sparse, plan)
    optimizer = cursor.attach(still(model))  # from here on, gradients are watched
    clone = copy.deepcopy(sparse)
    cursor_of_clone = Cursor(clone, plan)
    of_clone = cursor_of_clone.attach(still(clone.model))
    pass_one(clone.model, of_clone, clone.model.linear(0, 0, 1, 2))
    assert alive(clone) == [1, 1, 0, 1]
    assert alive(sparse) == [1, 1, 0, 0]
    pass_one(model, optimizer, model.linear(0, 0, 2, 1))
    assert alive(sparse) == [1, 1, 1, 0]


def test_gradients_that_are_not_numbers_are_an_error_that_names_the_weight() -> None:
    model = Few(1.0, 1.0, 1.0, 1.0)
    sparse = SparseModel(model, sparsity=0.5)
    sparse.score(By.SNIP, [model.linear(1, float("nan"), 1, 1)])
    with pytest.raises(GrowpruneError, match=r"^weight has NaN or infinity"):
        sparse.prune(by=By.SNIP)
    assert sparse.num_alive == 4


NANS = {"all bits": 0x7FFFFFFF, "all bits and a sign": -1, "usual": 0x7FC00000}


def nan_of(name: str) -> Tensor:
    return torch.tensor(NANS[name], dtype=torch.int32).view(torch.float32)


@every_storage
@pytest.mark.parametrize("nan", NANS)
def test_growth_by_gradients_that_are_not_numbers_is_refused(storage: str, nan: str) -> None:
    model = Few(4.0, 3.0, 0.2, 0.1)
    sparse = SparseModel(model, sparsity=0.5, storage=storage)
    sparse.prune()
    cursor = Cursor(sparse, [Phase(iterations=1), Phase(grow(ALL, to=0.25, by=By.GRADIENT), iterations=1)])
    optimizer = cursor.attach(still(model))
    (model.weight * nan_of(nan)).sum().backward()
    for parameter in model.parameters():
        parameter.grad.zero_()  # which were seen already: the weights stay finite
    with pytest.raises(GrowpruneError, match=r"weight has NaN or infinity, .* training diverged"):
        optimizer.step()


@pytest.mark.parametrize("dtype, whole, bits", [(torch.float32, torch.int32, 31), (torch.float64, torch.int64, 63)])
def test_the_key_of_a_nan_is_above_infinity_and_below_that_of_live_weights(
    dtype: torch.dtype, whole: torch.dtype, bits: int
) -> None:
    nans = torch.tensor([(1 << bits) - 1, -1], dtype=whole).view(dtype)
    infinity = int(magnitude_keys(torch.tensor(float("inf"), dtype=dtype)))
    assert all(infinity < key < (1 << bits) - 1 for key in magnitude_keys(nans).tolist())


# Pruning for a while


def trained(storage: str, **options: Any) -> tuple[SparseModel, torch.optim.Optimizer]:
    model = small_net()
    sparse = SparseModel(model, sparsity=0.75, storage=storage, **options)
    optimizer = sparse.attach(sgd(model.parameters()))
    sparse.prune(to=0.5)
    for iteration in range(2):
        train_step(model, optimizer, iteration)
    return sparse, optimizer


@every_storage
@pytest.mark.parametrize("allocation", ["uniform", "erk", "global"])
@pytest.mark.parametrize("pattern", ["unstructured", "1x4", "2:4"])
def test_while_it_is_pruned_a_model_is_what_pruning_would_make_of_it(
    storage: str, allocation: str, pattern: str, tmp_path: Any
) -> None:
    sparse, optimizer = trained(storage, allocation=allocation, pattern=pattern)
    really = copy.deepcopy(sparse)
    really.prune()
    parameters = list(sparse.model.parameters())
    before = copy.deepcopy((sparse.model.state_dict(), sparse.state_dict(), optimizer.state_dict()))
    assert sparse.can_be_pruned
    with sparse.pruned():
        check_same_bits(dict(sparse.model.state_dict()), dict(really.model.state_dict()))
        check_same_bits(sparse.masks, really.masks)
        assert sparse.num_alive == really.num_alive == 376
        gp.save(sparse, tmp_path / "inside.gp")
        outputs = sparse.model(torch.ones(1, 4, 3, 3))
    assert torch.equal(outputs, really.model(torch.ones(1, 4, 3, 3)))
    after = sparse.model.state_dict(), sparse.state_dict(), optimizer.state_dict()
    check_same_bits(after, before)
    assert all(a is b for a, b in zip(sparse.model.parameters(), parameters, strict=True))
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], parameters, strict=True))
    check_same_bits(gp.load(tmp_path / "inside.gp", small_net()).masks, really.masks)


@every_storage
def test_a_model_that_was_pruned_for_a_while_trains_on_as_if_nothing_had_been(storage: str) -> None:
    ends = []
    for is_looked_at in (False, True):
        sparse, optimizer = trained(storage)
        for iteration in range(2, 5):
            if is_looked_at:
                with sparse.pruned():
                    sparse.model(torch.ones(1, 4, 3, 3))
            train_step(sparse.model, optimizer, iteration)
        ends.append((sparse.model.state_dict(), sparse.masks, optimizer.state_dict()))
    check_same_bits(*ends)


@every_storage
def test_an_error_while_it_is_pruned_leaves_the_model_as_it_was(storage: str) -> None:
    sparse, _ = trained(storage)
    before = copy.deepcopy((sparse.model.state_dict(), sparse.state_dict()))
    with pytest.raises(KeyError), sparse.pruned():
        raise KeyError("no such image")
    check_same_bits((sparse.model.state_dict(), sparse.state_dict()), before)


@every_storage
def test_a_model_that_is_sparser_already_cannot_be_pruned(storage: str) -> None:
    sparse, _ = trained(storage)
    assert sparse.can_be_pruned
    sparse.prune()
    assert sparse.can_be_pruned  # to what it is
    sparse.prune(to=0.8)
    assert not sparse.can_be_pruned
    with pytest.raises(GrowpruneError, match="cannot prune"):
        sparse.prune()


# A step that does not come


@every_storage
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("bad", ["inf", "-1000", *NANS])
def test_gradients_of_a_skipped_step_are_dropped(storage: str, passes: int, set_to_none: bool, bad: str) -> None:
    """As a GradScaler skips one if some layer has infinite gradients, and then those of all are emptied."""
    masks = []
    good, skipped = torch.tensor(1.0), nan_of(bad) if bad in NANS else torch.tensor(float(bad))
    for scales in ([good], [skipped, good]):
        torch.manual_seed(0)
        model = nn.Linear(8, 8, bias=False)
        sparse = SparseModel(model, sparsity=0.5, storage=storage)
        sparse.prune()
        swap = prune(ALL, share=0.5), grow(ALL, to=0.5, by=By.GRADIENT)
        cursor = Cursor(sparse, [Phase(iterations=1), Phase(*swap, iterations=1)])
        optimizer = cursor.attach(torch.optim.SGD(model.parameters(), lr=0.1))
        for scale in scales:
            generator = torch.Generator().manual_seed(1 if scale is good else 2)
            for _ in range(passes):
                (model(torch.randn(4, 8, generator=generator)).square().sum() * scale).backward()
            if scale is good:
                optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        masks.append(sparse.masks["weight"])
    assert torch.equal(*masks)


def test_a_compact_layer_that_is_used_twice_has_the_sum_of_its_gradients() -> None:
    sparse = SparseModel(nn.Linear(4, 4, bias=False), sparsity=0.5, storage="compact")
    sparse.prune()
    sparse.attach(torch.optim.SGD(sparse.model.parameters(), lr=0.1))
    sparse.watch([grow(Part("all", ("weight",)), to=0.25, by=By.GRADIENT)])
    model = sparse.model
    (model(torch.ones(1, 4)).sum() + model(torch.ones(1, 4)).sum()).backward()
    sparse.gradients.end_iteration()
    assert sparse.gradients.scores(By.GRADIENT, "weight").tolist() == [[2.0] * 4] * 4


# Several optimizers


class Pair(nn.Module):
    """A generator, and a discriminator through which its loss goes too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.g, self.d = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)

    def loss(self, name: str, x: Tensor) -> Tensor:
        """Of the discriminator its own, with what is made taken as it is; of the generator through both."""
        made = self.g(x)
        return self.d(made.detach()).square().sum() if name == "d" else (1 - self.d(made)).square().sum()


@every_storage
@pytest.mark.parametrize("by", [By.GRADIENT, By.MOMENTUM])
@pytest.mark.parametrize("order", ["gd", "dg"])
def test_with_several_optimizers_each_weight_is_looked_at_by_the_loss_it_is_trained_with(
    order: str, by: By, storage: Literal["masked", "compact"]
) -> None:
    model, x = Pair(), torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    own = {name: torch.autograd.grad(model.loss(name, x), getattr(model, name).weight)[0] for name in "gd"}
    sparse = SparseModel(model, sparsity=0.5, storage=storage)
    optimizers = {name: torch.optim.SGD(getattr(model, name).parameters(), lr=0.0) for name in order}
    for optimizer in optimizers.values():
        sparse.attach(optimizer)
    sparse.gradients.watch(by)
    for _ in range(2):
        for name in order:
            model.zero_grad()
            model.loss(name, x).backward()
            optimizers[name].step()
    weight = 1 - 0.9**2 if by is By.MOMENTUM else 1.0  # of an average over two iterations that are alike
    for name in order:
        torch.testing.assert_close(sparse.gradients.scores(by, f"{name}.weight"), weight * own[name])
