"""Compact storage computes what masked storage computes, and holds only what lives."""

import copy
import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_cases import ForkCursor
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as activation_checkpoint
from toy import continuing, cyclic, parallel

import growprune as gp
import growprune.sparse.init
from growprune import engine
from growprune.masks.partition import Partition
from growprune.methods import cyclic_gap, parallel_gap
from growprune.plan import By
from growprune.sparse.init import reset
from growprune.sparse.model import SparseModel
from growprune.storage.compact import layouts_of

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(8, 16), (3, 8)),
    "linear without bias, 3-D input": (lambda: nn.Linear(8, 16, bias=False), (2, 3, 8)),
    "conv1d": (lambda: nn.Conv1d(8, 16, 3, padding=1, stride=2), (2, 8, 9)),
    "conv2d same": (lambda: nn.Conv2d(8, 16, (3, 2), padding="same", dilation=2), (2, 8, 6, 5)),
    "conv2d grouped": (lambda: nn.Conv2d(16, 8, 3, groups=2), (2, 16, 6, 5)),
    "conv2d reflecting": (lambda: nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect"), (2, 8, 6, 5)),
    "conv2d, no batch": (lambda: nn.Conv2d(8, 8, 3), (8, 6, 5)),
    "conv3d": (lambda: nn.Conv3d(8, 4, 2), (1, 8, 3, 4, 3)),
    "transposed1d": (lambda: nn.ConvTranspose1d(8, 16, 3, stride=2, output_padding=1), (2, 8, 5)),
    "transposed2d grouped": (lambda: nn.ConvTranspose2d(16, 8, 2, stride=2, groups=2), (2, 16, 3, 4)),
    "transposed3d": (lambda: nn.ConvTranspose3d(8, 4, 2), (1, 8, 2, 3, 2)),
}


