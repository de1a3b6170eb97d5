"""Trains recipes: `train` starts a run in a folder, `resume` continues one.

recipe       recipe.py, optim.py: the settings of a run; override.py, source.py: recipes from strings and files;
             cost.py: cost estimates; metric.py: comparing scores
run          loop.py: the training program; state.py: what is resumed; forks.py: the place in the plan; building.py: the
             model; trainer.py, batches.py: an iteration; evaluation.py: the best model; accounting.py: counters;
             events.py: log and listeners; device.py: the device
store        folder.py: the files of a run; compatibility.py: checks before a run starts or is resumed
distributed  mesh.py: several processes; replicas.py: BatchNorm over replicas
"""

from growprune.engine.events import Event, Listener
from growprune.engine.folder import RunFolder
from growprune.engine.loop import Interrupted, Run, resume, train
from growprune.engine.mesh import PeerFailed, leave
from growprune.engine.recipe import Recipe
from growprune.engine.trainer import TrainingDiverged

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
