"""A model of names and shapes alone, for tensors whose model's code is not at hand."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from growprune.errors import GrowpruneError

MAX_DEPTH = 64
"""How many dots a name may have: going through a deeper model would overflow Python's stack."""


def bare_model(tensors: Mapping[str, Tensor], aliases: Mapping[str, str] | None = None) -> nn.Module:
    """A module that holds tensors under their names, and can compute nothing. Their memory is shared, not copied.

    >>> [name for name, _ in bare_model({"a.weight": Tensor(2, 2), "a.bias": Tensor(2)}).named_parameters()]
    ['a.weight', 'a.bias']
    """
    root = nn.Module()
    made: dict[str, nn.Parameter] = {}
    for name, tensor in tensors.items():
        made[name] = nn.Parameter(tensor.detach(), requires_grad=False)
        _put(root, name, made[name])
    for alias, name in (aliases or {}).items():
        _put(root, alias, made[name])
    return root


def _put(root: nn.Module, name: str, parameter: nn.Parameter) -> None:
    *path, local = name.split(".")
    if len(path) > MAX_DEPTH:
        raise GrowpruneError(f"the name {name[:60]!r} has more than {MAX_DEPTH} dots, as no model has")
    module = root
    try:
        for step in path:
            if step not in module._modules:
                module.add_module(step, nn.Module())
            module = module.get_submodule(step)
        module.register_parameter(local, parameter)
    except (AttributeError, KeyError, TypeError) as error:
        raise GrowpruneError(f"no model can hold a tensor named {name!r} beside the others ({error.args[0]})") from None
