"""The optimizers that train a sparse model: what is pruned stays zero in their state, which follows each edit.

Most optimizers keep zeros by themselves: from a zero gradient, a zero weight and zero state they make zeros. There,
only gradients are masked, as they arise (see storage/masked.py), and once more before a step if someone has written to
them since. For all others weights and state are masked after each step too.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from growprune.errors import GrowpruneError, warn
from growprune.masks.bits import like, whole
from growprune.storage import SparseParameter, parse_storage
from growprune.storage.compact_modules import is_sharded

REPLACED: Any = WeakTensorKeyDictionary()
"""Parameters in whose place there is another since an edit, and how they were stored: training them changes nothing."""

CAME_FIRST = "_growprune_came_first"
"""The attribute of an optimizer whose state was loaded since its last step: whether other masks came after it."""

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
"""Optimizers that leave a weight and its state at zero if its gradient is: these, and nothing derived from them."""


def keeps_zeros(optimizer: Optimizer) -> bool:
    """Whether a step with masked gradients leaves zeros exactly zero, with the settings an optimizer has now."""
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
    """Those attached to a model, as long as someone else holds them.

    Args:
        sparse_parameter: how the model's prunable parameters are stored, by name.
        storage: the name of that storage.
    """

    def __init__(self, sparse_parameter: Mapping[str, SparseParameter], storage: str) -> None:
        self._sparse_parameters, self._storage = sparse_parameter, storage
        self.attached: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._versions: dict[str, tuple[int, int]] = {}
        self._written: set[str] = set()
        self._has_warned = False
        self._is_released = False
        self._replaced: list[weakref.ref[Tensor]] = []
        self.num_mask_changes = 0
        """How many masks were set that optimizers had to follow, by edits, by rules, or from a state."""

    def attach(self, optimizer: Optimizer, *, own: Set[int]) -> None:
        """Follow an optimizer, which must train some of the model's own parameters, given by their ids."""
        optimizer = unwrapped(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(id(parameter) in own for parameter in parameters):
            raise GrowpruneError("the optimizer has no parameter of the model: make it of model.parameters()")
        for parameter in parameters:
            if parameter in REPLACED:
                raise GrowpruneError(
                    f"the optimizer holds {REPLACED[parameter]} weights as they were before an edit: make it after the "
                    f"edit, or attach it before"
                )
        self._refuse(optimizer, parameters)
        for sparse_parameter in self._sparse_parameters.values():
            sparse_parameter.hook_gradients()
        if optimizer not in self.attached:
            optimizer.register_step_pre_hook(self._before_step)
            if self._storage == "masked":
                optimizer.register_step_post_hook(self._after_step)
                optimizer.register_load_state_dict_post_hook(lambda loaded: self._versions.clear())
            else:
                optimizer.register_load_state_dict_post_hook(lambda loaded: setattr(loaded, CAME_FIRST, False))
            self.attached.add(optimizer)

    def release(self) -> None:
        """The model is no longer sparse: what was attached must not go on as if it were."""
        self._is_released, self._storage = True, "masked"

    def _refuse(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise GrowpruneError(
                "LBFGS cannot train a sparse model: its state is not shaped like the weights; use SGD or Adam"
            )
        ours = {id(sparse_parameter.parameter) for sparse_parameter in self._sparse_parameters.values()}
        if isinstance(optimizer, torch.optim.Muon) and self._storage == "compact" and ours & set(map(id, parameters)):
            raise GrowpruneError(
                "Muon cannot train weights in compact storage, which are not 2-D: use storage='masked'"
            )

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Mask what gradients are not known to be masked; those that a closure makes, when it has made them."""
        if self._is_released:
            raise GrowpruneError("the model was made dense by to_dense_(): make the optimizer anew")
        self._check_wrapped_again()
        if self._storage == "compact":
            _check_order(optimizer)
            return None  # dead weights are not there
        self._written = {name for name, s in self.trained_by(optimizer) if self._versions.get(name) != _version(s)}
        return when_gradients_are_there(args, kwargs, lambda: self._mask_gradients(optimizer))

    def _mask_gradients(self, optimizer: Optimizer) -> None:
        # what is done to gradients on their way between processes, no version tells
        is_shared = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
        for _, sparse_parameter in self.trained_by(optimizer):
            sparse_parameter.mask_gradient(again=is_shared)

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """Mask weights and state too: all if the optimizer may not keep zeros, else what someone wrote to before."""
        del args, kwargs
        is_kept = keeps_zeros(optimizer)
        trained = self.trained_by(optimizer)
        self._enforce((optimizer,), [(name, s) for name, s in trained if not is_kept or name in self._written])
        self._versions.update((name, _version(s)) for name, s in trained)

    def note_other_masks(self) -> None:
        """Other masks were loaded: compact state that was loaded before is now taken for that of other weights."""
        for optimizer in self.attached:
            if self._storage == "compact" and CAME_FIRST in vars(optimizer):
                setattr(optimizer, CAME_FIRST, True)

    def trained_by(self, optimizer: Optimizer) -> list[tuple[str, SparseParameter]]:
        ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return [(name, s) for name, s in self._sparse_parameters.items() if id(s.parameter) in ids]

    def trained_by_others(self, optimizer: Optimizer) -> set[str]:
        """The names of parameters that other attached optimizers train, and this one does not."""
        others = [other for other in tuple(self.attached) if other is not optimizer]
        own = {name for name, _ in self.trained_by(optimizer)}
        return {name for other in others for name, _ in self.trained_by(other)} - own

    def learning_rates(self, optimizer: Optimizer) -> dict[str, float]:
        """Those of the parameters that an optimizer trains, by name; not a number, if it sets them by itself."""
        rates = {id(p): group.get("lr") for group in optimizer.param_groups for p in group["params"]}
        trained = {name: rates[id(s.parameter)] for name, s in self.trained_by(optimizer)}
        return {name: math.nan if rate is None else float(rate) for name, rate in trained.items()}

    def enforce(self) -> None:
        """Make weights, and state that is shaped like its parameter, exactly zero off the masks."""
        if self._storage == "masked":
            self._enforce(tuple(self.attached), list(self._sparse_parameters.items()))

    def _enforce(self, optimizers: Iterable[Optimizer], which: Sequence[tuple[str, SparseParameter]]) -> None:
        listed = []
        for _, sparse_parameter in which:
            parameter = sparse_parameter.parameter
            states = [o.state[parameter] for o in optimizers if parameter in o.state]
            tensors = [t for state in states for t in state.values() if isinstance(t, Tensor)]
            listed.append((sparse_parameter, [parameter, *(t for t in tensors if t.shape == parameter.shape)]))
        parse_storage(self._storage).enforce(listed)
        self._versions.update((name, _version(s)) for name, s in which)

    @contextmanager
    def following(self, sparse_parameter: SparseParameter) -> Iterator[None]:
        """While a mask changes: optimizers go on with the live weights, or with the new parameter that has them."""
        self.num_mask_changes += 1
        old = sparse_parameter.parameter
        dense = {
            o: _reshaped(o.state[old], old.shape, sparse_parameter.to_dense) for o in self.attached if old in o.state
        }
        yield
        new = sparse_parameter.parameter
        if new is old:
            if self._storage == "masked" and self.attached:  # the weight itself is zero where it is pruned
                self._enforce(tuple(self.attached), [(self._name_of(sparse_parameter), sparse_parameter)])
            return
        REPLACED[old] = self._storage
        if not is_sharded(new):  # FSDP2 is told of it; DistributedDataParallel would hold the old one
            self._replaced.append(weakref.ref(old))
        for optimizer in self.attached:
            for group in optimizer.param_groups:
                group["params"] = [new if p is old else p for p in group["params"]]
            if optimizer in dense:
                entries = optimizer.state.pop(old)
                if _follows(optimizer, entries, old):
                    convert = sparse_parameter.from_dense
                    optimizer.state[new] = _reshaped(dense[optimizer], sparse_parameter.shape, convert)
                else:
                    self._warn_of_lost_state(optimizer, sparse_parameter)

    def _warn_of_lost_state(self, optimizer: Optimizer, sparse_parameter: SparseParameter) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn(
                f"{type(optimizer).__name__}'s state of {self._name_of(sparse_parameter)} does not fit the weight "
                f"after an edit, and starts anew; so does that of others it edits: storage='masked' keeps it"
            )

    def _name_of(self, sparse_parameter: SparseParameter) -> str:
        return next(name for name, other in self._sparse_parameters.items() if other is sparse_parameter)

    def _check_wrapped_again(self) -> None:
        """Raise if gradients are shared by a DistributedDataParallel made before an edit: new weights are not in it."""
        replaced, self._replaced = self._replaced, []
        if not replaced or not (distributed.is_available() and distributed.is_initialized()):
            return
        gc.collect()
        old = {id(parameter) for reference in replaced if (parameter := reference()) is not None}
        wrapped = [id(p) for w in _data_parallel() for p in w._module_parameters] if old else []
        new = {id(sparse_parameter.parameter) for sparse_parameter in self._sparse_parameters.values()}
        if old & set(wrapped) and not new <= set(wrapped):
            raise GrowpruneError("edits changed weights that DistributedDataParallel holds: wrap the model in it again")

    def live_state(self, optimizer: Optimizer, device: torch.device | str | None) -> dict[str, Any]:
        """Like `optimizer.state_dict()`, but of state shaped like a sparse weight, only that of live weights.

        Args:
            device: where what is shaped like a parameter goes, one after the other; where it is, if not given.
        """

        def put(tensor: Tensor) -> Tensor:
            return tensor if device is None else tensor.to(device)

        return self._converted(
            optimizer,
            optimizer.state_dict(),
            lambda stored: (stored.parameter.shape, lambda entry: put(stored.to_live(entry))),
            lambda parameter, entry: put(whole(entry)),
        )

    def load_live_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Take back what `live_state` gave, whatever storage it was taken from."""
        optimizer.load_state_dict(
            self._converted(
                optimizer,
                state,
                lambda sparse_parameter: (
                    (int(torch.count_nonzero(sparse_parameter.mask())),),
                    sparse_parameter.from_live,
                ),
                like,
            )
        )

    def _converted(
        self,
        optimizer: Optimizer,
        state: dict[str, Any],
        how: Callable[[SparseParameter], tuple[Sequence[int], Callable[[Tensor], Tensor]]],
        other: Callable[[Tensor, Tensor], Tensor],
    ) -> dict[str, Any]:
        """State whose tensors of a certain shape are converted, parameter by parameter."""
        stored_of = {
            id(sparse_parameter.parameter): sparse_parameter for sparse_parameter in self._sparse_parameters.values()
        }
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        converted = {}
        for index, entries in state["state"].items():
            sparse_parameter = stored_of.get(id(parameters[index]))
            if sparse_parameter is not None:
                converted[index] = _reshaped(entries, *how(sparse_parameter))
            else:
                converted[index] = _reshaped(entries, parameters[index].shape, partial(other, parameters[index]))
        return {**state, "state": converted}


def when_gradients_are_there(args: tuple[Any, ...], kwargs: dict[str, Any], act: Callable[[], None]) -> Any:
    """In a hook before a step: act at once, or, if the step has a closure that makes gradients, when it has made them.

    Gives what such a hook returns: nothing, or other arguments of the step.
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
    """Asked in a hook of a step: whether the step changes nothing, since a GradScaler has found infinite gradients.

    It makes no such step of most optimizers, but leaves the skipping to those that unscale gradients by themselves, as
    fused ones do. To ask waits for the device, in this case only.
    """
    return bool(vars(optimizer).get("found_inf", False))


def unscale(optimizer: Optimizer) -> None:
    """In a hook before a step: make gradients those of the loss, if a GradScaler has left that to the optimizer."""
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
    """The optimizer itself, where accelerate has wrapped it."""
    inner = getattr(optimizer, "__dict__", {}).get("optimizer")
    return unwrapped(inner) if isinstance(inner, Optimizer) else optimizer


def _check_order(optimizer: Optimizer) -> None:
    """Raise, before a step, if the state that was loaded has followed masks which it had never been of."""
    if vars(optimizer).get(CAME_FIRST, False):
        raise GrowpruneError(
            "the optimizer's state was loaded before the SparseModel's, whose masks say what it is of: load the "
            "optimizer's once more, and next time after it"
        )
    vars(optimizer).pop(CAME_FIRST, None)


def _version(sparse_parameter: SparseParameter) -> tuple[int, int]:
    parameter = sparse_parameter.parameter
    return id(parameter), parameter._version


def _follows(optimizer: Optimizer, entries: dict[str, Any], old: Tensor) -> bool:
    """Whether state can be taken to a parameter of another shape: not if it is of rows and columns."""
    tensors = [entry for entry in entries.values() if isinstance(entry, Tensor) and entry.numel() > 1]
    return "adafactor" not in type(optimizer).__name__.lower() and all(t.shape == old.shape for t in tensors)


def _data_parallel() -> list[DistributedDataParallel]:
    return [o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel)]


def _reshaped(entries: dict[str, Any], shape: Sequence[int], convert: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """The state of one parameter, with the tensors of a shape converted."""
    return {
        name: convert(entry) if isinstance(entry, Tensor) and entry.shape == torch.Size(shape) else entry
        for name, entry in entries.items()
    }
