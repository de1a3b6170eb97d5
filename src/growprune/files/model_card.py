"""The model card of a pretrained folder: README.md, with the front matter that model hubs read.

It is rewritten with each save while it has the line MARKER. A README.md without that line is the user's and stays.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from growprune.files.atomic import plain_file, replacing
from growprune.plan import Plan
from growprune.sparse.cursor import cursor_of
from growprune.sparse.model import SparseModel

NAME = "README.md"
MARKER = "<!-- Written by growprune, and rewritten when the model is saved. Remove this line to keep your edits. -->"
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def write_model_card(sparse: SparseModel, folder: Path, manifest: Mapping[str, Any], name: str = "") -> None:
    """Write the card, unless there is a README.md that growprune did not write, or that was edited.

    Args:
        manifest: the manifest of the sparse file in the folder.
        name: the name of the model; by default that of the folder.
    """
    path = folder / NAME
    if path.exists() and MARKER not in plain_file(path).read_text(errors="replace").splitlines():
        return
    with replacing(path) as file:
        file.write("\n".join(_lines(sparse, folder, manifest, name or folder.resolve().name)).encode())


def _lines(sparse: SparseModel, folder: Path, manifest: Mapping[str, Any], name: str) -> Iterator[str]:
    totals, method = manifest["totals"], _method(sparse)
    yield from _front_matter(sparse.model)
    yield from ("", MARKER, "", f"# {name}", "")
    trained = f" Trained with the method `{method}`." if method else ""
    zeros = _share(totals["prunable"], totals["prunable_nnz"])
    yield f"A sparse model: {zeros} of its prunable weights are zero (pattern `{manifest['pattern']}`).{trained}"
    yield from ("", *_weights_table(sparse.model, manifest), "", *_files_table(folder), "")
    yield from ("Load it sparse, with [growprune](https://pypi.org/project/growprune/):", "", "```python")
    yield from (*_how_to_load(sparse.model, name), "```", "")


def _front_matter(model: nn.Module) -> Iterator[str]:
    """Yield the front matter that model hubs read. The user adds the license."""
    yield from ("---", "library_name: growprune", "tags:", "- sparse", "- pruning")
    base = getattr(getattr(model, "config", None), "_name_or_path", None)
    if isinstance(base, str) and HUB_ID.fullmatch(base) and not Path(base).exists():
        yield f"base_model: {base}"
    yield "---"


def _method(sparse: SparseModel) -> str | None:
    """Return the method that the model was trained with, while its cursor exists."""
    plan = getattr(cursor_of(sparse), "plan", None)
    return plan.method.__name__ if isinstance(plan, Plan) else None


def _weights_table(model: nn.Module, manifest: Mapping[str, Any]) -> Iterator[str]:
    """Yield a row for each kind of layer, one for all prunable weights, and one for all weights."""
    kinds: dict[str, list[tuple[int, int]]] = {}
    for name, about in manifest["tensors"].items():
        size = math.prod(about["shape"])
        kind = _kind(model, name) if "matrices" in about else ""
        kinds.setdefault(kind, []).append((size, about.get("nnz", size)))
    others = kinds.pop("", [])
    prunable = [pair for pairs in kinds.values() for pair in pairs]
    rows = {**kinds, "**all prunable**": prunable, "**whole model**": prunable + others}
    yield from ("| weights | number | non-zero | sparsity |", "|---|---:|---:|---:|")
    for kind, pairs in rows.items():
        size, alive = (sum(column) for column in zip(*pairs, strict=True))
        yield f"| {kind} | {size:,} | {alive:,} | {_share(size, alive)} |"


def _kind(model: nn.Module, parameter: str) -> str:
    """Return the class name of the layer with a parameter; for compact storage, that of the original layer."""
    name = type(model.get_submodule(parameter.rpartition(".")[0])).__name__
    return "matrices" if name == "Module" else name.removeprefix("Compact").removeprefix("NonDynamicallyQuantizable")


def _files_table(folder: Path) -> Iterator[str]:
    yield from ("| file | bytes |", "|---|---:|")
    for path in sorted(folder.glob("*.safetensors")):
        yield f"| {path.name} | {path.stat().st_size:,} |"


def _share(size: int, alive: int) -> str:
    return f"{1 - alive / size:.2%}" if size else "0.00%"


def _how_to_load(model: nn.Module, name: str) -> Iterator[str]:
    """Yield three lines that load the model; if its class needs arguments, with a placeholder for a function."""
    kind = type(model)
    module, is_hub_class = kind.__module__, hasattr(kind, "from_pretrained")
    yield "import growprune as gp"
    if is_hub_class or (_needs_nothing(kind) and not module.startswith(("torch.", "growprune.", "__main__"))):
        yield f"from {'transformers' if module.startswith('transformers.') else module} import {kind.__name__}"
        yield f"sparse = gp.from_pretrained({kind.__name__}, {name!r})"
    else:
        yield "# build_model: your function that returns the model, with any weights"
        yield f"sparse = gp.from_pretrained(build_model, {name!r})"


def _needs_nothing(kind: type) -> bool:
    """True if a class at the top of its module can be called without arguments."""
    try:
        inspect.signature(kind).bind()
    except (TypeError, ValueError):
        return False
    return "." not in kind.__qualname__
