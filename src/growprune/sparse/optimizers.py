"""Hook the optimizers of a sparse model: keep pruned weights and their state zero, and update state after each edit.

Most optimizers keep zeros by themselves: a zero gradient, weight and state stay zero. For these, only gradients are
masked as they arise (see storage/masked.py), and again before a step if they were written to since. For all others,
weights and state are masked after each step too.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from growprune.errors import GrowpruneError, warn
from growprune.sparse.gradients import Gradients
from growprune.sparse.learning_rates import Exponent, ScaledRates
from growprune.sparse.optimizer_state import cast, live_state, load_live_state
from growprune.storage import Masked, SparseParameter
from growprune.storage.uncompiled import uncompiled
from growprune.storage.wrapped import plain

if TYPE_CHECKING:
    from growprune.sparse.rules.base import RunningRule

Trained = Mapping[str, tuple[SparseParameter, nn.Parameter]]
"""By name: how a parameter is stored, and the parameter."""

REPLACED: Any = WeakTensorKeyDictionary()
"""Parameters that an edit has replaced, and how they were stored. Training them has no effect."""

CAME_FIRST = "_growprune_came_first"
"""The attribute of an optimizer whose state was loaded since its last step: True if other masks were loaded later."""

KEEPS_ZEROS = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.SGD,
    }
)
"""Optimizers that keep a weight and its state at zero if its gradient is zero: these classes, not subclasses."""


def keeps_zeros(optimizer: Optimizer) -> bool:
    """True if a step with masked gradients keeps zeros exactly zero, with the optimizer's present settings."""
    return type(optimizer) in KEEPS_ZEROS and all(map(_keeps_zeros, optimizer.param_groups))


def _keeps_zeros(group: dict[str, Any]) -> bool:
    if group.get("maximize"):
        return False  # turns the sign of a zero
    if group.get("capturable") and not group.get("fused"):
        return False  # divides by the learning rate, which may be zero
    dtypes = {p.dtype for p in group["params"]}
    if group.get("fused") and dtypes & {torch.float16, torch.bfloat16} and not group["params"][0].is_cuda:
        return False  # torch 2.13's SGD mixes up its momentum there
    # zero by zero is no number, and in half precision the usual 1e-8 is zero
    return float(group.get("eps", 1.0)) > (1e-7 if torch.float16 in dtypes else 1e-37)


