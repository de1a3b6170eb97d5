"""Rules: what a phase does in each iteration besides the optimizer's step. To add one: its file, and a line here.

A method names a rule with a value (a `Rule`, see plan/phases.py). This package implements the rules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from growprune.methods.admm import Admm
from growprune.methods.deepr import Deepr
from growprune.methods.dpf import Dpf
from growprune.methods.str_ import Str
from growprune.plan import Rule
from growprune.sparse.model import SparseModel
from growprune.sparse.rules.admm_rule import AdmmRule
from growprune.sparse.rules.base import RunningRule
from growprune.sparse.rules.deepr_rule import DeeprRule
from growprune.sparse.rules.dpf_rule import DpfRule
from growprune.sparse.rules.str_rule import StrRule

RULES: dict[type[Rule], Callable[[Any, SparseModel], RunningRule]] = {
    Admm: AdmmRule,
    Dpf: DpfRule,
    Str: StrRule,
    Deepr: DeeprRule,
}
"""By the type of a rule: the class that runs it on a model. It raises, without changes, if it does not fit."""


def running(rule: Rule, own: SparseModel) -> RunningRule:
    """Return the running rule of a model."""
    return RULES[type(rule)](rule, own)