class Attending(nn.Module):
    """A convolution, an attention and linear layers: every way a weight is used."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.fc = nn.Linear(8, 16)
        self.head = nn.Linear(16, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(torch.relu(self.norm(self.conv(x)))).flatten(2).transpose(1, 2).contiguous()
        x = (x + self.attention(x, x, x)[0]).contiguous()
        return self.head(torch.relu(self.fc(x))).mean(1)


def pair(make: Callable[[], nn.Module], dtype: torch.dtype, **settings: Any) -> tuple[SparseModel, SparseModel]:
    """The same layer, masked and compact."""
    torch.manual_seed(0)
    layer = make().to(dtype)
    made = []
    for storage in ("masked", "compact"):
        sparse = SparseModel(copy.deepcopy(layer), sparsity=0.75, storage=storage, **settings)
        sparse.prune()
        sparse.attach(torch.optim.SGD(sparse.model.parameters(), lr=0.1))
        made.append(sparse)
    return made[0], made[1]


def live_gradients(sparse: SparseModel) -> dict[str, Tensor]:
    gradients = {}
    for name, parameter in sparse.model.named_parameters():
        dense = name in sparse.masks and parameter.grad.dim() > 1
        gradients[name] = parameter.grad[sparse.masks[name]] if dense else parameter.grad
    return gradients


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_computes_the_same_bits_forward_and_backward(name: str) -> None:
    make, shape = LAYERS[name]
    masked, compact = pair(make, torch.float32)
    results = []
    for sparse in (masked, compact):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = sparse.model(x)
        (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
        results.append((y, x.grad, live_gradients(sparse)))
    (y1, x1, g1), (y2, x2, g2) = results
    assert torch.equal(y1, y2)
    assert torch.equal(x1, x2)
    assert all(torch.equal(g1[n], g2[n]) for n in g1)
    assert sum(p.numel() for p in compact.model.parameters()) < sum(p.numel() for p in masked.model.parameters())


@pytest.mark.parametrize(
    ("layer", "inputs"),
    [
        (nn.Linear(8, 16), [torch.ones(3, 8)]),
        (nn.Conv2d(4, 8, 3), [torch.ones(2, 4, 5, 5)]),
        (nn.Bilinear(8, 8, 4), [torch.ones(3, 8)] * 2),  # reads its weight as an attribute
    ],
    ids=["linear", "convolution", "attribute"],
)
def test_second_derivatives_are_refused(layer: nn.Module, inputs: list[Tensor]) -> None:
    sparse = SparseModel(copy.deepcopy(layer), sparsity=0.5, storage="compact")
    sparse.prune()
    with pytest.raises(RuntimeError, match="compact storage has no second derivatives"):
        loss = sparse.model(*inputs).square().sum()
        torch.autograd.grad(loss, list(sparse.model.parameters()), create_graph=True)


def train(storage: str, pattern: str, allocation: str, method: Any, is_restart: bool, optimizer: Any) -> SparseModel:
    torch.manual_seed(0)
    model = Attending()
    sparse = SparseModel(model, sparsity=0.75, allocation=allocation, pattern=pattern, storage=storage)
    plan = method(Partition.contiguous(model, 3), sparsity=0.75, steps=3, epochs=2, finetune=2)
    running = None
    for phase in ForkCursor(sparse, plan):
        if running is None or is_restart:
            running = sparse.attach(optimizer(model.parameters()))
        for _ in range(phase.epochs):
            x, y = torch.randn(4, 3, 6, 6), torch.randint(10, (4,))
            running.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            running.step()
    return sparse


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("pattern", "allocation", "method", "is_restart", "optimizer"),
    [  # of all 32, eight in which any two settings meet
        ("unstructured", "uniform", cyclic_gap, True, adamw),
        ("unstructured", "uniform", parallel_gap, False, sgd),
        ("unstructured", "global", cyclic_gap, True, sgd),
        ("unstructured", "global", parallel_gap, False, adamw),
        ("1x8", "erk", cyclic_gap, False, adamw),
        ("1x8", "erk", parallel_gap, True, sgd),
        ("2x2", "global", cyclic_gap, False, sgd),
        ("2x2", "global", parallel_gap, True, adamw),
    ],
)
@pytest.mark.filterwarnings("ignore:layer.* pruned to zero weights")
def test_a_whole_run_gives_the_bits_of_masked_storage(
    pattern: str, allocation: str, method: Any, is_restart: bool, optimizer: Any
) -> None:
    masked, compact = (train(s, pattern, allocation, method, is_restart, optimizer) for s in ("masked", "compact"))
    expected, found = masked.model.state_dict(), compact.model.state_dict()
    assert list(expected) == list(found)
    for name in expected:
        assert torch.equal(expected[name], found[name]), name


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_resume_is_bit_exact_with_blocks_in_1x1_convolutions(memory_format: torch.memory_format) -> None:
    def begin() -> tuple[nn.Module, Any, gp.Sparsifier]:
        torch.manual_seed(1)
        convolutions = nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 1)
        model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(256, 4)).to(memory_format=memory_format)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        settings: dict[str, Any] = {"sparsity": 0.7, "iterations": 20, "storage": "compact", "pattern": "1x8"}
        return model, optimizer, gp.sparsify(model, optimizer, "cyclic_gap", **settings)

    def train(model: nn.Module, optimizer: Any, iterations: range) -> None:
        for iteration in iterations:
            x = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(iteration))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    for cut in range(0, 20, 2):
        whole, optimizer, sparsifier = begin()
        train(whole, optimizer, range(cut))
        resumed, other_optimizer, other = begin()
        other.load_state_dict(sparsifier.state_dict())
        train(whole, optimizer, range(cut, 20))
        train(resumed, other_optimizer, range(cut, 20))
        for (name, tensor), found in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
            assert torch.equal(tensor, found), (cut, name)


def test_dense_weights_keep_the_strides_of_the_model() -> None:
    convolution = nn.Conv2d(16, 16, 1)
    sparse = SparseModel(convolution, sparsity=0.5, storage="compact", pattern="1x8")
    sparse.prune()
    assert layouts_of(convolution)["weight"].expand(convolution._parameters["weight"]).stride() == (16, 1, 1, 1)
    sparse.grow()
    assert convolution.weight.stride() == (16, 1, 1, 1)
    convolution = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
    sparse = SparseModel(convolution, sparsity=0.5, storage="compact")
    sparse.prune()
    sparse.grow()
    assert convolution.weight.stride() == (36, 1, 12, 4)


def test_only_what_lives_is_held_and_a_grown_part_is_a_plain_parameter() -> None:
    model = nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 10))
    sparse = SparseModel(model, sparsity=0.9, storage="compact")
    sparse.prune(by=By.RANDOM)
    assert [tuple(p.shape) for p in model.parameters()] == [(200,), (50,), (50,), (10,)]
    assert layouts_of(model[0])["weight"].bits.numel() == 2 * 128  # 2,000 bits, in whole blocks of 1,024
    first = Partition.of(model, [["0"], ["1"]])[0]
    sparse.grow(first)
    assert model[0].weight.shape == (50, 40)
    assert model[0].weight is model[0]._parameters["weight"]
    assert torch.count_nonzero(model[0].weight) == 200
    assert model[1]._parameters["weight"].shape == (50,)
    assert not list(model.buffers())


def test_a_block_pattern_takes_one_bit_a_block() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.Conv2d(64, 16, 3), nn.ConvTranspose2d(16, 64, 2))
    sparse = SparseModel(model, sparsity=0.5, pattern="1x8", storage="compact")
    sparse.prune()
    assert [layouts_of(layer)["weight"].group for layer in model] == [8, 8, 1]
    assert layouts_of(model[0])["weight"].bits.numel() * 8 == 64 * 128 // 8


def test_optimizer_state_follows_a_weight_through_growing_and_pruning() -> None:
    model = nn.Linear(4, 4, bias=False)
    sparse = SparseModel(model, sparsity=0.5, storage="compact")
    sparse.prune()
    optimizer = sparse.attach(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    alive = sparse.masks["weight"]
    sparse.grow()
    (parameter,) = optimizer.param_groups[0]["params"]
    assert parameter is model.weight
    momentum = optimizer.state[parameter]["momentum_buffer"]
    assert momentum.shape == (4, 4)
    assert torch.equal(momentum != 0, alive)
    assert len(optimizer.state) == 1


def test_the_state_dict_is_plain_and_dense_both_ways() -> None:
    _, compact = pair(Attending, torch.float32)
    plain = Attending()
    plain.load_state_dict(compact.model.state_dict())
    x = torch.randn(2, 3, 6, 6)
    assert torch.equal(plain.eval()(x), compact.model.eval()(x))
    with torch.no_grad():
        plain.fc.weight.mul_(2)
    compact.model.load_state_dict(plain.state_dict())
    assert torch.equal(plain(x), compact.model(x))


def test_copies_and_moving_averages_are_compact_and_independent() -> None:
    _, compact = pair(lambda: nn.Linear(8, 16), torch.float32)
    clone = copy.deepcopy(compact.model)
    average = AveragedModel(compact.model)
    with torch.no_grad():
        compact.model._parameters["weight"].zero_()
    average.update_parameters(compact.model)
    assert torch.count_nonzero(clone.state_dict()["weight"]) == 32
    assert sum(p.numel() for p in average.parameters()) == 32 + 16
    other = copy.deepcopy(compact)
    other.grow()
    assert compact.num_alive == 32
    assert other.num_alive == 128


def test_autocast_computes_in_its_dtype_and_gives_full_precision_gradients() -> None:
    masked, compact = pair(lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.float32)
    outputs = []
    for sparse in (masked, compact):
        with torch.autocast("cpu", torch.bfloat16):
            outputs.append(sparse.model(torch.ones(2, 8)))
        outputs[-1].float().sum().backward()
    assert outputs[1].dtype == torch.bfloat16
    assert torch.equal(*outputs)
    for name, gradient in live_gradients(compact).items():
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, live_gradients(masked)[name])


def test_the_dense_weight_is_not_kept_for_the_backward_pass() -> None:
    sizes: list[int] = []
    for sparse in pair(lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.float32):
        kept: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, k=kept: (k.append(t.numel()), t)[1], lambda t: t):
            sparse.model(torch.randn(2, 64, requires_grad=True))
        sizes.append(max(kept))
    assert sizes == [64 * 64, 64 * 64 // 4]


def test_activation_checkpointing_gives_the_same_gradients() -> None:
    _, compact = pair(lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.float32)
    x = torch.randn(2, 8)
    compact.model(x).sum().backward()
    expected = {name: gradient.clone() for name, gradient in live_gradients(compact).items()}
    compact.model.zero_grad()
    activation_checkpoint(compact.model, x, use_reentrant=False).sum().backward()
    assert all(torch.equal(gradient, expected[name]) for name, gradient in live_gradients(compact).items())


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def test_no_product_is_computed_that_nobody_needs() -> None:
    """Two forward, three backward (the data wants no gradient)."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    SparseModel(model, sparsity=0.5, storage="compact").prune()
    x = torch.randn(4, 8)
    with Products() as products:
        model(x).sum().backward()
    assert products.count == 2 + 3


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile does that itself
def test_compile_takes_the_whole_graph() -> None:
    _, compact = pair(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(128, 4)), torch.float32)
    x = torch.randn(2, 3, 6, 6)
    expected = compact.model(x)
    counter = CompileCounterWithBackend("aot_eager")
    y = torch.compile(compact.model, backend=counter, fullgraph=True)(x)
    assert torch.equal(y, expected)
    y.sum().backward()
    compiled = {name: gradient.clone() for name, gradient in live_gradients(compact).items()}
    compact.model.zero_grad()
    expected.sum().backward()
    assert counter.frame_count == 1
    assert all(torch.equal(gradient, compiled[name]) for name, gradient in live_gradients(compact).items())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_model_is_compiled_once_for_each_part_that_is_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 3)  # fewer than there are parts
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    sparse = SparseModel(model, sparsity=0.5, storage="compact")
    sparse.prune()
    S = Partition.contiguous(model, 4)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter)
    counts = []
    for _ in range(2):
        compiled(torch.ones(2, 4)).sum().backward()
        for part in S:
            sparse.grow(part)
            y = compiled(torch.ones(2, 4))
            y.sum().backward()
            counts.append(counter.frame_count)
            assert torch.equal(y, model(torch.ones(2, 4)))
            sparse.prune(part)
    assert counts == [2, 3, 4, 5] + [5] * 4


