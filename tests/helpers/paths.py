"""Where things are: the project, its experiments, and the data sets beside it, which may be absent."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data"
TOY = ROOT / "tests" / "helpers" / "toy.py"