class Optimizers:
    """The optimizers attached to a model, held by weak references."""

    def __init__(
        self, stored: Mapping[str, SparseParameter], storage: str, gradients: Gradients, lr_scaling: Exponent = 0.0
    ) -> None:
        self._stored, self._storage, self._gradients = stored, storage, gradients
        self.rates = ScaledRates(lr_scaling, stored)
        self.attached: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.rule: RunningRule | None = None
        """What happens around each step."""
        self.num_mask_changes = 0
        """The number of masks that were set by edits, by rules, or from a state."""
        self._versions: dict[str, tuple[int, int]] = {}
        self._dtypes: weakref.WeakKeyDictionary[Optimizer, torch.dtype] = weakref.WeakKeyDictionary()
        """By optimizer: the dtype of its first parameter in the last step."""
        self._written: set[str] = set()
        self._has_warned = False
        self._is_released = False
        self.is_checked = False
        """False if the next step must be checked; see `attach`."""
        self._replaced: list[weakref.ref[Tensor]] = []

    def attach(self, optimizer: Optimizer, *, own: Set[int], check: Callable[[Optimizer], None]) -> None:
        """Hook an optimizer.

        Args:
            own: the ids of the model's parameters. The optimizer must train some of them.
            check: called before a step until it sets `is_checked`. Only the optimizer holds it, so there is no cycle.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(id(parameter) in own for parameter in parameters):
            raise GrowpruneError("the optimizer has no parameter of the model: create it with model.parameters()")
        for parameter in parameters:
            if parameter in REPLACED:
                raise GrowpruneError(
                    f"the optimizer holds {REPLACED[parameter]} weights from before an edit: create it after the edit, "
                    f"or attach it before"
                )
        self._refuse(optimizer, parameters)
        self.rates.check(optimizer)
        for stored in self._stored.values():
            stored.hook_gradients()
        if optimizer not in self.attached:
            self._hook(optimizer, check)
            self.attached.add(optimizer)

    def _hook(self, optimizer: Optimizer, check: Callable[[Optimizer], None]) -> None:
        """Masking comes first, so that a rule sees masked gradients and, after the step, masked weights."""

        def before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not self.is_checked:
                check(optimizer)
            return self._before_step(optimizer, args, kwargs)

        self.rates.hook_before(optimizer, _when_gradients_are_there)
        optimizer.register_step_pre_hook(uncompiled(before_step))
        optimizer.register_step_pre_hook(uncompiled(self._let_rule_begin))
        if self._storage == "masked":
            optimizer.register_step_post_hook(uncompiled(self._after_step))
            optimizer.register_load_state_dict_post_hook(lambda loaded: self._versions.clear())
        else:
            optimizer.register_load_state_dict_post_hook(lambda loaded: setattr(loaded, CAME_FIRST, False))
        optimizer.register_step_post_hook(uncompiled(self._end_iteration))
        self.rates.hook_after(optimizer)

    def release(self) -> None:
        """Refuse further steps of attached optimizers, because the model is no longer sparse."""
        self._is_released, self._storage = True, "masked"

    def reset(self) -> None:
        """Clear the state of attached optimizers."""
        for optimizer in self.attached:
            optimizer.state.clear()

    def _refuse(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise GrowpruneError(
                "LBFGS cannot train a sparse model, because its state does not have the shape of the weights: use SGD "
                "or Adam"
            )
        ours = {id(stored.parameter) for stored in self._stored.values()}
        if isinstance(optimizer, torch.optim.Muon) and self._storage == "compact" and ours & set(map(id, parameters)):
            raise GrowpruneError(
                "Muon cannot train weights in compact storage, which are not 2-D: use storage='masked'"
            )

    # Hooks of each step

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Mask gradients that are not known to be masked; those that a closure makes, once it has made them."""
        if self._is_released:
            raise GrowpruneError("the model was made dense by to_dense_(): create a new optimizer")
        self._check_wrapped_again()
        self._follow_dtype(optimizer)
        if self._storage == "compact":
            _check_order(optimizer)
            return None  # dead weights are not stored
        trained = self._trained_by(optimizer)
        self._written = {name for name, (_, p) in trained.items() if self._versions.get(name) != (id(p), p._version)}
        if len(self._written) == len(trained):
            self._warn_of_loaded_weights(trained)

        def mask_gradients() -> None:
            # versions do not show what is done to gradients on their way between processes
            is_shared = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
            for stored, _ in trained.values():
                stored.mask_gradient(again=is_shared)

        return _when_gradients_are_there(args, kwargs, mask_gradients)

    def _warn_of_loaded_weights(self, trained: Trained) -> None:
        """Warn if somebody has loaded weights over pruned ones since the last step: they are about to be zeroed."""
        dead = [~stored.mask() for stored, _ in trained.values()]
        total = sum(int(torch.count_nonzero(mask)) for mask in dead)
        lost = sum(
            int(torch.count_nonzero(p.detach()[mask])) for mask, (_, p) in zip(dead, trained.values(), strict=True)
        )
        if total and 2 * lost > total:
            warn(
                "most pruned weights are no longer zero, as after load_state_dict, and this step zeroes them again: "
                "load weights before you make the model sparse, or resume with the Sparsifier's load_state_dict"
            )

    def _follow_dtype(self, optimizer: Optimizer) -> None:
        """Convert state if the model's dtype has changed since the last step, which torch does not do."""
        dtype = next(p.dtype for group in optimizer.param_groups for p in group["params"])
        before = self._dtypes.get(optimizer, dtype)
        self._dtypes[optimizer] = dtype
        if before != dtype:
            cast(optimizer, before)

    def _let_rule_begin(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.rule is None or is_skipped(optimizer):
            return None
        _unscale(optimizer)
        return _when_gradients_are_there(args, kwargs, partial(self.rule.before_step, self._learning_rates(optimizer)))

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """Mask weights and state too: all if the optimizer may not keep zeros, else those written to before it."""
        del args, kwargs
        is_kept = keeps_zeros(optimizer)
        trained = self._trained_by(optimizer)
        off = {name: found for name, found in trained.items() if not is_kept or name in self._written}
        if off:
            self._enforce((optimizer,), off)
        self._versions.update({name: (id(p), p._version) for name, (_, p) in trained.items()})

    def _end_iteration(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """End the iteration of the gradients that edits look at, and let the rule act."""
        del args, kwargs
        if (self.rule is None and not self._gradients.is_watching) or is_skipped(optimizer):
            return
        if self._gradients.is_watching:
            others = [self._trained_by(other) for other in self.attached if other is not optimizer]
            of_others = {name for trained in others for name in trained} - self._trained_by(optimizer).keys()
            self._gradients.end_iteration(of_others=of_others, scale=vars(optimizer).get("grad_scale"))
        if self.rule is not None:
            self.rule.after_step(self._learning_rates(optimizer))

    def _trained_by(self, optimizer: Optimizer) -> Trained:
        ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        found = [(name, stored, stored.parameter) for name, stored in self._stored.items()]
        return {name: (stored, parameter) for name, stored, parameter in found if id(parameter) in ids}

    def _learning_rates(self, optimizer: Optimizer) -> dict[str, float]:
        """Those of the parameters that an optimizer trains, by name; NaN if it sets them by itself."""
        rates = {id(p): group.get("lr") for group in optimizer.param_groups for p in group["params"]}
        trained = {name: rates[id(p)] for name, (_, p) in self._trained_by(optimizer).items()}
        return {name: math.nan if rate is None else float(rate) for name, rate in trained.items()}

    def note_other_masks(self) -> None:
        """Record that other masks were loaded, so that compact state loaded before belongs to other weights."""
        for optimizer in self.attached:
            if self._storage == "compact" and CAME_FIRST in vars(optimizer):
                setattr(optimizer, CAME_FIRST, True)

    # Masks

    def enforce(self) -> None:
        """Set pruned weights, and state with the shape of its parameter, to exactly zero."""
        if self._storage == "masked":
            found = [(name, stored, stored.parameter) for name, stored in self._stored.items()]
            self._enforce(self.attached, {name: (stored, parameter) for name, stored, parameter in found})

    def _enforce(self, optimizers: Iterable[Optimizer], which: Trained, *, only_state: bool = False) -> None:
        optimizers, listed = tuple(optimizers), []
        for stored, parameter in which.values():
            states = [optimizer.state[parameter] for optimizer in optimizers if parameter in optimizer.state]
            tensors = [tensor for state in states for tensor in state.values() if isinstance(tensor, Tensor)]
            weight = [] if only_state else [parameter]
            # codes of quantized state are integers, and a code of zero need not stand for zero
            shaped_alike = [t for t in tensors if t.shape == parameter.shape and t.is_floating_point()]
            listed.append((stored, [*weight, *shaped_alike]))
        Masked.enforce(listed)
        self._versions.update({name: (id(p), p._version) for name, (_, p) in which.items()})

    @contextmanager
    def following(self, name: str) -> Iterator[SparseParameter]:
        """Keep the optimizer state of live weights while the mask of a parameter changes."""
        self.num_mask_changes += 1
        self.rates.densities = None  # which follow the masks
        stored = self._stored[name]
        old = stored.parameter
        dense = {}
        if self._storage == "compact":
            holding = [optimizer for optimizer in self.attached if old in optimizer.state]
            dense = {o: _reshaped(o.state[old], old.shape, stored.to_dense) for o in holding}
        yield stored
        new = stored.parameter
        if new is not old:
            self._replace(name, old, new, dense)
        elif self._storage == "masked":  # the weight itself is zero where it is pruned
            self._enforce(self.attached, {name: (stored, old)}, only_state=True)

    def _replace(self, name: str, old: nn.Parameter, new: nn.Parameter, dense: Mapping[Optimizer, Any]) -> None:
        """Make optimizers train a new parameter in place of an old one, with its state."""
        stored, REPLACED[old] = self._stored[name], self._storage
        if not hasattr(new, "device_mesh"):  # FSDP2 knows the new one; DistributedDataParallel would hold the old one
            self._replaced.append(weakref.ref(old))
        for optimizer in self.attached:
            for group in optimizer.param_groups:
                group["params"] = [new if p is old else p for p in group["params"]]
            if optimizer not in dense:
                continue
            if _follows(optimizer, optimizer.state.pop(old), old):
                optimizer.state[new] = _reshaped(dense[optimizer], stored.shape, stored.from_dense)
            elif not self._has_warned:
                self._has_warned = True
                warn(
                    f"the state of {name} in {type(optimizer).__name__} does not fit the weight after an edit and was "
                    f"reset, as for every edited weight: use storage='masked' to keep it"
                )

    def _check_wrapped_again(self) -> None:
        """Raise if a DistributedDataParallel from before an edit lacks the new weights."""
        replaced, self._replaced = self._replaced, []
        if not replaced or not (distributed.is_available() and distributed.is_initialized()):
            return
        gc.collect()
        old = {id(parameter) for reference in replaced if (parameter := reference()) is not None}
        wrappers = [o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel)] if old else []
        wrapped = [id(parameter) for wrapper in wrappers for parameter in wrapper._module_parameters]
        new = {id(stored.parameter) for stored in self._stored.values()}
        if old & set(wrapped) and not new <= set(wrapped):
            raise GrowpruneError("an edit replaced weights that DistributedDataParallel holds: wrap the model again")

    def live_state(self, optimizer: Optimizer, device: torch.device | str | None = None) -> dict[str, Any]:
        return live_state(self._stored, optimizer, device)

    def load_live_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        load_live_state(self._stored, optimizer, state)


def _when_gradients_are_there(args: tuple[Any, ...], kwargs: dict[str, Any], act: Callable[[], None]) -> Any:
    """Act in a hook before a step: at once, or after the step's closure has computed gradients.

    Return what such a hook returns: None, or new arguments of the step.
    """
    closure = kwargs.get("closure") or next(iter(args[1:]), None)
    if closure is None:
        act()
        return None

    def acting() -> Any:
        loss = closure()
        act()
        return loss

    return (args[0], acting, *args[2:]), {name: kwargs[name] for name in kwargs if name != "closure"}


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


def unwrapped(optimizer: Any) -> Optimizer:
    """Return the optimizer inside accelerate's wrapper."""
    inner = getattr(optimizer, "__dict__", {}).get("optimizer")
    return unwrapped(inner) if isinstance(inner, Optimizer) else optimizer


def _check_order(optimizer: Optimizer) -> None:
    """Raise before a step if the optimizer's state was loaded before the masks that it belongs to."""
    if vars(optimizer).get(CAME_FIRST, False):
        raise GrowpruneError(
            "the optimizer's state was loaded before the SparseModel's, whose masks say which weights it belongs to: "
            "load the SparseModel's state first, then the optimizer's"
        )
    vars(optimizer).pop(CAME_FIRST, None)


def _reshaped(entries: dict[str, Any], shape: Sequence[int], convert: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Convert those tensors of a parameter's state that have a given shape. Quantized ones become plain."""
    return {
        name: convert(entry if type(entry) is Tensor else plain(entry))
        if isinstance(entry, Tensor) and entry.shape == torch.Size(shape)
        else entry
        for name, entry in entries.items()
    }


def _follows(optimizer: Optimizer, entries: dict[str, Any], old: Tensor) -> bool:
    """True if state can move to a parameter of another shape: not if it belongs to rows and columns."""
    tensors = [entry for entry in entries.values() if isinstance(entry, Tensor) and entry.numel() > 1]
    return "adafactor" not in type(optimizer).__name__.lower() and all(t.shape == old.shape for t in tensors)
