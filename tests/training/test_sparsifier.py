"""`gp.sparsify`: three lines in a plain loop do what the objects below it do, and one state resumes all of it."""

import contextlib
import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_cases import adamw, all_of, check_same_bits, frozen, loss_of, options_of, sgd, small_net, thawed, train_step
from torch import nn

import growprune as gp
from growprune.integrations.callback import SparseCallback
from growprune.methods import METHODS
from growprune.plan import declaration_of
from growprune.sparse.cursor import Cursor
from growprune.training.settings import Settings
from growprune.training.sparsifier import Sparsifier, sparsify

ONE_LOOP = [name for name in METHODS if not name.startswith("parallel")]
NEED_DENSE = {"admm", "deepr", "dpf", "grasp", "iterative_admm", "snfs", "str"}
"""Methods that look at dense tensors, which compact storage does not have."""
CASES = [
    (name, storage)
    for name in ONE_LOOP
    for storage in ("masked", "compact")
    if storage == "masked" or name not in NEED_DENSE
]
TOTAL = 40


def arguments_of(name: str, model: nn.Module, **more: Any) -> dict[str, Any]:
    """How a method is asked to train for 40 iterations."""
    needs_losses = name in ("snip", "grasp")
    losses = {"losses": [lambda: loss_of(model, 1), lambda: loss_of(model, 2)]} if needs_losses else {}
    return {"sparsity": 0.75, "iterations": TOTAL, **losses, **more}


def begun(name: str, storage: str = "masked", optimize: Any = sgd, **more: Any) -> tuple[Sparsifier, Any]:
    model = small_net()
    optimizer = optimize(model.parameters())
    return sparsify(model, optimizer, name, **arguments_of(name, model, storage=storage, **more)), optimizer


def state_of(sparsifier: Sparsifier, optimizer: Any) -> dict[str, Any]:
    return all_of(sparsifier.sparse, optimizer)


# Old way and new way


@pytest.mark.parametrize("name", ONE_LOOP)
def test_three_lines_do_what_the_objects_below_do(name: str) -> None:
    ours, optimizer = begun(name)
    model = small_net()
    method: Any = METHODS[name]
    keep_dense = ["5"]  # "auto": the last layer
    sparse = gp.SparseModel(
        model,
        0.0 if name == "dense" else 0.75,
        allocation=declaration_of(method).allocation,
        keep_dense=keep_dense,
        rescale=True,
    )
    kind = getattr(gp.Partition, declaration_of(method).partition)
    parts = (
        kind(model, keep_dense=keep_dense)
        if declaration_of(method).partition == "per_layer"
        else kind(model, 2, keep_dense=keep_dense)
    )
    cursor = Cursor(sparse, method(parts, **ours.plan.options), iterations_per_epoch=1)
    if "losses" in arguments_of(name, model):
        sparse.score(gp.By(name), arguments_of(name, model)["losses"])
    other = cursor.attach(sgd(model.parameters()))
    for iteration in range(TOTAL):
        train_step(ours.model, optimizer, iteration)
        train_step(model, other, iteration)
    assert ours.is_finished
    assert cursor.is_over
    check_same_bits(state_of(ours, optimizer), all_of(sparse, other))


# Resume


@pytest.mark.parametrize(("name", "storage"), CASES)
def test_a_loop_resumes_to_the_same_bits_from_every_iteration(name: str, storage: str) -> None:
    """Loaded at k and trained for a step, everything is as it was at k + 1: so it is at the end."""
    # one with rates that follow the density
    how: dict[str, Any] = {"optimize": adamw, "lr_scaling": 1} if name == "gradual_gap" else {}
    whole, optimizer = begun(name, storage, **how)
    for iteration in range(TOTAL):
        saved = frozen(whole.state_dict())
        train_step(whole.model, optimizer, iteration)
        again, other = begun(name, storage, **how)  # as in a new process
        again.load_state_dict(thawed(saved)[0])
        train_step(again.model, other, iteration)
        check_same_bits(state_of(whole, optimizer), state_of(again, other), f"{iteration}")
        check_same_bits(whole.cursor.state_dict(), again.cursor.state_dict(), f"{iteration}")
    assert again.is_finished


