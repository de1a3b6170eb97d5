"""What happens when you call `optimizer.step()`: read `Stepper.before` and `Stepper.after` from top to bottom.

Gradients of pruned weights are set to zero as soon as they are there (storage/masked.py). That alone keeps pruned
weights at zero under most optimizers. The stepper does the rest: it sees to every gradient, weight and state that
someone else wrote, scales learning rates with density, runs the rule of the current phase, and advances the plan.

An optimizer of a sparse model gets its stepper from `SparseModel.attach`, or at its first step (`notice`).
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, distributed, optim
from torch.optim import Adafactor, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from growprune.errors import GrowpruneError
from growprune.storage.parameter import uncompiled

if TYPE_CHECKING:
    from growprune.sparse.model import SparseModel


Group = dict[str, Any]


class _Owners(WeakTensorKeyDictionary):
    num_models = 0
    """The number of SparseModels made so far."""


OWNERS: Any = _Owners()
"""By parameter: a weak reference to the SparseModel that owns its mask, or None if an edit has replaced the parameter.
An optimizer knows only parameters, so this is how the first step of a new optimizer finds the masks."""

STALE = "the optimizer holds compact weights from before an edit: create it after the edit, or attach it before"
INSTEAD = "shard it with sparse.shard(mesh), which is torch's FSDP2 (fully_shard)"

STEPPER = "_growprune_stepper"
"""The attribute of an optimizer that holds its stepper."""
SEEN = "_growprune_seen"
"""The attribute of an optimizer that says when its parameters were last looked up in OWNERS."""

KEEPS_ZEROS = frozenset({optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam})
KEEPS_ZEROS |= {optim.RMSprop, optim.SGD}
"""Optimizers that keep a weight and its state at zero if its gradient is zero: these classes, not subclasses."""


def keeps_zeros(optimizer: Optimizer) -> bool:
    """True if a step with masked gradients keeps state exactly zero, with the optimizer's present settings."""
    if type(optimizer) not in KEEPS_ZEROS:
        return False
    for group in optimizer.param_groups:
        if group.get("maximize"):
            return False  # turns the sign of a zero
        if group.get("capturable") and not group.get("fused"):
            return False  # divides by the learning rate, which may be zero
        dtypes = {p.dtype for p in group["params"]}
        if group.get("fused") and dtypes & {torch.float16, torch.bfloat16} and not group["params"][0].is_cuda:
            return False  # torch 2.13's SGD mixes up its momentum there
        # zero by zero is no number, and in half precision the usual 1e-8 is zero
        if float(group.get("eps", 1.0)) <= (1e-7 if torch.float16 in dtypes else 1e-37):
            return False
    return True


