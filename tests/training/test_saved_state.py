"""A state that is damaged, forged or of something else is refused in plain words, and nothing is changed."""

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from plan_cases import adamw, all_of, check_same_bits, sgd, small_net, train_step

import growprune as gp
from growprune.training.sparsifier import Sparsifier, sparsify

GONE = object()


def begun(optimize: Any = sgd, storage: str = "masked", method: str = "rigl") -> tuple[Sparsifier, Any]:
    model = small_net()
    optimizer = optimize(model.parameters())
    sparsifier = sparsify(model, optimizer, method, sparsity=0.75, iterations=40, every=4, storage=storage)
    train_step(model, optimizer, 0)
    return sparsifier, optimizer


def saved(optimize: Any = sgd, storage: str = "masked") -> dict[str, Any]:
    sparsifier, optimizer = begun(optimize, storage)
    for iteration in range(7):
        train_step(sparsifier.model, optimizer, iteration)
    return sparsifier.state_dict()


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in nested dicts and lists, but only the first item of each list."""
    items = value.items() if isinstance(value, dict) else [*enumerate(value)][:1] if isinstance(value, list) else ()
    for key, inside in items:
        yield (*path, key)
        yield from places(inside, (*path, key))


def changed(state: Any, path: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    """A state with another value at a place, or without it."""
    if not path:
        return change(state)
    copied, (key, *rest) = copy.copy(state), path
    copied[key] = changed(state[key], tuple(rest), change)
    if copied[key] is GONE:
        del copied[key]
    return copied


def is_free(path: tuple[Any, ...], value: Any) -> bool:
    """True for what need not be as it was: the storage, what may be None, and what only torch can check."""
    of_torch = path[0] == "optimizers" and (len(path) > 4 or (len(path) == 4 and value is GONE))
    is_optional = path == ("cursor", "base") or (path[0] in ("first", "lengths") and len(path) == 2)
    return of_torch or path == ("settings", "storage") or (value is None and is_optional)


@pytest.mark.parametrize("storage", ["masked", "compact"])
@pytest.mark.parametrize("value", [GONE, "text", None], ids=["gone", "text", "none"])
def test_a_state_that_is_damaged_anywhere_is_refused_and_changes_nothing(value: Any, storage: str) -> None:
    state = saved(storage=storage)
    sparsifier, optimizer = begun(storage=storage)
    before = copy.deepcopy((all_of(sparsifier.sparse, optimizer), sparsifier.cursor.state_dict()))
    for path in places(state):
        if not is_free(path, value):
            with pytest.raises(gp.GrowpruneError):
                sparsifier.load_state_dict(changed(state, path, lambda _: value))
    check_same_bits(before, (all_of(sparsifier.sparse, optimizer), sparsifier.cursor.state_dict()))
    sparsifier.load_state_dict(state)


def test_values_that_do_not_fit_their_mask_are_refused() -> None:
    state = saved()
    sparsifier, _ = begun()
    values, mask = state["weights"]["0.weight"]
    cases = {r"0.weight has \d+ values in it for \d+ live": (values[1:], mask), "uint8, got": (values, mask.float())}
    for match, forged in cases.items():
        with pytest.raises(gp.GrowpruneError, match=match):
            sparsifier.load_state_dict(state | {"weights": state["weights"] | {"0.weight": forged}})


@pytest.mark.parametrize(("first", "second", "names"), [(adamw, sgd, "AdamW SGD"), (sgd, adamw, "SGD AdamW")])
def test_the_state_of_another_optimizer_is_refused(first: Any, second: Any, names: str) -> None:
    sparsifier, optimizer = begun(second)
    before = copy.deepcopy(all_of(sparsifier.sparse, optimizer))
    its, own = names.split()
    match = re.escape(f"saved with the optimizers ['{its}'], but this Sparsifier has ['{own}']: resume with the same")
    with pytest.raises(gp.GrowpruneError, match=match):
        sparsifier.load_state_dict(saved(first))
    check_same_bits(before, all_of(sparsifier.sparse, optimizer))


def test_an_optimizer_with_other_groups_is_refused() -> None:
    def grouped(parameters: Any) -> torch.optim.Optimizer:
        first, *others = parameters
        return sgd([{"params": [first]}, {"params": others}])

    sparsifier, _ = begun(grouped)
    with pytest.raises(gp.GrowpruneError, match=r"SGD groups of \[\d+\] parameters, but the optimizer has \[1, \d+\]"):
        sparsifier.load_state_dict(saved())
