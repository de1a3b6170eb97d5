"""Training under masks: after any step of any optimizer, what is pruned is exactly zero, and so is its state."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from growprune.masks.partition import Partition
from growprune.plan import Part, grow, prune
from growprune.sparse.model import SparseModel

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "ascent": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, maximize=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=1e-2),
    "adam, one by one": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
    "adam, fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adamw, amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01, weight_decay=1e-2),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01, weight_decay=1e-2),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
}

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
no_complaints_from_torch = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
every_optimizer = pytest.mark.parametrize("name", list(OPTIMIZERS))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.down = nn.ConvTranspose2d(4, 2, 2)
        self.attention = nn.MultiheadAttention(10, 2, batch_first=True)
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:  # (B, 2, 6, 6)
        x = self.down(torch.relu(self.norm(self.conv(x)))).flatten(2).mean(2)  # (B, 2)
        x = x.repeat(1, 5).unsqueeze(1)  # (B, 1, 10)
        return self.head(self.attention(x, x, x, need_weights=False)[0][:, 0])


def make(sparsity: float = 0.5, **options: str) -> SparseModel:
    torch.manual_seed(0)
    return SparseModel(Net(), sparsity=sparsity, **options)  # type: ignore[arg-type]


def batches(seed: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(4, 2, 6, 6, generator=generator), torch.randint(3, (4,), generator=generator)


def backward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    return loss.detach()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    def closure() -> float:
        optimizer.zero_grad()
        return float(backward(model, batch))

    optimizer.step(closure)


def bits(tensor: Tensor) -> Tensor:
    """As integers, so that a negative zero is not a zero."""
    return tensor.detach().contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def check_zero_off_masks(
    sparse: SparseModel, optimizer: torch.optim.Optimizer, masks: dict[str, Tensor] | None = None
) -> None:
    """Unless other masks are given, gradients are zero off the model's, too."""
    for name, mask in sparse.masks.items():
        parameter = sparse.model.get_parameter(name)
        states = [t for t in optimizer.state[parameter].values() if isinstance(t, Tensor) and t.shape == mask.shape]
        gradients = [parameter.grad] if parameter.grad is not None and masks is None else []
        for tensor in (parameter, *gradients, *states):
            assert not bool(bits(tensor)[~(mask if masks is None else masks[name])].any()), name


@every_optimizer
def test_off_the_mask_weight_gradient_and_state_are_exactly_zero_after_every_step(name: str) -> None:
    sparse = make()
    optimizer = sparse.attach(OPTIMIZERS[name](sparse.model.parameters()))
    S = Partition.contiguous(sparse.model, 3)
    sparse.prune()
    data = batches()
    for edit in (lambda: None, lambda: sparse.grow(S[0]), lambda: sparse.prune(S[0]), lambda: sparse.grow(to=0.25)):
        before = sparse.masks
        edit()
        lived = {name: mask & before[name] for name, mask in sparse.masks.items()}
        check_zero_off_masks(sparse, optimizer, lived)  # what has grown begins at zero
        for _ in range(2):
            step(sparse.model, optimizer, next(data))
            check_zero_off_masks(sparse, optimizer)
    grown = sparse.masks["head.weight"] & ~before["head.weight"]
    assert bool(sparse.model.head.weight[grown].any()), "what grows learns"
    assert sparse.num_alive == sum(round(0.75 * weight.numel) for weight in sparse.weights)


@every_optimizer
def test_the_living_train_as_without_masks(name: str) -> None:
    sparse, plain = make(0.0), Net()
    plain.load_state_dict(sparse.model.state_dict())
    masked, free = sparse.attach(OPTIMIZERS[name](sparse.model.parameters())), OPTIMIZERS[name](plain.parameters())
    for _, batch in zip(range(3), batches(), strict=False):
        step(sparse.model, masked, batch)
        step(plain, free, batch)
    for ours, theirs in zip(sparse.model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_state_that_an_optimizer_held_before_is_masked_when_it_is_attached() -> None:
    sparse = make()
    optimizer = torch.optim.Adam(sparse.model.parameters())
    step(sparse.model, optimizer, next(batches()))
    sparse.model.zero_grad()
    sparse.prune()
    sparse.attach(optimizer)
    check_zero_off_masks(sparse, optimizer)


def total_norm(model: nn.Module) -> Tensor:
    return nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])


