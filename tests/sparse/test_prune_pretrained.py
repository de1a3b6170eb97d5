"""gp.prune_pretrained: exact counts, less error than by magnitude, the model left in order, and what is refused."""

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from stacked import Conv1D, Experts
from torch import Tensor, nn
from torch.nn import functional as F

import growprune as gp
from growprune.sparse import calibration

PATTERNS = ["unstructured", "2:4", "1:4", "1x8", "4x1", "2x4"]
DATA_AWARE = ["sparsegpt", "wanda"]


class Net(nn.Module):
    """A convolution of each kind, a block with attention, an expert layer, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2))
        self.depthwise = nn.Conv2d(8, 8, 2, groups=8)
        self.up = nn.Conv2d(8, 8, 1, groups=2)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True) for _ in range(2)
        )
        self.experts, self.mixed = Experts(is_transposed=True), Conv1D(16, 8)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(self.depthwise(self.stem(x)).relu()).relu()
        x = x.flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        x = self.experts(x[:, :12].reshape(-1, 8)).relu()
        return self.head(self.mixed(x))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def images(count: int = 6) -> Tensor:
    return torch.randn(count, 4, 8, 8, generator=torch.Generator().manual_seed(1))


def alive(sparse: gp.SparseModel) -> dict[str, int]:
    """The number of live groups of each weight."""
    return sparse.editor.num_alive(sparse.weights)


@pytest.mark.parametrize("allocation", ["uniform", "erk"])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("by", DATA_AWARE)
def test_exactly_as_many_weights_live_as_pruning_by_magnitude_leaves(by: str, pattern: str, allocation: str) -> None:
    sparsity = 0.75 if pattern == "1:4" or allocation == "erk" else 0.5
    options: dict[str, Any] = {"sparsity": sparsity, "pattern": pattern, "allocation": allocation}
    if ":" in pattern:
        options["keep_dense"] = ["depthwise", "head"]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*pruned to zero weights")  # a depthwise one is few blocks
        expected = alive(gp.prune_pretrained(net(), by="magnitude", **options))
        sparse = gp.prune_pretrained(net(), [images()], by=by, **options)
    assert alive(sparse) == expected
    assert sparse.is_at_target
    for name, mask in sparse.masks.items():
        values = sparse.model.get_parameter(name)
        assert torch.equal(values != 0, mask)
    again = gp.SparseModel.from_zeros(sparse.model, pattern=pattern, keep_dense=sparse.keep_dense)
    assert again.num_alive == sparse.num_alive  # the zeros keep to the pattern


def correlated(seed: int) -> Tensor:
    """Inputs that depend on each other, some much larger than others, as those of language models."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(24, 48, generator=generator)
    sizes = torch.randn(48, generator=generator).exp()
    return (torch.randn(400, 24, generator=generator) @ mixing + torch.randn(400, 48, generator=generator)) * sizes


def error_after(model: nn.Module, x: Tensor, by: str, **options: Any) -> float:
    model = copy.deepcopy(model)
    with torch.no_grad():
        before = model(x)
        gp.prune_pretrained(model, x.split(100), by=by, keep_dense=[], **options)
        return float((model(x) - before).square().sum() / before.square().sum())


@pytest.mark.parametrize("pattern", ["unstructured", "2:4"])
def test_sparsegpt_reconstructs_better_than_wanda_and_wanda_better_than_magnitude(pattern: str) -> None:
    for seed in range(20):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 16))
        errors = [error_after(model, correlated(seed), by, pattern=pattern) for by in (*DATA_AWARE, "magnitude")]
        assert errors == sorted(errors), seed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("by", DATA_AWARE)
def test_the_batch_size_of_the_calibration_does_not_matter(by: str, dtype: torch.dtype) -> None:
    found = []
    for size in (1, 2, 4):
        model = net().to(dtype)
        model.experts = nn.Identity()  # which goes by the place of a token in its batch
        batches = images(8).to(dtype).split(size)
        found.append((gp.prune_pretrained(model, batches, by=by).masks, model.state_dict()))
    for masks, state in found[1:]:
        assert all(torch.equal(mask, found[0][0][name]) for name, mask in masks.items())
        for name, tensor in state.items():
            torch.testing.assert_close(tensor, found[0][1][name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("by", DATA_AWARE)
def test_the_same_call_gives_the_same_bits(by: str) -> None:
    one, two = net(), net()
    gp.prune_pretrained(one, [images()], by=by)
    gp.prune_pretrained(two, (batch for batch in [images()]), by=by)
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))


# Layers stored otherwise


