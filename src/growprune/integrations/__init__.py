"""growprune in other people's trainers, each by one file that users import, on the public Cursor alone.

`transformers.GrowPruneCallback` is for the Trainer of transformers, `lightning.GrowPrune` for that of Lightning, and
`accelerate.keep_in_checkpoints` for loops with accelerate.
"""
