"""SparseModel: what prune and grow leave alive, exactly, for every pattern, allocation and kind of layer."""

import math
import warnings
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from growprune.errors import GrowpruneError
from growprune.masks import patterns
from growprune.masks.allocation import num_kept
from growprune.masks.layers import Weight
from growprune.masks.partition import Partition
from growprune.masks.patterns import Block, NofM
from growprune.plan import By, Part, grow, prune
from growprune.sparse.model import SparseModel

SPARSITIES = [0, 0.5, 0.8, 0.9, 0.95, 0.99]
PATTERNS = ["unstructured", "1x8", "2x4", "4x4", "2:4", "1:4"]
ALLOCATIONS = ("uniform", "global", "erk")


def zoo(*, ragged: bool) -> nn.Module:
    """A layer of every kind; ragged sizes fit no block, the others suit N:M."""
    torch.manual_seed(0)
    odd = 1 if ragged else 0
    return nn.ModuleList(
        [
            nn.Linear(8 - odd, 6 - odd),
            nn.Conv1d(4 - odd, 6 - odd, 3),
            nn.Conv2d(4 - odd, 6 - odd, (3, 2)),
            nn.Conv3d(4 - odd, 3, 2),
            nn.Conv2d(8, 4, 3, groups=2),
            nn.Conv2d(4, 4, 2, groups=4),
            nn.ConvTranspose1d(4 - odd, 6 - odd, 3),
            nn.ConvTranspose2d(8, 6, 2, groups=2),
            nn.ConvTranspose3d(4 - odd, 2, 2),
            nn.MultiheadAttention(8, 2),
            nn.MultiheadAttention(8, 2, kdim=4, vdim=12),
            nn.BatchNorm2d(4),
        ]
    )


def make(model: nn.Module, sparsity: float, **options: object) -> SparseModel:
    return SparseModel(model, sparsity=sparsity, **options)  # type: ignore[arg-type]


def prune_quietly(sparse: SparseModel, parts: Sequence[Part | None] = (None,)) -> None:
    """Prune where layers may be too small to keep anything, which is warned of."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "layer.* pruned to zero weights")
        for part in parts:
            sparse.prune(part)


def one_layer(values: Sequence[Sequence[float]], sparsity: float = 0.5, **options: object) -> SparseModel:
    weight = torch.tensor(values)
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    with torch.no_grad():
        layer.weight.copy_(weight)
    return make(layer, sparsity, **options)


def folded(mask: Tensor, weight: Weight) -> Tensor:
    """A weight's mask as (out, kernel positions x in), done by hand."""
    own = weight.of(mask)
    own = own.transpose(0, 1) if weight.transposed else own
    return own.movedim(1, -1).flatten(1)


def live_blocks(matrix: Tensor, height: int, width: int) -> tuple[int, bool]:
    """How many blocks have life in them, and whether each is alive as a whole or not at all."""
    alive, whole = 0, True
    for top in range(0, matrix.shape[0], height):
        for left in range(0, matrix.shape[1], width):
            block = matrix[top : top + height, left : left + width]
            alive += bool(block.any())
            whole &= bool(block.all()) or not bool(block.any())
    return alive, whole


def groups_alive(sparse: SparseModel, weight: Weight) -> int:
    """The count the sparsity is about: blocks, or weights."""
    matrix = folded(sparse.masks[weight.parameter], weight)
    if isinstance(sparse.pattern, Block):
        alive, whole = live_blocks(matrix, sparse.pattern.height, sparse.pattern.width)
        assert whole, f"{weight.name} has half a block"
        return alive
    if isinstance(sparse.pattern, NofM) and sparse.target_sparsity > 0:
        assert int(matrix.view(-1, sparse.pattern.m).sum(1).max()) <= sparse.pattern.n
    return int(matrix.sum())


def groups_in(sparse: SparseModel, weight: Weight) -> int:
    if isinstance(sparse.pattern, Block):
        rows, columns = folded(sparse.masks[weight.parameter], weight).shape
        return math.ceil(rows / sparse.pattern.height) * math.ceil(columns / sparse.pattern.width)
    return weight.numel


