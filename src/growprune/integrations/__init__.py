"""Integrations with the trainers of other libraries, one file each, built on the public Cursor.

`transformers.GrowPruneCallback` is for the Trainer of transformers, `lightning.GrowPrune` for the Trainer of Lightning,
and `accelerate.keep_in_checkpoints` for loops with accelerate.
"""