def test_a_state_resumes_in_the_other_storage() -> None:
    whole, optimizer = begun("gradual_gap", "masked")
    for iteration in range(17):
        train_step(whole.model, optimizer, iteration)
    again, other = begun("gradual_gap", "compact")
    again.load_state_dict(thawed(frozen(whole.state_dict()))[0])
    for iteration in range(17, TOTAL):
        train_step(whole.model, optimizer, iteration)
        train_step(again.model, other, iteration)
    assert {name: mask.tolist() for name, mask in whole.sparse.masks.items()} == {
        name: mask.tolist() for name, mask in again.sparse.masks.items()
    }


def test_a_state_is_a_copy_that_later_steps_leave_alone() -> None:
    sparsifier, optimizer = begun("gradual_gap", "masked", adamw)
    for iteration in range(5):
        train_step(sparsifier.model, optimizer, iteration)
    state = sparsifier.state_dict()
    before = copy.deepcopy(state)
    for iteration in range(5, 9):
        train_step(sparsifier.model, optimizer, iteration)
    check_same_bits(state, before)


def test_two_optimizers_and_extra_state_are_resumed() -> None:
    class Counting(nn.Module):
        count = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return x

        def get_extra_state(self) -> torch.Tensor:
            return torch.tensor(self.count)

        def set_extra_state(self, state: torch.Tensor) -> None:
            self.count = int(state)

    def make() -> tuple[Sparsifier, list[torch.optim.Optimizer]]:
        model = nn.Sequential(*small_net(), Counting())
        optimizers = [sgd(model[:3].parameters()), adamw(model[3:].parameters())]
        return sparsify(model, optimizers, "rigl", sparsity=0.75, iterations=TOTAL), optimizers

    def step(sparsifier: Sparsifier, optimizers: list[torch.optim.Optimizer], iteration: int) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(sparsifier.model, iteration).backward()
        for optimizer in optimizers:
            optimizer.step()

    whole, first = make()
    for iteration in range(10):
        step(whole, first, iteration)
    again, second = make()
    again.load_state_dict(thawed(frozen(whole.state_dict()))[0])
    for iteration in range(10, TOTAL):
        step(whole, first, iteration)
        step(again, second, iteration)
    check_same_bits(dict(whole.model.state_dict()), dict(again.model.state_dict()))
    assert again.model[-1].count == TOTAL
    assert again.is_finished


# The same arguments everywhere


def test_sparsify_and_the_callbacks_take_the_same_arguments() -> None:
    def arguments(function: Any, *others: str) -> dict[str, Any]:
        parameters = inspect.signature(function).parameters.values()
        return {p.name: p.default for p in parameters if p.name not in ("self", "options", *others)}

    front = arguments(sparsify, "model", "optimizer", "losses")
    assert front == arguments(SparseCallback.__init__, "log_layers")
    assert front.keys() == set(Settings.__dataclass_fields__) - {"options"}


# What it says


def test_a_sparsifier_says_where_it_stands_in_one_line() -> None:
    assert repr(begun("rigl")[0]) == "Sparsifier(rigl, iteration 0 of 40, sparsity 0.75 of 0.75)"
    sparsifier, optimizer = begun("gradual_gap", parts=2)
    for iteration in range(TOTAL + 2):
        train_step(sparsifier.model, optimizer, iteration)
    assert repr(sparsifier) == (
        "Sparsifier(gradual_gap, finished after 40 iterations, 2 steps past the plan, sparsity 0.75)"
    )
    assert repr(sparsifier.sparse) == (
        "SparseModel(Sequential, sparsity 0.75 of target 0.75, 1,440 prunable weights, storage='masked')"
    )
    assert repr(sparsifier.cursor) == "Cursor(gradual_gap, over, 40 iterations done)"
    assert repr(sparsifier.plan) == ("Plan(gradual_gap(iterations=40, sparsity=0.75, initial_mask='random'), 2 parts)")
    assert (sparsifier.sparsity, sparsifier.target_sparsity, sparsifier.is_finished) == (0.75, 0.75, True)
    assert sparsifier.summary().alive == 360


