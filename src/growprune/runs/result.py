"""The schema of result.json. The engine writes it, and every table, page and script reads it, through `Result`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from growprune.errors import GrowpruneError
from growprune.files import json_file
from growprune.files.json_file import NUMBER

Json = dict[str, Any]

FORMAT = 2
"""Version of result.json. Version 1 has no `format`, and may hold NaN, which is not JSON."""
SCORE = (*NUMBER, type(None))
"""A metric or a loss. JSON has no NaN and no infinity: both are stored as null, and a metric is read back as nan."""

NAMES: json_file.Names = {
    "format?": int,
    **{"recipe.task.name": str, "recipe.method": str, "recipe.sparsity": NUMBER, "recipe.options": dict},
    **{"recipe.seed": int, "recipe.accumulate?": int, "seed": int, "metric": str, "lower_is_better": bool},
    **{"environment": dict, "origin": dict, "origin.source?": str, "origin.settings?": dict},
    **{"origin.row?": str, "origin.files?": dict, "origin.files?.*": str},
    **{"data?": dict, "data?.num_batches": int, "weights?": dict, "signature?": str},
    **{"validation": dict, "validation.*": SCORE, "test": dict, "test.*": SCORE},
    **{"best?": dict, "best?.stage": int, "best?.test.*": SCORE},
    **{"history": list, "history.*.stage": int, "history.*.branch": (int, type(None)), "history.*.edits": str},
    **{"history.*.epoch": int, "history.*.iteration?": int, "history.*.alive": int, "history.*.loss?": SCORE},
    **{"history.*.explored?": NUMBER, "history.*.churn?": SCORE, "history.*.grown?": NUMBER},
    **{
        "history.*.validation?": dict,
        "history.*.validation?.*": SCORE,
        "history.*.candidate?": dict,
        "history.*.candidate?.*": SCORE,
    },
    **{"sparsity.rows": list, "sparsity.rows.*.name": str, "sparsity.rows.*.size": int},
    **{"sparsity.rows.*.target?": NUMBER, "sparsity.rows.*.sparsity": NUMBER, "sparsity.totals.sparsity": NUMBER},
    **{"sparsity.totals.alive": int, "sparsity.totals.prunable": int},
    **{"sparsity.totals.flops_dense?": int, "sparsity.totals.flops_sparse?": int},
    **{"file_bytes": int, "peak_bytes": int, "seconds": NUMBER},
    **{"training_flops?": NUMBER, "training_iterations?": int, "training_examples?": int},
    **{"peak_alive?": int, "average_alive?": NUMBER},
}
"""What the fields of the file must be. Optional fields may be missing or null."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a finished run has found out."""

    recipe: Json
    """All settings, as JSON values."""
    origin: Json
    """How to find the recipe again, without paths of the machine: source and settings as typed; `row`, the row of
    `growprune compare`; `files`, digests of the user's own files by name."""
    seed: int
    metric: str
    """Name of the number that measures the model, in `validation` and `test`."""
    lower_is_better: bool
    environment: Json
    """Versions and hardware. `commit` is that of growprune's source; empty if unknown, and it ends in "-dirty" if the
    source had local changes. `source` is then a digest of the source."""
    history: list[Json]
    """One row per epoch: epoch, iteration, stage, branch, edits, alive, loss, lr, explored, churn, grown (the share of
    live weights that were dead before), and, if evaluated, validation and candidate (pruned to the target then)."""
    validation: Mapping[str, float]
    """Metrics of the last model on validation data, which may select runs."""
    test: Mapping[str, float]
    """Metrics of the last model on test data, which selects nothing."""
    sparsity: Json
    """`totals`, and `rows`: one for each prunable weight."""
    file_bytes: int
    peak_bytes: int
    """Peak memory of the GPU, or of the process on a CPU."""
    seconds: float
    data: Json | None = None
    """Fingerprint of the data: num_batches, and a digest of the first batch."""
    weights: Json | None = None
    """The file of initial weights."""
    signature: str = ""
    """How the task computes its metric, such as the signature of sacrebleu."""
    training_flops: float | None = None
    training_iterations: int | None = None
    training_examples: int | None = None
    peak_alive: int | None = None
    average_alive: float | None = None
    """Live weights per iteration. The counts are None in old results."""
    best: Json | None = None
    """The best model at the target sparsity by validation data: stage, epoch, validation and test."""

    def to_dict(self) -> Json:
        """The content of result.json, except that numbers that are not finite stay."""
        return {"format": FORMAT, **{field.name: getattr(self, field.name) for field in fields(self)}}

    def write(self, path: Path) -> None:
        json_file.write(path, self.to_dict())

    @classmethod
    def read(cls, path: Path) -> Result:
        """Read result.json. Raise GrowpruneError if it is damaged, or of a newer version."""
        content = json_file.read(path, NAMES, "remove it and resume the run to write it again, or leave it out")
        if (content.get("format") or 1) > FORMAT:
            raise GrowpruneError(
                f"{path} was written by a newer growprune: it has format {content['format']}, this version reads "
                f"{FORMAT}. Upgrade growprune, or leave it out"
            )
        return cls.from_dict(content)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Result:
        """The result of a valid content of result.json. Fields that this version does not know are left out."""
        known = {field.name: content[field.name] for field in fields(cls) if content.get(field.name) is not None}
        known |= {name: _scores(known[name]) for name in ("validation", "test")}
        known["history"] = [_with_scores(row, ("validation", "candidate")) for row in known["history"]]
        if "best" in known:
            known["best"] = _with_scores(known["best"], ("validation", "test"))
        return cls(**known)


def _with_scores(row: Json, names: tuple[str, ...]) -> Json:
    return row | {name: _scores(row[name]) for name in names if row.get(name)}


def _scores(metrics: Mapping[str, float | None]) -> dict[str, float]:
    return {name: math.nan if score is None else score for name, score in metrics.items()}
