"""Draw the layers of the code from the table MAY_IMPORT of tests/project/test_layering.py: `python docs/layers.py`.

A package is drawn above all that it may import. A line is left out where a longer way along lines says the same.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

DOCS = Path(__file__).resolve().parent
TABLE = DOCS.parent / "tests" / "project" / "test_layering.py"
PICTURE = DOCS / "images" / "layers.svg"
WIDTH, ROW, BOX, TALL = 560, 58, 92, 28
"""The width of the picture, the distance of rows, and the size of a box."""
GREY, BLUE = "#808890", "#1f77b4"


def read_table() -> dict[str, str]:
    """The table, without what else the test imports."""
    tree = ast.parse(TABLE.read_text(encoding="utf-8"))
    nodes = [node for node in tree.body if isinstance(node, ast.Assign) and _name(node) in ("LIBRARY", "MAY_IMPORT")]
    names: dict[str, dict[str, str]] = {}
    exec(compile(ast.Module(list(nodes), []), str(TABLE), "exec"), names)
    return names["MAY_IMPORT"]


def _name(node: ast.Assign) -> str:
    target = node.targets[0]
    return target.id if isinstance(target, ast.Name) else ""


def levels(below: Mapping[str, set[str]]) -> dict[str, int]:
    """How many packages lie below each, one under the other. The table has the lowest first."""
    found: dict[str, int] = {}
    for package, imported in below.items():
        found[package] = 1 + max((found[one] for one in imported), default=-1)
    return found


def reached(below: Mapping[str, set[str]], package: str) -> set[str]:
    """All that lies below a package."""
    return below[package].union(*(reached(below, one) for one in below[package]))


def draw(table: Mapping[str, str]) -> str:
    """The picture, as SVG."""
    below = {package: {entry.split(".")[0] for entry in allowed.split()} for package, allowed in table.items()}
    level = levels(below)
    height = ROW * (1 + max(level.values()))
    at = {}
    for number in sorted(set(level.values())):
        row = [package for package in table if level[package] == number]
        for i, package in enumerate(row):
            at[package] = (WIDTH * (2 * i + 1) / (2 * len(row)), height - ROW * number - ROW / 2)
    lines, boxes = [], []
    for package, (x, y) in at.items():
        for one in sorted(below[package] - set().union(*(reached(below, other) for other in below[package]))):
            ends = f'x1="{x:g}" y1="{y + TALL / 2:g}" x2="{at[one][0]:g}" y2="{at[one][1] - TALL / 2:g}"'
            lines.append(f'<line {ends} stroke="{GREY}" stroke-opacity="0.6"/>')
        corner = f'x="{x - BOX / 2:g}" y="{y - TALL / 2:g}" width="{BOX}" height="{TALL}"'
        boxes.append(f'<rect {corner} rx="4" fill="{BLUE}" fill-opacity="0.15" stroke="{BLUE}"/>')
        boxes.append(
            f'<text x="{x:g}" y="{y + 5:g}" font-size="14" text-anchor="middle" fill="{GREY}">{package}</text>'
        )
    size = f'width="{WIDTH}" viewBox="0 0 {WIDTH} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" role="img">'
    return "\n".join([head, "<title>The packages, each above what it may import</title>", *lines, *boxes, "</svg>\n"])


if __name__ == "__main__":
    PICTURE.write_text(draw(read_table()), encoding="utf-8")
