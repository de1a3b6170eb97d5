"""Optimizers that keep zeros by themselves are left alone; whatever else may happen, zeros are zeros after a step."""

import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from growprune.errors import GrowpruneError
from growprune.files.sparse_file import save
from growprune.sparse.model import SparseModel
from growprune.sparse.stepper import KEEPS_ZEROS, keeps_zeros

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "ASGD": [{}, {"weight_decay": 0.1}, {"t0": 1.0, "lambd": 0.1}],
    "Adadelta": [{}, {"lr": 0.5, "weight_decay": 0.1}, {"lr": 1.0, "rho": 0.5}],
    "Adagrad": [{}, {"lr_decay": 0.1, "weight_decay": 0.1}],
    "Adam": [{}, {"weight_decay": 0.1}, {"amsgrad": True}, {"fused": True}, {"decoupled_weight_decay": True}],
    "AdamW": [{}, {"weight_decay": 0.5, "lr": 0.1}, {"amsgrad": True}, {"fused": True}, {"betas": (0.0, 0.5)}],
    "NAdam": [{}, {"weight_decay": 0.1}, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RAdam": [{}, {"weight_decay": 0.1}, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RMSprop": [{}, {"momentum": 0.9}, {"centered": True, "momentum": 0.9, "weight_decay": 0.1}],
    "SGD": [
        {},
        {"momentum": 0.9, "weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.9, "dampening": 0.5},
        {"momentum": 0.9, "fused": True},
    ],
}
"""By the optimizers that keep zeros, the options to try; with and without `foreach`."""


def cases() -> Iterator[Any]:
    for name, options in OPTIONS.items():
        for some, foreach in itertools.product(options, (False, True)):
            if "fused" not in some or not foreach:
                yield pytest.param(name, some if "fused" in some else {**some, "foreach": foreach}, id=f"{name} {some}")


def is_positive_zero(tensor: Tensor) -> bool:
    return not bool(tensor.detach().contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()]).any())


@pytest.mark.parametrize("name, options", list(cases()))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_twenty_steps_on_masked_gradients_leave_weights_and_state_zero(
    name: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    if "fused" in options and dtype == torch.bfloat16:
        pytest.skip("torch's fused SGD mixes up its momentum there")
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(40).view(5, 8) % 3 == 0
    parameter = nn.Parameter(torch.where(mask, torch.randn(5, 8, generator=generator), 0).to(dtype))
    optimizer = getattr(torch.optim, name)([parameter], **{"lr": 0.05, **options})
    before = parameter.detach().clone()
    for _ in range(20):
        parameter.grad = torch.where(mask, torch.randn(5, 8, generator=generator), 0).to(dtype)
        optimizer.step()
    state = [t for t in optimizer.state[parameter].values() if isinstance(t, Tensor) and t.shape == parameter.shape]
    assert keeps_zeros(optimizer)
    assert not torch.equal(parameter[mask], before[mask])
    assert all(is_positive_zero(tensor[~mask]) for tensor in (parameter, *state))


def test_every_optimizer_of_torch_is_decided_on() -> None:
    found = {o for o in vars(torch.optim).values() if isinstance(o, type) and issubclass(o, torch.optim.Optimizer)}
    assert {o.__name__ for o in KEEPS_ZEROS} == set(OPTIONS)
    others = {"Adafactor", "Adamax", "LBFGS", "Muon", "Optimizer", "Rprop", "SparseAdam"}
    assert {o.__name__ for o in found - KEEPS_ZEROS} == others


@pytest.mark.parametrize(
    "make, expected",
    [
        (lambda p: torch.optim.SGD([p], 0.1), True),
        (lambda p: torch.optim.SGD([p], 0.1, momentum=0.9, maximize=True), False),
        (lambda p: torch.optim.Adam([p], eps=0.0), False),
        (lambda p: torch.optim.Adam([nn.Parameter(p.detach().half())]), False),
        (lambda p: torch.optim.Adam([nn.Parameter(p.detach().half())], eps=1e-4), True),
        (lambda p: type("Mine", (torch.optim.SGD,), {})([p], 0.1), False),
        (lambda p: torch.optim.Rprop([p]), False),
        (lambda p: torch.optim.SGD([nn.Parameter(p.detach().bfloat16())], 0.1, momentum=0.9, fused=True), False),
    ],
    ids=["plain", "maximize", "eps 0", "half", "half, large eps", "derived", "Rprop", "fused bfloat16 on a CPU"],
)
def test_settings_under_which_zeros_may_not_be_kept_are_known(make: Any, expected: bool) -> None:
    assert keeps_zeros(make(nn.Parameter(torch.ones(3)))) is expected


def make() -> tuple[SparseModel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    sparse = SparseModel(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)), sparsity=0.5)
    sparse.prune()
    optimizer = sparse.attach(torch.optim.Adam(sparse.model.parameters(), 0.01))
    run(sparse)
    optimizer.step()
    return sparse, optimizer


def run(sparse: SparseModel) -> None:
    sparse.model.zero_grad()
    sparse.model(torch.randn(3, 6)).square().sum().backward()


def check(sparse: SparseModel, optimizer: torch.optim.Optimizer, *, with_state: bool = True) -> None:
    for name, mask in sparse.masks.items():
        parameter = sparse.model.get_parameter(name)
        state = [t for t in optimizer.state[parameter].values() if t.shape == mask.shape]
        assert len(state) == 2
        assert all(is_positive_zero(tensor[~mask]) for tensor in (parameter, *(state if with_state else ())))


