"""growprune in other people's trainers, each in one file, on the public Cursor alone.

`growprune.integrations.transformers.GrowPruneCallback` is for the Trainer of transformers.
"""