def check_counts_are_exact(sparse: SparseModel) -> None:
    """Counts against the sparsity asked for, and weights against masks."""
    alive = {weight.name: groups_alive(sparse, weight) for weight in sparse.weights}
    sizes = {weight.name: groups_in(sparse, weight) for weight in sparse.weights}
    if sparse.allocation == "uniform":
        assert alive == {name: num_kept(sparse.target_sparsity, size) for name, size in sizes.items()}
    else:
        assert sum(alive.values()) == num_kept(sparse.target_sparsity, sum(sizes.values()))
    for name, mask in sparse.masks.items():
        assert torch.equal(sparse.model.get_parameter(name) != 0, mask)
    assert sparse.num_alive == sum(int(mask.sum()) for mask in sparse.masks.values())


# Counts


@pytest.mark.parametrize("sparsity", SPARSITIES)
@pytest.mark.parametrize("allocation", ALLOCATIONS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_number_alive_is_exact(pattern: str, allocation: str, sparsity: float) -> None:
    for ragged in (False, True) if ":" not in pattern else (False,):
        model = zoo(ragged=ragged)
        options = {"allocation": allocation, "pattern": pattern}
        least = {"2:4": 0.5, "1:4": 0.75}.get(pattern, 0)
        if 0 < sparsity < least:
            with pytest.raises(ValueError, match=f"sparsity must be >= .* for pattern {pattern} .*got {sparsity}"):
                make(model, sparsity, **options)
            continue
        sparse = make(model, sparsity, **options)
        prune_quietly(sparse, [None])
        check_counts_are_exact(sparse)


dimension = st.integers(1, 7)
linear_shapes = st.tuples(dimension, dimension)
conv_shapes = st.tuples(dimension, dimension, st.integers(1, 3), st.integers(1, 3), st.booleans())


@given(
    st.lists(linear_shapes, min_size=1, max_size=3),
    st.lists(conv_shapes, max_size=2),
    st.sampled_from(["unstructured", "1x8", "2x4", "4x4", "3x2"]),
    st.sampled_from(["uniform", "global", "erk"]),
    st.floats(0, 0.999),
    st.integers(1, 40),
    st.sampled_from([By.MAGNITUDE, By.RANDOM]),
)
def test_the_number_alive_is_exact_for_any_layers_sparsity_and_chunks(
    linears: list[tuple[int, int]],
    convs: list[tuple[int, int, int, int, bool]],
    pattern: str,
    allocation: str,
    sparsity: float,
    chunk: int,
    by: By,
) -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(a, b) for a, b in linears]
    layers += [(nn.ConvTranspose2d if transposed else nn.Conv2d)(a, b, (h, w)) for a, b, h, w, transposed in convs]
    sparse = make(nn.ModuleList(layers), sparsity, pattern=pattern, allocation=allocation)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setattr(patterns, "chunk_elements", lambda device: chunk)
        warnings.filterwarnings("ignore", "layer.* pruned to zero weights")
        sparse.prune(by=by)
    check_counts_are_exact(sparse)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("by", [By.MAGNITUDE, By.RANDOM])
def test_the_number_alive_is_exact_in_every_float_type(dtype: torch.dtype, by: By) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20)).to(dtype)
    sparse = make(model, 0.9, allocation="global")
    sparse.prune(to=0.5, by=by)
    assert sparse.num_alive == 400
    sparse.prune(by=by)
    assert sparse.num_alive == 80
    sparse.grow(to=0.7)
    assert sparse.num_alive == 240


@pytest.mark.filterwarnings("ignore:layer.* pruned to zero weights")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("by", [By.MAGNITUDE, By.RANDOM])
@pytest.mark.parametrize("pattern", ["unstructured", "1x4", "2:4"])
def test_a_layer_can_lose_all(dtype: torch.dtype, by: By, pattern: str) -> None:
    sparse = make(nn.Linear(4, 2, dtype=dtype), 0.99, pattern=pattern)
    sparse.prune(by=by)
    assert sparse.num_alive == 0
    assert int(sparse.model.weight.count_nonzero()) == 0


