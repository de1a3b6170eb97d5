"""Sparse models that are sharded over several processes by torch's FSDP2: every rank holds and sends what lives.

`handles.py` is what FSDP2 keeps, `ranks.py` who shares a model, `parameter.py` a weight that is sharded, `masks.py`
masks that are, `choosing.py` edits without gathering, `units.py` how a model becomes sharded, `state.py` checkpoints.
"""

from growprune.sharding.units import UnitByUnit, adopt, shard, sharded_names, units_of

__all__ = ["UnitByUnit", "adopt", "shard", "sharded_names", "units_of"]