def test_saving_says_if_the_loop_was_shorter_or_longer_than_the_plan(tmp_path: Path) -> None:
    sparsifier, optimizer = begun("rigl")
    for iteration in range(TOTAL):
        if iteration == 30:
            with pytest.warns(UserWarning, match=r"saved before the end of its plan of 40 iterations \(see its repr\)"):
                sparsifier.save(tmp_path / "model.safetensors")
        train_step(sparsifier.model, optimizer, iteration)
    sparsifier.save(tmp_path / "model.safetensors")
    train_step(sparsifier.model, optimizer, TOTAL)
    with pytest.warns(UserWarning, match="1 steps after the plan's 40 iterations.*pass iterations=41"):
        sparsifier.save(tmp_path / "model.safetensors")
    loaded = gp.load(tmp_path / "model.safetensors", small_net())
    assert loaded.num_alive == sparsifier.sparse.num_alive == 360


# From 80 to 95 %


def test_a_model_that_is_sparse_already_keeps_its_zeros_and_says_so() -> None:
    model = small_net()
    gp.SparseModel(model, 0.8, allocation="global", keep_dense=["5"]).prune()
    zeros = {name: p == 0 for name, p in model.named_parameters() if p.ndim > 1}
    with pytest.warns(UserWarning, match=r"0\.8 of the model's weights are already zero and stay pruned"):
        sparsifier = sparsify(
            model, sgd(model.parameters()), "static_random", sparsity=0.8, iterations=4, allocation="global"
        )
    for name, mask in sparsifier.sparse.masks.items():
        assert torch.equal(~mask, zeros[name])


# The first mask of a trained model


def with_moved_norms() -> nn.Module:
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 4))
    nn.init.normal_(model[1].weight)
    return model


def with_moved_statistics() -> nn.Module:
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16, affine=False), nn.Linear(16, 16), nn.Linear(16, 4))
    model(torch.randn(8, 16))
    return model


def fresh() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))


@pytest.mark.parametrize(
    ("make", "why"), [(with_moved_norms, "its norms differ"), (with_moved_statistics, "its BatchNorm statistics")]
)
def test_a_trained_model_keeps_its_largest_weights_and_says_so(make: Any, why: str) -> None:
    model = make()
    weight = model[0].weight.detach().clone()
    with pytest.warns(UserWarning, match=f"already trained .{why}.*largest weights are kept"):
        sparsifier = sparsify(
            model, sgd(model.parameters()), "static_random", sparsity=0.75, iterations=4, allocation="uniform"
        )
    smallest_kept = weight.abs()[sparsifier.sparse.masks["0.weight"]].min()
    assert (weight.abs()[~sparsifier.sparse.masks["0.weight"]] <= smallest_kept).all()


def test_a_fresh_model_begins_with_a_random_mask_and_nothing_is_said() -> None:
    model = fresh()
    sparsifier = sparsify(model, sgd(model.parameters()), sparsity=0.75, iterations=8)
    assert sparsifier.plan.options["initial_mask"] == "random"