@pytest.mark.parametrize("pattern", ["unstructured", "2:4", "1x8"])
@pytest.mark.parametrize("by", DATA_AWARE)
def test_a_convolution_is_pruned_like_the_linear_layer_on_its_patches(by: str, pattern: str) -> None:
    torch.manual_seed(0)
    convolution, x = nn.Conv2d(8, 6, 3, stride=2, padding=1, bias=False).double(), torch.randn(4, 8, 7, 7).double()
    linear = nn.Linear(72, 6, bias=False).double()
    linear.weight.data = convolution.weight.detach().permute(0, 2, 3, 1).reshape(6, 72).clone()
    patches = F.unfold(x, 3, stride=2, padding=1).unflatten(1, (8, 9)).permute(0, 3, 2, 1).reshape(-1, 72)
    gp.prune_pretrained(convolution, [x], by=by, pattern=pattern)
    gp.prune_pretrained(linear, [patches], by=by, pattern=pattern)
    torch.testing.assert_close(convolution.weight.permute(0, 2, 3, 1).reshape(6, 72), linear.weight)


@pytest.mark.parametrize("pattern", ["unstructured", "2:4", "4x1"])
@pytest.mark.parametrize("by", DATA_AWARE)
def test_a_layer_stored_transposed_is_pruned_like_a_linear_one(by: str, pattern: str) -> None:
    torch.manual_seed(0)
    transposed, linear, x = Conv1D(8, 16).double(), nn.Linear(16, 8, bias=False).double(), torch.randn(40, 16).double()
    linear.weight.data = transposed.weight.detach().T.clone()
    for layer in (transposed, linear):
        gp.prune_pretrained(layer, [x], by=by, pattern=pattern)
    torch.testing.assert_close(transposed.weight.T, linear.weight)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_an_expert_is_pruned_by_its_own_tokens(is_transposed: bool) -> None:
    torch.manual_seed(0)
    experts, x = Experts(is_transposed=is_transposed), torch.randn(30, 8)
    before = experts.up.detach().clone()
    gp.prune_pretrained(experts, [x], keep_dense=["down"])
    for i, rows in enumerate(x.chunk(3)):
        layer = nn.Linear(8, 12, bias=False)
        layer.weight.data = before[i].T.clone() if is_transposed else before[i].clone()
        gp.prune_pretrained(layer, [rows])
        torch.testing.assert_close(experts.up[i].T if is_transposed else experts.up[i], layer.weight)


def test_a_block_sees_what_the_pruned_blocks_before_it_give() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(50, 8)
    second = copy.deepcopy(model[2])
    gp.prune_pretrained(model, [x], keep_dense=[])
    gp.prune_pretrained(second, [model[1](model[0](x)).detach()])
    assert torch.equal(second.weight, model[2].weight)


def test_blocks_are_pruned_in_the_order_in_which_they_compute() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.first = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).relu())

    torch.manual_seed(0)
    model, x = Backwards(), torch.randn(50, 8)
    last = copy.deepcopy(model.last)
    gp.prune_pretrained(model, [x], keep_dense=[])
    gp.prune_pretrained(last, [model.first(x).relu().detach()])
    assert torch.equal(last.weight, model.last.weight)


def test_a_pass_ends_where_its_block_does_unless_the_block_computes_again() -> None:
    calls: list[str] = []
    layers = nn.ModuleDict({name: nn.Linear(4, 4) for name in "abc"})
    for name, layer in layers.items():
        layer.register_forward_hook(lambda *_, name=name: calls.append(name))

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        for name in "abac":
            x = layers[name](x)
        return x

    gp.prune_pretrained(layers, [torch.randn(9, 4)], forward=forward, keep_dense=[])
    assert calls == [*"abac", *"aba", *"aba", *"abac"]  # to find the order; for a, b and c


# What is given, and what is left


class Fancy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, scale: float = 1.0, labels: Tensor | None = None) -> Tensor:
        return self.head(self.layer(x * scale))


@pytest.mark.parametrize("kind", ["tensor", "tuple", "list", "dict", "forward"])
def test_batches_are_tensors_or_positional_or_keyword_arguments(kind: str) -> None:
    x, model, expected = torch.randn(20, 4), Fancy(), Fancy()
    expected.load_state_dict(model.state_dict())
    batch: Any = {"tensor": x, "tuple": (x, 1.0), "list": [x], "forward": (x, "label")}.get(kind)
    batch = {"x": x, "labels": torch.zeros(20)} if kind == "dict" else batch
    forward = (lambda model, batch: model(batch[0])) if kind == "forward" else None
    gp.prune_pretrained(model, [batch], forward=forward)
    gp.prune_pretrained(expected.layer, [x])
    assert torch.equal(model.layer.weight, expected.layer.weight)


def test_the_output_stays_dense_unless_asked_otherwise() -> None:
    assert list(gp.prune_pretrained(Fancy(), [torch.randn(20, 4)]).masks) == ["layer.weight"]
    assert len(gp.prune_pretrained(Fancy(), [torch.randn(20, 4)], keep_dense=[]).masks) == 2


