"""torch.compile of an optimizer's step, or of a whole training step: hooks and edits run between its graphs."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from plan_cases import adamw, sgd
from torch import Tensor, nn

import growprune as gp

pytestmark = [
    # torch.compile does all of these itself
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*is deprecated:DeprecationWarning"),
]

OPTIMIZERS: dict[str, Any] = {"sgd": sgd, "adamw": adamw}
PLANS: dict[str, Callable[[Any], Any]] = {
    "gradual_gap": lambda S: gp.methods.gradual_gap(S, sparsity=0.8, iterations=6, every=2, start=0.5),
    "rigl": lambda S: gp.methods.rigl(S, sparsity=0.8, iterations=6, every=2, until=1.0),
    "gmp": lambda S: gp.methods.gmp(S, sparsity=0.8, iterations=6, every=2),
}

Step = Callable[[Tensor], Any]
"""Trains one iteration on a batch."""
Compile = Callable[[nn.Module, torch.optim.Optimizer], Step]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """What another test has compiled counts towards torch's limit of recompilations."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss  # type: ignore[no-any-return]

    return step


def whole(backend: str) -> Compile:
    return lambda model, optimizer: torch.compile(plain(model, optimizer), backend=backend)


def only_step(backend: str, *, fullgraph: bool = False) -> Compile:
    """PyTorch's recipe for compiled optimizers."""

    def prepare(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        compiled = torch.compile(lambda: optimizer.step(), backend=backend, fullgraph=fullgraph)

        def step(x: Tensor) -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            compiled()

        return step

    return prepare


def only_model(backend: str) -> Compile:
    return lambda model, optimizer: plain(torch.compile(model, backend=backend), optimizer)


COMPILED = {"whole": whole, "step": only_step}


def train(compile_: Compile, storage: str, method: str, optimizer_of: Any, lr_scaling: float = 0.0) -> Any:
    """Weights and counts after each step; raises unless what is pruned is zero then."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4))
    sparse = gp.SparseModel(model, sparsity=0.8, allocation="uniform", storage=storage, lr_scaling=lr_scaling)
    cursor = gp.Cursor(sparse, PLANS[method](gp.Partition.contiguous(model, 2)))
    optimizer = cursor.attach(optimizer_of(model.parameters()))
    step, counts, weights = compile_(model, optimizer), [], []
    for _ in range(8):
        step(torch.randn(4, 8))
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        assert all(torch.count_nonzero(state[name][~mask]) == 0 for name, mask in sparse.masks.items())
        counts.append(sparse.num_alive)
        weights.append(state)
    assert cursor.is_over
    return weights, counts


def check_like_eager(compile_: Compile, *case: Any) -> None:
    (expected, counts), (found, found_counts) = train(plain, *case), train(compile_, *case)
    assert found_counts == counts
    assert counts[-1] == 29  # of 144
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("what", COMPILED)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("storage", ["masked", "compact"])
@pytest.mark.parametrize("method", PLANS)
def test_compiled_steps_train_like_eager_ones(what: str, optimizer: str, storage: str, method: str) -> None:
    check_like_eager(COMPILED[what]("eager"), storage, method, OPTIMIZERS[optimizer])


@pytest.mark.parametrize("what, storage", [("whole", "masked"), ("step", "compact")])
def test_compiled_steps_take_scaled_rates(what: str, storage: str) -> None:
    check_like_eager(COMPILED[what]("aot_eager"), storage, "gradual_gap", adamw, 1.0)


@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_a_compiled_model_shows_the_gradients_that_edits_look_at(storage: str) -> None:
    check_like_eager(only_model("aot_eager"), storage, "rigl", sgd)


@pytest.mark.slow
def test_steps_of_the_default_compiler_train_like_eager_ones() -> None:
    check_like_eager(whole("inductor"), "compact", "rigl", adamw)


def test_a_model_is_compiled_as_one_graph_again_when_nobody_looks_at_gradients_any_more() -> None:
    model = nn.Linear(8, 8)
    sparse = gp.SparseModel(model, sparsity=0.8, storage="compact", allocation="uniform")
    cursor = gp.Cursor(sparse, PLANS["rigl"](gp.Partition.contiguous(model, 1)))
    optimizer = cursor.attach(sgd(model.parameters()))
    step = plain(model, optimizer)
    for _ in range(6):
        step(torch.randn(4, 8))
    assert cursor.is_over
    plain(torch.compile(model, backend="aot_eager", fullgraph=True), optimizer)(torch.randn(4, 8))


def test_gradients_that_a_compiled_step_writes_to_are_masked_again() -> None:
    model = nn.Linear(8, 8)
    sparse = gp.SparseModel(model, sparsity=0.75, allocation="uniform")
    sparse.prune()
    optimizer = sparse.attach(sgd(model.parameters()))

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        for parameter in model.parameters():
            parameter.grad.add_(0.5)  # type: ignore[union-attr]
        optimizer.step()

    compiled = torch.compile(step, backend="aot_eager")
    for _ in range(3):
        compiled(torch.randn(4, 8))
        assert torch.equal(model.weight != 0, sparse.masks["weight"])


def test_a_step_that_must_be_one_graph_is_refused_before_it_is_made() -> None:
    model = nn.Linear(8, 8)
    sparse = gp.SparseModel(model, sparsity=0.75, allocation="uniform")
    sparse.prune()
    before = model.weight.detach().clone()
    step = only_step("eager", fullgraph=True)(model, sparse.attach(sgd(model.parameters())))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compile with fullgraph=False"):
        step(torch.randn(4, 8))
    assert torch.equal(model.weight, before)