@pytest.mark.parametrize(
    "initialise",
    [
        nn.init.kaiming_normal_,
        nn.init.kaiming_uniform_,
        nn.init.xavier_normal_,
        nn.init.xavier_uniform_,
        nn.init.orthogonal_,
        nn.init.trunc_normal_,
    ],
)
@pytest.mark.parametrize("is_trained", [False, True])
def test_fresh_models_without_norms_are_told_from_trained_ones(initialise: Any, is_trained: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    for layer in model[::2]:
        initialise(layer.weight)
    x = torch.randn(256, 16)
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    for _ in range(200 if is_trained else 0):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
        optimizer.step()
    expected = (
        contextlib.nullcontext()
        if not is_trained
        else pytest.warns(UserWarning, match="do not look like initial weights")
    )
    with expected:
        sparsifier = sparsify(model, sgd(model.parameters()), sparsity=0.75, iterations=8)
    assert sparsifier.plan.options["initial_mask"] == ("magnitude" if is_trained else "random")


def test_what_the_user_says_of_the_first_mask_is_obeyed_without_a_word() -> None:
    model = with_moved_norms()
    sparsifier = sparsify(model, sgd(model.parameters()), sparsity=0.75, iterations=8, initial_mask="random")
    assert sparsifier.plan.options["initial_mask"] == "random"


def test_a_resumed_loop_begins_with_the_first_mask_of_its_state() -> None:
    """Of a model that is built anew, and was trained when the state was saved, and the other way round."""
    model = with_moved_norms()
    with pytest.warns(UserWarning, match="already trained"):
        first = sparsify(model, sgd(model.parameters()), sparsity=0.75, iterations=8)
    state = first.state_dict()
    model = fresh()[:1].append(nn.LayerNorm(16)).extend([nn.Linear(16, 16), nn.Linear(16, 4)])
    second = sparsify(model, sgd(model.parameters()), sparsity=0.75, iterations=8)
    second.load_state_dict(state)
    assert second.plan.options["initial_mask"] == "magnitude"
    check_same_bits(dict(first.model.state_dict()), dict(second.model.state_dict()))


def test_frozen_layers_stay_as_they_are_unless_included() -> None:
    for include, expected in (([], [144, 36, 24]), (["0*"], [36, 36, 24])):
        model = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 2))
        model[0].requires_grad_(False)
        before = model[0].weight.clone()
        optimizer = sgd([p for p in model.parameters() if p.requires_grad])
        sparsify(model, optimizer, "static_random", sparsity=0.75, iterations=4, allocation="uniform", include=include)
        assert [int(layer.weight.count_nonzero()) for layer in model] == expected
        assert torch.equal(model[0].weight, before) is not bool(include)
    model = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 2)).requires_grad_(False)
    assert gp.prune_pretrained(model, by="magnitude").num_alive == 72  # a request, so frozen weights are pruned


# Lengths


def test_lengths_may_be_given_in_epochs() -> None:
    model = small_net()
    sparsifier = sparsify(model, sgd(model.parameters()), sparsity=0.75, epochs=4, iterations_per_epoch=10)
    assert sparsifier.cursor.num_iterations == 40
    model = small_net()
    lengths = {"steps": 2, "epochs": 3, "finetune": 4}
    sparsifier = sparsify(
        model, sgd(model.parameters()), "cyclic_gap", sparsity=0.75, iterations_per_epoch=5, **lengths
    )
    assert sparsifier.cursor.num_iterations == 5 * (2 * 3 + 4)


# Bad input


@pytest.mark.parametrize(
    ("match", "given"),
    [
        (r"sparsity must be in \[0, 1\), got 90. Did you mean 0.9\?", {"sparsity": 90}),
        (r"sparsity must be in \[0, 1\), got -1$", {"sparsity": -1}),
        ("Embedding", {"model": nn.Sequential(nn.Embedding(4, 4), nn.LayerNorm(4))}),  # what the model has
        (r"trains none of the weights to prune \(0\.weight", {"optimizer": sgd(small_net().parameters())}),
        ("optimizer must be a torch optimizer, .*, got a str", {"optimizer": "sgd"}),
        ("gradual_gap takes no option 'peak': it takes every, start, peak_density", {"peak": 0.5}),
        ("gradual_gap takes no option 'peak_densty': did you mean peak_density", {"peak_densty": 0.5}),
        ("gradual_gap takes no option 'kep_dense': did you mean keep_dense", {"kep_dense": []}),
        ("there is no method 'gradul'", {"method": "gradul"}),
        ("gradual_gap takes no option 'kappa': did you mean parts?", {"kappa": 4}),
        ("gradual_gap takes no option 'steps': did you mean iterations?", {"steps": 4}),
        (r"needs the length of the training: pass iterations=epochs \* len\(loader\)", {"iterations": None}),
        (r"epochs=3 also needs iterations_per_epoch", {"iterations": None, "epochs": 3}),
        (
            r"cyclic_gap with epochs also needs iterations_per_epoch",
            {"method": "cyclic_gap", "iterations": None, "steps": 2, "epochs": 3, "finetune": 4},
        ),
        ("iterations must be an integer >= 1, got 0", {"iterations": 0}),
        ("gmp chooses its first mask itself", {"method": "gmp", "initial_mask": "magnitude"}),
        (r"initial_mask must be one of auto, .*, got 'zeros'", {"initial_mask": "zeros"}),
        ("parallel_gap trains branches on several machines", {"method": "parallel_gap"}),
        (r"snip chooses its first mask by gradients: pass losses, .* such as losses=\[", {"method": "snip"}),
        ("initial_mask='sparsegpt' needs calibration=", {"initial_mask": "sparsegpt"}),
        ("calibration is only used by initial_mask='wanda' or 'sparsegpt', got 'auto'", {"calibration": [1]}),
    ],
)
def test_wrong_arguments_are_refused_and_change_nothing(match: str, given: dict[str, Any]) -> None:
    model = given.get("model", small_net())
    before = copy.deepcopy(model.state_dict())
    usual = {"model": model, "optimizer": sgd(model.parameters()), "sparsity": 0.75, "iterations": 8}
    with pytest.raises(gp.GrowpruneError, match=match):
        sparsify(**usual | given)
    check_same_bits(dict(before), dict(model.state_dict()))