class Stepper:
    """The hooks around the steps of one optimizer, for all sparse models that it trains.

    The optimizer owns its stepper. The stepper refers to models weakly, and its hooks go with the last of them.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = weakref.ref(optimizer)
        """Returns the optimizer, as long as it exists."""
        self._models: list[weakref.ref[SparseModel]] = []
        self._handles: list[Any] = []
        self._refusal: Any = None
        """The hook that refuses steps after `to_dense_`."""
        self._now: list[tuple[SparseModel, dict[str, Any]]] = []
        """During a step: each model, and how its parameters that the optimizer trains are stored, by name."""
        self._scaled: list[tuple[Group, list[Group]]] = []
        """During a step: the user's param groups, each with the groups that stand for it."""
        self._users_groups: list[Group] = []
        """During a step: the user's list of param groups."""
        self._dtype: torch.dtype | None = None
        self.loaded: Literal["", "state", "state, then masks"] = ""
        """What was loaded since the last step: the optimizer's state, and perhaps other masks after it."""

    # A step

    def before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do what comes before a step; where a closure computes the gradients, when it has computed them.

        Return what such a hook returns: None, or new arguments of the step.
        """
        self.restore_groups()  # those of a step that raised
        self._now = [(model, model.trained_by(optimizer)) for model in self.models()]
        is_loaded = bool(self.loaded)
        for model, _ in self._now:
            model.check_ready(self)
        if all(model.waiting is None for model, _ in self._now):
            self.loaded = ""
        for model, trained in self._now if is_loaded else ():  # only now, since masks may be loaded after the state
            model.mask_weights(trained, (optimizer,), only_state=True)
        self._follow_dtype(optimizer)

        shared = is_replicated()

        def with_gradients() -> None:
            self._scale_groups(optimizer)
            for model, trained in self._now:
                for stored in trained.values() if model.storage == "masked" else ():
                    stored.mask_gradient(again=shared)  # versions do not show what processes did to gradients
            for model, trained in self._now:
                if model.rule is not None and not is_skipped(optimizer):
                    _unscale(optimizer)
                    model.rule.before_step(_learning_rates(optimizer, trained))

        closure = kwargs.get("closure") or next(iter(args[1:]), None)
        if closure is None:
            with_gradients()
            return None

        def acting() -> Any:
            loss = closure()
            with_gradients()
            return loss

        return (args[0], acting, *args[2:]), {name: kwargs[name] for name in kwargs if name != "closure"}

    def after(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """Do what comes after a step."""
        models, skipped = self._now, is_skipped(optimizer)
        self._now = []  # so that it does not keep models alive
        for model, trained in models:
            model.mask_weights(trained, () if keeps_zeros(optimizer) else (optimizer,))
        for model, trained in models if not skipped else ():
            if model.gradients.is_watching:
                of_others = {name for other in model.optimizers() for name in model.trained_by(other)} - trained.keys()
                model.gradients.end_iteration(of_others=of_others, scale=vars(optimizer).get("grad_scale"))
            if model.rule is not None:
                model.rule.after_step(_learning_rates(optimizer, trained))
        self._check_groups_alike(optimizer)
        self.restore_groups()
        for model, _ in models if not skipped else ():
            if model.cursor is not None and model.cursor.clock is optimizer:
                model.cursor.step()

    # Models

    def models(self) -> list[SparseModel]:
        """Return the models that the optimizer trains, in the order of their attachment."""
        return [model for reference in self._models if (model := reference()) is not None]

    def add(self, model: SparseModel) -> None:
        optimizer = self.optimizer()
        if optimizer is None or model in self.models():
            return
        if self._refusal is not None:
            self._refusal.remove()
            self._refusal = None
        if not self._models:
            self._handles = [
                optimizer.register_step_pre_hook(uncompiled(self.before)),
                optimizer.register_step_post_hook(uncompiled(self.after)),
                optimizer.register_state_dict_pre_hook(lambda saving: self.restore_groups()),
                optimizer.register_load_state_dict_pre_hook(lambda loading, state: self.restore_groups()),
                optimizer.register_load_state_dict_post_hook(self._follow_loaded_state),
            ]
        mine = weakref.ref(self)

        def forget(gone: weakref.ref[SparseModel]) -> None:
            if (stepper := mine()) is not None:
                stepper._drop(gone)

        self._models.append(weakref.ref(model, forget))

    def drop(self, model: SparseModel, *, reason: str) -> None:
        """Let a model go. Steps are refused from now on, with a reason, until another is taken in."""
        self.restore_groups()
        for reference in [reference for reference in self._models if reference() is model]:
            self._drop(reference)
        if reason and self._refusal is None and (optimizer := self.optimizer()) is not None:

            def refuse(*_: Any) -> None:
                raise GrowpruneError(reason)

            self._refusal = optimizer.register_step_pre_hook(uncompiled(refuse))

    def _drop(self, reference: weakref.ref[SparseModel]) -> None:
        self._models = [other for other in self._models if other is not reference]
        if not self._models:
            for handle in self._handles:
                handle.remove()
            self._handles, self._now = [], []

    # Learning rates

    def _scale_groups(self, optimizer: Optimizer) -> None:
        """Split the param groups by the densities of all models until `restore_groups`."""
        self.restore_groups()  # an optimizer may call its closure twice in a step
        factors: dict[int, float] = {}
        for model, trained in self._now:
            exponent = exponent_for(model.lr_scaling, optimizer)
            if exponent and model.cursor is not None and model.lr_ramp:
                exponent *= min(1.0, model.cursor.progress / model.lr_ramp)
            if exponent:
                densities = model.densities()
                for name, stored in trained.items():
                    density = densities[name]
                    factors[id(stored.parameter)] = min(CAP, density**-exponent) if density > 0 else CAP
        if all(factor == 1 for factor in factors.values()):
            return
        self._scaled = [(group, _split(group, factors)) for group in optimizer.param_groups]
        # each group's first part stands where the group stood, and what is left of all groups comes last
        firsts = [parts[0] for _, parts in self._scaled]
        rest = [part for _, parts in self._scaled for part in parts[1:]]
        self._users_groups = optimizer.param_groups
        optimizer.param_groups = [*firsts, *rest]

    def restore_groups(self) -> None:
        """Give the optimizer the user's param groups again, with what was written into those that stood for them.

        This is done after each step. After a step that raised, it is done by whatever comes next: a step, an edit, or
        saving and loading of the optimizer or of a model.
        """
        optimizer = self.optimizer()
        if optimizer is None or not self._scaled:
            return
        for group, parts in self._scaled:
            group |= {name: value for name, value in parts[0].items() if name != "params"}
        ours = {id(part) for _, parts in self._scaled for part in parts}
        self._users_groups += [group for group in optimizer.param_groups if id(group) not in ours]  # added since
        optimizer.param_groups, self._scaled, self._users_groups = self._users_groups, [], []

    def _check_groups_alike(self, optimizer: Optimizer) -> None:
        """Raise if the step has written numbers into param groups that differ between layers with different rates."""
        for _, (first, *rest) in self._scaled:
            for part in rest:
                for name, value in first.items():
                    if name not in ("params", "lr") and not _is_same(part.get(name), value):
                        self.restore_groups()
                        raise GrowpruneError(
                            f"{type(optimizer).__name__} keeps {name!r} for each param group, and it differs between "
                            f"layers whose learning rates lr_scaling scales: use lr_scaling=0"
                        )

    # State

    def _follow_loaded_state(self, loaded: Optimizer) -> None:
        self.loaded = "state"  # the next step masks it

    def _follow_dtype(self, optimizer: Optimizer) -> None:
        """Convert state if the model's dtype has changed since the last step, which torch does not do."""
        dtype = next(p.dtype for group in optimizer.param_groups for p in group["params"])
        if self._dtype is not None and self._dtype != dtype:
            for parameter, entries in optimizer.state.items():  # as `load_state_dict` would
                for name, entry in entries.items():
                    if isinstance(entry, Tensor) and entry.shape == parameter.shape and entry.dtype == self._dtype:
                        entries[name] = entry.to(parameter.dtype)
        self._dtype = dtype


