"""Following a plan: forks and merges, resuming bit for bit, and the loops one would write by hand."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import ForkCursor, phases_of
from torch import Tensor, nn

from growprune.masks.bits import pack, unpack
from growprune.masks.partition import Partition
from growprune.masks.patterns import count_groups
from growprune.methods import cyclic_gap, one_shot, parallel_gap
from growprune.plan import Branch, By, Fork, Phase, Plan, Stage, grow, prune
from growprune.sparse.model import SparseModel

STEPS = 3
"""Batches in an epoch."""


class Net(nn.Module):
    """Running statistics, a norm and biases: all that a merge must not forget."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 12)
        self.norm1 = nn.BatchNorm1d(12)
        self.fc2 = nn.Linear(12, 12)
        self.norm2 = nn.BatchNorm1d(12)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.fc1(x)))
        return self.head(torch.relu(self.norm2(self.fc2(x))))


def make(seed: int = 0, **options: Any) -> SparseModel:
    torch.manual_seed(seed)
    return SparseModel(Net(), **({"sparsity": 0.75, "allocation": "uniform"} | options))


def batch_of(scheduled: int, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * scheduled + number)
    return torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, scheduled: int, number: int) -> None:
    x, y = batch_of(scheduled, number)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)


def run(sparse: SparseModel, plan: Plan) -> None:
    """A user's own loop, with a fresh optimizer in each phase."""
    cursor = ForkCursor(sparse, plan)
    for phase in cursor:
        optimizer = sparse.attach(sgd(sparse.model))
        for number in range(STEPS * phase.epochs):
            train_step(sparse.model, optimizer, cursor.position, number)


def alive(sparse: SparseModel) -> list[int]:
    return list(sparse.alive_by_weight().values())


# Walking


def test_each_phase_is_handed_out_with_its_edits_done() -> None:
    sparse = make()
    S = Partition.per_layer(sparse.model)
    seen = []
    plan = cyclic_gap(S, sparsity=0.75, steps=3, epochs=1, finetune=2)
    cursor = ForkCursor(sparse, plan)
    for phase in cursor:
        seen.append((cursor.position, phase.epochs, alive(sparse)))
    assert seen == [
        (0, 0, [18, 36, 9]),
        (1, 1, [72, 36, 9]),
        (2, 1, [18, 144, 9]),
        (3, 1, [18, 36, 36]),
        (4, 2, [18, 36, 9]),
    ]


def test_under_a_global_ranking_the_model_without_the_grown_part_has_the_target_sparsity() -> None:
    sparse = make(allocation="global")
    S = Partition.per_layer(sparse.model)
    plan = cyclic_gap(S, sparsity=0.75, steps=4, epochs=1, finetune=1)
    before = 252
    for scheduled in phases_of(sparse, plan):
        grown = [edit.part for edit in scheduled.phase.edits if edit.action.value == "grow"]
        for part in grown:
            (weight,) = sparse.editor.weights_of(part)
            assert sparse.alive_by_weight()[weight.name] == weight.numel
        if not grown:
            assert sparse.num_alive == 63
        assert sparse.num_alive != before
        before = sparse.num_alive
        for number in range(STEPS * scheduled.phase.epochs):
            train_step(sparse.model, sparse.attach(sgd(sparse.model)), scheduled.index, number)


@pytest.mark.filterwarnings("ignore:layer.* pruned to zero weights")
@pytest.mark.parametrize(("pattern", "groups"), [("unstructured", 45), ("1x4", 11), ("2x2", 12), ("2:4", 45)])
@pytest.mark.parametrize("allocation", ["uniform", "global", "erk"])
def test_cyclic_and_parallel_gap_end_sparse_with_every_pattern(pattern: str, groups: int, allocation: str) -> None:
    for method in (cyclic_gap, parallel_gap):
        sparse = make(pattern=pattern, allocation=allocation, keep_dense=["fc1"])
        S = Partition.per_layer(sparse.model, keep_dense=["fc1"])
        run(sparse, method(S, sparsity=0.75, steps=3, epochs=1, finetune=1))
        assert sum(count_groups(sparse.pattern, sparse.masks[w.parameter], w) for w in sparse.weights) == groups
        for name, mask in sparse.masks.items():
            assert int(sparse.model.get_parameter(name)[~mask].count_nonzero()) == 0


# Forks


def two_halves(model: nn.Module) -> Partition:
    return Partition.of(model, [["fc1", "norm1"], ["fc2", "norm2", "head"]])


