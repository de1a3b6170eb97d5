"""Trains recipes: `train` starts a run in a folder, `resume` continues one.

recipe       recipe.py, optim.py, partitions.py: all that decides a run; override.py and source.py: recipes from text;
             cost.py: what one will cost; metric.py: which of two scores is better
run          start.py: train and resume; run.py: the order of events; building.py, trainer.py, batches.py, backward.py,
             evaluation.py, accounting.py: what happens in them; events.py: who is told; device.py: where it runs
store        folder.py: the files of a run; json_file.py; run_checkpoints.py; compatibility.py: what must stay the
             same
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
