"""Plans of every method, and going through one phase by phase."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from growprune.cursor import Cursor
from growprune.methods import METHODS
from growprune.partition import Partition
from growprune.plan import Part, Parts, Plan, ScheduledPhase, Stage
from growprune.sparse import SparseModel


def options_of(name: str) -> dict[str, Any]:
    """The options of the example in a method's docstring."""
    return plan_of(name, Partition(tuple(Part(f"S{i}", (f"{i}.weight",)) for i in range(4)))).options


def plan_of(name: str, S: Parts, **changes: Any) -> Plan:
    """The plan that a method's docstring has as its example, with some options changed."""
    example = re.search(r"Example: (\w+\(S, .*\))", METHODS[name].__doc__ or "")
    assert example, f"the docstring of {name} has no line 'Example: {name}(S, ...)'"
    plan: Plan = eval(example[1], {"S": S, **METHODS})
    return METHODS[name](S, **{**plan.options, **{k: v for k, v in changes.items() if k in plan.options}})


def phases_of(sparse: SparseModel, plan: Plan | Sequence[Stage], **settings: Any) -> Iterator[ScheduledPhase]:
    """Each phase of a plan, its edits done."""
    cursor = Cursor(sparse, plan, **settings)
    for _ in cursor:
        assert cursor.current is not None
        yield cursor.current