def _split(group: Group, factors: Mapping[int, float]) -> list[Group]:
    """Split a group by rate. A group whose rates stay as they are is itself.

    The first part has the user's rate, even if it has no parameters, so that a rate which is set or multiplied after a
    step that raised is the user's.
    """
    by_factor: dict[float, list[Any]] = {1.0: []}
    for parameter in group["params"]:
        by_factor.setdefault(factors.get(id(parameter), 1.0), []).append(parameter)
    if by_factor.keys() <= {1.0}:
        return [group]
    return [
        {**group, "params": parameters, "lr": group["lr"] if factor == 1 else group["lr"] * factor}
        for factor, parameters in by_factor.items()
    ]


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b))


# Finding models and optimizers


def stepper_of(optimizer: Optimizer) -> Stepper:
    """Return the stepper of an optimizer, made when it is first needed."""
    if STEPPER not in vars(optimizer):
        vars(optimizer)[STEPPER] = Stepper(optimizer)
    stepper: Stepper = vars(optimizer)[STEPPER]
    return stepper


def notice(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Attach an optimizer at its first step to the sparse models whose parameters it trains.

    torch calls this before the step of any optimizer, and reads the optimizer's own hooks only after it, so a stepper
    that is attached here takes part in the same step. Nothing is looked up twice.
    """
    now = (OWNERS.num_models, sum(len(group["params"]) for group in optimizer.param_groups))
    if vars(optimizer).get(SEEN) == now:
        return
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if parameter in OWNERS:
            if (reference := OWNERS[parameter]) is None:
                raise GrowpruneError(STALE)
            if (model := reference()) is not None:
                model.take_in(optimizer)
    vars(optimizer)[SEEN] = now


@functools.cache
def watch_optimizers() -> None:
    """Have torch call `notice`. Done once, when the first SparseModel is made."""
    register_optimizer_step_pre_hook(uncompiled(notice))


# What optimizers and GradScalers do


def is_skipped(optimizer: Optimizer) -> bool:
    """True, in a hook of a step, if the step changes nothing because a GradScaler has found infinite gradients.

    GradScaler skips the step of most optimizers itself. It leaves skipping to those that unscale gradients themselves,
    such as fused ones. Only then does this wait for the device.
    """
    return bool(vars(optimizer).get("found_inf", False))


def _unscale(optimizer: Optimizer) -> None:
    """Unscale gradients in a hook before a step, if a GradScaler has left that to the optimizer."""
    scale: Tensor | None = vars(optimizer).get("grad_scale")
    if scale is None:
        return
    inverse = scale.double().reciprocal().float()  # as the GradScaler does it for others
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(inverse.to(parameter.grad.device))
    vars(optimizer)["grad_scale"] = None  # as after GradScaler.unscale_, so that they are not unscaled twice


def _learning_rates(optimizer: Optimizer, trained: Mapping[str, Any]) -> dict[str, float]:
    """Return the learning rates of parameters, by name; NaN if the optimizer sets them by itself."""
    rates = {id(p): group.get("lr") for group in optimizer.param_groups for p in group["params"]}
    of_name = {name: rates[id(stored.parameter)] for name, stored in trained.items()}
    return {name: float("nan") if rate is None else float(rate) for name, rate in of_name.items()}


def check_optimizer(optimizer: Any) -> None:
    """Raise unless this is a torch optimizer that can train sparse weights."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise GrowpruneError("LBFGS cannot train a sparse model, as its state has other shapes: use SGD or Adam")
    if type(optimizer).__module__.split(".")[0] == "deepspeed":
        raise GrowpruneError(f"DeepSpeed's {type(optimizer).__name__} cannot train a sparse model: {INSTEAD}")
    if not hasattr(optimizer, "register_step_pre_hook"):
        what = "a torch optimizer, such as torch.optim.SGD(model.parameters(), 0.1)"
        raise GrowpruneError(f"optimizer must be {what}, got a {type(optimizer).__name__}")


def unwrapped(optimizer: Any) -> Optimizer:
    """Return the optimizer inside accelerate's wrapper."""
    inner = getattr(optimizer, "__dict__", {}).get("optimizer")
    return unwrapped(inner) if isinstance(inner, Optimizer) else optimizer


def is_replicated() -> bool:
    """True if several processes train together."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def first_to_differ(
    contents: Iterable[bytes], device: torch.device | str = "cpu", group: Any = None
) -> tuple[int, int] | None:
    """Return the first rank that differs from rank 0, and the index of the difference; None if all agree.

    Every process of the group calls this. Digests are compared, so little is sent.
    """
    digests = [int.from_bytes(hashlib.sha256(content).digest()[:8], "little", signed=True) for content in contents]
    mine = torch.tensor(digests, dtype=torch.int64, device=device)
    all_of_them = [torch.empty_like(mine) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(all_of_them, mine, group=group)
    first, *others = torch.stack(all_of_them).tolist()
    for rank, row in zip(distributed.get_process_group_ranks(group)[1:], others, strict=True):
        if row != first:
            return rank, next(index for index, digest in enumerate(row) if digest != first[index])
    return None


# Learning rates: a layer of density d trains at `lr * d ** -exponent` (docs/theory.md). The stepper splits param groups
# by rate just before a step and puts them back just after it, so schedulers and checkpoints see only the user's groups.

LR_RAMP = 0.3
"""The share of a plan in which the exponent rises from 0. At the rates that suit training best, a model that starts
sparse is pushed far off in some seeds if all of the factor applies from the first iterations on (docs/theory.md)."""
CAP = 10.0
"""The largest factor: a layer with almost no live weights would otherwise train at any rate."""

Exponent = float | Literal["auto"]


def exponent_for(lr_scaling: Exponent, optimizer: Optimizer) -> float:
    """Return the exponent that a setting means for an optimizer.

    "auto" is 1 for Adam-like optimizers, since only these were seen to gain on every task (docs/theory.md).
    """
    if lr_scaling != "auto":
        return lr_scaling
    is_adam_like = all({"lr", "betas"} <= group.keys() for group in optimizer.param_groups)
    return 1.0 if is_adam_like and not adapts_its_rate(optimizer) else 0.0


def check_rates(lr_scaling: Exponent, optimizer: Optimizer) -> None:
    """Raise if learning rates are to be scaled, and the optimizer has none, or only one for all layers."""
    if not (exponent := exponent_for(lr_scaling, optimizer)):
        return
    name = type(optimizer).__name__
    if any("lr" not in group for group in optimizer.param_groups):
        raise GrowpruneError(
            f"lr_scaling={exponent:g} needs a learning rate, but {name} has none: use lr_scaling=0 or another optimizer"
        )
    if adapts_its_rate(optimizer):
        raise GrowpruneError(
            f"lr_scaling={exponent:g} gives layers different learning rates, but {name} needs one rate for all: use "
            f"lr_scaling=0"
        )


def adapts_its_rate(optimizer: Optimizer) -> bool:
    """True for Prodigy and D-Adaptation, which refuse different rates, and for schedule-free optimizers.

    Their param groups hold running numbers of the whole training: an estimated distance d, or the sum of all weights of
    an average. Adafactor's d is where it clips updates.
    """
    is_running = any(not {"d", "weight_sum"}.isdisjoint(group) for group in optimizer.param_groups)
    return is_running and not isinstance(optimizer, Adafactor)