def test_weights_of_different_types_are_ranked_together() -> None:
    model = nn.Sequential(
        nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False).double(), nn.Linear(2, 1, bias=False)
    )
    for layer, values in zip(model, ([3.0, -1.0], [2.0, 0.5], [-4.0, 0.25]), strict=True):
        layer.weight.data.copy_(torch.tensor([values]))
    model[2].bfloat16()
    sparse = make(model, 0.5, allocation="global")
    sparse.prune()
    assert [mask.tolist() for mask in sparse.masks.values()] == [[[True, False]], [[True, False]], [[True, False]]]


DEAD = r"^layer 0\.weight was pruned to zero weights"


def test_a_layer_too_small_to_keep_anything_is_warned_of_and_is_all_zero() -> None:
    sparse = make(nn.Sequential(nn.Linear(4, 4), nn.Linear(40, 40)), 0.99)
    with pytest.warns(UserWarning, match=DEAD + ", too small for this sparsity; add it to keep_dense$"):
        sparse.prune()
    assert list(sparse.alive_by_weight().values()) == [0, 16]
    assert int(sparse.model.get_parameter("0.weight").count_nonzero()) == 0


def test_a_layer_that_one_ranking_leaves_nothing_is_told_from_one_that_is_too_small() -> None:
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    model[0].weight.data.mul_(1e-3)
    sparse = make(model, 0.9, allocation="global_no_floor")
    with pytest.warns(UserWarning, match=DEAD + "; add it to keep_dense or use allocation='uniform'$"):
        sparse.prune()
    assert list(sparse.alive_by_weight().values()) == [0, 320]


def test_a_layer_without_live_weights_is_warned_of_once_and_layers_that_follow_too() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    for layer, size in zip(model, (1e-3, 1e-2, 1e-1, 1), strict=True):
        layer.weight.data.uniform_(1, 2).mul_(size)
    sparse = make(model, 0.8, allocation="global_no_floor")
    with pytest.warns(UserWarning) as caught:
        for sparsity in (0.3, 0.4, 0.8, 0.9):
            sparse.prune(to=sparsity)
    assert [str(warning.message) for warning in caught] == [
        "layer 0.weight was pruned to zero weights; add it to keep_dense or use allocation='uniform'",
        "layers 1.weight, 2.weight were pruned to zero weights; add them to keep_dense or use allocation='uniform'",
    ]


# Prune


def test_pruning_keeps_the_largest_magnitudes() -> None:
    sparse = one_layer([[1.0, -4.0, 2.0], [0.5, 3.0, -5.0]])
    sparse.prune()
    assert sparse.model.weight.tolist() == [[0, -4, 0], [0, 3, -5]]
    assert sparse.masks["weight"].tolist() == [[False, True, False], [False, True, True]]


def test_pruning_equal_weights_keeps_the_earlier() -> None:
    sparse = one_layer([[1.0, -1.0, 1.0, 1.0]])
    sparse.prune()
    assert sparse.model.weight.tolist() == [[1, -1, 0, 0]]


def test_a_living_weight_that_is_zero_is_alive_and_ranks_before_the_dead() -> None:
    sparse = one_layer([[1.0, 2.0, 3.0, 4.0]], 0.75)
    sparse.prune(to=0.5)
    with torch.no_grad():
        sparse.model.weight.zero_()
    sparse.prune()
    assert sparse.masks["weight"].tolist() == [[False, False, True, False]]


@pytest.mark.parametrize("to", [0.5, 0])
def test_pruning_to_no_more_than_there_is_changes_nothing(to: float) -> None:
    sparse = one_layer([[1.0, 2.0, 3.0, 4.0]])
    sparse.prune(by=By.RANDOM)
    before = sparse.masks["weight"]
    sparse.prune(to=to)
    assert torch.equal(sparse.masks["weight"], before)


@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_pruning_to_more_than_is_alive_is_an_error(allocation: str) -> None:
    sparse = one_layer([[1.0, 2.0, 3.0, 4.0]], 0.75, allocation=allocation)
    sparse.prune()
    with pytest.raises(ValueError, match=r"cannot prune .* to sparsity 0\.5: .* 2 live .* 1 .*; grow first"):
        sparse.prune(to=0.5)