@pytest.mark.parametrize(
    "recipe", [continuing(cyclic()), cyclic(), parallel()], ids=["continue", "restart", "parallel"]
)
def test_a_run_may_change_its_storage_at_any_checkpoint(recipe: Any, tmp_path: Path) -> None:
    engine.train(recipe, tmp_path / "masked")
    storages, folder, lives = ("masked", "compact"), tmp_path / "switching", 0
    while not (folder / "result.json").exists():
        current = replace(recipe, storage=storages[lives % 2])
        go_on = engine.resume if (folder / "recipe.json").exists() else engine.train
        countdown = iter([False] * 3)
        try:
            go_on(current, folder, should_stop=lambda it=countdown: next(it, True))
        except engine.Interrupted:
            lives += 1
    assert lives > 5
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("masked", "switching")]
    assert files[0] == files[1]


def test_a_file_does_not_tell_how_a_model_was_held_and_loads_either_way(tmp_path: Path) -> None:
    masked, compact = pair(Attending, torch.float32)
    for name, sparse in (("masked", masked), ("compact", compact)):
        gp.save(sparse, tmp_path / name)
    assert (tmp_path / "masked").read_bytes() == (tmp_path / "compact").read_bytes()
    model = Attending()
    loaded = gp.load(tmp_path / "masked", model, storage="compact")
    assert loaded.num_alive == masked.num_alive
    assert model._parameters.keys() == {}.keys()
    assert model.fc._parameters["weight"].dim() == 1
    assert torch.equal(model.state_dict()["fc.weight"], masked.model.fc.weight)


