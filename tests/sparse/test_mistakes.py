"""What is easily done wrong: it is refused in words, or works after all, but is never silently something else."""

import copy
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plan_cases import sgd, small_net, train_step
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.testing._internal.two_tensor import TwoTensor

import growprune as gp
from growprune.errors import GrowpruneError
from growprune.methods import cyclic_gap, one_shot
from growprune.plan import By, Edit
from growprune.sparse.cursor import Cursor


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


compiled = functools.partial(torch.compile, backend="eager")


def pruned(model: nn.Module | None = None, **options: Any) -> gp.SparseModel:
    sparse = gp.SparseModel(mlp() if model is None else model, **({"sparsity": 0.9} | options))
    sparse.prune()
    return sparse


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 16, generator=torch.Generator().manual_seed(1))).square().sum().backward()
    optimizer.step()


# Plans


@pytest.mark.parametrize("wrap", [nn.DataParallel, compiled])
def test_a_partition_of_another_model_is_refused(wrap: Any) -> None:
    model = mlp()
    sparse = gp.SparseModel(wrap(model), sparsity=0.9)
    plan = cyclic_gap(gp.Partition.contiguous(model, 3), sparsity=0.9, steps=3, epochs=1, finetune=1)
    with pytest.raises(ValueError, match=r"has '0.weight', but the model has names like '\w+\.0\.weight': create the"):
        list(Cursor(sparse, plan))
    assert sparse.num_alive == sparse.num_prunable == 1664


def test_when_a_plan_is_over_another_begins() -> None:
    model = mlp()
    sparse, S = gp.SparseModel(model, sparsity=0.9, allocation="uniform"), gp.Partition.contiguous(model, 1)
    first, second = (one_shot(S, sparsity=sparsity, epochs=1, finetune=1) for sparsity in (0.5, 0.9))
    assert len(list(Cursor(sparse, list(first)))) == 2  # phases, which may stop short of the model's sparsity
    cursor = Cursor(sparse, second)
    assert [str(phase) for phase in cursor] == ["train", "prune all to 0.9"]
    assert sparse.num_alive == 51 + 102 + 13
    again = gp.SparseModel(mlp(), sparsity=0.9, allocation="uniform")
    again.load_state_dict(sparse.state_dict())
    resumed = Cursor(again, second)
    resumed.load_state_dict(cursor.state_dict())
    assert list(resumed) == list(cursor) == []  # a script run twice trains once
    again.grow()
    assert len(list(Cursor(again, second))) == 2


def test_a_plan_may_be_a_generator() -> None:
    sparse = gp.SparseModel(mlp(), sparsity=0.9)
    S = gp.Partition.contiguous(sparse.model, 2)
    steps = (step for step in one_shot(S, sparsity=0.9, epochs=1, finetune=1))
    assert len(list(Cursor(sparse, steps))) == 2  # type: ignore[arg-type]
    assert sparse.num_alive == 166


def test_an_edit_that_failed_is_done_when_the_plan_is_followed_again() -> None:
    sparse = gp.SparseModel(mlp(), sparsity=0.9, allocation="uniform")
    plan = one_shot(gp.Partition.contiguous(sparse.model, 1), sparsity=np.float64(0.9), epochs=1, finetune=1)
    cursor = Cursor(sparse, plan)
    walk = iter(cursor)
    next(walk)
    weight = sparse.model.get_parameter("0.weight")
    with torch.no_grad():
        before = weight.clone()
        weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"not finite|NaN|nan"):
        next(walk)
    with torch.no_grad():
        weight.copy_(before)
    assert len(list(cursor)) == 2  # the phase it was in, and the one that failed
    assert sparse.num_alive == 166


def test_what_ranks_is_named_by_its_text_or_refused() -> None:
    random, magnitude = gp.SparseModel(mlp(), sparsity=0.9), pruned()
    random.prune(by="random")  # type: ignore[arg-type]
    assert not torch.equal(random.masks["0.weight"], magnitude.masks["0.weight"])
    with pytest.raises(ValueError, match=r"by must be one of magnitude, random, .*, got 'banana'"):
        random.prune(by="banana")  # type: ignore[arg-type]
    assert isinstance(gp.prune(gp.Partition.contiguous(mlp(), 1).whole, to=0.5, by="random"), Edit)  # type: ignore[arg-type]
    assert By.RANDOM.value == "random"


# Models