def test_pruning_a_part_leaves_other_parts_untouched() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    before = model[1].weight.clone()
    sparse = make(model, 0.75)
    sparse.prune(Partition.per_layer(model)[0])
    assert list(sparse.alive_by_weight().values()) == [4, 16, 16]
    assert torch.equal(model[1].weight, before)


def test_global_prune_of_a_part_ranks_the_whole_model() -> None:
    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False))
    model[0].weight.data.copy_(torch.tensor([[4.0, 3.0]]))
    model[1].weight.data.copy_(torch.tensor([[2.0, 1.0]]))
    sparse = make(model, 0.5, allocation="global")
    prune_quietly(sparse, [Partition.per_layer(model)[0]])
    assert list(sparse.alive_by_weight().values()) == [2, 0]


def test_query_key_and_value_are_pruned_apart() -> None:
    attention = nn.MultiheadAttention(4, 2, bias=False)
    with torch.no_grad():
        attention.in_proj_weight[:4] *= 100
    sparse = make(attention, 0.5)
    sparse.prune()
    assert list(sparse.alive_by_weight().values()) == [8, 8, 8, 8]


def test_the_query_matrix_can_stay_dense_and_is_not_counted() -> None:
    sparse = make(nn.MultiheadAttention(4, 2), 0.5, keep_dense=["in_proj_weight[q]"])
    sparse.prune()
    assert sparse.num_prunable == 48
    assert sparse.num_alive == 24
    assert bool(sparse.masks["in_proj_weight"][:4].all())


# Grow


@pytest.mark.parametrize("written", [None, 9.0])
def test_growing_to_dense_lets_all_live_from_exactly_zero(written: float | None) -> None:
    sparse = one_layer([[1.0, -4.0, 2.0, 3.0]])
    sparse.prune()
    if written is not None:  # past the mask, by someone
        sparse.model.weight.data.fill_(written)
    sparse.grow()
    assert sparse.num_alive == 4
    assert sparse.model.weight.tolist() == [[0, written or -4, 0, written or 3]]


def test_growing_to_a_sparsity_keeps_the_living_and_adds_the_exact_count() -> None:
    torch.manual_seed(0)
    sparse = make(nn.Linear(20, 10), 0.9)
    sparse.prune()
    before, weight = sparse.masks["weight"], sparse.model.weight.detach().clone()
    sparse.grow(to=0.6)
    after = sparse.masks["weight"]
    assert int(after.sum()) == 80
    assert bool((after | ~before).all())
    assert torch.equal(sparse.model.weight, weight)


def test_growing_a_part_leaves_other_parts_untouched() -> None:
    for allocation in ("uniform", "global", "erk"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
        sparse = make(model, 0.75, allocation=allocation)
        sparse.prune()
        before = sparse.masks
        sparse.grow(Partition.per_layer(model)[1], to=0.25)
        assert sparse.alive_by_weight()[sparse.weights[1].name] == 48
        assert torch.equal(sparse.masks["0.weight"], before["0.weight"])
        assert torch.equal(sparse.masks["2.weight"], before["2.weight"])


def test_growing_respects_the_pattern() -> None:
    for pattern in ("1x8", "2x2", "2:4"):
        sparse = make(nn.Linear(16, 8), 0.75, pattern=pattern)
        sparse.prune()
        sparse.grow(to=0.5)
        assert groups_alive(sparse, sparse.weights[0]) == num_kept(0.5, groups_in(sparse, sparse.weights[0]))


def test_growing_to_fewer_than_are_alive_is_an_error() -> None:
    sparse = one_layer([[1.0, 2.0, 3.0, 4.0]])
    with pytest.raises(ValueError, match=r"cannot grow weight to sparsity 0\.5: .* 2 live .* 4 .*; prune first"):
        sparse.grow(to=0.5)


def test_edits_apply_in_the_order_given() -> None:
    sparse = one_layer([[1.0, 2.0, 3.0, 4.0]])
    whole = Part("all", ("weight",))
    sparse.apply(prune(whole, to=0.5), grow(whole))
    assert sparse.model.weight.tolist() == [[0, 0, 3, 4]]
    assert sparse.num_alive == 4


# Randomness


def test_a_random_mask_is_the_same_for_the_same_seed_and_another_for_another() -> None:
    def mask(seed: int) -> Tensor:
        torch.manual_seed(seed + 17)  # the global generator has no say
        sparse = make(nn.Linear(20, 20), 0.5, seed=seed)
        sparse.prune(by=By.RANDOM)
        return sparse.masks["weight"]

    assert torch.equal(mask(3), mask(3))
    assert not torch.equal(mask(3), mask(4))


def test_random_masks_differ_from_layer_to_layer_and_from_edit_to_edit() -> None:
    model = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))
    sparse = make(model, 0.5)
    sparse.prune(by=By.RANDOM)
    first = sparse.masks
    assert not torch.equal(first["0.weight"], first["1.weight"])
    sparse.grow()
    sparse.prune(by=By.RANDOM)
    assert not torch.equal(sparse.masks["0.weight"], first["0.weight"])