def test_flops_and_report_are_those_of_masked_storage() -> None:
    masked, compact = pair(Attending, torch.float32)
    example = torch.zeros(1, 3, 6, 6)
    expected, found = masked.summary(example).to_dict(), compact.summary(example).to_dict()
    assert found["rows"] == expected["rows"]
    assert found["totals"] == expected["totals"]


@pytest.mark.parametrize("allocation", ["uniform", "global", "erk"])
@pytest.mark.filterwarnings("ignore:layer.* pruned to zero weights")
def test_a_model_built_sparse_is_the_model_built_dense_and_pruned_at_random(allocation: str) -> None:
    torch.manual_seed(0)
    built = gp.sparse_init(Attending, sparsity=0.75, allocation=allocation, seed=3)
    torch.manual_seed(0)
    expected = SparseModel(Attending(), sparsity=0.75, allocation=allocation, seed=3)
    expected.prune(by=By.RANDOM)
    assert built.num_alive == expected.num_alive
    assert built.editor.num_edits == expected.editor.num_edits == 1
    for name, tensor in expected.model.state_dict().items():
        assert torch.equal(built.model.state_dict()[name], tensor), name
    plan = cyclic_gap(Partition.contiguous(built.model, 2), sparsity=0.75, steps=2, epochs=1, finetune=1)
    assert [phase.epochs for phase in ForkCursor(built, plan)] == [0, 1, 1, 1]


