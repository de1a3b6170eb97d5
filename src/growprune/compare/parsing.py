"""Rows of a comparison: a method, an allocation, and options of its own, as a person types them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from growprune.engine.override import find_method
from growprune.engine.source import absolute, is_source
from growprune.errors import GrowpruneError, shorten
from growprune.methods import METHODS

CONTROLS = ("start", "peak")
"""The same plan never growing, and never growing from as many live weights as the plan has at its peak."""
ALLOCATIONS = ("uniform", "erk", "global")
ELSEWHERE = {
    "method": "first in the row",
    "allocation": "after the method, as in rigl:erk",
    "sparsity": "with --sparsities",
    "seed": "with --seeds",
    "options": "as key=value for each",
}
"""What a row does not set for itself: its name, or the folder of its runs, would say another than they do."""
LONGEST = 255
"""Characters that file systems let the name of a folder have."""


@dataclass(frozen=True)
class Row:
    """One line of the table at one sparsity."""

    method: str
    """One of `METHODS`, or path.py:function."""
    allocation: str
    settings: tuple[tuple[str, str], ...] = ()
    """Options of the method, or fields of the recipe, as they were typed."""

    @property
    def takes_sparsity(self) -> bool:
        """Whether its method does; one that does not, as dense, is run once, and has no allocation."""
        return "sparsity" in inspect.signature(find_method(self.method)).parameters

    @property
    def name(self) -> str:
        """As it stands in the table."""
        method = self.method.rpartition(":")[2]
        allocated = f"{method}:{self.allocation}" if self.takes_sparsity else method
        return " ".join([allocated, *(f"{key}={value}" for key, value in self.settings)])

    @property
    def folder(self) -> str:
        """Its name as that of a folder."""
        return re.sub(r"[^A-Za-z0-9_.=]+", "-", self.name).strip("-.")


def parse_rows(text: str) -> list[Row]:
    """The rows that `--methods` asks for, each once, in its order.

    >>> [row.name for row in parse_rows("dense,rigl,gmp:uniform until=0.5")]
    ['dense', 'rigl:erk', 'gmp:uniform until=0.5']
    """
    texts = [part.strip() for part in _split(text)]
    texts = [name for part in texts for name in (METHODS if part == "all" else (part,)) if name]
    rows = [row for part in dict.fromkeys(texts) for row in _with_controls(_parse(part))]
    rows = list(dict.fromkeys(rows))
    if not rows:
        raise GrowpruneError(f"--methods is {text!r}, but wants one or more rows, such as dense,rigl:erk,gmp")
    _check_names(rows)
    return rows


def _with_controls(row: Row) -> list[Row]:
    """A row, and its controls: where a method has the option, what it is without what it claims to help."""
    is_controlled = "control" in inspect.signature(find_method(row.method)).parameters
    if not is_controlled or "control" in dict(row.settings):
        return [row]
    return [row, *(replace(row, settings=(*row.settings, ("control", kind))) for kind in CONTROLS)]


def _split(text: str) -> list[str]:
    """At commas, but for those inside brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[({") - (letter in "])}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _parse(text: str) -> Row:
    head, *words = _words(text)
    for word in words:
        if word.find("=") < 1:
            raise GrowpruneError(f"the row {text!r} has {word!r}, but after its method a row has only key=value")
    method, allocation = _method_and_allocation(head)
    find_method(method)  # an unknown one is said now
    settings = tuple((key, value) for key, _, value in (word.partition("=") for word in words))
    _check_keys(text, [key for key, _ in settings])
    return Row(method, allocation, settings)


def _words(text: str) -> list[str]:
    """At spaces, but for those in the path of a file."""
    path, colon, rest = text.rpartition(".py:")
    head, *words = f"{colon}{rest}".split()
    return [path + head, *words]


def _check_keys(text: str, keys: Sequence[str]) -> None:
    for key in keys:
        if (field := key.partition(".")[0]) in ELSEWHERE:
            raise GrowpruneError(f"the row {text!r} sets {key}: write it {ELSEWHERE[field]}")
        if keys.count(key) > 1:
            raise GrowpruneError(f"the row {text!r} has {key} twice: leave one of them out")


def _method_and_allocation(head: str) -> tuple[str, str]:
    """rigl, rigl:erk, path.py:function or path.py:function:erk"""
    method, colon, allocation = head.rpartition(":")
    if not colon or method.endswith(".py"):
        method, allocation = head, getattr(find_method(head), "allocation", "uniform")
    if allocation not in ALLOCATIONS:
        raise GrowpruneError(
            f"the row {head!r} has the allocation {allocation!r}, but it must be one of {', '.join(ALLOCATIONS)}"
        )
    return (absolute(method) if is_source(method) else method), allocation


def _check_names(rows: Sequence[Row]) -> None:
    folders: dict[str, Row] = {}
    for row in rows:
        if len(row.folder) > LONGEST:
            raise GrowpruneError(
                f"the row {shorten(row.name, 100)!r} has a name of {len(row.folder)} characters, but its folder can "
                f"have {LONGEST}: leave options out, or write a method of your own that has them as defaults"
            )
        if (other := folders.setdefault(row.folder, row)) != row:
            raise GrowpruneError(f"the rows {other.name!r} and {row.name!r} would share a folder: name them apart")