def test_a_second_sparsifier_of_a_model_is_refused() -> None:
    sparsifier, optimizer = begun("gradual_gap")
    with pytest.raises(gp.GrowpruneError, match=r"at iteration 0 of 40.*load_state_dict to resume.*to_dense_"):
        sparsify(sparsifier.model, sgd(sparsifier.model.parameters()), sparsity=0.9, iterations=8)
    del optimizer


def test_where_the_masks_are_wanted_a_sparsifier_is_pointed_to_them(tmp_path: Path) -> None:
    sparsifier, optimizer = begun("rigl")
    with pytest.raises(gp.GrowpruneError, match=r"save needs a SparseModel, got a Sparsifier: .*sparse"):
        gp.save(sparsifier, tmp_path / "model.safetensors")  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="the optimizer given to sparsify made no step"):
        sparsifier.save(tmp_path / "model.safetensors")
    del optimizer


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"name": "rigl"}, "saved with method='gradual_gap', .* but this Sparsifier has method='rigl'"),
        ({"seed": 3}, "saved with seed=0, but this Sparsifier has seed=3: resume with seed=0"),
        ({"iterations": 30}, "saved with iterations=40, but this Sparsifier has iterations=30"),
        ({"parts": 1}, "phase 1 of another plan: resume with the same method, options, parts"),
        ({"sparsity": 0.5}, "saved with sparsity=0.75, but this Sparsifier has sparsity=0.5"),
    ],
)
def test_a_state_of_something_else_is_refused_and_changes_nothing(change: dict[str, Any], match: str) -> None:
    saved, _ = begun("gradual_gap")
    other, optimizer = begun(change.pop("name", "gradual_gap"), **change)
    before = copy.deepcopy(state_of(other, optimizer))
    with pytest.raises(gp.GrowpruneError, match=match):
        other.load_state_dict(saved.state_dict())
    check_same_bits(before, state_of(other, optimizer))


def test_after_a_refused_state_of_another_first_mask_training_goes_on() -> None:
    done, optimizer = begun("gradual_gap")
    for t in range(TOTAL):
        train_step(done.model, optimizer, t)
    state = copy.deepcopy(done.state_dict())
    state["first"], state["cursor"]["trail"] = ["magnitude", None], "another"
    with pytest.raises(gp.GrowpruneError, match="of another plan") as held:
        done.load_state_dict(state)
    train_step(done.model, optimizer, 0)
    assert done.is_finished and held


@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_a_state_is_loaded_where_another_first_mask_was_chosen(storage: str) -> None:
    saved, optimizer = begun("gradual_gap", storage=storage)
    for t in range(5):
        train_step(saved.model, optimizer, t)
    model = small_net()
    other = sgd(model.parameters())
    train_step(model, other, 0)  # its optimizer has state, so that its largest weights are kept
    with pytest.warns(UserWarning, match="already trained"):
        resumed = sparsify(model, other, "gradual_gap", sparsity=0.75, iterations=TOTAL, storage=storage)
    resumed.load_state_dict(saved.state_dict())
    for each, its in ((saved, optimizer), (resumed, other)):
        for t in range(5, TOTAL):
            train_step(each.model, its, t)
    check_same_bits(resumed.sparse.masks, saved.sparse.masks)


