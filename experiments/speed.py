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

from tables import put

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
    for name, (script, *words) in commands.items():
        command = [sys.executable, str(ROOT / "benchmarks" / script), *words, "--threads", str(threads)]
        subprocess.run([*command, "--json", str(STORED / f"{name}.json")], check=True)


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


if __name__ == "__main__":
    main()
