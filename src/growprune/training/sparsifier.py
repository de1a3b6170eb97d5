"""`sparsify`: make a model sparse while your own loop trains it."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from growprune.errors import GrowpruneError, warn
from growprune.files.disk import NUMBER, Names, fault
from growprune.files.writer import write_file
from growprune.masks.bits import Snapshot, unpack
from growprune.plan import By, Plan, walk
from growprune.plan.settings import check_state
from growprune.sparse.cursor import cursor_of
from growprune.sparse.model import SparseModel, check_settings, named_tensors
from growprune.sparse.stepper import KEEPS_ZEROS, LR_RAMP, check_optimizer, unwrapped
from growprune.sparse.summary import Summary
from growprune.storage.masked import is_wrapped
from growprune.training.settings import BY_DATA, FirstMask, PartsLike, Scorer, Settings, describe

log = logging.getLogger("growprune")


def sparsify(
    model: nn.Module | SparseModel,
    optimizer: Optimizer | Sequence[Optimizer],
    method: str | Callable[..., Plan] = "gradual_gap",
    *,
    sparsity: float,
    iterations: int | None = None,
    epochs: int | None = None,
    iterations_per_epoch: int | None = None,
    parts: PartsLike = None,
    allocation: str | None = None,
    pattern: str = "unstructured",
    keep_dense: str | Sequence[str] = "auto",
    include: Sequence[str] = (),
    storage: str = "masked",
    initial_mask: str = "auto",
    calibration: Iterable[Any] | None = None,
    lr_scaling: float | Literal["auto"] = "auto",
    lr_ramp: float = LR_RAMP,
    seed: int = 0,
    cost_power: float = 0.0,
    rescale: bool | Literal["auto"] = "auto",
    example: Any = None,
    losses: Sequence[Callable[[], Tensor]] | None = None,
    **options: Any,
) -> Sparsifier:
    """Make a model sparse while your own loop trains it: each `optimizer.step()` prunes and grows when it is due.

    Args:
        model: any module, also wrapped by `torch.compile` or DistributedDataParallel; or a SparseModel that is sparse
            already, as `sparse_init` builds it. That has its own settings, and its mask is the first one.
        optimizer: the optimizer of the model's parameters, or several. The last one advances the plan.
        method: a name in `growprune.methods.METHODS`, or your own method.
        sparsity: the fraction of zeros to reach.
        iterations: the optimizer steps of the whole training.
        epochs: instead of `iterations`, with `iterations_per_epoch`; or the method's own option, as in "cyclic_gap".
        iterations_per_epoch: the optimizer steps of an epoch.
        parts: what grows in turn: a number, a kind such as "balanced", lists of names, or a `Partition`; 4 by default.
        allocation: how sparsity is divided among layers: "uniform", "global" or "erk"; by default the method's own.
        pattern: which positions may be live: "unstructured", a block such as "1x8", or N:M such as "2:4".
        keep_dense: names or globs that are never pruned; "auto" for output layers: those that `example` leads to, or
            else the layer registered last. Frozen layers are never pruned, unless `include` names them.
        include: names or globs of further parameters to prune, which belong to no known kind of layer.
        storage: "masked" (dense values and a mask) or "compact" (live values only).
        initial_mask: "random"; "magnitude", "wanda", "sparsegpt" for trained weights; "as_is" for a sparse model; or
            "auto", which inspects the model, and warns if it does not choose "random".
        calibration: a few batches of inputs for "wanda" and "sparsegpt"; see `prune_pretrained`.
        lr_scaling: a layer of density d trains at lr * d ** -lr_scaling, at most 10 * lr. "auto" is 1 if the sparsity
            rises from a random mask (gradual_gap, granet) under an Adam-like optimizer, else 0.
        lr_ramp: the exponent rises from 0 to lr_scaling over this share of the plan: sparse layers bear high rates
            later, not at once.
        seed: the seed of every random mask.
        losses: functions that each compute a loss, for methods whose first mask needs gradients (snip, grasp).
        cost_power: with allocation="global", magnitudes of a layer are ranked times (operations per weight) **
            -cost_power: more than 0 keeps fewer weights in layers where each costs much, less than 0 keeps more.
        rescale: multiply the weights that a random first mask keeps by 1 / sqrt(density of their layer), so that
            activations stay as large; "auto" does so for models without normalization.
        example: an input of the model, as a tuple or a dict if it has several; used to find the output layers, and to
            count operations for `cost_power`.
        options: the method's own options, such as `peak_density=0.5`.
    """
    optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    for one in optimizers:
        check_optimizer(unwrapped(one))

    def score(sparse: SparseModel, by: By) -> None:
        sparse.score(by, losses or ())

    settings = Settings.among(locals())
    sparsifier = Sparsifier(model, settings, optimizers, score=None if losses is None else score)
    try:
        sparsifier.begin(optimizers)
    except GrowpruneError:
        if not isinstance(model, SparseModel) and sparsifier.sparse.ranks is None:
            sparsifier.to_dense_()  # which can be given again
        raise
    return sparsifier


class Sparsifier:
    """A model that becomes sparse while it is trained. Created by `sparsify`.

    Examples:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
        >>> sparsifier = sparsify(model, optimizer, sparsity=0.9, iterations=100)
        >>> for _ in range(100):
        ...     optimizer.zero_grad()
        ...     model(torch.randn(8, 20)).square().mean().backward()
        ...     optimizer.step()
        >>> sparsifier
        Sparsifier(gradual_gap, finished after 100 iterations, sparsity 0.9)
    """

    def __init__(
        self,
        model: nn.Module | SparseModel,
        settings: Settings,
        optimizers: Sequence[Any] = (),
        *,
        iterations: int | None = None,
        iterations_per_epoch: int | None = None,
        remedy: Callable[[int], str] = "iterations={}".format,
        score: Scorer | None = None,
        resume: Mapping[str, Any] | None = None,
    ) -> None:
        """Make the model sparse, with all weights live until `begin`. Nothing is changed if anything is refused.

        Args:
            optimizers: those of the model, as far as they exist.
            iterations: the optimizer steps of the training, if a trainer owns the loop.
            iterations_per_epoch: its optimizer steps in an epoch.
            remedy: returns the setting of the trainer for a training of a given number of steps, for an error.
            score: computes gradients for a method whose first mask needs them, by calling `sparse.score`.
            resume: a state that will be loaded, which says what the plan was made with.
        """
        if not isinstance(model, nn.Module | SparseModel):
            raise GrowpruneError(f"sparsify needs a torch module, then its optimizer, got a {type(model).__name__}")
        given = model if isinstance(model, SparseModel) else None
        self.model = model.model if isinstance(model, SparseModel) else _inner(model, settings.storage)
        """The module that becomes sparse."""
        cursor = cursor_of(self.model)
        if cursor is not None and cursor.position >= 0:
            raise GrowpruneError(
                f"the model already belongs to a Sparsifier, at iteration {cursor.iteration} of "
                f"{cursor.num_iterations}: use that one, and its load_state_dict to resume. To start another plan from "
                f"its zeros, call its to_dense_() first and create a new optimizer"
            )
        first = None
        if resume is not None:
            check_contents(resume)
            check_settings(resume["settings"], settings.to_save(), "Sparsifier")
            first, (iterations, iterations_per_epoch) = FirstMask(*resume["first"]), resume["lengths"]
        resolved = settings.resolve(
            self.model,
            optimizers,
            sparse=given,
            first=first,
            iterations=iterations,
            iterations_per_epoch=iterations_per_epoch,
            remedy=remedy,
        )
        if score is None and walk(resolved.plan)[0].phase.needs_gradients:
            raise GrowpruneError(
                f"{settings.name} chooses its first mask by gradients: pass losses, a list of functions that each "
                f"compute a loss, such as losses=[lambda: loss_fn(model(x), y)]"
            )
        self.settings, self.resolved = resolved.settings, resolved
        self.lengths: tuple[int | None, int | None] = (iterations, iterations_per_epoch)
        self._score, self._optimizers = score, list[Any]()
        self.description = describe(resolved, self.model)
        """What is pruned, what stays dense and why, and how long, in one line."""
        self.cursor = resolved.cursor(self.model, given, score)
        """The place in the plan."""

    def begin(self, optimizers: Sequence[Any]) -> None:
        """Train with these optimizers: begin the plan, if it has not begun. The last of them advances it."""
        self._optimizers = list(optimizers)
        for optimizer in optimizers[:-1]:
            self.sparse.attach(optimizer)  # all, before an edit gives the model other parameters
        is_new = self.cursor.position < 0
        self.cursor.attach(optimizers[-1])
        if is_new:
            log.info("%s", self.description)

    @property
    def sparse(self) -> SparseModel:
        """The SparseModel, with the masks of the model."""
        return self.cursor.sparse

    @property
    def plan(self) -> Plan:
        """The plan: what is pruned and grown, and when."""
        assert isinstance(self.cursor.plan, Plan)
        return self.cursor.plan

    @property
    def sparsity(self) -> float:
        """The fraction of the prunable weights that are zero now."""
        return self.sparse.sparsity

    @property
    def target_sparsity(self) -> float:
        """The fraction of zeros to reach."""
        return self.sparse.target_sparsity

    @property
    def is_finished(self) -> bool:
        """True if the plan is over, so that no more weights are pruned or grown."""
        return self.cursor.is_over

    def __repr__(self) -> str:
        done, total, late = self.cursor.iteration, self.cursor.num_iterations, self.cursor.num_steps_after
        target = "" if self.is_finished else f" of {self.target_sparsity:.4g}"
        place = f"finished after {total} iterations" if self.is_finished else f"iteration {done} of {total}"
        extra = f", {late} steps past the plan" if late else ""
        wrong = self.sparse.wrong_weights()
        return f"Sparsifier({self.settings.name}, {place}{extra}, sparsity {self.sparsity:.4g}{target}{wrong})"

    def summary(self, example: Any = None) -> Summary:
        """Count the live weights per layer and in total, and FLOPs if given an example input. Print it for a table."""
        return replace(self.sparse.summary(example), about=self.description)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the sparse model to a file; `growprune.load` reads it. Warn if the loop did not match the plan."""
        self.sparse.check_zeros()
        total, late = self.cursor.num_iterations, self.cursor.num_steps_after
        if late:
            warn(
                f"the loop made {late} steps after the plan's {total} iterations, with fixed masks: pass "
                f"iterations={total + late} to use them all"
            )
        elif not self.is_finished:
            missed = "the optimizer given to sparsify made no step" if not self.cursor.iteration else "see its repr"
            warn(
                f"the model is saved before the end of its plan of {total} iterations ({missed}): pass iterations=, "
                f"the number of steps of your loop"
            )
        write_file(self.sparse, path)

    def to_dense_(self) -> nn.Module:
        """Turn the model back into a plain module with zeros. To prune it further, `sparsify` it again."""
        return self.sparse.to_dense_()

    # State

    def state_dict(self, *, only_masks: bool = False) -> dict[str, Any]:
        """Return everything for a checkpoint: weights, masks, optimizer state and the place in the plan.

        It holds copies of the live values, on the CPU. `torch.load(..., weights_only=True)` reads it. Save random
        states, learning-rate schedules and the place in the data yourself.

        Args:
            only_masks: leave out weights and optimizers, if your code saves them. Load such a state before them.
        """
        place = {
            "version": VERSION,
            "settings": self.settings.to_save(),
            "num_iterations": self.cursor.num_iterations,
            "first": [self.resolved.first.initial_mask, self.resolved.first.found],
            "lengths": list(self.lengths),
            "sparse": self.sparse.state_dict(),
            "cursor": self.cursor.state_dict(),
        }
        if only_masks:
            return place
        self._refuse_shards()
        return {
            **place,
            "weights": self.sparse.snapshot(device="cpu"),
            "extra": {name: module.get_extra_state() for name, module in _with_extra_state(self.model)},
            "optimizer_classes": [type(unwrapped(optimizer)).__name__ for optimizer in self._optimizers],
            "optimizers": [copy.deepcopy(self.sparse.live_state(o, "cpu")) for o in self._optimizers],
        }

    def _refuse_shards(self) -> None:
        if self.sparse.ranks is not None:
            raise GrowpruneError(
                "the model is sharded: use growprune.save_sharded_checkpoint and growprune.load_sharded_checkpoint"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state of the same model, method and optimizers, in any storage.

        Everything is checked first: a state that is refused changes nothing.
        """
        sparse = self.sparse
        sparse.restore_groups()
        check_contents(state)
        check_settings(state["settings"], self.settings.to_save(), "Sparsifier")
        if state["num_iterations"] != self.cursor.num_iterations:
            raise GrowpruneError(
                f"the state was saved with iterations={state['num_iterations']}, but this Sparsifier has "
                f"iterations={self.cursor.num_iterations}: resume with iterations={state['num_iterations']}"
            )
        if "weights" in state:
            self._refuse_shards()
            check_weights(state["weights"], sparse)
            check_state(state["extra"], *[name for name, _ in _with_extra_state(self.model)])
        check_masks(state["sparse"], sparse)
        if "weights" in state:
            check_optimizers(state, [*map(unwrapped, self._optimizers)], sparse)
        first = FirstMask(*state["first"])
        cursor, lr_scaling, resolved = self.cursor, sparse.lr_scaling, self.resolved
        if first != resolved.first and self.settings.initial_mask in ("auto", *BY_DATA):
            # the model may look different by now, so that another first mask was chosen
            iterations, per_epoch = self.lengths
            resolved = resolved.starting_from(first, iterations=iterations, iterations_per_epoch=per_epoch)
            cursor, lr_scaling = resolved.new_cursor(sparse, self._score), resolved.lr_scaling
        try:
            cursor.check_place(state["cursor"])
        except GrowpruneError:
            sparse.wait_for(self.cursor)  # not for the one that was refused
            raise

        if "weights" not in state:
            sparse.load_state_dict(state["sparse"])
        else:
            sparse.restore(state["weights"])  # masks too
            sparse.resume(state["sparse"])
            for name, module in _with_extra_state(self.model):
                module.set_extra_state(state["extra"][name])
            for optimizer, loaded in zip(self._optimizers, state["optimizers"], strict=True):
                sparse.load_live_state(optimizer, loaded)
        cursor.load_state_dict(state["cursor"])
        sparse.aim(sparse.target_sparsity, lr_scaling)
        self.resolved, self.cursor = resolved, cursor
        if self._optimizers:
            cursor.attach(self._optimizers[-1])


def _inner(model: nn.Module, storage: str) -> nn.Module:
    """Return the model inside wrappers that share its parameters."""
    is_replicated = isinstance(model, DataParallel | DistributedDataParallel)
    if is_replicated and storage == "compact":
        raise GrowpruneError(
            f"storage='compact' creates new parameters at each edit, which {type(model).__name__} does not see: use "
            f"storage='masked', or shard the model (FSDP2) instead of replicating it"
        )
    inner: Any = getattr(model, "_orig_mod", model.module if is_replicated else model)
    return model if inner is model else _inner(inner, storage)


def _with_extra_state(model: nn.Module) -> list[tuple[str, nn.Module]]:
    has_own = nn.Module.get_extra_state
    return [(name, m) for name, m in model.named_modules() if type(m).get_extra_state is not has_own]


VERSION = 1
"""The version of the format of a state."""

_PLACE: Names = {
    "version": int,
    "settings": dict,
    "num_iterations": int,
    "lengths": (list, tuple),
    "lengths.*": (int, type(None)),
    "first": (list, tuple),
    "first.*": (str, *NUMBER, type(None)),
    "sparse.masks": dict,
    "sparse.masks.*": Tensor,
    "sparse.num_edits": int,
    "sparse.settings": dict,
    "sparse.settings.*": (*NUMBER, str, dict),
    "sparse.gradients.sums": dict,
    "sparse.gradients.sums.*": Tensor,
    "sparse.gradients.averages": dict,
    "sparse.gradients.averages.*": Tensor,
    "sparse.gradients.is_over": bool,
    "sparse.gradients.is_hessian": bool,
    "cursor.position": int,
    "cursor.trail": str,
    "cursor.is_over": bool,
    "cursor.iteration": int,
    "cursor.start": int,
    "cursor.is_counting": bool,
    "cursor.num_steps_after": int,
    "cursor.rule": dict,
}
_MORE: Names = {
    "weights": dict,
    "weights.*": tuple,
    "weights.*.*": (Tensor, type(None)),
    "extra": dict,
    "optimizer_classes": list,
    "optimizers": list,
    "optimizers.*.state": dict,
    "optimizers.*.state.*": dict,
    "optimizers.*.param_groups": list,
    "optimizers.*.param_groups.*.params": list,
}
"""Keys of a whole state that a state with `only_masks` lacks."""


def check_contents(state: Mapping[str, Any]) -> None:
    """Raise unless a state has all that the state of a Sparsifier has."""
    check_state(state, "version", "settings", "first", "lengths", "sparse", "cursor")
    if state["version"] != VERSION:
        raise GrowpruneError(
            f"the state has version {state['version']!r}, but this growprune reads version {VERSION}: load it with the "
            f"growprune that wrote it"
        )
    is_whole = not state.keys().isdisjoint(name.partition(".")[0] for name in _MORE)
    wrong = fault(dict(state), {**_PLACE, **(_MORE if is_whole else {})})
    for name in ("first", "lengths") if not wrong else ():
        wrong = wrong or ("" if len(state[name]) == 2 else f"its {name} is {state[name]!r}")
    if wrong:
        raise GrowpruneError(
            f"the state is damaged, or not that of a Sparsifier ({wrong}): pass one that state_dict() of this version "
            f"returned"
        )


def check_masks(saved: Mapping[str, Any], own: SparseModel) -> None:
    """Raise unless masks and gradients have the names and sizes of the model's prunable weights."""
    check_settings(saved["settings"], own.decisive, "SparseModel")
    own.check_packed_masks(saved["masks"])
    for sums in (saved["gradients"]["sums"], saved["gradients"]["averages"]):
        for name, total in sums.items():
            if name not in own.stored or total.numel() != own.stored[name].shape.numel():
                raise GrowpruneError(f"the state belongs to another model: its gradients of {name!r} do not fit")


def check_weights(saved: Snapshot, own: SparseModel) -> None:
    """Raise unless the model has the same tensors, and there is a value for each live weight."""
    tensors = named_tensors(own.model)
    found = [f"only one of the two has {name!r}" for name in sorted(tensors.keys() ^ saved.keys())]
    for name in () if found else tensors:
        pair, stored = saved[name], own.stored.get(name)
        values, mask = pair if len(pair) == 2 else (None, None)
        if values is None or (mask is None) != (stored is None):
            found.append(f"{name} is prunable in only one of the two")
        elif mask is None or stored is None:
            shape = tuple(tensors[name].shape)
            found += [f"{name} has shape {tuple(values.shape)} in it, but {shape} here"] * (values.shape != shape)
        else:
            alive = int(unpack(mask, stored.shape).sum())
            found += [f"{name} has {values.numel()} values in it for {alive} live weights"] * (values.numel() != alive)
    if found:
        raise GrowpruneError(f"the state belongs to another model: {found[0]}. Build the model that was saved")


def check_optimizers(state: Mapping[str, Any], optimizers: Sequence[Optimizer], own: SparseModel) -> None:
    """Raise unless the saved optimizers are of the same classes, with the same groups, and entries that fit."""
    saved, classes, mine = state["optimizers"], state["optimizer_classes"], [type(o).__name__ for o in optimizers]
    if len(saved) != len(mine):
        raise GrowpruneError(
            f"the state has {len(saved)} optimizers, but this Sparsifier has {len(mine)}: resume with as many as when "
            f"it was saved"
        )
    if classes != mine:
        raise GrowpruneError(
            f"the state was saved with the optimizers {classes}, but this Sparsifier has {mine}: resume with the same "
            f"optimizers, or save with state_dict(only_masks=True) to change them"
        )
    for one, optimizer in zip(saved, optimizers, strict=True):
        sizes, here = ([len(g["params"]) for g in groups] for groups in (one["param_groups"], optimizer.param_groups))
        if sizes != here or not all(index in range(sum(here)) for index in one["state"]):
            raise GrowpruneError(
                f"the state has {type(optimizer).__name__} groups of {sizes} parameters, but the optimizer has {here}: "
                f"create it as when the state was saved"
            )
        if type(optimizer) not in KEEPS_ZEROS:
            continue  # its state may have any form
        alive = {
            id(stored.parameter): int(unpack(state["sparse"]["masks"][name], stored.shape).sum())
            for name, stored in own.stored.items()
        }
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        names = _entries_of(optimizer)
        for index, entries in one["state"].items():
            parameter = parameters[index]
            fitting = (parameter.shape, torch.Size([alive.get(id(parameter), parameter.numel())]), torch.Size())
            for name in names:
                entry = entries.get(name, "missing")
                if not (entry is None or (isinstance(entry, Tensor) and (entry.shape in fitting or is_wrapped(entry)))):
                    raise GrowpruneError(
                        f"the state is damaged: {name} of parameter {index} in {type(optimizer).__name__} is "
                        f"{tuple(entry.shape) if isinstance(entry, Tensor) else entry!r}, for a parameter of shape "
                        f"{tuple(parameter.shape)}"
                    )


def _entries_of(optimizer: Optimizer) -> list[str]:
    """Return the names of what one of torch's optimizers keeps for a parameter: those of a step that was made."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    group = {name: value for name, value in optimizer.param_groups[0].items() if name not in ("params", "lr")}
    plain = {name: False if name in ("fused", "foreach", "capturable") else value for name, value in group.items()}
    probe = type(optimizer)([{**plain, "params": [parameter], "lr": 0.1}], lr=0.1)  # type: ignore[call-arg]
    probe.step()
    return list(probe.state[parameter])
