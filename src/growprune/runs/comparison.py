"""The table of a comparison: its rows, what they are compared with, and notes for the reader.

`comparison.json` has everything (its fields are in docs/comparing.md), `comparison.md` the rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from growprune.files.disk import finite, replacing, writing_to
from growprune.runs.record import in_full, say_small
from growprune.runs.result import Json, Metric, decimals, plus_minus
from growprune.runs.table import HEAD as TUNING_HEAD
from growprune.runs.table import Gap, RunRow, baseline, cells_of, errors_of, notes_of, notes_on_versions, reference

FORMAT = 2
"""Format version of comparison.json."""
SHARES = ("training_flops", "inference_flops", "peak_alive", "average_alive")
FIGURES = ("validation", "test", "epochs", "reached", *SHARES, "peak_bytes", "seconds")
"""Numbers of each run in comparison.json."""
QUALITY = ("row", "sparsity", "epochs", "test", "inference FLOPs", "vs baseline", "vs dense", "runs")
COST = ("training FLOPs", "peak alive", "average alive", "memory", "seconds")
"""Columns for the quality and the cost of a row."""


@dataclass
class Comparison:
    rows: list[RunRow]
    base: str = ""
    """The recipe. Empty for existing runs."""
    budget: Mapping[str, Any] = field(default_factory=dict)
    """kind, epochs and max_epochs. Empty for existing runs."""
    planned: Mapping[Path, float] = field(default_factory=dict)
    """Epochs by run folder, for rows without a finished run."""
    remarks: Sequence[str] = ()
    """Notes on how the runs were made, and on allowed differences between them."""

    def __post_init__(self) -> None:
        dense = reference(self.rows)
        length = self.budget.get("epochs") or (None if dense is None else dense.epochs)
        self.rows = [replace(row, dense_epochs=length) for row in self.rows]

    @cached_property
    def metric(self) -> Metric:
        return next((row.metric for row in self.rows if row.metric.name), Metric(""))

    @cached_property
    def reference(self) -> RunRow | None:
        """The dense row that "vs dense" compares with."""
        return reference(self.rows)

    @cached_property
    def baselines(self) -> list[RunRow | None]:
        """The best baseline of each row."""
        return [baseline(row, self.rows) for row in self.rows]

    @property
    def terms(self) -> str:
        """Recipe, sparsity and epochs, as far as all rows share them."""
        sparsities = {row.sparsity for row in self.rows if row.has_sparsity}
        epochs = {self.epochs(row) for row in self.rows}
        words = [f" on {self.base}"] if self.base else []
        words += [f" at sparsity {in_full(sparsity)}" for sparsity in sparsities if len(sparsities) == 1]
        words += [f", {each:g} epochs" for each in epochs if each is not None and len(epochs) == 1]
        return "".join(words)

    @property
    def errors(self) -> list[str]:
        """One line for each run that has no result, including tuning runs. Empty if the table is complete."""
        said = [line for tuning in self.tunings for line in errors_of(tuning)]
        for row in [row for row in self.rows if not row.tuning or row.tuning["chosen"]]:
            for run in [run for run in row.runs if not run.is_finished]:
                what = "failed" if run.status == "failed" else f"is {run.status}"
                said.append(f"{row.name} {in_full(row.sparsity)} seed {run.seed} {what}: {run.why}")
        return said

    @property
    def tunings(self) -> list[Json]:
        """How each row was tuned. Empty without tuning."""
        return [row.tuning for row in self.rows if row.tuning]

    @property
    def notes(self) -> list[str]:
        """Notes for the reader."""
        runs = [run for row in self.rows for run in row.runs]
        notes = [f"a lower {self.metric.name} is better"] if self.metric.lower_is_better else []
        notes += self.remarks
        if self.reference is not None and sum(row.is_dense for row in self.rows) > 1:
            notes.append(f"vs dense compares with {self.reference.name}, the best dense row by validation")
        places = sorted({str(run.result.environment.get("device")) for run in runs if run.result is not None})
        if len(places) > 1:
            notes.append(f"runs used different devices ({', '.join(places)}): do not compare seconds")
        # the best baseline is not the same for rows of its own method or of other seeds
        found: dict[float, dict[str, list[str]]] = {}
        for row, best in zip(self.rows, self.baselines, strict=True):
            if best is not None:
                found.setdefault(row.sparsity, {}).setdefault(best.name, []).append(row.name)
        for sparsity, rows_by_best in found.items():
            (usual, _), *others = sorted(rows_by_best.items(), key=lambda item: -len(item[1]))
            exceptions = "".join(f"; for {', '.join(names)} it is {best}" for best, names in others)
            notes.append(f"best baseline at {in_full(sparsity)}, by validation: {usual}{exceptions}")
        notes += [f"{row.label}: {say_small(row.small, at_length=True)}" for row in self.rows if row.small]
        for row in [row for row in self.rows if row.is_off]:
            notes.append(f"{row.name} missed sparsity {in_full(row.sparsity)}: it reached {row.reached:.4g}")
        return [*notes, *notes_of(self.tunings), *notes_on_versions(runs)]

    def epochs(self, row: RunRow) -> float | None:
        """Epochs that a row trains for, or was planned to."""
        return row.epochs if row.finished else self.planned.get(row.first.folder)

    def minus_baseline(self, row: RunRow) -> Gap | None:
        best = self.baselines[self.rows.index(row)]
        return None if best is None else row.minus(best)

    def minus_dense(self, row: RunRow) -> Gap | None:
        return None if self.reference is None or row is self.reference else row.minus(self.reference)

    def cells(self, row: RunRow) -> dict[str, str]:
        """All cells of a row by column, as text."""
        test, epochs = row.spread("test"), self.epochs(row)
        places = decimals(test.mean)
        sparsity = in_full(row.sparsity) + (f" (reached {row.reached:.4g})" if row.is_off else "")
        sparsity += f" ({say_small(row.small)})" if row.small else ""
        shares = {name: "-" if (mean := row.mean(name)) is None else f"{mean:.3f}" for name in SHARES}
        memory, seconds = row.values("peak_bytes"), row.mean("seconds")
        found = (self.minus_baseline(row), self.minus_dense(row))
        gaps = ["" if gap is None else plus_minus(gap.mean, gap.standard_error, places, "+") for gap in found]
        states = [run.status for run in row.runs]
        missing = [f"{n} {status}" for status in ("failed", "unfinished", "damaged") if (n := states.count(status))]
        quality = (
            *(row.name, sparsity, "-" if epochs is None else f"{epochs:g}"),
            *(plus_minus(test.mean, test.deviation, places), shares["inference_flops"], *gaps),
            ", ".join([str(states.count("finished")), *missing]),
        )
        cost = (
            *(shares["training_flops"], shares["peak_alive"], shares["average_alive"]),
            f"{max(memory.values()) / 2**20:.0f} MiB" if memory else "-",
            "-" if seconds is None else f"{seconds:.1f}",
        )
        return dict(zip((*QUALITY, *COST), (*quality, *cost), strict=True))

    def to_dict(self) -> Json:
        """The content of comparison.json. nan and infinity become null."""
        found: Json = {
            **{"format": FORMAT, "base": self.base, "budget": self.budget, "metric": self.metric.name},
            **{"lower_is_better": self.metric.lower_is_better, "notes": self.notes, "errors": self.errors},
            "rows": [],
        }
        for row in self.rows:
            runs = []
            for run in row.runs:
                about = {"seed": run.seed, "folder": str(run.folder), "status": run.status}
                about["error"] = run.why if run.status == "failed" else ""
                figures = {name: row.value(run, name) for name in FIGURES} if run.is_finished else {}
                runs.append({**about, **figures})
            whole = {
                **{"name": row.name, "method": row.method, "allocation": str(row.first.recipe.get("allocation", ""))},
                "options": dict(row.first.recipe.get("options") or {}),
                **{"sparsity": row.sparsity, "epochs": self.epochs(row), "runs": runs, "summary": self.summary(row)},
                **{"small": row.small or None, "tuning": row.tuning or None},
            }
            found["rows"].append(whole)
        return finite(found)  # type: ignore[no-any-return]

    def summary(self, row: RunRow) -> Json:
        """The columns of a row as numbers."""
        best = self.baselines[self.rows.index(row)]
        gaps = {"minus_baseline": self.minus_baseline(row), "minus_dense": self.minus_dense(row)}
        states = [run.status for run in row.runs]
        return {
            "reached": row.reached,
            **{name: asdict(row.spread(name)) for name in ("test", "validation")},
            "baseline": None if best is None else best.name,
            **{name: gap and asdict(gap) for name, gap in gaps.items()},
            **{name: row.mean(name) for name in (*SHARES, "seconds")},
            "peak_bytes": max(row.values("peak_bytes").values(), default=None),
            **{status: states.count(status) for status in ("finished", "failed", "unfinished")},
        }

    def write(self, folder: Path, *, with_markdown: bool = False) -> None:
        texts = {"comparison.json": json.dumps(self.to_dict(), indent=2) + "\n"}
        texts |= {"comparison.md": self.to_markdown()} if with_markdown else {}
        with writing_to(folder):
            folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            with replacing(folder / name) as file:
                file.write(text.encode())

    def to_markdown(self) -> str:
        heads = [*QUALITY, *COST]
        lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
        lines += ["| " + " | ".join(self.cells(row).values()) + " |" for row in self.rows]
        if self.tunings:
            lines += ["", "| " + " | ".join(TUNING_HEAD) + " |", "|---|---|" + "---:|" * (len(TUNING_HEAD) - 2)]
            lines += ["| " + " | ".join(cells_of(tuning)) + " |" for tuning in self.tunings]
        return "\n".join([*lines, "", *(f"- {note}" for note in [*self.notes, *self.errors])]) + "\n"
