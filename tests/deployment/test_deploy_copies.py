"""A deployed model is one of its own: it gives what the model gave, whatever becomes of that, and keeps its state."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import growprune as gp
from growprune.deployment.api import deploy_on_gpu
from growprune.deployment.example import Example

CPU = torch.device("cpu")


def pruned(model: nn.Module, **settings: Any) -> gp.SparseModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of small layers
        sparse = gp.SparseModel(model.eval(), **{"sparsity": 0.8, **settings})
        sparse.prune()
    return sparse


def nearly_dense_first() -> nn.Module:
    """A global ranking leaves the first layer dense, and its compact weight too."""
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    model[0].weight.data *= 10
    return model


class Experts(nn.Module):
    """Stacked (experts, out, in), as transformers has them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 3
        self.up = nn.Parameter(torch.randn(3, 16, 8))
        self.down = nn.Parameter(torch.randn(3, 8, 16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("beh,eoh->bo", torch.einsum("bi,ehi->beh", x, self.up).relu(), self.down)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.experts = nn.Linear(8, 8), Experts()

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(self.first(x))  # type: ignore[no-any-return]


LEFT_OUT: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], dict[str, Any]]] = {
    "20 % sparse": (nearly_dense_first, lambda: torch.randn(3, 16), {"sparsity": 0.2}),
    "one layer is nearly dense": (
        nearly_dense_first,
        lambda: torch.randn(3, 16),
        {"sparsity": 0.6, "allocation": "global"},
    ),
    "transposed convolution": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ConvTranspose2d(8, 4, 2, 2)),
        lambda: torch.randn(2, 3, 6, 6),
        {},
    ),
    "stacked experts": (Mixture, lambda: torch.randn(3, 8), {}),
    "bfloat16": (lambda: nearly_dense_first().bfloat16(), lambda: torch.randn(3, 16).bfloat16(), {}),
    "float64": (lambda: nearly_dense_first().double(), lambda: torch.randn(3, 16).double(), {}),
}


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("case", LEFT_OUT)
def test_sparse_layers_that_stay_in_torch_give_the_same_in_both_storages(case: str, whole: bool) -> None:
    make, example, settings = LEFT_OUT[case]
    outputs = {}
    for storage in ("masked", "compact"):
        torch.manual_seed(0)
        model, x = make(), example()
        sparse = pruned(model, storage=storage, **settings)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.filterwarnings("ignore", "the model has no sparse weights")
            deployed = gp.deploy(sparse, x, seconds=0, whole=whole)
            outputs[storage] = deployed(x)
            assert torch.allclose(deployed(x), model(x), rtol=1e-5, atol=1e-6)
    assert torch.equal(outputs["masked"], outputs["compact"])
    assert outputs["masked"].abs().max() > 0.01


class Tagger(nn.Module):
    """Has one of all that a deployed model may keep: embedding, bias, norms, buffers, a layer that stays in torch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.norm = nn.Embedding(9, 16), nn.Linear(16, 16), nn.LayerNorm(16)
        self.second, self.batch, self.group = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.GroupNorm(4, 16)
        self.odd = nn.Bilinear(16, 16, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.first(self.embed(tokens)).relu())
        x = self.group(self.batch(self.second(x)))
        return self.odd(x, x)  # type: ignore[no-any-return]


def tell_apart(deployed: gp.Deployed, model: nn.Module, x: Tensor) -> tuple[float, float]:
    """How far the deployed model is, for a shape it knows and for a new one, from what the model was."""
    both = torch.cat([x, x])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*each new shape is prepared once")
        before = model(x).clone()
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.copy_(tensor * 1.5)
        assert (model(x) - before).abs().max() > 0.1
        return tuple((found - before).abs().max().item() for found in (deployed(x), deployed(both)[: len(x)]))  # type: ignore[return-value]


def deployed_for(where: str, sparse: gp.SparseModel, x: Tensor) -> gp.Deployed:
    if where == "gpu":  # on a CPU, where products are dense, but all else is the same
        return deploy_on_gpu(sparse, Example.of(x), device=CPU, seconds=0, known={})
    return gp.deploy(sparse, x, seconds=0, whole=where == "whole")


@pytest.mark.parametrize("storage", ["masked", "compact"])
@pytest.mark.parametrize("where", ["whole", "layers", "gpu"])
def test_what_becomes_of_the_model_does_not_change_the_deployed_one(storage: str, where: str) -> None:
    torch.manual_seed(0)
    model, x = Tagger(), torch.randint(0, 9, (4,))
    deployed = deployed_for(where, pruned(model, storage=storage), x)
    assert max(tell_apart(deployed, model, x)) < 1e-4


def test_tied_parameters_are_one_in_the_deployed_model_too() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.LayerNorm(8)), torch.randn(2, 8)
    model[2].weight = model[1].weight
    deployed = gp.deploy(pruned(model), x, seconds=0, whole=False).module
    assert deployed[2].weight is deployed[1].weight and deployed[1].weight is not model[1].weight  # type: ignore[index]


class Counts(nn.Module):
    """In a buffer, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x) + self.calls  # type: ignore[no-any-return]