def test_mode_random_numbers_and_settings_are_as_before() -> None:
    model, x = net(), images()
    model.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    torch.set_float32_matmul_precision("high")
    try:
        gp.prune_pretrained(model, [x], forward=lambda model, x: model(x + 1e-3 * torch.rand(1)))
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(torch.rand(3), expected)
    assert [module.training for module in model.modules()] == modes
    assert torch.backends.mha.get_fastpath_enabled()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("by", DATA_AWARE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_pruned_as_in_full(by: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    half, x = nn.Linear(32, 16).to(dtype), torch.randn(100, 32).to(dtype)
    full = copy.deepcopy(half).float()
    gp.prune_pretrained(half, [x], by=by)
    gp.prune_pretrained(full, [x.float()], by=by)
    assert torch.equal(half.weight, full.weight.to(dtype))


def test_autocast_keeps_no_copy_of_a_weight_as_it_was() -> None:
    model, x = nn.Linear(16, 16), torch.randn(40, 16)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        before = model(x)  # which caches a copy of the weight
        gp.prune_pretrained(model, [x], sparsity=0.9)
        after = model(x)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert torch.equal(model(x), after)
    assert not torch.equal(before, after)


@pytest.mark.parametrize("by", DATA_AWARE)
def test_both_storages_hold_the_same(by: str) -> None:
    masked = gp.prune_pretrained(net(), [images()], by=by)
    compact = gp.prune_pretrained(net(), [images()], by=by, storage="compact")
    assert all(torch.equal(mask, compact.masks[name]) for name, mask in masked.masks.items())
    compact.to_dense_()
    for name, tensor in masked.model.state_dict().items():
        torch.testing.assert_close(compact.model.state_dict()[name], tensor)


def test_wanda_ranks_each_row_on_its_own() -> None:
    layer = nn.Linear(4, 2, bias=False)
    layer.weight.data = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    by_row = gp.prune_pretrained(layer, [torch.eye(4)], by="wanda")
    assert by_row.masks["weight"].int().tolist() == [[0, 0, 1, 1], [0, 0, 1, 1]]


# What is refused, in one line, and what is left if it stops half-way


def chain(depth: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(depth)))


def inputs(count: int = 20) -> Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(1))


def refused(model: nn.Module, batches: Any, match: str, **options: Any) -> None:
    """The call is refused in one line, and the model is as it was."""
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(gp.GrowpruneError, match=match) as caught:
        gp.prune_pretrained(model, batches, **options)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items() if not tensor.is_meta)
    assert all(module.training for module in model.modules())


def test_calibration_from_an_exhausted_generator_is_refused() -> None:
    batches = (batch for batch in [inputs()])
    gp.prune_pretrained(chain(), batches)
    refused(
        chain(), batches, "calibration must have .*A generator can be read only once: create it again, or pass a list"
    )


@pytest.mark.parametrize(
    ("batches", "match"),
    [
        ([], "calibration must have at least one batch, got none"),
        *(
            (given, rf"calibration must be an iterable of batches, such as \[batch\], got {what}")
            for given, what in ((inputs(), "one batch"), ({"x": inputs()}, "one batch"), (None, "None"), (3, "3"))
        ),
        (
            [inputs(), (inputs(), torch.zeros(20))],
            "cannot compute batch 1 .*, a tuple .*pass forward=lambda model, batch",
        ),
    ],
)
def test_calibration_that_is_not_an_iterable_of_batches_is_refused(batches: Any, match: str) -> None:
    refused(chain(), batches, match)


def test_endless_calibration_is_refused_at_the_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless() -> Iterator[Tensor]:
        while True:
            yield torch.empty(1 << 28)  # memory that nobody writes to

    monkeypatch.setattr(calibration, "LIMIT", 1 << 30)
    refused(chain(), endless(), "more than 1 GiB in 2 batches.*islice")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_activations_that_are_not_finite_name_the_layer_and_the_batch(bad: float) -> None:
    class Spoiled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.where(x.abs() > 50, bad, x)

    model = nn.Sequential(nn.Linear(8, 8), Spoiled(), nn.Linear(8, 8))
    refused(model, [inputs(), 1e4 * inputs()], r"the input of 2.weight has NaN or infinity in batch 1", keep_dense=[])


def test_pruning_weights_that_are_not_finite_is_refused() -> None:
    model = chain()
    model[1].weight.data[0, 0] = float("inf")
    refused(model, [inputs()], "1.weight has NaN or infinity")


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.used(x))


