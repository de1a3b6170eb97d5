"""Trains recipes: `train` starts a run in a folder, `resume` continues one.

recipe       recipe.py, optim.py: the settings of a run; override.py, source.py: recipes from strings and files;
             cost.py: cost estimates; metric.py: comparing scores
run          start.py: train and resume; run.py: the order of events; building.py, trainer.py, batches.py, backward.py,
             evaluation.py, accounting.py: the steps of a run; events.py: listeners; device.py: the device
store        folder.py: the files of a run; json_file.py; run_checkpoints.py; compatibility.py: checks before a resume
distributed  mesh.py: several processes
"""

from growprune.engine.events import Event, Listener
from growprune.engine.folder import RunFolder
from growprune.engine.mesh import PeerFailed, leave
from growprune.engine.recipe import Recipe
from growprune.engine.run import Interrupted, Run
from growprune.engine.start import resume, train
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
