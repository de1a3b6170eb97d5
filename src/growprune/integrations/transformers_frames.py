"""Find the Trainer that calls a callback.

The Trainer of transformers (5.22) passes neither itself nor anything that refers to it to the callbacks of
`callbacks=[...]`: `CallbackHandler.call_event` passes arguments, state, control, model, optimizer, scheduler and
loaders. For its own JITCheckpointCallback, the Trainer has a special case that calls `set_trainer`. But masks must be
loaded before the weights of a checkpoint, and no event comes before those. So this file looks at the calling functions,
once when a Trainer is made, and once when it begins to train.
"""

from __future__ import annotations

import inspect

from transformers import Trainer

from growprune.errors import GrowpruneError


def calling_trainer() -> Trainer:
    """Return the Trainer whose method calls the function that calls this one, through any number of others."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer):
            return caller
        frame = frame.f_back
    raise GrowpruneError(
        "GrowPruneCallback works only in the Trainer of transformers: give it as Trainer(callbacks=[...])"
    )
