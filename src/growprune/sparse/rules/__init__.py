"""What a phase does in each iteration beside the optimizer's step. To add a rule: write its file, add its line here.

A method names a rule by a value (a `Rule`, see plan/phases.py), which touches nothing; here is what carries it out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from growprune.methods.admm import Admm
from growprune.methods.deepr import Deepr
from growprune.methods.dpf import Dpf
from growprune.methods.str_ import Str
from growprune.plan import Rule
from growprune.sparse.internals import Internals
from growprune.sparse.rules.admm_rule import AdmmRule
from growprune.sparse.rules.base import RunningRule
from growprune.sparse.rules.deepr_rule import DeeprRule
from growprune.sparse.rules.dpf_rule import DpfRule
from growprune.sparse.rules.str_rule import StrRule

RULES: dict[type[Rule], Callable[[Any, Internals], RunningRule]] = {
    Admm: AdmmRule,
    Dpf: DpfRule,
    Str: StrRule,
    Deepr: DeeprRule,
}
"""By the kind of rule: what sets it to work on a model. It raises if it cannot work there, and changes nothing."""


def running(rule: Rule | None, own: Internals) -> RunningRule | None:
    """The rule at work on a model; none if there is no rule."""
    return None if rule is None else RULES[type(rule)](rule, own)
