"""Shard sparse models over several processes with torch's FSDP2. Every rank holds and sends only live weights.

`handles.py` wraps FSDP2's records, `ranks.py` has the processes that share a model, `parameter.py` a sharded weight,
`layout.py` sharded masks, and `units.py` shards a model. Checkpoints are in
`growprune.files.sharded_checkpoints`. `growprune/__init__.py` registers this package with `growprune.sparse.sharded`,
and no lower package imports it.
"""

from growprune.sharding.units import UnitByUnit, adopt, shard, sharded_names, units_of

__all__ = ["UnitByUnit", "adopt", "shard", "sharded_names", "units_of"]
