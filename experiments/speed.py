"""Measure deployed models, merged adapters and generation on a quiet CPU, and put the tables into the pages.

    python experiments/speed.py --runs runs/suite/cifar10-90 [--threads 2]    # about half an hour; nothing else may run
    python experiments/speed.py --write                                       # only the tables, of what is stored

DIR is the folder of the suite's cell, whose runs of seed 0 are timed. Results go to experiments/inference/.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from pictures import GREEN, GREY, IMAGES, RED, svg, text
from tables import put

from growprune.engine.building import commit

HERE = Path(__file__).parent
ROOT = HERE.parent
STORED = HERE / "inference"
MASKS = (
    *("gradual_gap/gradual_gap-global-*", "gradual_gap-cost_power-0-25/*", "gmp/gmp-global-*"),
    *("gmp-cost_power-0-1/*", "rigl/*", "C-GaP-4x-as-long/*"),
)
"""Rows of the suite: one global ranking, the same by cost, erk, and equal sparsity in all layers."""
ENGINES = ("deployed", "torch", "onnxruntime", "openvino")


def measure(runs: Path, threads: int) -> None:
    folders = [str(next(runs.glob(f"{mask}/0.9/seed0"))) for mask in MASKS]
    counts = HERE / "compare" / "cifar10-width32" / "results.json"
    networks = ["inference_networks.py", "--rounds", "15", "--seconds", "10", "--engines", ",".join(ENGINES)]
    networks += [word for folder in folders for word in ("--run", folder)]
    commands = {
        "trained": [*networks, "--batch", "1,16", "--counts", str(counts)],
        "merging": ["merging.py"],
        "generate": ["generate.py"],
    }
    code = commit()  # before its files are written
    for name, (script, *words) in commands.items():
        command = [sys.executable, str(ROOT / "benchmarks" / script), *words, "--threads", str(threads)]
        subprocess.run([*command, "--json", str(STORED / f"{name}.json")], check=True)
        (STORED / f"{name}.json").write_text(json.dumps({"commit": code, **stored(name)}, indent=1) + "\n")


def stored(name: str) -> Any:
    return json.loads((STORED / f"{name}.json").read_text())


def conditions(content: Any) -> str:
    note = f" ({content['note']})" if "note" in content else ""
    return f"{content['cpu']}, {content['threads']} thread{'s' * (content['threads'] > 1)}{note}"


def trained() -> str:
    """A row for each mask and batch, with what runs it fastest beside us."""
    content = stored("trained")
    lines = [
        "| mask | top-1 | operations | batch | deployed | torch | onnxruntime | OpenVINO | against the best dense |"
    ]
    lines.append("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for row in content["rows"]:
        cells = []
        for name in ENGINES:
            one = next((engine for engine in row["engines"] if engine["engine"] == name), None)
            spread = "" if one is None or name != "deployed" else f" ({one['spread']:.0%})"
            cells.append("" if one is None or one["ms"] is None else f"{one['ms']:.3f}{spread}")
        score = "" if row["test"] is None else f"{row['test']:.1f}"
        about = [row["mask"], score, f"{row['operations']:.2f}", str(row["batch"])]
        lines.append(f"| {' | '.join([*about, *cells])} | {row['ratio']:.2f}x |")
    return "\n".join([f"{conditions(content)}:\n", *lines, ""])


def merging() -> str:
    content = stored("merging")
    lines = [f"{conditions(content)}:\n", "| model | adapters | difference | ms a step | PEFT's own | |"]
    lines.append("|---|---|---:|---:|---:|---:|")
    for row in content["rows"]:
        times = f"{row['sparse_ms']:.1f} | {row['plain_ms']:.1f} | {row['sparse_ms'] / row['plain_ms']:.2f}x"
        lines.append(f"| {row['model']} | {row['adapters']} | {row['difference']:.1e} | {times} |")
    return "\n".join([*lines, ""])


def generate() -> str:
    content = stored("generate")
    lines = [
        f"{conditions(content)}:\n",
        "| sparsity | deployed | float32 | bfloat16 | against the faster | same tokens |",
    ]
    lines.append("|---:|---:|---:|---:|---:|---|")
    for row in content["rows"]:
        times = [row[key] for key in ("deployed_ms", "float32_ms", "bfloat16_ms")]
        same = "yes" if row["has_same_tokens"] else "no"
        shown = " | ".join(f"{ms:.1f}" for ms in times)
        lines.append(f"| {row['sparsity']:.0%} | {shown} | {min(times[1:]) / times[0]:.2f}x | {same} |")
    return "\n".join([*lines, ""])


def picture() -> str:
    """Top-1 against milliseconds of the deployed model, a panel for each batch; a line for the best dense engine."""
    rows = [row for row in stored("trained")["rows"] if row["test"] is not None]
    low, high = min(row["test"] for row in rows) - 0.5, max(row["test"] for row in rows) + 0.5
    names, body = list(dict.fromkeys(row["mask"] for row in rows)), []
    for number, batch in enumerate(dict.fromkeys(row["batch"] for row in rows)):
        left, own = 60 + 330 * number, [row for row in rows if row["batch"] == batch]
        dense = min(e["ms"] for row in own for e in row["engines"] if e["engine"] != "deployed" and e["ms"] is not None)
        longest = 1.15 * max(dense, *(row["engines"][0]["ms"] for row in own))
        at = left + 260 * dense / longest
        body.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="20" y2="240" stroke="{GREY}" stroke-dasharray="4"/>')
        body.append(text(at, 14, f"dense {dense:.3g} ms", anchor="middle", size=12))
        for tick in (k * longest / 4 for k in range(5)):
            body.append(text(left + 260 * tick / longest, 258, f"{tick:.2g}", anchor="middle", size=11))
        for tick in range(round(low + 0.5), round(high) + 1):
            y = 240 - 220 * (tick - low) / (high - low)
            body.append(
                f'<line x1="{left}" x2="{left + 260}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GREY}" stroke-opacity="0.3"/>'
            )
            body.append(text(left - 8, y + 4, str(tick), anchor="end", size=11))
        body.append(text(left + 130, 280, f"ms, batch {batch}", anchor="middle", size=13))
        for row in own:
            x, y = left + 260 * row["engines"][0]["ms"] / longest, 240 - 220 * (row["test"] - low) / (high - low)
            colour = RED if row["mask"].startswith("gradual") else GREEN if row["mask"].startswith("gmp") else GREY
            body.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
            body.append(text(x + 7, y + 4, str(names.index(row["mask"]) + 1), size=12, colour=colour))
    shares = {row["mask"]: row["operations"] for row in rows}
    for number, name in enumerate(names):
        words = f"{number + 1} {name}: {shares[name]:.2f} of the operations"
        body.append(text(60, 306 + 18 * number, words, size=12))
    body.append(text(10, 14, "top-1", size=12))
    height = 306 + 18 * len(names)
    return svg(700, height, body, "CIFAR-10, ResNet-18, 90 % sparse: top-1 against milliseconds on a CPU")


PLACES = {"trained": ("deploying", trained), "generate": ("deploying", generate), "merging": ("pretrained", merging)}
"""By file of results: the page with its table, between two comments."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, metavar="DIR")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    if args.runs is not None:
        measure(args.runs, args.threads)
    for name, (page, table) in PLACES.items():
        path = ROOT / "docs" / f"{page}.md"
        filled = put(path.read_text(), f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->", table())
        path.write_text(filled) if args.write or args.runs else print(table())
    if args.write or args.runs:
        (IMAGES / "deployed.svg").write_text(picture())


if __name__ == "__main__":
    main()
