"""All sparsification methods, one paper per file. To add one, write its file, import it here and add its name below.

A method gets a partition S and yields phases (see `growprune.plan`). It never sees a model, so nothing here may import
torch. Methods that edit every few iterations take `iterations`, the length of the whole training, and `every`, the
iterations between two edits. A recipe converts its epochs to iterations for them.
"""

import difflib
from collections.abc import Callable

from growprune.errors import GrowpruneError
from growprune.methods.acdc import acdc as acdc
from growprune.methods.admm import admm as admm
from growprune.methods.cyclic_gap import cyclic_gap as cyclic_gap
from growprune.methods.deepr import deepr as deepr
from growprune.methods.dense import dense as dense
from growprune.methods.dpf import dpf as dpf
from growprune.methods.dsr import dsr as dsr
from growprune.methods.gmp import gmp as gmp
from growprune.methods.gradual_gap import gradual_gap as gradual_gap
from growprune.methods.granet import granet as granet
from growprune.methods.grasp import grasp as grasp
from growprune.methods.iterative import iterative as iterative
from growprune.methods.iterative_admm import iterative_admm as iterative_admm
from growprune.methods.one_shot import one_shot as one_shot
from growprune.methods.parallel_gap import parallel_gap as parallel_gap
from growprune.methods.parallel_gradual_gap import parallel_gradual_gap as parallel_gradual_gap
from growprune.methods.random_gap import random_gap as random_gap
from growprune.methods.rigl import rigl as rigl
from growprune.methods.set_ import set_ as set_
from growprune.methods.snfs import snfs as snfs
from growprune.methods.snip import snip as snip
from growprune.methods.static_random import static_random as static_random
from growprune.methods.str_ import str_ as str_
from growprune.plan import Plan

Methods = tuple[Callable[..., Plan], ...]
GROWING: Methods = (gradual_gap, parallel_gradual_gap, cyclic_gap, parallel_gap, random_gap)
PUBLISHED: Methods = (gmp, granet, rigl, set_, dsr, snfs, snip, grasp, acdc, admm, dpf, str_, deepr, iterative_admm)
SIMPLE: Methods = (iterative, one_shot, static_random, dense)

METHODS: dict[str, Callable[..., Plan]] = {each.__name__: each for each in (*GROWING, *PUBLISHED, *SIMPLE)}


def find_method(name: str, *, otherwise: str = "") -> Callable[..., Plan]:
    """Return the method with this name, or raise an error that lists similar names.

    Args:
        otherwise: the end of the error message, with what else the user may pass.

    Examples:
        >>> find_method("rigl") is rigl
        True
    """
    if name in METHODS:
        return METHODS[name]
    folded = str(name).lower()
    close = [known for known in METHODS if folded in known or known in folded]
    close += [known for known in difflib.get_close_matches(folded, METHODS, 3, 0.5) if known not in close]
    known = f"similar: {', '.join(close)}" if close and folded else f"available: {', '.join(METHODS)}"
    raise GrowpruneError(f"there is no method {name!r}; {known}{otherwise}")
