"""Write the tables of api.md, so that the page can be read without building the site: `python docs/api_summary.py`.

Each section lists the names of its `:::` lines, with the first sentence of their docstrings.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import growprune

PAGE = Path(__file__).resolve().parent / "api.md"
BEGIN, END = "<!-- names -->\n", "<!-- end of names -->\n"


def find(path: str) -> Any:
    """The object that a `:::` line names: a module's attribute, or an attribute of that."""
    module, rest = path, []
    while True:
        try:
            found = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, name = module.rpartition(".")
            rest.insert(0, name)
    for name in rest:
        found = getattr(found, name)
    return found


def row(path: str) -> str:
    thing = find(path)
    public = [name for name in growprune.__all__ if getattr(growprune, name) is thing]
    name = public[0] if public else path.rpartition(".")[2].rstrip("_")
    paragraph = inspect.cleandoc(thing.__doc__).split("\n\n")[0]
    first = re.split(r"(?<=[.!?:])\s", " ".join(paragraph.split()), maxsplit=1)[0]
    return f"| `{name}` | {first.rstrip(':').replace('|', '/')} |\n"


def page() -> str:
    """The page with its tables; each stands before the `:::` lines of its section, which git hosts do not show."""
    text = re.sub(f"{BEGIN}.*?{END}\n", "", PAGE.read_text(encoding="utf-8"), flags=re.S)
    sections = re.split(r"^(?=## )", text, flags=re.M)
    for number, section in enumerate(sections):
        paths = re.findall(r"^::: (\S+)", section, re.M)
        if paths:
            table = "| name | |\n|---|---|\n" + "".join(map(row, paths))
            sections[number] = section.replace("<!-- reference", f"{BEGIN}{table}{END}\n<!-- reference", 1)
    return "".join(sections)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