def test_clipping_sees_only_the_gradients_of_the_living() -> None:
    sparse = make(0.9)
    sparse.prune()
    dense = copy.deepcopy(sparse).to_dense_()
    batch = next(batches())
    sparse.attach(torch.optim.SGD(sparse.model.parameters(), lr=0.1))
    backward(sparse.model, batch)
    backward(dense, batch)
    unmasked = total_norm(dense)
    for name, mask in sparse.masks.items():
        dense.get_parameter(name).grad.mul_(mask)  # type: ignore[union-attr]
    assert torch.equal(nn.utils.clip_grad_norm_(sparse.model.parameters(), 1e-3), total_norm(dense))
    assert total_norm(dense) < unmasked


def test_accumulated_gradients_are_masked_and_add_up() -> None:
    sparse = make(0.9)
    sparse.prune()
    dense = copy.deepcopy(sparse).to_dense_()
    sparse.attach(torch.optim.SGD(sparse.model.parameters(), lr=0.1))
    for batch, _ in zip(batches(), range(3), strict=False):
        backward(sparse.model, batch)
        backward(dense, batch)
    for name, mask in sparse.masks.items():
        gradient = sparse.model.get_parameter(name).grad
        assert gradient is not None
        assert torch.equal(gradient, torch.where(mask, dense.get_parameter(name).grad, 0))


def test_gradients_that_are_nan_off_the_mask_do_no_harm() -> None:
    sparse = make()
    sparse.prune()
    optimizer = sparse.attach(torch.optim.Adam(sparse.model.parameters()))
    weight, mask = sparse.model.head.weight, sparse.masks["head.weight"]
    (weight * torch.where(mask, 1.0, math.nan)).sum().backward()
    optimizer.step()
    assert bool(weight.isfinite().all())
    assert not bool(bits(weight)[~mask].any())


def test_training_under_autocast_keeps_zeros_exact() -> None:
    sparse = make()
    sparse.prune()
    optimizer = sparse.attach(torch.optim.AdamW(sparse.model.parameters(), weight_decay=0.1))
    for batch, _ in zip(batches(), range(3), strict=False):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(sparse.model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        check_zero_off_masks(sparse, optimizer)


# A model that is copied, moved, frozen, compiled


@no_complaints_from_torch
def test_a_compiled_model_has_no_graph_break_and_is_not_compiled_again_when_masks_change() -> None:
    torch._dynamo.reset()
    sparse = make()
    optimizer = sparse.attach(torch.optim.SGD(sparse.model.parameters(), lr=0.1, momentum=0.9))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(sparse.model, backend=counter, fullgraph=True)
    data = batches()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for edit in (sparse.prune, sparse.grow, sparse.prune, lambda: None):
            edit()
            optimizer.zero_grad()
            backward(compiled, next(data))
            optimizer.step()
            check_zero_off_masks(sparse, optimizer)
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    "to",
    [
        {"dtype": torch.float64},
        {"dtype": torch.bfloat16},
        {"memory_format": torch.channels_last},
        pytest.param({"device": "cuda"}, marks=[pytest.mark.gpu, needs_cuda]),
    ],
    ids=str,
)
def test_a_model_that_is_moved_stays_masked(to: dict[str, Any]) -> None:
    sparse = make()
    sparse.prune()
    sparse.attach(torch.optim.SGD(sparse.model.parameters(), lr=0.1))
    backward(sparse.model, next(batches()))  # makes autograd remember the old type
    masks = sparse.masks
    sparse.model.to(**to)
    sparse.model.zero_grad()
    optimizer = sparse.attach(torch.optim.Adam(sparse.model.parameters()))
    x, y = next(batches())
    step(sparse.model, optimizer, (x.to(**to), y.to(to.get("device", "cpu"))))
    check_zero_off_masks(sparse, optimizer)
    for name, mask in sparse.masks.items():
        assert mask.device == sparse.model.get_parameter(name).device
        assert torch.equal(mask.cpu(), masks[name])


