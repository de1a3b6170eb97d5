"""What `deploy` returns: a model with deployed parts, which refuses to be copied, moved or trained."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from growprune.deployment import deployed_folder
from growprune.deployment.example import Example, first_line
from growprune.deployment.layer_table import Row, Table
from growprune.deployment.skeleton import Skeleton
from growprune.errors import GrowpruneError
from growprune.files.disk import replacing

DEPLOY_AGAIN = "change the original model and deploy it again, with device='cpu' or 'cuda'"


@dataclass(frozen=True)
class Replaced:
    """A part in the place of a module."""

    owner: nn.Module
    name: str
    part: nn.Module
    module: nn.Module
    """Its sparse weight may hold nothing; see `Skeleton.fill_in`."""


@dataclass
class Swapped:
    """A module with its parts deployed."""

    module: nn.Module
    rows: list[Row] = field(default_factory=list)
    in_torch: list[str] = field(default_factory=list)
    replaced: list[Replaced] = field(default_factory=list)

    def put(self, *, deployed: bool) -> None:
        """Put the parts in their places, or what they were made of."""
        for one in self.replaced:
            one.owner._modules[one.name] = one.part if deployed else one.module


def refuse_to_copy(module: nn.Module, protocol: object) -> Any:
    """Refuse copy, deepcopy, pickle and torch.save: kernels are bound to memory that no copy would have."""
    del protocol
    raise GrowpruneError(
        f"{type(module).__name__} is deployed and can be neither copied nor pickled: use deployed.save(folder) and "
        f"growprune.load_deployed(folder, model), or deploy the model again"
    )


def stay_as_made(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    """Refuse half(), to(), cuda() and the like, unless they would change nothing; then nothing is done."""
    del recurse
    tensors = itertools.chain(module.parameters(), module.buffers())
    device = vars(module).get("device", torch.device("cpu"))  # of a Deployed; parts are on the CPU
    for dtype in {tensor.dtype for tensor in tensors if tensor.is_floating_point()} or {torch.float32}:
        try:
            changed = change(torch.empty(0, dtype=dtype, device=device))
        except (AssertionError, RuntimeError) as error:  # AssertionError: torch has no CUDA here
            said = first_line(error)
            raise GrowpruneError(f"a deployed model cannot be converted ({said}): {DEPLOY_AGAIN}") from None
        if (changed.device, changed.dtype) != (device, dtype):
            raise GrowpruneError(
                f"the model is deployed in {dtype} on {device} and cannot become {changed.dtype} on {changed.device}: "
                f"{DEPLOY_AGAIN} (the CPU kernels only support float32)"
            )
    return module


class Deployed(nn.Module):
    """A model on sparse kernels, with the inputs and outputs of the original model. Made by `deploy`.

    Attributes:
        module: the module that runs. It has the original class, with its other methods, if only layers were replaced.
        table: how each layer runs, with the measured times.
        device: the device it runs on.
    """

    __reduce_ex__ = refuse_to_copy
    _apply = stay_as_made

    def __init__(
        self,
        swapped: Swapped,
        skeleton: Skeleton,
        table: Table,
        example: Example,
        *,
        whole: bool = True,
        settings: Mapping[str, Any],
        device: str | torch.device = "cpu",
    ) -> None:
        super().__init__()
        self.table, self.device = table, torch.device(device)
        self._skeleton, self._example, self._whole, self._settings = skeleton, example, whole, dict(settings)
        self._swapped, self.module = swapped, swapped.module
        self.eval()

    def train(self, mode: bool = True) -> Self:
        """Refuse training mode; `train(False)` does nothing."""
        if mode:
            raise GrowpruneError("a deployed model cannot be trained: train the original model and deploy it again")
        return super().train(False)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state if the model runs in torch; raise otherwise, since sparse kernels hold none."""
        if not self.is_in_torch:
            raise GrowpruneError(
                "a deployed model has no state_dict: use deployed.save(folder), or the state_dict of the original model"
            )
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state if the model runs in torch; raise otherwise."""
        self.state_dict()
        return super().load_state_dict(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._modules["module"]
        if not torch.is_grad_enabled():  # to switch it off takes as long as a small layer
            return module(*args, **kwargs)
        with torch.no_grad():
            return module(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's own `generate`, as models of transformers have it."""
        if not callable(own := getattr(self.module, "generate", None)):
            raise GrowpruneError(
                "the module that runs has no method generate: deploy a model that has one, with whole=False"
            )
        return own(*args, **kwargs)

    @property
    def is_in_torch(self) -> bool:
        """True if nothing of it runs on sparse kernels."""
        return self.module is self._skeleton.module and not self._swapped.replaced

    def stay_in_torch(self) -> None:
        """Run the whole model in torch."""
        self._swapped.put(deployed=False)
        self._skeleton.fill_in()
        self.module = self._skeleton.module
        self._swapped = Swapped(self.module, self._swapped.rows)

    def save(self, folder: str | os.PathLike[str], *, origin: Mapping[str, Any] | None = None) -> None:
        """Write a folder that `load_deployed` reads: the weights as a sparse file, the table and choices as JSON.

        Args:
            folder: the folder to write.
            origin: where the model's code is, for the command line.
        """
        self._swapped.put(deployed=False)
        try:
            deployed_folder.save_weights(Path(folder), self._skeleton, self._settings)
        finally:
            self._swapped.put(deployed=True)
        about = {
            "format": deployed_folder.FORMAT,
            "device": self.device.type,
            "machine": deployed_folder.machine(self.device),
            "is_whole": self._whole,
            "runs": "torch" if self.is_in_torch else "deployed",
            "example": deployed_folder.encoded(self._example),
            "origin": dict(origin or {}),
            **self.table.to_dict(),
        }
        with replacing(Path(folder) / deployed_folder.ABOUT) as written:
            written.write((json.dumps(about, indent=1) + "\n").encode())
