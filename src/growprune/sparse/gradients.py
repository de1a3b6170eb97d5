"""Collect the gradients that edits need, including those of dead weights, which training never needs.

They exist for a moment in each backward pass, and are masked as they accumulate. If an edit needs them, they are
*watched* in the iteration before it: `Gradients` receives each dense gradient before it is masked, sums those of the
iteration, and keeps the sum until the edit.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from growprune.errors import GrowpruneError
from growprune.plan import By
from growprune.storage import SparseParameter
from growprune.storage.parameter import uncompiled

DECAY = 0.9
"""The decay per iteration of the moving average of gradients, as in RigL's code for "momentum"."""

current_backward: Callable[[], int] = torch._C._current_graph_task_id
"""Return the number of the current backward pass."""


class Gradients:
    """Collect the gradients of sparse parameters for edits."""

    def __init__(self, parameters: Mapping[str, SparseParameter]) -> None:
        self._parameters = parameters
        self._sums: dict[str, Tensor] = {}
        """The sums of the current iteration, by parameter."""
        self._ended: dict[str, Tensor] = {}
        """The same of the last complete iteration that was watched: what edits use."""
        self.averages: dict[str, Tensor] = {}
        """The moving averages over the iterations of a phase, by parameter."""
        self._passes: dict[str, int] = {}
        """By parameter: the backward pass that its last gradient came from."""
        self._is_hessian = False
        """True if edits use the Hessian times the gradient."""
        self._watched: By | None = None
        self.is_watching = False
        self._handles: list[Any] = []
        """Hooks that see a gradient before it is added to the parameter's."""
        self.add_up: Callable[[Tensor], Tensor] | None = None
        """Adds up a tensor over the replicas of the model, if there are several."""
        self.shares: Any = None
        """If the model is sharded: its sharding.handles.Ranks. Each keeps its part of the gradients, flat."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_watched": None, "is_watching": False, "_handles": []}  # a copy watches nothing

    def watch(self, by: By | None) -> None:
        """Watch the next iterations for an edit that needs gradients; with None, stop watching."""
        if by is not self._watched:
            self._watched, self.is_watching = by, by is not None
            for handle in self._handles:
                handle.remove()
            self._handles = []
            for name, parameter in self._parameters.items():
                parameter.record = None if by is None else partial(self._add, name)
                if by is not None and parameter.adds_up_gradients and parameter.parameter.requires_grad:
                    begin = uncompiled(lambda gradient, name=name: self._begin(name))
                    self._handles.append(parameter.parameter.register_hook(begin))  # type: ignore[no-untyped-call]

    def _begin(self, name: str) -> None:
        """Drop the sum so far if gradients were emptied without a step, as after one that a GradScaler has skipped.

        Called before a gradient is added to that of the parameter. With `zero_grad(set_to_none=False)`, the gradient of
        live weights is zero then, although that of earlier passes is not.
        """
        parameter, before = self._parameters[name], self._sums.get(name)
        if before is None or self._passes.get(name) == current_backward():
            return
        own = parameter.parameter.grad
        if self.shares is not None:  # each process has other values of both, and FSDP2 may hold unsent gradients
            is_over = parameter.is_first_gradient or not bool(before.isfinite().all())
        elif own is None:
            is_over = True
        else:
            is_over = not bool(own.any()) and bool(((before != 0) & (parameter.mask() | ~before.isfinite())).any())
        if is_over:
            del self._sums[name]

    def _add(self, name: str, gradient: Tensor) -> None:
        """Take a gradient in: the first of an iteration, or one more of it."""
        if self._is_hessian:
            self._ended, self._is_hessian = {}, False
        parameter, now = self._parameters[name], current_backward()
        if not parameter.adds_up_gradients:  # the gradient is not added to that of the parameter yet
            self._begin(name)
        before = None if parameter.is_first_gradient and self._passes.get(name) != now else self._sums.get(name)
        self._passes[name] = now
        gradient = gradient.detach().float() if gradient.dtype != torch.float64 else gradient.detach()
        if self.shares is not None:
            gradient = self.shares.local_shard(gradient.reshape(-1))
        if self._watched is By.MOMENTUM:  # for many iterations: free what is over
            self._ended.pop(name, None)
        if before is None:
            self._sums[name] = gradient.clone()
        elif parameter.adds_up_gradients:  # that of live weights is a sum already
            self._sums[name] = torch.where(parameter.mask(), gradient, before + gradient)
        else:  # not in place: a state that was taken does not change
            self._sums[name] = before + gradient

    def end_iteration(self, *, of_others: Container[str] = (), scale: Tensor | None = None) -> None:
        """End the iteration after an optimizer step: later gradients of its weights belong to the next iteration.

        Args:
            of_others: parameters of other optimizers, whose iteration ends with a step of those. A backward pass may
                still reach them, as a generator's goes through the discriminator.
            scale: the factor of the loss, if known. It does not change a ranking, because it is the same for all
                weights. But it may differ between the iterations of an average.
        """
        ended = [name for name in self._sums if name not in of_others]
        if self._watched is None or not ended:
            return
        totals = self._over_replicas({name: self._sums.pop(name) for name in ended})
        self._ended = {name: self._ended[name] for name in self._ended if name in of_others} | totals
        for name, total in totals.items() if self._watched is By.MOMENTUM else ():
            total = total if scale is None else total / scale
            average = self.averages.get(name, torch.zeros_like(total))
            self.averages[name] = average.mul(DECAY).add_(total, alpha=1 - DECAY)

    def _over_replicas(self, totals: dict[str, Tensor]) -> dict[str, Tensor]:
        return totals if self.add_up is None else {name: self.add_up(total) for name, total in totals.items()}

    def are_seen(self, by: By) -> bool:
        """True if there are gradients for an edit, from an iteration that an attached optimizer has ended."""
        if by is By.GRASP:
            return self._is_hessian
        return bool(self.averages) if by is By.MOMENTUM else bool(self._ended) and not self._is_hessian

    def scores(self, by: By, name: str) -> Tensor:
        """Return the scores by which an edit ranks a parameter's weights. The sign matters only for GraSP."""
        found = self.averages if by is By.MOMENTUM else self._ended
        parameter = self._parameters[name]
        if not self.are_seen(by):
            self._check_trained(by)
            raise GrowpruneError(
                f"an edit by {by.value} needs gradients, but none were seen: attach the optimizer at least one "
                f"iteration before the edit, or call SparseModel.score() with losses first"
            )
        if name not in found:  # it took no part in the loss
            return torch.zeros(parameter.shape, device=parameter.parameter.device)
        seen: Tensor = self._whole(name, found[name]).view(parameter.shape)
        return seen * parameter.weight() if by in (By.SNIP, By.GRASP) else seen

    def _check_trained(self, by: By) -> None:
        """Raise if all sparse weights are frozen, as with adapters, and never get a gradient."""
        if not any(parameter.parameter.requires_grad for parameter in self._parameters.values()):
            raise GrowpruneError(
                f"an edit by {by.value} needs gradients, but all prunable weights are frozen (requires_grad=False), as "
                f"with LoRA: train them, or use a method that needs no gradients, such as gradual_gap"
            )

    def _whole(self, name: str, total: Tensor) -> Any:
        return total if self.shares is None else self.shares.all_gather(total, self._parameters[name].shape.numel())

    def clear(self) -> None:
        """Drop all gradients once the edits that needed them are done."""
        self._sums, self._ended, self.averages, self._is_hessian = {}, {}, {}, False

    def flags(self) -> dict[str, bool]:
        return {"is_over": bool(self._ended), "is_hessian": self._is_hessian}

    def all_shares(self) -> dict[str, Tensor]:
        """Return this process's flat shares of all gradients, by parameter."""
        return {name: total.reshape(-1) for name, total in self._ended.items()}

    def take_shares(self, parts: Mapping[str, Tensor]) -> None:
        """Load what `all_shares` returned, for the present number of processes."""
        shapes = {name: (-1,) if self.shares is not None else self._parameters[name].shape for name in parts}
        self._ended = {name: part.view(shapes[name]) for name, part in parts.items()}

    def state_dict(self) -> dict[str, Any]:
        sums = {name: self._whole(name, total) for name, total in (self._ended or self._sums).items()}
        return {"sums": sums, "averages": dict(self.averages), **self.flags()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.clear()
        sums = self._ended if state["is_over"] else self._sums
        for mine, stored in ((sums, state["sums"]), (self.averages, state["averages"])):
            mine |= {name: tensor.to(self._parameters[name].parameter.device) for name, tensor in stored.items()}
        self._is_hessian = state["is_hessian"]

    # Before any training

    def observe(self, by: By, model: nn.Module, losses: Sequence[Callable[[], Tensor]]) -> None:
        """Compute the gradients of some losses without a step; for GraSP, the Hessian times the gradient."""
        self._check_trained(by)
        self.clear()
        if by is By.GRASP:
            with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
                products = self._hessian_gradient(losses)
            # replicas choose by the same bits, whatever their GPUs make of the same batch
            self._ended, self._is_hessian = self._over_replicas(products), True
            return
        model.zero_grad(set_to_none=True)  # what was there is of other losses
        self.watch(by)
        for loss in losses:
            loss().backward()  # type: ignore[no-untyped-call]
        self.end_iteration()
        self.watch(None)
        model.zero_grad(set_to_none=True)

    def _hessian_gradient(self, losses: Sequence[Callable[[], Tensor]]) -> dict[str, Tensor]:
        """H g: first g over all losses, then for each loss the gradient of the product of its own gradient with g."""
        trained = {name: p.parameter for name, p in self._parameters.items() if p.parameter.requires_grad}
        names, tensors = list(trained), list(trained.values())
        total = _sum(torch.autograd.grad(loss(), tensors, materialize_grads=True) for loss in losses)
        products = []
        for loss in losses:
            own = torch.autograd.grad(loss(), tensors, create_graph=True, materialize_grads=True)
            product = torch.stack([(g * o).sum() for g, o in zip(total, own, strict=True)]).sum()
            products.append(torch.autograd.grad(product, tensors, materialize_grads=True))
        return dict(zip(names, _sum(products), strict=True))


def _sum(many: Iterable[Sequence[Tensor]]) -> list[Tensor]:
    return [torch.stack(list(same)).sum(0) for same in zip(*many, strict=True)]
