"""Sparse models sharded over several processes by torch's FSDP2: every rank holds and sends live weights only.

`handles.py` is what FSDP2 keeps, `ranks.py` the processes that share a model, `parameter.py` a sharded weight,
`layout.py` sharded masks, `choosing.py` edits without gathering, `units.py` how a model becomes sharded. Checkpoints
are in `growprune.files.sharded_checkpoints`. `growprune/__init__.py` registers this package with
`growprune.sparse.sharded`, and nothing below imports it.
"""

from growprune.sharding.units import UnitByUnit, adopt, shard, sharded_names, units_of

__all__ = ["UnitByUnit", "adopt", "shard", "sharded_names", "units_of"]