def test_pruning_draws_nothing_from_the_global_generator() -> None:
    before = torch.get_rng_state()
    sparse = one_layer([[1.0, 2.0, 3.0, 4.0]])
    torch.set_rng_state(before)
    sparse.prune(by=By.RANDOM)
    sparse.grow(to=0.25)
    assert torch.equal(torch.get_rng_state(), before)


# What is prunable, and options


def test_a_weight_of_two_layers_is_pruned_once_and_in_both() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    sparse = make(model, 0.75)
    sparse.prune()
    assert sparse.num_prunable == 16
    assert int(model[1].weight.count_nonzero()) == 4


def test_a_matrix_named_in_include_is_pruned() -> None:
    sparse = make(nn.Sequential(nn.Linear(4, 4), nn.Embedding(2, 2)), 0.5, include=["1.weight"])
    sparse.model.get_parameter("1.weight").data.copy_(torch.tensor([[1.0, -3.0], [0.5, 2.0]]))
    sparse.prune()
    assert sparse.masks["1.weight"].tolist() == [[False, True], [False, True]]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"sparsity": 1.0}, "sparsity must be in .*, got 1.0"),
        ({"sparsity": -0.5}, "sparsity must be in .*, got -0.5"),
        ({"sparsity": 90}, "sparsity must be in .*, got 90"),
        ({"sparsity": "0.9"}, "sparsity must be in .*, got '0.9'"),
        ({"sparsity": None}, "sparsity must be in .*, got None"),
        ({"sparsity": True}, "sparsity must be in .*, got True"),
        ({"sparsity": math.nan}, "sparsity must be in .*, got nan"),
        ({"allocation": "layerwise"}, "allocation must be one of .*, got 'layerwise'"),
        ({"pattern": "8"}, "pattern must be 'unstructured', a block like '1x8', or N:M .*, got '8'"),
        ({"storage": "zip"}, "storage must be one of masked, compact, got 'zip'"),
        ({"pattern": "2:4", "sparsity": 0.4}, "sparsity must be >= 0.5 for pattern 2:4 .*, got 0.4"),
        ({"pattern": "2:3"}, "needs a multiple of 3 inputs, but weight has 4"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        SparseModel(nn.Linear(4, 4), **({"sparsity": 0.5} | options))  # type: ignore[arg-type]


def test_the_mask_of_an_unknown_parameter_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(KeyError, match="'bias' is not a prunable parameter; these are: weight"):
        make(nn.Linear(4, 4), 0.5).masks["bias"]


def test_masks_handed_out_are_copies() -> None:
    sparse = one_layer([[1.0, 2.0, 3.0, 4.0]])
    sparse.masks["weight"].zero_()
    sparse.masks["weight"].zero_()
    assert sparse.num_alive == 4


def test_the_model_keeps_its_names_and_its_class() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    keys, kinds = list(model.state_dict()), [type(module) for module in model.modules()]
    sparse = make(model, 0.5)
    sparse.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    sparse.prune()
    assert list(model.state_dict()) == keys
    assert [type(module) for module in model.modules()] == kinds
    fresh = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    fresh.load_state_dict(model.state_dict())
    x = torch.randn(3, 4)
    assert torch.equal(fresh(x), model(x))


def test_an_edit_that_cannot_be_done_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sparse = SparseModel(model, sparsity=0.5)
    with torch.no_grad():
        model[1].weight[2, 1] = float("nan")
    before = model[0].weight.clone()
    with pytest.raises(ValueError, match=r"^1\.weight has NaN or infinity"):
        sparse.prune()
    assert torch.equal(model[0].weight, before)
    assert sparse.num_alive == 32


@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_a_preview_that_is_refused_leaves_the_model_as_it_was(storage: str) -> None:
    model = nn.Sequential(*(nn.Linear(10, 10) for _ in range(3)))
    sparse = SparseModel(model, sparsity=0.5, storage=storage)
    sparse.prune(Part("last", ("2.weight",)), to=0.9)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(GrowpruneError, match=r"that needs 50 live weights, but 10 are live; grow first"):
        sparse.pruned().__enter__()
    assert list(sparse.alive_by_weight().values()) == [100, 100, 10]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_a_preview_that_fails_on_the_way_is_undone(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Linear(10, 10) for _ in range(3)))
    sparse = SparseModel(model, sparsity=0.5, storage=storage)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def fail(mask: torch.Tensor) -> None:
        raise MemoryError

    monkeypatch.setattr(sparse.stored["2.weight"], "preview", fail)
    with pytest.raises(MemoryError):
        sparse.pruned().__enter__()
    assert list(sparse.alive_by_weight().values()) == [100, 100, 100]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("storage", ["masked", "compact"])