def add_noise(sparse: SparseModel, optimizer: torch.optim.Optimizer) -> None:
    run(sparse)
    for parameter in sparse.model.parameters():
        assert parameter.grad is not None
        parameter.grad += torch.randn_like(parameter.grad)


def clip_to_nothing(sparse: SparseModel, optimizer: torch.optim.Optimizer) -> None:
    run(sparse)
    parameter = next(sparse.model.parameters())
    parameter.grad[sparse.masks["0.weight"]] = float("nan")
    nn.utils.clip_grad_norm_(sparse.model.parameters(), 1.0)  # zero times NaN is NaN
    assert parameter.grad.isnan().all()


def assign(sparse: SparseModel, optimizer: torch.optim.Optimizer) -> None:
    for parameter in sparse.model.parameters():
        parameter.grad = torch.ones_like(parameter)


def edit_after_backward(sparse: SparseModel, optimizer: torch.optim.Optimizer) -> None:
    run(sparse)
    sparse.prune(to=0.75)


def write_weights(sparse: SparseModel, optimizer: torch.optim.Optimizer) -> None:
    run(sparse)
    for tensor in sparse.model.state_dict().values():
        tensor.data.fill_(1)


def write_gradients(sparse: SparseModel, optimizer: torch.optim.Optimizer) -> None:
    run(sparse)
    for parameter in sparse.model.parameters():
        parameter.grad.data.add_(1e-3)


def replace_data(sparse: SparseModel, optimizer: torch.optim.Optimizer) -> None:
    run(sparse)
    for parameter in sparse.model.parameters():
        parameter.data = parameter.data + 1e-3


def write_vector(sparse: SparseModel, optimizer: torch.optim.Optimizer) -> None:
    run(sparse)
    vector = nn.utils.parameters_to_vector(sparse.model.parameters())
    nn.utils.vector_to_parameters(vector + 1e-3, sparse.model.parameters())


def load_state(sparse: SparseModel, optimizer: torch.optim.Optimizer) -> None:
    run(sparse)
    state = copy.deepcopy(optimizer.state_dict())
    for entries in state["state"].values():
        entries["exp_avg"] += 1
    optimizer.load_state_dict(state)


@pytest.mark.parametrize(
    "disturb",
    [
        add_noise,
        clip_to_nothing,
        assign,
        edit_after_backward,
        write_weights,
        write_gradients,
        replace_data,
        write_vector,
        load_state,
    ],
)
def test_zeros_are_zeros_after_a_step_whatever_was_done_before(
    disturb: Callable[[SparseModel, torch.optim.Optimizer], None],
) -> None:
    sparse, optimizer = make()
    disturb(sparse, optimizer)
    optimizer.step()
    check(sparse, optimizer, with_state=disturb is not write_gradients)  # torch tells nobody of these


def test_gradients_that_a_closure_disturbs_are_masked() -> None:
    sparse, optimizer = make()

    def closure() -> float:
        add_noise(sparse, optimizer)
        return 0.5

    assert optimizer.step(closure) == 0.5
    check(sparse, optimizer)
    assert optimizer.step(closure=closure) == 0.5
    check(sparse, optimizer)


def test_lbfgs_is_refused_and_so_is_muon_for_compact_weights() -> None:
    sparse = SparseModel(nn.Linear(8, 8, bias=False), sparsity=0.5)
    with pytest.raises(GrowpruneError, match=r"LBFGS cannot train a sparse model.*use SGD or Adam"):
        sparse.attach(torch.optim.LBFGS(sparse.model.parameters()))
    sparse.attach(torch.optim.Muon(sparse.model.parameters()))
    compact = SparseModel(nn.Linear(8, 8, bias=False), sparsity=0.5, storage="compact")
    with pytest.raises(GrowpruneError, match=r"Muon cannot train.*use storage='masked'"):
        compact.attach(torch.optim.Muon(compact.model.parameters()))


def test_state_of_rows_and_columns_starts_anew_after_an_edit_and_says_so_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    sparse = SparseModel(model, sparsity=0.5, storage="compact")
    optimizer = sparse.attach(torch.optim.Adafactor(model.parameters(), 0.1))

    def train() -> None:
        optimizer.zero_grad()
        model(torch.randn(3, 8)).square().sum().backward()
        optimizer.step()

    train()
    with pytest.warns(UserWarning, match=r"the state of 0\.weight in Adafactor does not fit") as told:
        sparse.prune()
    assert len(told) == 1
    assert model[0]._parameters["weight"] not in optimizer.state
    train()
    sparse.grow()
    train()
    assert set(optimizer.state[model[0]._parameters["weight"]]) == {"step", "row_var", "col_var"}


def test_what_is_written_through_data_goes_unseen_but_is_not_saved_and_ends_with_the_next_edit(tmp_path: Path) -> None:
    """As the promises say: of such a write torch tells nobody."""
    model = nn.Linear(8, 8)
    sparse = SparseModel(model, sparsity=0.5)
    sparse.prune()
    for end in (sparse.enforce, lambda: sparse.prune(to=0.75)):
        model.weight.data.add_(1)
        with pytest.raises(GrowpruneError, match=r"\d+ weights of weight are non-zero where the mask prunes"):
            save(sparse, tmp_path / "model.safetensors")
        end()
        assert is_positive_zero(model.weight[~sparse.masks["weight"]])
        save(sparse, tmp_path / "model.safetensors")
