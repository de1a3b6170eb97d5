"""Adapters (LoRA and its kin, as in PEFT) on a sparse model: merging them keeps every mask.

To merge, an adapter writes into the weight of the layer it adapts: `base_layer.weight.data += change`. Where that is
masked, weights off the mask would come alive; where it is compact, the attribute is a dense copy, and the change would
be lost. So an adapter's methods that write run while the layer has a plain dense weight, and what they wrote off the
mask is dropped. PEFT is not imported: an adapter is known by what it has.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from growprune.errors import GrowpruneError
from growprune.masks.layers import is_adapter
from growprune.storage.compact_modules import layouts_of
from growprune.storage.parameter import SparseParameter

SPARSE_PARAMETERS = "_growprune_sparse_parameters"
"""The attribute in which a module refers to how its sparse parameters are stored, by their local names."""

WRITING = ("merge", "unmerge", "update_layer")
"""The methods of an adapter that may write into the layer it adapts; the last when it is made, as PiSSA does."""


class Reference:
    """A weak reference that a copy of the model takes along: it then refers to the copy, if that is copied too."""

    def __init__(self, target: SparseParameter) -> None:
        self._target = weakref.ref(target)

    def __call__(self) -> SparseParameter | None:
        return self._target()

    def __deepcopy__(self, memo: dict[int, Any]) -> Reference | None:
        target = self()
        return None if target is None else Reference(copy.deepcopy(target, memo))

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a model that is pickled leaves its SparseModel behind, and needs no growprune


def check_adapters(model: nn.Module, names: Iterable[str]) -> None:
    """Raise if a parameter that is to be compact has an adapter that takes its place."""
    own: dict[nn.Module, list[str]] = {}
    for path, _, local in (name.rpartition(".") for name in names):
        own.setdefault(model.get_submodule(path), []).append(local)
    for module in filter(is_adapter, model.modules()):
        _check(module, own.get(_innermost(module), ()))


def _check(adapter: nn.Module, compact: Collection[str]) -> None:
    if (parameter := vars(adapter).get("parameter_name")) in compact:
        raise GrowpruneError(
            f"{parameter} cannot be compact and have an adapter of its own (target_parameters of PEFT): use "
            f"storage='masked', or adapt whole layers"
        )


def keep_masks(model: nn.Module, sparse_parameters: Mapping[str, SparseParameter]) -> None:
    """See to it that adapters of these parameters, those there are and those to come, keep their masks."""
    for name, sparse_parameter in sparse_parameters.items():
        own = vars(sparse_parameter.module).setdefault(SPARSE_PARAMETERS, {})
        own[name.rpartition(".")[2]] = Reference(sparse_parameter)
    for module in filter(is_adapter, model.modules()):
        _guard(module, _innermost(module))
    _watch_for_adapters()


def forget_masks(model: nn.Module) -> None:
    """Let adapters write whatever they like from now on."""
    for module in model.modules():
        vars(module).pop(SPARSE_PARAMETERS, None)
        if is_adapter(module):
            for name in WRITING:
                vars(module).pop(name, None)


@functools.cache
def _watch_for_adapters() -> None:
    """Have torch say when a module becomes part of another: an adapter may be put on a model that is sparse."""
    register_module_module_registration_hook(_guard_if_adapter)


def _guard_if_adapter(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    if name == "base_layer" and submodule is not None and SPARSE_PARAMETERS in vars(_innermost(submodule)):
        _guard(module, _innermost(submodule))


def _guard(adapter: nn.Module, layer: nn.Module) -> None:
    """Have an adapter keep the masks of the layer it adapts."""
    _check(adapter, layouts_of(layer))
    for name in WRITING:
        if hasattr(type(adapter), name):
            vars(adapter)[name] = functools.partial(_call_keeping_masks, adapter, name)


def _call_keeping_masks(adapter: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """What an adapter's own method does, but with the masks of the layer it adapts."""
    with dense_weights(_innermost(adapter.base_layer)):
        return getattr(type(adapter), name)(adapter, *args, **kwargs)


def _innermost(module: Any) -> Any:
    """The layer under adapters upon adapters."""
    while hasattr(module, "base_layer"):
        module = module.base_layer
    return module


@contextmanager
def dense_weights(module: nn.Module) -> Iterator[None]:
    """While a module's sparse weights are dense parameters that can be written to; then what is off a mask is dropped.

    If writing fails, compact weights are what they were.
    """
    compact = {local: layout for local, layout in layouts_of(module).items() if layout is not None}
    values = {local: _parameter(module, local) for local in compact}
    for local, layout in compact.items():
        dense = layout.expand(values[local].detach())
        module._parameters[local] = nn.Parameter(dense, requires_grad=values[local].requires_grad)
        layouts_of(module)[local] = None
    written: dict[str, Tensor] = {}
    try:
        yield
        written = {local: _parameter(module, local).detach() for local in compact}
    finally:
        module._parameters.update(values)
        layouts_of(module).update(compact)
        for local, dense in written.items():
            values[local].data.copy_(compact[local].compress(dense))
        _enforce(module)


def _parameter(module: nn.Module, local: str) -> nn.Parameter:
    parameter = module._parameters[local]  # not the attribute, which is dense
    assert parameter is not None
    return parameter


def _enforce(module: nn.Module) -> None:
    """Make the module's masked weights zero again where none lives; compact ones have no such place."""
    for reference in vars(module).get(SPARSE_PARAMETERS, {}).values():
        sparse_parameter = None if reference is None else reference()
        if sparse_parameter is not None:
            sparse_parameter.enforce([(sparse_parameter, [sparse_parameter.parameter])])