@pytest.mark.parametrize(("allocation", "expected"), [("global", [197, 3]), ("global_no_floor", [200, 0])])
def test_global_leaves_each_layer_three_percent_of_its_uniform_share(
    storage: str, allocation: str, expected: list[int]
) -> None:
    """Uniform leaves 100 of each layer's 1,000 weights. All of the first layer's are larger than the second's."""
    model = nn.Sequential(nn.Linear(50, 20, bias=False), nn.Linear(20, 50, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.arange(1000, 2000).view(20, 50))
        model[1].weight.copy_(torch.arange(1, 1001).view(50, 20) / 1000)
    sparse = make(model, 0.9, allocation=allocation, storage=storage)
    says = "prunes 1.weight to its floor, 3%" if expected[1] else "1.weight was pruned to zero weights"
    with pytest.warns(UserWarning, match=says):
        sparse.prune()
    assert list(sparse.alive_by_weight().values()) == expected
    assert sparse.masks["1.weight"].flatten()[-3:].all() == bool(expected[1])
    sparse.prune(to=0.95)  # 50 and 50, so one is left to the second, and no second warning
    assert list(sparse.alive_by_weight().values()) == ([99, 1] if expected[1] else [100, 0])


def test_the_memory_layout_does_not_matter() -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(8, 8, 3)
    last = nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last)
    last.load_state_dict(model.state_dict())
    for pattern in ("unstructured", "1x8", "2:4"):
        ours, theirs = make(model, 0.9, pattern=pattern), make(last, 0.9, pattern=pattern)
        ours.prune()
        theirs.prune()
        assert torch.equal(ours.masks["weight"], theirs.masks["weight"])


def test_pruning_again_only_takes_from_the_living() -> None:
    sparse = one_layer([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]], 0.75)
    sparse.prune(to=0.5)
    sparse.prune()
    assert sparse.model.weight.tolist() == [[0, 0, 0, 0, 0, 0, 7, 8]]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_pruning_a_diverged_weight_is_an_error_that_names_it(bad: float) -> None:
    sparse = one_layer([[1.0, bad, 3.0, 4.0]])
    with pytest.raises(ValueError, match="weight has NaN or infinity, so it cannot be pruned by rank"):
        sparse.prune()
    assert sparse.num_alive == 4


def test_a_part_with_nothing_to_prune_is_passed_over() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    sparse = make(model, 0.5)
    norm = Part("norm", ("1.weight", "1.bias", "1.running_mean"))
    with pytest.warns(UserWarning, match="norm has nothing to grow"):
        sparse.apply(prune(norm, to=0.5), grow(norm))
    assert sparse.num_alive == 16