def test_building_sparse_never_holds_two_dense_layers() -> None:
    dense: list[int] = []

    def count(module: nn.Module) -> None:
        reset(module)
        gc.collect()
        tensors = [t for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter) and t.device.type == "cpu"]
        dense.append(sum(tuple(t.shape) == (317, 211) for t in tensors))

    sparse = gp.sparse_init(
        lambda: nn.Sequential(*(nn.Linear(211, 317) for _ in range(4))), sparsity=0.9, initialise=count
    )
    assert dense == [1, 1, 1, 1]
    assert sparse.num_alive == 4 * 6689


def test_building_sparse_keeps_ties_and_refuses_what_it_cannot_initialise() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.fc, self.out = nn.Embedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 10, bias=False)
            self.out.weight = self.embed.weight

    model = gp.sparse_init(Tied, sparsity=0.5).model
    assert model.out.weight is model.embed.weight

    class Token(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.fc = nn.Parameter(torch.zeros(4)), nn.Linear(4, 4)

    with pytest.raises(ValueError, match="Token has token but no reset_parameters"):
        gp.sparse_init(Token, sparsity=0.5)


def test_what_compact_storage_cannot_hold_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match=r"does not support 0\.weight, which is tied to 1\.weight"):
        SparseModel(model, sparsity=0.5, storage="compact")
    complex_model = nn.Linear(4, 4, dtype=torch.complex64)
    with pytest.raises(ValueError, match=r"does not support weight, which has dtype torch\.complex64"):
        SparseModel(complex_model, sparsity=0.5, storage="compact")


def recorded(sparse: SparseModel, run: Callable[[nn.Module], Tensor]) -> dict[str, list[Tensor]]:
    """The dense gradients of each weight in one backward pass."""
    found: dict[str, list[Tensor]] = {name: [] for name in sparse.masks}
    for name, sparse_parameter in sparse.stored.items():
        sparse_parameter.record = lambda gradient, name=name: found[name].append(gradient.clone())  # type: ignore[misc]
    sparse.model.zero_grad()
    run(sparse.model).backward()
    return found


@pytest.mark.parametrize("name", LAYERS)
def test_both_storages_record_the_same_dense_gradients(name: str) -> None:
    make, shape = LAYERS[name]
    masked, compact = pair(make, torch.float32)
    x = torch.randn(shape)
    for sparse in (masked, compact):
        sparse.attach(torch.optim.SGD(sparse.model.parameters(), 0.1))

    def run(model: nn.Module) -> Tensor:
        return model(x).square().sum()

    for is_grown in (False, True):
        if is_grown:
            masked.grow()
            compact.grow()
        expected = make()
        expected.load_state_dict(masked.model.state_dict())
        run(expected).backward()
        for sparse in (masked, compact):
            (gradient,) = recorded(sparse, run)["weight"]
            assert torch.equal(gradient, expected.weight.grad)


def test_a_weight_that_is_read_as_an_attribute_records_its_dense_gradient() -> None:
    masked, compact = pair(Attending, torch.float32)
    x = torch.randn(2, 3, 4, 4)
    for sparse in (masked, compact):
        sparse.attach(torch.optim.SGD(sparse.model.parameters(), 0.1))
    found, other = (recorded(sparse, lambda model: model(x).square().sum()) for sparse in (masked, compact))
    assert {name: len(gradients) for name, gradients in found.items()} == dict.fromkeys(masked.masks, 1)
    for name, (gradient,) in found.items():
        assert torch.equal(gradient, other[name][0])
        assert gradient[~masked.masks[name]].any()


def test_a_copy_records_nothing() -> None:
    for sparse in pair(lambda: nn.Linear(8, 16), torch.float32):
        sparse.attach(torch.optim.SGD(sparse.model.parameters(), 0.1))
        recorded(sparse, lambda model: model(torch.ones(2, 8)).sum())
        copied = copy.deepcopy(sparse)
        assert copied.stored["weight"].record is None
        sparse.stored["weight"].record = None
        sparse.model(torch.ones(2, 8)).sum().backward()


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_right_in_float64(name: str) -> None:
    make, shape = LAYERS[name]
    sparse = pair(make, torch.float64)[1]
    values = dict(sparse.model.named_parameters())
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)

    def forward(x: Tensor, *parameters: Tensor) -> Tensor:
        return sparse.model(x)  # gradcheck changes the parameters in place

    # along random directions, so exactly that one wrong entry of many shows
    assert torch.autograd.gradcheck(forward, (x, *values.values()), atol=1e-7, rtol=1e-7, fast_mode=True)