@pytest.mark.parametrize("at", [1, 2, 9])
def test_a_rule_is_resumed_before_it_has_pruned(at: int) -> None:
    saved, optimizer = begun("dpf", every=4)
    for t in range(at):
        train_step(saved.model, optimizer, t)
    resumed, other = begun("dpf", every=4)
    resumed.load_state_dict(saved.state_dict())
    assert str(resumed) == str(saved) and other.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()


def test_a_state_of_another_model_is_refused() -> None:
    saved, _ = begun("gradual_gap")
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    other = sparsify(model, sgd(model.parameters()), sparsity=0.75, iterations=TOTAL)
    with pytest.raises(gp.GrowpruneError, match=r"belongs to another model: only one of the two has '1\.bias'"):
        other.load_state_dict(saved.state_dict())


def test_a_state_that_is_none_is_refused() -> None:
    sparsifier, _ = begun("gradual_gap")
    with pytest.raises(gp.GrowpruneError, match=r"the state dict lacks cursor, first, lengths, .*, version"):
        sparsifier.load_state_dict({})


def test_every_option_of_the_examples_is_taken() -> None:
    """So that no method's own option is hidden by an argument of the same name."""
    shared = {"sparsity", "iterations", "epochs", "initial_mask", "seed", "kappa"}
    for name in ONE_LOOP:
        own = {option: value for option, value in options_of(name).items() if option not in shared}
        assert Settings(name, 0.75, options=own).options == own


# A first mask by data


def calibrated(by: str, method: str = "gradual_gap", **more: Any) -> tuple[Sparsifier, nn.Module]:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    draw = torch.Generator().manual_seed(0)
    batches = [torch.randn(64, 32, generator=draw) * torch.linspace(0, 2, 32) for _ in range(2)]
    given = {"sparsity": 0.9, "iterations": 20, "initial_mask": by, "calibration": batches} | more
    return sparsify(model, sgd(model.parameters()), method, **given), model


@pytest.mark.parametrize("storage", ["masked", "compact"])
@pytest.mark.parametrize("by", ["wanda", "sparsegpt"])
def test_a_first_mask_by_data_is_that_of_prune_pretrained_and_the_plan_begins_there(by: str, storage: str) -> None:
    torch.manual_seed(3)
    sparsifier, _ = calibrated(by, storage=storage, control="start", start=0.5)
    torch.manual_seed(3)
    other = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    draw = torch.Generator().manual_seed(0)
    batches = [torch.randn(64, 32, generator=draw) * torch.linspace(0, 2, 32) for _ in range(2)]
    pruned = gp.prune_pretrained(other, batches, sparsity=0.5, by=by, allocation="erk")
    assert sparsifier.sparsity == pruned.sparsity == 0.5
    masks = pruned.masks
    assert [name for name, mask in sparsifier.sparse.masks.items() if not torch.equal(mask, masks[name])] == []


def test_a_method_of_constant_sparsity_keeps_a_first_mask_by_data() -> None:
    sparsifier, _ = calibrated("wanda", "rigl")
    assert sparsifier.plan.options["initial_mask"] == "as_is"
    assert sparsifier.sparse.is_at_target


@pytest.mark.parametrize("at", [0, 1, 13, 39])
@pytest.mark.parametrize(("name", "storage"), [("gradual_gap", "compact"), ("rigl", "masked"), ("dpf", "masked")])
def test_a_new_process_resumes_to_the_same_bits(name: str, storage: str, at: int) -> None:
    whole, optimizer = begun(name, storage, adamw, lr_scaling=1)
    for iteration in range(at):
        train_step(whole.model, optimizer, iteration)
    saved = frozen(whole.state_dict())
    again, other = begun(name, storage, adamw, lr_scaling=1)
    again.load_state_dict(thawed(saved)[0])
    for iteration in range(at, TOTAL):
        train_step(whole.model, optimizer, iteration)
        train_step(again.model, other, iteration)
    check_same_bits(state_of(whole, optimizer), state_of(again, other))


def test_an_optimizer_of_dense_layers_alone_is_refused() -> None:
    model = small_net()
    with pytest.raises(gp.GrowpruneError, match=r"trains none of the weights to prune \(0\.weight, \.\.\.\)"):
        sparsify(model, sgd(model[-1].parameters()), sparsity=0.9, iterations=20)
