"""Carries a recipe out: `train` starts a run in a folder, `resume` goes on with one."""

from growprune.engine.events import Event, Listener
from growprune.engine.folder import RunFolder
from growprune.engine.mesh import PeerFailed, leave
from growprune.engine.recipe import Recipe
from growprune.engine.run import Interrupted, Run
from growprune.engine.start import resume, train
from growprune.engine.training import TrainingDiverged

__all__ = [
    "Event",
    "Interrupted",
    "Listener",
    "PeerFailed",
    "Recipe",
    "Run",
    "RunFolder",
    "TrainingDiverged",
    "leave",
    "resume",
    "train",
]