class Replaces(Counts):
    """Its buffer by another."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.inner(x) + self.calls  # type: ignore[no-any-return]


class Adds(nn.Module):
    """Up what it gave, in an attribute."""

    sum: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        self.sum = self.inner(x) if self.sum is None else self.sum + self.inner(x)
        return self.sum


class Remembers(Adds):
    """In a list."""

    def __init__(self) -> None:
        super().__init__()
        self.past: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.past.append(self.inner(x))
        return torch.stack(self.past).sum(0)


STATEFUL = [Counts, Replaces, Adds, Remembers]


def assert_in_step(deployed: nn.Module, model: nn.Module, x: Tensor) -> None:
    """Three calls of both, which are three states."""
    found, expected = ([called(x).clone() for _ in range(3)] for called in (deployed, model))
    torch.testing.assert_close(torch.stack(found), torch.stack(expected))
    assert (expected[0] - expected[2]).abs().max() > 0.1


@torch.no_grad()
@pytest.mark.parametrize("storage", ["masked", "compact"])
@pytest.mark.parametrize("kind", STATEFUL)
def test_a_model_with_a_state_stays_in_torch_and_begins_where_the_model_is(kind: type[nn.Module], storage: str) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(2, 16)
    with pytest.warns(UserWarning, match=r"keeps a state .*: it stays in torch; with whole=False"):
        deployed = gp.deploy(pruned(model, storage=storage), x, seconds=0)
    assert deployed.is_in_torch and [row.choice for row in deployed.table] == ["torch"]
    assert_in_step(deployed, model, x)


@torch.no_grad()
@pytest.mark.parametrize("where", ["layers", "gpu"])
@pytest.mark.parametrize("kind", STATEFUL)
def test_layer_by_layer_it_keeps_its_state(kind: type[nn.Module], where: str) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(2, 16)
    assert_in_step(deployed_for(where, pruned(model), x), model, x)


class Watches(Counts):
    """Counts what it is given, and gives the same anyway."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = x
        x.mul_(2)  # its input, which is no state
        return self.inner(x) + torch.rand_like(x)  # type: ignore[no-any-return]


def test_a_state_that_does_not_matter_is_as_it_was_and_hinders_nothing() -> None:
    model, x = Watches(), torch.randn(2, 16)
    deployed = gp.deploy(pruned(model), x, seconds=0)
    assert not deployed.is_in_torch
    assert deployed.module.calls.item() == 0 and not hasattr(deployed.module, "last")
    assert model.calls.item() == 0 and not hasattr(model, "last")


@pytest.mark.parametrize("deploy", [gp.deploy, lambda *a: gp.deploy(*a, whole=False)])
def test_an_example_that_the_model_cannot_take_is_said_in_one_line(deploy: Any) -> None:
    with pytest.raises(gp.GrowpruneError, match=r"^the model failed on the example \(RuntimeError") as said:
        deploy(pruned(nn.Sequential(nn.Linear(16, 16))), torch.randn(1, 17))
    assert "\n" not in str(said.value)