def test_second_sparse_model_replaces_first(tmp_path: Path) -> None:
    model = mlp()
    sparse = pruned(model)
    optimizer = sparse.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    gp.save(sparse, tmp_path / "model.safetensors")
    again = gp.load(tmp_path / "model.safetensors", model)  # sparse and its optimizer are still there
    again.grow()
    step(model, again.attach(torch.optim.SGD(model.parameters(), lr=0.1)))
    assert sum(int(w.count_nonzero()) for w in (model[0].weight, model[2].weight, model[4].weight)) > 400
    assert optimizer.param_groups


def test_a_sparse_model_that_is_gone_leaves_the_other_in_charge(tmp_path: Path) -> None:
    model = mlp()
    sparse = pruned(model)
    optimizer = sparse.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    gp.save(sparse, tmp_path / "model.safetensors")
    again = gp.load(tmp_path / "model.safetensors", model)
    again.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    del again
    step(model, optimizer)
    assert int(model[0].weight.grad[~sparse.masks["0.weight"]].count_nonzero()) == 0


def test_layers_may_be_wrapped_afterwards() -> None:
    class Wrapped(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

    model = mlp()
    sparse = gp.SparseModel(model, sparsity=0.9)
    model[2] = Wrapped(model[2])
    assert sparse.summary().rows
    sparse.enforce()


def test_a_layer_that_was_replaced_is_noticed() -> None:
    for change in (lambda m: m.__setitem__(4, nn.Linear(32, 4)), lambda m: weight_norm(m[4])):
        model = mlp()
        sparse = pruned(model)
        change(model)
        for use in (sparse.prune, sparse.summary):
            with pytest.raises(ValueError, match=r"4.weight was replaced after the SparseModel was created"):
                use()


def test_a_model_with_a_layer_more_is_not_saved(tmp_path: Path) -> None:
    sparse = pruned()
    sparse.model.add_module("more", nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"more.weight was added after the SparseModel was created"):
        gp.save(sparse, tmp_path / "model.safetensors")


@pytest.mark.parametrize("wrap", [nn.DataParallel, compiled])
def test_a_file_of_a_wrapped_model_says_so(wrap: Any, tmp_path: Path) -> None:
    gp.save(pruned(wrap(mlp())), tmp_path / "wrapped.safetensors")
    with pytest.raises(ValueError, match=r"has \w+\.0\.weight, which is 0\.weight in the model: wrap"):
        gp.load(tmp_path / "wrapped.safetensors", mlp())
    assert gp.load(tmp_path / "wrapped.safetensors", wrap(mlp())).num_alive == 166


@pytest.mark.parametrize("wrap", [nn.DataParallel, compiled, torch.optim.swa_utils.AveragedModel])
def test_a_copy_may_be_wrapped(wrap: Any) -> None:
    sparse = pruned()
    other = wrap(mlp())
    sparse.mask_copy(other)
    assert sum(int(p.count_nonzero()) for p in other.parameters() if p.dim() > 1) == 166
    with pytest.raises(ValueError, match=r"the copy has no parameter 0.weight: pass a copy of the same model"):
        sparse.mask_copy(nn.Bilinear(2, 2, 2))


def test_a_tied_weight_has_all_its_names() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.weight = self.a.weight

    for name in ("a", "b", "b.weight", "*b.weight"):
        assert [w.name for w in gp.SparseModel(Tied(), sparsity=0.5, keep_dense=[name]).weights] == ["c.weight"]
    S = gp.Partition.of(Tied(), [["a", "b.weight"], ["b.bias", "c"]])
    assert S[0].tensors == ("a.weight", "a.bias")
    with pytest.raises(ValueError, match="part 1 has no parameters or buffers"):
        gp.Partition.of(Tied(), [["a", "b.bias", "c"], ["b.weight"]])
    model = Tied()
    assert pruned(model, sparsity=0.5).num_alive == 16  # as it was told, and the model is as it was


def test_looking_for_computed_weights_computes_none() -> None:
    model = mlp()
    nn.utils.parametrizations.spectral_norm(model[2])
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with pytest.warns(UserWarning, match="computed from other parameters"):
        gp.SparseModel(model, sparsity=0.5)
    assert before and all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_weights_that_are_computed_are_warned_of_until_the_advice_is_followed() -> None:
    def normed() -> nn.Sequential:
        model = mlp()
        weight_norm(model[2])
        return model

    with pytest.warns(UserWarning, match=r"computed from other parameters .* 2\.weight.*, or add them to"):
        gp.SparseModel(normed(), sparsity=0.5)
    for name in ("2", "2.weight", "2.parametrizations.weight.original1"):  # warnings are errors here
        gp.SparseModel(normed(), sparsity=0.5, keep_dense=[name])
    model = normed()
    nn.utils.parametrize.remove_parametrizations(model[2], "weight")
    assert gp.SparseModel(model, sparsity=0.5).num_prunable == 1664
    model = mlp()
    nn.utils.parametrizations.spectral_norm(model[2])
    assert gp.SparseModel(model, sparsity=0.5, include=["2.parametrizations.weight.original"]).num_prunable == 1664


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize(("norm", "name"), [(weight_norm, "0.param*.original1"), (nn.utils.weight_norm, "0.weight_v")])
def test_the_direction_of_a_weight_norm_is_not_pruned_as_a_dead_row_would_be_nan(norm: Any, name: str) -> None:
    model = mlp()
    norm(model[0])
    with pytest.raises(ValueError, match=r"0 for a row without live weights: remove the weight_norm first"):
        gp.SparseModel(model, sparsity=0.95, include=[name])


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_with_sparse_gradients_is_refused_at_once(kind: Any) -> None:
    model = nn.Sequential(kind(10, 4, sparse=True), nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"include has '0.weight', of an embedding with sparse=True, .*sparse=False"):
        gp.SparseModel(model, sparsity=0.5, include=["0"])
    assert gp.SparseModel(model, sparsity=0.5).num_prunable == 16


class Einsum(nn.Module):
    """A matrix of no known kind of layer, and what is meant to stay dense."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.fc = nn.Embedding(16, 8), nn.LayerNorm((16, 8)), nn.Linear(8, 8)
        self.position, self.matrix = nn.Parameter(torch.zeros(1, 16, 8)), nn.Parameter(torch.ones(8, 8))
        self.pos_embed, self.expert_bias = nn.Parameter(torch.zeros(16, 8)), nn.Parameter(torch.zeros(8, 8))
        self.small = nn.Parameter(torch.zeros(2, 2))


@pytest.mark.parametrize("name", ["matrix", "mat*"])
def test_a_large_matrix_that_stays_dense_is_warned_of_once_until_the_advice_is_followed(name: str) -> None:
    with pytest.warns(UserWarning, match=r"will not be pruned: matrix \(8x8\). Add them to include=\[") as caught:
        gp.SparseModel(Einsum(), sparsity=0.5)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert gp.SparseModel(Einsum(), sparsity=0.5, include=[name]).num_prunable == 128
    assert gp.SparseModel(Einsum(), sparsity=0.5, keep_dense=[name]).num_prunable == 64


def test_many_matrices_that_stay_dense_are_one_warning() -> None:
    matrices = nn.ParameterList(torch.zeros(16, 4) for _ in range(6))
    model = nn.Sequential(nn.Linear(4, 4), matrices)
    with pytest.warns(
        UserWarning, match=r"1\.0 \(16x4\), 1\.1 \(16x4\), 1\.2 \(16x4\) and 3 more\. Add them"
    ) as caught:
        gp.SparseModel(model, sparsity=0.5)
    assert len(caught) == 1


# Zeros that are not there, or would be revived


def test_a_model_without_a_plan_that_nobody_pruned_is_not_saved_in_silence(tmp_path: Path) -> None:
    model = small_net()
    sparse = gp.SparseModel(model, 0.9)
    train_step(model, sparse.attach(sgd(model.parameters())), 0)
    with pytest.warns(UserWarning, match=r"has sparsity 0, not at its target sparsity of 0.9: call sparse.prune"):
        gp.save(sparse, tmp_path / "model.safetensors")
    sparse.prune()
    gp.save(sparse, tmp_path / "model.safetensors")


def test_sparsity_is_that_of_the_model_now_and_cannot_be_set() -> None:
    sparse = gp.SparseModel(small_net(), 0.9)
    assert (sparse.sparsity, sparse.target_sparsity) == (0.0, 0.9)
    sparse.prune(to=0.5)
    assert (sparse.sparsity, sparse.target_sparsity) == (0.5, 0.9)
    with pytest.raises(AttributeError):
        sparse.sparsity = 0.8  # type: ignore[misc]


def zeros(model: nn.Module) -> int:
    return sum(int((p == 0).sum()) for p in model.parameters() if p.ndim > 1)


def test_zeros_of_a_pruned_model_are_not_revived_in_silence() -> None:
    model = small_net()
    gp.SparseModel(model, 0.9).prune()
    state = model.state_dict()
    again = small_net()
    again.load_state_dict(state)  # somewhere else, into a plain model
    before = zeros(again)
    optimizer = gp.SparseModel(again, 0.9).attach(sgd(again.parameters()))
    with pytest.warns(UserWarning, match=r"0\.9\d* of the model's weights are zero"):
        train_step(again, optimizer, 0)
    train_step(again, optimizer, 1)  # said once
    third = small_net()
    third.load_state_dict(state)
    sparse = gp.SparseModel.from_zeros(third)
    optimizer = sparse.attach(sgd(third.parameters()))
    for iteration in range(5):
        train_step(third, optimizer, iteration)
    assert zeros(third) == before


def test_a_dense_model_and_one_pruned_before_it_is_attached_are_no_reason_to_warn() -> None:
    model = small_net()
    sparse = gp.SparseModel(model, 0.9)
    sparse.prune()
    train_step(model, sparse.attach(sgd(model.parameters())), 0)
    dense = small_net()
    train_step(dense, gp.SparseModel(dense, 0.9).attach(sgd(dense.parameters())), 0)


def test_a_model_that_was_compiled_is_made_sparse_inside() -> None:
    compiled = torch.compile(small_net(), backend="eager")
    sparsifier = gp.sparsify(compiled, sgd(compiled.parameters()), sparsity=0.9, iterations=4)  # type: ignore[arg-type]
    assert list(sparsifier.sparse.masks) == ["0.weight", "3.weight"]


# What users hand over


@pytest.mark.parametrize("argument", ["keep_dense", "include"])
def test_keep_dense_and_include_must_be_strings(argument: str) -> None:
    for wrong in ([3], 3):
        with pytest.raises(ValueError, match=rf"{argument} must be a list of names or globs \(strings\), got 3"):
            gp.SparseModel(mlp(), sparsity=0.5, **{argument: wrong})


def test_numbers_of_numpy_are_saved_as_what_is_meant(tmp_path: Path) -> None:
    for sparsity in (np.float16(0.9), np.float32(0.9), np.float64(0.9)):
        sparse = pruned(sparsity=sparsity, seed=np.int64(3))
        assert (sparse.target_sparsity, sparse.seed) == (0.9, 3)
        assert (type(sparse.target_sparsity), type(sparse.seed)) == (float, int)
        gp.save(sparse, tmp_path / "model.safetensors")
        manifest = gp.manifest(tmp_path / "model.safetensors")
        assert (manifest["sparsity"], manifest["seed"]) == (0.9, 3)
    assert pruned(sparsity=0).target_sparsity == 0.0


@pytest.mark.parametrize("seed", [True, "3", 1.0, None])
def test_seed_that_is_not_an_integer_is_refused(seed: Any) -> None:
    with pytest.raises(ValueError, match=r"seed must be an integer, such as 0, got "):
        gp.SparseModel(mlp(), sparsity=0.5, seed=seed)


def test_models_that_cannot_be_made_sparse_are_refused() -> None:
    with pytest.raises(ValueError, match=r"0.weight has no shape yet: run a batch through the model first"):
        gp.SparseModel(nn.Sequential(nn.LazyLinear(4)), sparsity=0.5)
    with pytest.raises(ValueError, match=r"0.weight is complex, which cannot be pruned"):
        gp.SparseModel(nn.Sequential(nn.Linear(4, 4, dtype=torch.complex64)), sparsity=0.5)


@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_a_weight_in_eight_bits_is_refused_unless_it_is_kept_dense(storage: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight = nn.Parameter(model[0].weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(gp.GrowpruneError, match=r"0.weight has dtype torch.float8_e4m3fn, .* add it to keep_dense"):
        gp.SparseModel(model, sparsity=0.5, storage=storage)
    sparse = gp.SparseModel(model, sparsity=0.5, storage=storage, keep_dense=["0"])
    sparse.prune()
    gp.save(sparse, tmp_path / "model.safetensors")


def mistaken(model: Any, path: Path) -> list[tuple[str, Callable[[], object]]]:
    """What is easily given in place of another thing, and what is said of it."""
    sparse: Any = pruned(model, allocation="uniform")
    plan: Any = one_shot(gp.Partition.contiguous(model, 1), sparsity=0.9, epochs=1, finetune=1)
    uncalled: Any = one_shot
    text: Any = "gmp"
    return [
        ("Cursor needs a SparseModel, got a Sequential", lambda: gp.Cursor(model, plan)),
        ("save needs a SparseModel, got a Sequential", lambda: gp.save(model, path)),
        ("plan must be a plan or a list of phases, .*, got 'gmp'", lambda: gp.Cursor(sparse, text)),
        (
            "plan must be a plan or a list of phases, .*, got <function one_shot .*>",
            lambda: gp.Cursor(sparse, uncalled),
        ),
        ("optimizer must be a torch optimizer, .*, got a Sequential", lambda: sparse.attach(model)),
        ("optimizer must be a torch optimizer, .*, got a NoneType", lambda: sparse.attach(None)),
        ("part must be a Part of a Partition of the model, got '0'", lambda: sparse.prune("0")),
        ("lacks is_counting, is_over, iter", lambda: gp.Cursor(sparse, plan).load_state_dict(sparse.state_dict())),
        ("model must be a torch.nn.Module, got a generator", lambda: gp.SparseModel(model.parameters(), sparsity=0.5)),
        (
            "losses must be a list of functions that each compute a loss, got <function .*>",
            lambda: sparse.score(By.SNIP, lambda: torch.zeros(1)),
        ),
        (
            "losses must be a list of functions that each compute a loss, got an empty list",
            lambda: sparse.score(By.SNIP, []),
        ),
    ]


@pytest.mark.parametrize("index", range(11))
def test_what_is_given_in_place_of_another_thing_is_named(index: int, tmp_path: Path) -> None:
    message, act = mistaken(mlp(), tmp_path / "model.safetensors")[index]
    with pytest.raises(GrowpruneError, match=message):
        act()


def test_a_score_is_named_by_its_text_too() -> None:
    masks = []
    for by in (By.GRASP, "grasp"):
        model = mlp()
        sparse = gp.SparseModel(model, sparsity=0.5)
        sparse.score(by, [lambda model=model: model(torch.ones(2, 16)).square().sum()])  # type: ignore[arg-type]
        sparse.prune(by=by)  # type: ignore[arg-type]
        masks.append(sparse.masks["0.weight"])
    assert torch.equal(*masks)


def test_a_partition_of_a_model_without_layers_says_how_to_have_some() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(8, 8))

    for cut in (gp.Partition.contiguous, gp.Partition.balanced):
        with pytest.raises(ValueError, match=r"the model has no layers to divide: name parameters in include=\[...\]"):
            cut(Table(), 1)
        assert len(cut(Table(), 1, include=["table"])) == 1


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_layer_of_no_weights_is_left_alone(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(0, 5), nn.Linear(5, 4))
    for allocation in ("uniform", "erk", "global"):
        sparse = pruned(copy.deepcopy(model), sparsity=0.5, allocation=allocation)
        assert sparse.num_alive == 18
        gp.save(sparse, tmp_path / allocation)


def test_a_state_of_something_else_is_refused() -> None:
    sparse = pruned()
    with pytest.raises(ValueError, match=r"the state dict lacks .*masks"):
        sparse.load_state_dict({})
    assert sparse.num_alive == 166


# Optimizers


def test_an_optimizer_made_before_a_compact_edit_is_refused_after_it() -> None:
    model = mlp()
    sparse, optimizer = gp.SparseModel(model, sparsity=0.9, storage="compact"), torch.optim.SGD(model.parameters(), 0.1)
    sparse.prune()
    with pytest.raises(ValueError, match="the optimizer holds compact weights from before an edit"):
        sparse.attach(optimizer)


@pytest.mark.parametrize("is_attached", [True, False])
def test_a_weight_that_is_computed_since_is_noticed(is_attached: bool) -> None:
    model = mlp()
    sparse = pruned(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if is_attached:
        sparse.attach(optimizer)
    weight_norm(model[2])
    message = "a ParametrizedLinear of the sparse model has no parameter weight any more, as after weight_norm"
    with pytest.raises(ValueError, match=message):
        step(model, optimizer) if is_attached else sparse.attach(optimizer)


@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_what_is_frozen_stays_frozen(storage: str) -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)
    sparse = gp.SparseModel(model, sparsity=0.9, storage=storage)
    optimizer = sparse.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    before = model[0].weight.clone()
    for _ in range(2):
        step(model, optimizer)
    assert not model[0].weight.requires_grad and torch.equal(model[0].weight, before)


# Compact storage


TAKEN = (
    r"^0 already belongs to another SparseModel \(storage='compact'\): call its to_dense_\(\) first, or use a "
    r"new model$"
)


def test_a_compact_model_is_not_held_twice(tmp_path: Path) -> None:
    sparse = pruned(storage="compact")
    gp.save(sparse, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="cannot be loaded into a model with storage='compact': load it into a new"):
        gp.load(tmp_path / "model.safetensors", sparse.model)
    for storage in ("masked", "compact"):
        with pytest.raises(ValueError, match=TAKEN):
            gp.SparseModel(sparse.model, sparsity=0.9, storage=storage)
    assert copy.deepcopy(sparse).num_alive == 166
    assert gp.SparseModel(copy.deepcopy(sparse).to_dense_(), sparsity=0.9, storage="compact").num_prunable == 1664
    sparse.grow()  # all alive, it still belongs to the first
    for storage in ("masked", "compact"):
        with pytest.raises(ValueError, match=TAKEN):
            gp.SparseModel(sparse.model, sparsity=0.9, storage=storage)
    assert gp.load(tmp_path / "model.safetensors", sparse.to_dense_(), storage="compact").num_alive == 166


def test_recurrent_weights_are_not_held_compact() -> None:
    model = nn.ModuleDict({"head": nn.Linear(4, 4), "body": nn.LSTM(4, 4)})
    says = "storage='compact' does not support body (LSTM): use storage='masked', or keep_dense=['body']"
    with pytest.raises(ValueError, match=re.escape(says)):
        gp.SparseModel(model, sparsity=0.5, storage="compact")
    assert type(model["head"]) is nn.Linear
    assert gp.SparseModel(model, sparsity=0.5, storage="compact", keep_dense=["body"]).num_prunable == 16


def test_what_is_built_sparse_is_compact() -> None:
    assert gp.sparse_init(mlp, sparsity=0.9, storage="compact").num_alive == 166
    with pytest.raises(GrowpruneError, match="sparse_init supports only storage='compact', got 'masked': remove it"):
        gp.sparse_init(mlp, sparsity=0.9, storage="masked")


def test_building_sparse_notices_what_nothing_fills() -> None:
    class Tabled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.register_buffer("table", torch.arange(10))

    class Forgetful(nn.Linear):
        def reset_parameters(self) -> None:
            nn.init.ones_(self.weight)

    for build, name in ((Tabled, "table"), (lambda: Forgetful(8, 8), "bias")):
        with pytest.raises(ValueError, match=rf"^{name} was not initialized, not even by reset_parameters of \w+"):
            gp.sparse_init(build, sparsity=0.5)

    def select(module: nn.Module) -> None:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            ones: Tensor = torch.ones_like(tensor)
            tensor.data.copy_(ones)

    assert gp.sparse_init(Tabled, sparsity=0.5, initialise=select).num_alive == 32


# What is handed over in place of another


@pytest.mark.parametrize("start", [gp.train, gp.resume])
def test_the_name_of_a_recipe_is_no_recipe(start: Any, tmp_path: Path) -> None:
    with pytest.raises(gp.GrowpruneError, match=r"recipe must be a growprune\.Recipe .*, got 'digits/tiny'"):
        start("digits/tiny", tmp_path / "run")


@pytest.mark.parametrize("sparsity", ["0.9", None, True, 1.0, float("nan")])
def test_a_sparsity_is_a_number(sparsity: Any) -> None:
    with pytest.raises(ValueError, match="sparsity must be in"):
        gp.SparseModel(mlp(), sparsity=sparsity)


def test_an_optimizer_of_another_model_is_refused() -> None:
    sparse, optimizer = pruned(), torch.optim.SGD(mlp().parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"the optimizer has no parameter of the model"):
        sparse.attach(optimizer)
    assert not optimizer._optimizer_step_post_hooks


def test_packed_weights_such_as_quantized_ones_are_refused_and_the_model_stays_as_it_is() -> None:
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(TwoTensor(torch.ones(4, 4), torch.ones(4, 4)))
    with pytest.raises(GrowpruneError, match=r"^weight is packed in a TwoTensor[^\n]*$"):
        gp.SparseModel(model, 0.5)
    assert type(model.weight) is TwoTensor and set(vars(model)) == set(vars(nn.Linear(4, 4)))
