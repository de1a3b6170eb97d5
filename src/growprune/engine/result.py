"""What came out of a run, as `result.json` has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from growprune.engine.data_order import fingerprint
from growprune.engine.device import environment, move, peak_bytes
from growprune.engine.recipe import describe
from growprune.sparse.summary import summarise

if TYPE_CHECKING:
    from growprune.engine.run import Run


def result_of(run: Run) -> dict[str, Any]:
    """What a run was, and what came out of it. Its model is trained and saved, and becomes the best one here."""
    result = {
        "recipe": describe(run.recipe),
        "origin": run.folder.portable_origin(),
        "seed": run.recipe.seed,
        "metric": run.task.metric,
        "lower_is_better": run.task.lower_is_better,
        "data": fingerprint(run.recipe, run.num_batches),
        "weights": run.weights,
        "environment": environment(run.device),
        "history": run.history,
        "signature": run.task.signature,
        "validation": run.evaluation.evaluate("validation"),
        "test": run.evaluation.evaluate("test"),
        "sparsity": summarise(run.sparse, move(run.task.example(), run.device)).to_dict(),
        "file_bytes": run.folder.model.stat().st_size,
        "peak_bytes": peak_bytes(run.device),
        "seconds": run.seconds,
        **run.accounting.figures(),
    }
    result["best"] = run.evaluation.best_tested()  # last, because the model becomes the best one
    return result
