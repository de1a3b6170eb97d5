"""Trains recipes: `train` starts a run in a folder, `resume` continues one.

loop.py       the training program, from top to bottom
recipe.py     the settings of a run; override.py: recipes from strings and files; cost.py: estimates without training
building.py   device and model
state.py      the place in the plan, and all that is resumed
trainer.py    an iteration: batches, learning rate, forward and backward pass; and evaluation
observers.py  counters, explored weights, best model, log
folder.py     the files of a run, and checks before it is resumed
mesh.py       several processes; replicas.py: BatchNorm over replicas
"""

from growprune.engine.folder import RunFolder
from growprune.engine.loop import Interrupted, Run, resume, train
from growprune.engine.mesh import PeerFailed, leave
from growprune.engine.recipe import Recipe
from growprune.engine.trainer import TrainingDiverged

__all__ = ["Interrupted", "PeerFailed", "Recipe", "Run", "RunFolder", "TrainingDiverged", "leave", "resume", "train"]
