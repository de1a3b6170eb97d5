"""Recurrent layers (LSTM, GRU, RNN): their matrices are sparse, and what torch keeps beside them stays in step."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import growprune as gp
from growprune.masks.layers import prunable_weights
from growprune.sparse.flops import count_flops
from growprune.sparse.init import dense_init

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")

KINDS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTM(8, 12, batch_first=True),
    "LSTM with projections": lambda: nn.LSTM(8, 16, 2, proj_size=12, batch_first=True),
    "GRU both ways": lambda: nn.GRU(8, 6, 2, bidirectional=True, batch_first=True),
    "RNN without biases": lambda: nn.RNN(8, 12, bias=False, batch_first=True),
}
kinds = pytest.mark.parametrize("kind", KINDS)


class Tagger(nn.Module):
    """A label for each position of a sequence."""

    def __init__(self, kind: str = "LSTM") -> None:
        super().__init__()
        self.body = KINDS[kind]()
        self.head = nn.Linear(12, 4)
        nn.init.normal_(self.head.weight)  # large enough to outlive a ranking of all

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[0])


def tagger(kind: str = "LSTM", **options: Any) -> tuple[gp.SparseModel, Tensor]:
    torch.manual_seed(0)
    sparse = gp.SparseModel(Tagger(kind), **{"sparsity": 0.75, **options})
    sparse.prune()
    return sparse, torch.randn(2, 5, 8)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, *, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()


def is_in_step(model: nn.Module) -> bool:
    """Whether the parameters that a recurrent layer computes with are those that it has."""
    layers = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    pairs = [
        (used, layer.get_parameter(name))
        for layer in layers
        for used, name in zip(layer._flat_weights, layer._flat_weights_names, strict=True)
    ]
    return bool(pairs) and all(used is own for used, own in pairs)


# Which weights


def test_the_matrices_of_recurrent_layers_are_prunable_and_biases_are_not() -> None:
    model = nn.LSTM(8, 16, 2, proj_size=12, bidirectional=True)
    expected = {
        f"weight_{what}_l{layer}{way}": shape
        for layer, inputs in ((0, 8), (1, 24))
        for way in ("", "_reverse")
        for what, shape in {"ih": (64, inputs), "hh": (64, 12), "hr": (12, 16)}.items()
    }
    assert {weight.name: weight.shape for weight in prunable_weights(model)} == expected
    assert {weight.name for weight in prunable_weights(model, include=["*"])} == set(expected)
    with pytest.raises(ValueError, match=r"include has 'bias_\*', but bias_ih_l0, .* cannot be pruned"):
        prunable_weights(model, include=["bias_*"])


@pytest.mark.parametrize(("cell", "rows"), [(nn.LSTMCell, 16), (nn.GRUCell, 12), (nn.RNNCell, 4)])
@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_cells_are_layers_in_either_storage(cell: type[nn.Module], rows: int, storage: str) -> None:
    model = cell(8, 4)
    sparse = gp.SparseModel(model, sparsity=0.75, storage=storage)
    sparse.prune()
    assert {w.name: w.shape for w in sparse.weights} == {"weight_ih": (rows, 8), "weight_hh": (rows, 4)}
    assert sparse.num_alive == rows * 3
    x, plain = torch.randn(2, 8), cell(8, 4)
    plain.load_state_dict(model.state_dict())
    hidden, expected = (out if isinstance(out, Tensor) else out[0] for out in (model(x), plain(x)))
    assert torch.equal(hidden, expected)


# Training


@kinds
@pytest.mark.parametrize("allocation", ["uniform", "global", "erk"])
def test_counts_are_exact_while_recurrent_layers_train(kind: str, allocation: str) -> None:
    sparse, x = tagger(kind, allocation=allocation)
    alive = round(sparse.num_prunable * 0.25)
    optimizer = sparse.attach(torch.optim.AdamW(sparse.model.parameters(), lr=0.01))
    before = sparse.model(x)
    train(sparse.model, optimizer, x)
    assert sparse.num_alive == alive
    assert sum(int(p.count_nonzero()) for n, p in sparse.model.named_parameters() if n in sparse.masks) == alive
    assert sparse.model(x).square().sum() < before.square().sum()
    sparse.prune(share=0.2)
    sparse.grow(to=0.75)
    train(sparse.model, optimizer, x)
    assert sparse.num_alive == alive
    assert is_in_step(sparse.model)


@pytest.mark.parametrize("pattern", ["2:4", "4x4"])
def test_the_gates_of_a_recurrent_layer_keep_to_a_pattern(pattern: str) -> None:
    sparse, x = tagger(pattern=pattern, sparsity=0.5, keep_dense=["head"])
    train(sparse.model, sparse.attach(torch.optim.SGD(sparse.model.parameters(), lr=0.1)), x)
    assert sparse.num_alive == (48 * 8 + 48 * 12) // 2
    gp.SparseModel.from_zeros(sparse.model, pattern=pattern, keep_dense=["head"])  # refuses other zeros


@kinds
def test_a_deepcopy_of_a_recurrent_model_stays_in_step_and_independent(kind: str) -> None:
    sparse, x = tagger(kind)
    sparse.attach(torch.optim.SGD(sparse.model.parameters(), lr=0.1))
    expected, clone = sparse.model(x), copy.deepcopy(sparse.model)
    assert is_in_step(clone)
    assert torch.equal(clone(x), expected)
    train(clone, torch.optim.SGD(clone.parameters(), lr=0.1, momentum=0.9), x)
    assert torch.equal(sparse.model(x), expected)
    again = copy.deepcopy(sparse)
    assert is_in_step(again.model)
    assert again.num_alive == sparse.num_alive
    assert torch.equal(pickle.loads(pickle.dumps(sparse.model))(x), expected)


# Parts, files, FLOPs, deployment


def test_a_recurrent_layer_belongs_to_one_part() -> None:
    model = Tagger("LSTM with projections")
    first, second = gp.Partition.contiguous(model, 2)
    assert first.tensors == tuple(name for name, _ in model.named_parameters() if name.startswith("body."))
    assert second.tensors == ("head.weight", "head.bias")
    with pytest.raises(ValueError, match="parts must be <= the number of layers of the model, 2, got 3"):
        gp.Partition.contiguous(model, 3)


@kinds
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_recurrent_model_comes_back_from_a_file(kind: str, device: str, tmp_path: Path) -> None:
    sparse, x = tagger(kind)
    gp.save(sparse, tmp_path / "model.safetensors")
    with torch.device(device):
        model = Tagger(kind)
    loaded = gp.load(tmp_path / "model.safetensors", model)
    assert is_in_step(model)
    assert loaded.num_alive == sparse.num_alive
    assert torch.equal(model(x), sparse.model(x))
    train(model, loaded.attach(torch.optim.SGD(model.parameters(), lr=0.1)), x)
    assert loaded.num_alive == sparse.num_alive


def test_a_recurrent_layer_that_is_built_on_the_meta_device_computes_with_its_own_weights() -> None:
    sparse = gp.sparse_init(Tagger, sparsity=0.5, keep_dense=["body"])
    assert is_in_step(sparse.model)
    assert sparse.model(torch.randn(2, 5, 8)).isfinite().all()
    assert is_in_step(dense_init(Tagger))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_flops_of_a_sequence_are_those_of_its_steps(device: str) -> None:
    steps, batch = 5, 3
    with torch.device(device):
        model, x = nn.LSTM(8, 16, 2, proj_size=12), torch.zeros(steps, batch, 8)
        flops = count_flops(model, x)
    each = {"ih_l0": 64 * 8, "hh_l0": 64 * 12, "hr_l0": 12 * 16, "ih_l1": 64 * 12, "hh_l1": 64 * 12, "hr_l1": 12 * 16}
    expected = {f"weight_{name}": 2 * steps * batch * count for name, count in each.items()}
    assert {name: count for name, count in flops.by_weight.items() if "weight" in name} == expected
    assert flops.dense == 2 * 15 * (512 + 768 + 192 + 768 + 768 + 192)
    assert torch.backends.mkldnn.enabled
    assert torch.backends.cudnn.enabled


def test_flops_are_charged_to_the_right_one_of_weights_in_one_piece_of_memory() -> None:
    model = nn.GRU(8, 6)  # on a GPU, cuDNN has all of them in one
    expected = count_flops(model, torch.zeros(5, 3, 8))
    flat, at = torch.cat([p.detach().flatten() for p in model.parameters()]), 0
    for parameter in model.parameters():
        parameter.data = flat[at : at + parameter.numel()].view(parameter.shape)
        at += parameter.numel()
    assert count_flops(model, torch.zeros(5, 3, 8)) == expected
    assert expected.by_weight["weight_ih_l0"] == 2 * 15 * 18 * 8
    assert expected.by_weight["weight_hh_l0"] == 2 * 15 * 18 * 6


@kinds
@pytest.mark.parametrize("whole", [True, False])
def test_a_deployed_recurrent_model_gives_what_the_model_gives(kind: str, whole: bool, tmp_path: Path) -> None:
    sparse, x = tagger(kind)
    with torch.no_grad():
        expected = sparse.model.eval()(x)
    deployed = gp.deploy(sparse, x, seconds=0, whole=whole)
    assert (deployed(x) - expected).abs().max() <= 1e-6
    assert {row.layer: row.choice for row in deployed.table if row.layer.startswith("body.")} == {
        weight.name: "torch" for weight in sparse.weights if weight.name.startswith("body.")
    }
    deployed.save(tmp_path)
    assert (gp.load_deployed(tmp_path, Tagger(kind))(x) - expected).abs().max() <= 1e-6