def test_layers_that_are_not_reached_are_named_or_pruned_by_magnitude_if_asked() -> None:
    refused(Branching(), [inputs()], "no calibration input reaches unused.weight: pass batches that do")
    model = Branching()
    expected = gp.prune_pretrained(copy.deepcopy(model.unused), by="magnitude").masks["weight"]
    sparse = gp.prune_pretrained(model, [inputs()], unreached="magnitude")
    assert torch.equal(sparse.masks["unused.weight"], expected)
    assert sparse.is_at_target


def test_a_layer_that_is_no_longer_reached_is_said_to_go_by_magnitude() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.rare = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
            self.gate.weight.data = torch.full((8, 8), 0.1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.gate(x)
            return self.rare(x) if bool((x > 0.79).any()) else x  # 0.8 while dense

    with pytest.warns(UserWarning, match="rare.weight had no input after earlier layers were pruned"):
        sparse = gp.prune_pretrained(Routed(), [torch.ones(1, 8)], by="wanda", keep_dense=[])
    assert sparse.is_at_target


def test_pruning_a_model_on_the_meta_device_is_refused() -> None:
    with torch.device("meta"):
        model = chain()
    refused(model, [inputs()], "0.weight is on the meta device and has no values: load the model first")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"by": "obs"}, "by must be one of sparsegpt, wanda, magnitude, got 'obs'"),
        ({"unreached": "skip"}, "unreached must be one of error, magnitude, got 'skip'"),
        ({"allocation": "global"}, "allocation='global' ranks all layers together, but by='sparsegpt'"),
        ({"allocation": "fair"}, "allocation must be one of uniform, erk, global, global_no_floor, got 'fair'"),
        ({"sparsity": 50}, "sparsity"),
        ({"pattern": "2:4", "sparsity": 0.3}, "sparsity must be >= 0.5 for pattern 2:4 .*, got 0.3"),
        ({"keep_dense": ["nothing"]}, "keep_dense has 'nothing', which matches no parameter"),
    ],
)
def test_invalid_prune_pretrained_settings_are_refused(options: dict[str, Any], match: str) -> None:
    refused(chain(), [inputs()], match, **options)


def test_a_hessian_that_cannot_be_inverted_is_dampened_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = torch.linalg.cholesky_ex, []

    def failing_at_first(matrix: Tensor) -> Any:
        lower, info = real(matrix)
        calls.append(matrix)
        return lower, info + (len(calls) % 2)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", failing_at_first)
    with pytest.warns(UserWarning, match="Hessian of 0.weight, 1.weight .*dampened by 10%") as seen:
        assert gp.prune_pretrained(chain(), [inputs()]).is_at_target
    assert len(seen) == 1


class FailsLater(nn.Module):
    """Raises as soon as the layer before it is pruned."""

    def __init__(self, error: BaseException, before: nn.Linear) -> None:
        super().__init__()
        self.error, self.before = error, [before]

    def forward(self, x: Tensor) -> Tensor:
        if bool((self.before[0].weight == 0).any()):
            raise self.error
        return x


def half_way(error: BaseException) -> nn.Sequential:
    first, second, third = chain()
    return nn.Sequential(first, FailsLater(error, first), second, third)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA"), KeyboardInterrupt()])
def test_an_error_of_the_model_is_passed_on_with_a_note_of_what_is_done(error: BaseException) -> None:
    model = half_way(error)
    state = torch.get_rng_state()
    with pytest.raises(type(error)) as caught:
        gp.prune_pretrained(model, [inputs()], keep_dense=[])
    assert caught.value.__notes__ == [
        "growprune: 1 of 3 weights are already pruned, up to 0.weight: load the model again before you prune it again"
    ]
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.backends.mha.get_fastpath_enabled()
    model[1] = nn.Identity()
    model(inputs()).sum().backward()  # nothing watches any more


def test_the_groups_of_a_convolution_are_pruned_like_convolutions_of_their_own() -> None:
    torch.manual_seed(0)
    whole, x = nn.Conv2d(8, 8, 3, groups=2, bias=False).double(), torch.randn(4, 8, 6, 6).double()
    halves = [nn.Conv2d(4, 4, 3, bias=False).double() for _ in range(2)]
    for half, weight in zip(halves, whole.weight.detach().chunk(2), strict=True):
        half.weight.data = weight.clone()
        gp.prune_pretrained(half, [x[:, :4] if half is halves[0] else x[:, 4:]], pattern="1:2")
    gp.prune_pretrained(whole, [x], pattern="1:2")  # which ranks no two rows together
    torch.testing.assert_close(whole.weight, torch.cat([half.weight for half in halves]))


def test_both_heads_stay_dense() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classes, self.body, self.boxes = nn.Linear(8, 2), nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"classes": self.classes(self.body(x)), "boxes": self.boxes(self.body(x))}

    sparse = gp.prune_pretrained(TwoHeads(), [torch.randn(16, 8)], by="wanda")
    assert [weight.name for weight in sparse.weights] == ["body.weight"]
