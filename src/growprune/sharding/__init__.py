"""Shard sparse models over several processes with torch's FSDP2. Every rank holds and sends only live weights.

`handles.py` wraps FSDP2's records and the processes that share a model; `units.py` shards it. Checkpoints are in
`growprune.files.sharded_checkpoints`. `growprune.sparse` imports this package inside the functions that need it,
because FSDP2 takes a second to load.
"""

from growprune.sharding.units import UnitByUnit, newly_sharded, shard, sharded_names, units_of

__all__ = ["UnitByUnit", "newly_sharded", "shard", "sharded_names", "units_of"]