def test_after_a_fork_every_tensor_of_a_part_comes_from_its_branch() -> None:
    sparse = make()
    S = two_halves(sparse.model)
    ends = []
    plan = parallel_gap(S, sparsity=0.75, steps=1, epochs=2, finetune=0)
    merged: dict[str, Tensor] = {}
    for scheduled in phases_of(sparse, [*plan][:2] + [Phase()]):
        if scheduled.branch is None and ends:
            merged = copy.deepcopy(sparse.model.state_dict())
        optimizer = sparse.attach(sgd(sparse.model))
        for number in range(STEPS * scheduled.phase.epochs):
            train_step(sparse.model, optimizer, scheduled.index, number)
        if scheduled.branch is not None:
            ends.append(copy.deepcopy(sparse.model.state_dict()))
    assert set(merged) == {name for part in S for name in part.tensors}
    for branch, part in enumerate(S):
        for name in part.tensors:
            assert torch.equal(merged[name], ends[branch][name]), name
    for name in ("norm1.running_mean", "norm1.running_var", "norm1.weight", "fc1.bias", "fc1.weight"):
        assert not torch.equal(merged[name], ends[1][name]), "the branches differ, so the test can tell them apart"


def test_a_fork_right_after_a_fork_trains_dense_what_it_brought() -> None:
    sparse = make()
    S = Partition.per_layer(sparse.model)
    fork = Fork(*(Branch(Phase(grow(part), epochs=1), part) for part in S))
    plan: list[Stage] = [Phase(prune(S.whole, to=0.75, by=By.RANDOM)), fork, fork, Phase(prune(S.whole, to=0.75))]
    alive = [sparse.num_alive for _ in ForkCursor(sparse, plan)]
    assert alive[4:7] == [sparse.num_prunable] * 3  # all were grown in the first fork, and nothing has pruned them
    assert alive[-1] == alive[0] == 63


def test_two_branches_cannot_bring_the_same() -> None:
    S = Partition.per_layer(Net())
    with pytest.raises(ValueError, match=r"two branches of a fork return 'fc1.weight'"):
        Fork(Branch(Phase(epochs=1), S[0]), Branch(Phase(epochs=1), S.whole))


def test_a_part_that_is_kept_dense_is_warned_of_or_left_out() -> None:
    sparse = make(keep_dense=["head"])
    S = Partition.per_layer(sparse.model)
    assert len(S) == 3
    with pytest.warns(UserWarning, match="S2 has nothing to grow: all its weights are kept dense"):
        sparse.grow(S[2])
    S = Partition.per_layer(sparse.model, keep_dense=["head"])
    assert [part.tensors[0] for part in S] == ["fc1.weight", "fc2.weight"]
    assert "head.weight" in S[1].tensors


# Resuming


def test_growing_at_random_goes_on_as_if_nothing_had_happened() -> None:
    first = make()
    first.prune(by=By.RANDOM)
    second = make()
    second.load_state_dict(first.state_dict())
    first.grow(to=0.5)
    second.grow(to=0.5)
    assert all(torch.equal(mask, second.masks[name]) for name, mask in first.masks.items())


def test_loading_a_state_masks_the_model_and_its_optimizers() -> None:
    sparse, other = make(), make()
    sparse.prune()
    optimizer = other.attach(sgd(other.model))
    train_step(other.model, optimizer, 0, 0)
    other.load_state_dict(sparse.state_dict())
    for name, mask in sparse.masks.items():
        parameter = other.model.get_parameter(name)
        assert int(parameter[~mask].count_nonzero()) == 0
        assert int(optimizer.state[parameter]["momentum_buffer"][~mask].count_nonzero()) == 0


def test_a_snapshot_restores_tensors_and_masks() -> None:
    sparse = make()
    sparse.prune()
    before, masks = copy.deepcopy(sparse.model), sparse.masks
    snapshot = sparse.snapshot()
    sparse.grow()
    optimizer = sparse.attach(sgd(sparse.model))
    train_step(sparse.model, optimizer, 0, 0)
    sparse.restore(snapshot)
    torch.testing.assert_close(sparse.model.state_dict(), before.state_dict(), rtol=0, atol=0)
    assert all(torch.equal(mask, masks[name]) for name, mask in sparse.masks.items())


# Equivalences


def magnitude_mask(weight: Tensor, kept: int) -> Tensor:
    mask = torch.zeros_like(weight, dtype=torch.bool)
    mask.view(-1)[weight.abs().flatten().topk(kept).indices] = True
    return mask


