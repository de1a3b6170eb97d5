"""The model card of a pretrained folder: README.md, with the front matter that model hubs read.

It is rewritten with each save while it has the line MARKER. A README.md without that line is the user's and stays.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from growprune.files.disk import plain_file, replacing
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
    path, totals, name = folder / NAME, manifest["totals"], name or folder.resolve().name
    if path.exists() and MARKER not in plain_file(path).read_text(errors="replace").splitlines():
        return
    front = ["---", "library_name: growprune", "tags:", "- sparse", "- pruning"]
    base = getattr(getattr(sparse.model, "config", None), "_name_or_path", None)
    if isinstance(base, str) and HUB_ID.fullmatch(base) and not Path(base).exists():
        front.append(f"base_model: {base}")
    plan = getattr(cursor_of(sparse), "plan", None)  # known while the cursor exists
    trained = f" Trained with the method `{plan.method.__name__}`." if isinstance(plan, Plan) else ""
    size, alive = totals["prunable"], totals["prunable_nnz"]
    zeros = f"{1 - alive / size:.2%}" if size else "0.00%"
    files = sorted(path for path in folder.glob("*.safetensors"))
    lines = [
        *(*front, "---", "", MARKER, "", f"# {name}", ""),
        f"A sparse model: {zeros} of its prunable weights are zero (pattern `{manifest['pattern']}`).{trained}",
        f"{alive:,} of {size:,} prunable weights are non-zero, of {totals['elements']:,} weights in all.",
        *("", "| file | bytes |", "|---|---:|", *(f"| {path.name} | {path.stat().st_size:,} |" for path in files)),
        *("", "Load it sparse, with growprune:", "", "```python"),
        *("import growprune as gp", *_how_to_load(type(sparse.model), name), "```", ""),
    ]
    with replacing(path) as file:
        file.write("\n".join(lines).encode())


def _how_to_load(kind: type, name: str) -> tuple[str, str]:
    """Return two lines that load the model; if its class needs arguments, with a placeholder for a function."""
    module, is_importable = kind.__module__, hasattr(kind, "from_pretrained")
    is_local = "." in kind.__qualname__ or module.startswith(("torch.", "growprune.", "__main__"))
    if not is_importable and not is_local:
        with contextlib.suppress(TypeError, ValueError):
            inspect.signature(kind).bind()
            is_importable = True
    if is_importable:
        package = "transformers" if module.startswith("transformers.") else module
        return f"from {package} import {kind.__name__}", f"sparse = gp.from_pretrained({kind.__name__}, {name!r})"
    comment = "# build_model: your function that returns the model, with any weights"
    return comment, f"sparse = gp.from_pretrained(build_model, {name!r})"
