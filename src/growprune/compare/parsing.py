"""Parses the rows of a comparison: a method, an allocation and options."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from growprune.engine.override import find_method
from growprune.engine.source import absolute, is_source
from growprune.errors import GrowpruneError, shorten
from growprune.masks.allocation import ALLOCATIONS
from growprune.methods import METHODS
from growprune.plan import declaration_of
from growprune.runs.record import DENSE, EQUAL, SMALL_DENSE, small_name

CONTROLS = ("start", "peak")
"""Controls: the same plan without growing, from its density at the start or at its peak."""
ELSEWHERE = {
    "method": "first in the row",
    "allocation": "after the method, as in rigl:erk",
    "sparsity": "with --sparsities",
    "seed": "with --seeds",
    "options": "as key=value for each",
}
"""Fields that a row cannot set with key=value, and where to give them instead."""
LONGEST = 255
"""Maximum length of a folder name."""


@dataclass(frozen=True)
class Row:
    """One line of the table at one sparsity."""

    method: str
    """One of `METHODS`, or path.py:function."""
    allocation: str
    settings: tuple[tuple[str, str], ...] = ()
    """Options of the method, or fields of the recipe, as typed."""
    equal: str = ""
    """For a small dense model: the quantity in which it equals a sparse one, one of `EQUAL`."""

    @property
    def takes_sparsity(self) -> bool:
        """True if its method takes a sparsity. Others, such as dense, run once and have no allocation."""
        return bool(self.equal) or "sparsity" in declaration_of(find_method(self.method)).options

    @property
    def name(self) -> str:
        """Name of the row in the table."""
        method = small_name(self.equal) or self.method.rpartition(":")[2]
        allocated = f"{method}:{self.allocation}" if self.allocation and self.takes_sparsity else method
        return " ".join([allocated, *(f"{key}={value}" for key, value in self.settings)])

    @property
    def folder(self) -> str:
        """Folder name of the row."""
        return re.sub(r"[^A-Za-z0-9_.=]+", "-", self.name).strip("-.")


def parse_rows(text: str) -> list[Row]:
    """Parse the rows of `--methods`, each once, in the given order.

    >>> [row.name for row in parse_rows("dense,rigl,gmp:uniform until=0.5")]
    ['dense', 'rigl:erk', 'gmp:uniform until=0.5']
    """
    texts = [part.strip() for part in split(text)]
    texts = [name for part in texts for name in (METHODS if part == "all" else (part,)) if name]
    rows = [row for part in dict.fromkeys(texts) for row in _with_controls(_parse(part))]
    rows = list(dict.fromkeys(rows))
    if not rows:
        raise GrowpruneError(f"--methods must be one or more rows, such as dense,rigl:erk,gmp, got {text!r}")
    _check_names(rows)
    return rows


def _with_controls(row: Row) -> list[Row]:
    """A row and its controls, if the method declares a parameter for them: the same method without growing."""
    control = declaration_of(find_method(row.method)).control
    if control is None or control in dict(row.settings):
        return [row]
    return [row, *(replace(row, settings=(*row.settings, (control, kind))) for kind in CONTROLS)]


def split(text: str) -> list[str]:
    """Split at commas outside brackets."""
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
            raise GrowpruneError(f"the row {text!r} must be a method and key=value pairs, got {word!r}")
    settings = tuple((key, value) for key, _, value in (word.partition("=") for word in words))
    _check_keys(text, [key for key, _ in settings])
    if head.partition(":")[0] == SMALL_DENSE:
        return Row(DENSE, "", settings, _parse_equal(head))
    method, allocation = _method_and_allocation(head)
    find_method(method)  # raises if it is unknown
    return Row(method, allocation, settings)


def _parse_equal(head: str) -> str:
    """Parse small_dense or small_dense:flops."""
    equal = head.partition(":")[2] or EQUAL[0]
    if equal not in EQUAL:
        known = " or ".join(f"{SMALL_DENSE}:{each}" for each in EQUAL)
        raise GrowpruneError(f"the row must be {known}, got {head!r}")
    return equal


def _words(text: str) -> list[str]:
    """Split at spaces, except in the path of a file."""
    path, colon, rest = text.rpartition(".py:")
    head, *words = f"{colon}{rest}".split()
    return [path + head, *words]


def _check_keys(text: str, keys: Sequence[str]) -> None:
    for key in keys:
        if (field := key.partition(".")[0]) in ELSEWHERE:
            raise GrowpruneError(f"the row {text!r} cannot set {key}. Give it {ELSEWHERE[field]}")
        if keys.count(key) > 1:
            raise GrowpruneError(f"the row {text!r} has {key} twice. Leave one of them out")


def _method_and_allocation(head: str) -> tuple[str, str]:
    """Parse rigl, rigl:erk, path.py:function or path.py:function:erk."""
    method, colon, allocation = head.rpartition(":")
    if not colon or method.endswith(".py"):
        method, allocation = head, declaration_of(find_method(head)).allocation
    if allocation not in ALLOCATIONS:
        raise GrowpruneError(
            f"the allocation of a row must be one of {', '.join(ALLOCATIONS)}, got {allocation!r} in {head!r}"
        )
    return (absolute(method) if is_source(method) else method), allocation


def _check_names(rows: Sequence[Row]) -> None:
    folders: dict[str, Row] = {}
    for row in rows:
        if len(row.folder) > LONGEST:
            raise GrowpruneError(
                f"the row {shorten(row.name, 100)!r} has a name of {len(row.folder)} characters, but folder names can "
                f"have {LONGEST}. Leave options out, or write a method with these options as defaults"
            )
        if (other := folders.setdefault(row.folder, row)) != row:
            raise GrowpruneError(f"the rows {other.name!r} and {row.name!r} would share a folder. Give different names")
