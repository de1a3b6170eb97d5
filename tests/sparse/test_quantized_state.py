"""Optimizers whose state is quantized: a tensor subclass with few operations, as torchao's 8-bit AdamW has."""

import copy
from typing import Any

import pytest
import torch
from plan_cases import check_same_bits
from torch import Tensor, nn
from torch.optim import Optimizer

import growprune as gp


class Quantized(Tensor):
    """Values in steps of a hundredth of the largest; they can be read and written by copying, and by nothing else."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> "Quantized":
        made = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)  # type: ignore[attr-defined]
        made.codes, made.scale = codes, scale
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func is aten.copy_.default and isinstance(args[0], Quantized):
            values = args[1].values() if isinstance(args[1], Quantized) else args[1]
            args[0].scale.copy_(values.abs().max() / 100)
            args[0].codes.copy_((values / args[0].scale.clamp(min=1e-30)).round())
            return args[0]
        if func is aten.copy_.default:
            return args[0].copy_(args[1].values())
        if func in (aten.detach.default, aten._to_copy.default):
            return Quantized(args[0].codes.clone(), args[0].scale.clone())
        raise NotImplementedError(f"Quantized has no {func}")

    def values(self) -> Tensor:  # type: ignore[override]
        return self.codes * self.scale


class QuantizedMomentum(Optimizer):
    """SGD with momentum and decay, that shakes all weights: what is pruned stays zero only if it is masked."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = Quantized(torch.zeros(parameter.shape), torch.zeros(()))
                    state["step"] = 0
                state["step"] += 1
                momentum = torch.empty_like(parameter).copy_(state["momentum"])
                momentum.mul_(0.9).add_(parameter.grad)
                parameter.sub_(group["lr"] * momentum + 1e-3)
                state["momentum"].copy_(momentum)


def make(storage: str, method: str = "rigl", optimizer: Any = QuantizedMomentum) -> tuple[Any, gp.Cursor, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    sparse = gp.SparseModel(model, sparsity=0.5, allocation="uniform", storage=storage)
    plan = getattr(gp.methods, method)(gp.Partition.contiguous(model, 1), sparsity=0.5, iterations=6, every=2)
    cursor = gp.Cursor(sparse, plan)
    return sparse, cursor, cursor.attach(optimizer(model.parameters()))


def train(sparse: Any, optimizer: Optimizer, iterations: range) -> list[float]:
    losses = []
    for iteration in iterations:
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(iteration))
        optimizer.zero_grad()
        loss = (sparse.model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        state = sparse.model.state_dict()
        assert all(torch.count_nonzero(state[name][~mask]) == 0 for name, mask in sparse.masks.items())
    return losses


@pytest.mark.parametrize("method", ["gmp", "rigl"])
@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_pruned_weights_stay_zero_with_quantized_state(storage: str, method: str) -> None:
    sparse, cursor, optimizer = make(storage, method)
    losses = train(sparse, optimizer, range(8))
    assert cursor.is_over
    assert sparse.num_alive == 4096
    assert losses[-1] < losses[0]


def test_quantized_state_of_pruned_weights_is_zero_and_that_of_others_is_kept() -> None:
    sparse, _, optimizer = make("masked")
    train(sparse, optimizer, range(1))
    momentum = optimizer.state[sparse.model[0].weight]["momentum"]
    before = momentum.values().clone()
    sparse.prune(to=0.75)
    mask = sparse.masks["0.weight"]
    assert int(mask.sum()) < 2048
    assert torch.count_nonzero(momentum.values()[~mask]) == 0
    torch.testing.assert_close(momentum.values()[mask], before[mask], rtol=0, atol=float(momentum.scale))


def test_compact_storage_keeps_the_values_of_quantized_state_through_an_edit() -> None:
    sparse, _, optimizer = make("compact")
    train(sparse, optimizer, range(1))
    before_mask, parameter = sparse.masks["0.weight"].clone(), sparse.model[0]._parameters["weight"]
    before = torch.zeros(64, 64)
    before[before_mask] = optimizer.state[parameter]["momentum"].values()
    sparse.prune(to=0.75)
    momentum = optimizer.state[sparse.model[0]._parameters["weight"]]["momentum"]
    assert torch.equal(momentum, before[sparse.masks["0.weight"]])


@pytest.mark.parametrize("origin", ["masked", "compact"])
@pytest.mark.parametrize("target", ["masked", "compact"])
def test_a_training_with_quantized_state_is_resumed_in_either_storage(origin: str, target: str) -> None:
    """To the same bits in the same storage; otherwise the steps of the codes are rounded otherwise."""
    stop, end = (4, 8) if origin == target else (1, 2)
    whole, _, optimizer = make(origin)
    train(whole, optimizer, range(end))
    first, cursor, optimizer = make(origin)
    train(first, optimizer, range(stop))
    saved = copy.deepcopy([first.state_dict(), cursor.state_dict(), first.model.state_dict()])
    state = first.live_state(optimizer, device="cpu")
    second, cursor, optimizer = make(target)
    second.load_state_dict(saved[0])
    cursor.load_state_dict(saved[1])
    second.model.load_state_dict(saved[2])
    second.load_live_state(optimizer, state)
    train(second, optimizer, range(stop, end))
    torch.testing.assert_close(second.model.state_dict(), whole.model.state_dict())
    if origin == target:
        check_same_bits(second.model.state_dict(), whole.model.state_dict())


class Codes(QuantizedMomentum):
    """Keeps codes as plain integers, of which 128 stands for zero."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("codes", torch.full(parameter.shape, 128, dtype=torch.uint8))


def test_integer_codes_are_left_as_they_are() -> None:
    sparse, _, optimizer = make("masked", optimizer=Codes)
    train(sparse, optimizer, range(1))
    sparse.prune(to=0.75)
    assert all(bool((state["codes"] == 128).all()) for state in optimizer.state.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
@pytest.mark.parametrize("storage", ["masked", "compact"])
@pytest.mark.filterwarnings("ignore")  # torchao's own, and those of the compiler that it uses
def test_low_bit_optimizers_of_torchao_train(name: str, storage: str) -> None:
    optim = pytest.importorskip("torchao.optim", reason="torchao is not installed")
    sparse, cursor, optimizer = make(storage, optimizer=lambda ps: getattr(optim, name)(ps, lr=1e-3))
    losses = train(sparse, optimizer, range(8))
    assert cursor.is_over
    assert losses[-1] < losses[0]
    sparse.load_live_state(optimizer, sparse.live_state(optimizer))
    train(sparse, optimizer, range(8, 10))