def train_by_hand(model: nn.Module, masks: dict[str, Tensor], scheduled: int, epochs: int) -> None:
    """What everyone writes: mask the gradient before the step, and the weight after it."""
    optimizer = sgd(model)
    for number in range(STEPS * epochs):
        x, y = batch_of(scheduled, number)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for name, mask in masks.items():
                model.get_parameter(name).grad.mul_(mask)  # type: ignore[union-attr]
            optimizer.step()
            for name, mask in masks.items():
                model.get_parameter(name).mul_(mask)


def prune_by_hand(model: nn.Module, names: Sequence[str], sparsity: float) -> dict[str, Tensor]:
    masks = {}
    with torch.no_grad():
        for name in names:
            weight = model.get_parameter(name)
            masks[name] = magnitude_mask(weight, round((1 - sparsity) * weight.numel()))
            weight.mul_(masks[name])
    return masks


def test_one_shot_is_dense_training_then_pruning_then_fine_tuning() -> None:
    sparse, model = make(), make().model
    train_by_hand(model, {}, scheduled=0, epochs=2)
    masks = prune_by_hand(model, list(sparse.masks), 0.75)
    train_by_hand(model, masks, scheduled=1, epochs=3)
    run(sparse, one_shot(Partition.contiguous(sparse.model, 2), sparsity=0.75, epochs=2, finetune=3))
    torch.testing.assert_close(sparse.model.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_cyclic_gap_with_two_parts_by_hand() -> None:
    sparse, by_hand = make(), make()
    by_hand.prune(by=By.RANDOM)
    model, masks = by_hand.to_dense_(), by_hand.masks
    first, second = ["fc1.weight"], ["fc2.weight", "head.weight"]
    train_by_hand(model, {name: masks[name] for name in second}, scheduled=1, epochs=1)
    masks |= prune_by_hand(model, first, 0.75)
    train_by_hand(model, {name: masks[name] for name in first}, scheduled=2, epochs=1)
    masks |= prune_by_hand(model, second, 0.75)
    train_by_hand(model, masks, scheduled=3, epochs=1)

    run(sparse, cyclic_gap(two_halves(sparse.model), sparsity=0.75, steps=2, epochs=1, finetune=1))
    torch.testing.assert_close(sparse.model.state_dict(), model.state_dict(), rtol=0, atol=0)


# Packed masks


@given(st.lists(st.booleans(), max_size=40))
def test_a_packed_mask_unpacks(flags: list[bool]) -> None:
    mask = torch.tensor(flags, dtype=torch.bool)
    packed = pack(mask)
    assert packed.numel() == (len(flags) + 7) // 8
    assert packed.tolist() == [
        sum(bit << i for i, bit in enumerate(flags[at : at + 8])) for at in range(0, len(flags), 8)
    ]
    assert torch.equal(unpack(packed, (len(flags),)), mask)


def test_a_mask_of_any_layout_is_packed_row_by_row() -> None:
    mask = torch.tensor([[True, False, False], [True, True, False]])
    assert pack(mask).tolist() == [0b011001]
    assert pack(mask.T.contiguous().T).tolist() == [0b011001]
    assert torch.equal(unpack(pack(mask), (2, 3)), mask)


@pytest.mark.parametrize("allocation, returned", [("uniform", 4 * 40), ("global", 4 * 400)])
@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_a_part_is_pruned_before_it_is_brought_unless_it_is_ranked_with_the_others(
    storage: str, allocation: str, returned: int
) -> None:
    model = nn.Sequential(*(nn.Linear(20, 20) for _ in range(4)))
    sparse = SparseModel(model, sparsity=0.9, storage=storage, allocation=allocation)
    plan = parallel_gap(Partition.contiguous(model, 4), sparsity=0.9, steps=2, epochs=1, finetune=1)
    cursor = ForkCursor(sparse, plan)
    for _ in cursor:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn_like(parameter)  # as training would
        sparse.enforce()
    counts = [sum(values.numel() for values, mask in parts.values() if mask is not None) for parts in cursor.merged]
    assert counts == [returned] * 2
    assert sparse.num_alive == 4 * 40


def test_a_state_with_other_weights_is_refused() -> None:
    state = make().state_dict()
    with pytest.raises(ValueError, match=r"masks and the model's prunable weights differ in \['head.weight'\]"):
        make(keep_dense=["head"]).load_state_dict(state)