def test_a_parameter_put_in_place_of_another_is_masked_from_the_next_attach_on() -> None:
    sparse = make()
    sparse.prune()
    sparse.attach(torch.optim.SGD(sparse.model.parameters(), lr=0.1))
    sparse.model.head.weight = nn.Parameter(torch.ones(3, 10))
    optimizer = sparse.attach(torch.optim.Adam(sparse.model.parameters()))
    assert int(sparse.model.head.weight.count_nonzero()) == 15
    step(sparse.model, optimizer, next(batches()))
    check_zero_off_masks(sparse, optimizer)


def test_a_weight_that_thaws_has_masked_gradients_at_once() -> None:
    sparse = make()
    sparse.prune()
    for parameter in sparse.model.parameters():
        parameter.requires_grad_(False)
    sparse.attach(torch.optim.SGD(sparse.model.parameters(), lr=0.1))
    assert not any(parameter.requires_grad for parameter in sparse.model.parameters())
    for parameter in sparse.model.parameters():
        parameter.requires_grad_(True)
    backward(sparse.model, next(batches()))
    for name, mask in sparse.masks.items():
        gradient = sparse.model.get_parameter(name).grad
        assert gradient[mask].any()
        assert not gradient[~mask].any()


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("pattern", ["unstructured", "1x8", "2x4", "2:4"])
@pytest.mark.parametrize("allocation", ["uniform", "global", "erk"])
def test_masks_are_the_same_on_every_device(pattern: str, allocation: str) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 96), nn.Conv2d(32, 16, 3), nn.ConvTranspose2d(16, 32, 2))
    for layer in layers:
        nn.init.normal_(layer.weight)
        layer.weight.data[::2] = layer.weight.data[1::2]  # ties
    masks = []
    for device in ("cpu", "cuda"):
        sparse = SparseModel(copy.deepcopy(layers).to(device), sparsity=0.9, pattern=pattern, allocation=allocation)
        sparse.prune()
        sparse.grow(to=0.8)
        masks.append(sparse.masks)
    assert all(torch.equal(mask, masks[1][name].cpu()) for name, mask in masks[0].items())


def test_what_is_pruned_and_grown_again_in_one_phase_starts_from_zero_state() -> None:
    model = nn.Linear(4, 4, bias=False)
    sparse = SparseModel(model, sparsity=0.5)
    optimizer = sparse.attach(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    whole = Part("all", ("weight",))
    sparse.apply(prune(whole, to=0.5), grow(whole))
    pruned = model.weight == 0
    assert pruned.sum() == 8
    assert (optimizer.state[model.weight]["momentum_buffer"][pruned] == 0).all()
    assert (optimizer.state[model.weight]["momentum_buffer"][~pruned] != 0).all()


@every_optimizer
def test_what_grows_has_zero_weight_and_zero_state_and_then_learns(name: str) -> None:
    sparse = make(0.8)
    optimizer = sparse.attach(OPTIMIZERS[name](sparse.model.parameters()))
    sparse.prune()
    data = batches()
    for _ in range(3):
        step(sparse.model, optimizer, next(data))
    before = sparse.masks
    sparse.grow()
    for parameter_name, mask in before.items():
        parameter = sparse.model.get_parameter(parameter_name)
        states = [t for t in optimizer.state[parameter].values() if isinstance(t, Tensor) and t.shape == mask.shape]
        assert all(not bool(bits(tensor)[~mask].any()) for tensor in (parameter, *states))
        assert bool((parameter[mask] != 0).any())
    step(sparse.model, optimizer, next(data))
    assert int((sparse.model.head.weight[~before["head.weight"]] != 0).sum()) > 0
