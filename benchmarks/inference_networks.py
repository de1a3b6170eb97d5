"""How fast do whole sparse networks run on a CPU? Against torch, torch.compile, onnxruntime and OpenVINO.

    python benchmarks/inference_networks.py [--threads 2] [--rounds 15] [--only resnet50,encoder] [--python FILE]
                                            [--engines NAME,...] [--json FILE] [--seconds 20] [--small] [--run FOLDER]
                                            [--batch 1,16] [--busy 2]

Masks are random; with `--run`, which can be given several times, they are those of finished runs instead, which spread
the live weights over the layers as training did; a row then has the score on test data, and the share of the dense
model's operations. A translator is timed end to end: a sentence of 24 tokens in, its
greedy translation out, 32 tokens at most, one call of the decoder each; its error is 0 if all tokens are the same. The
column "error" is that of the deployed model, as a share of torch's largest output. Each engine is a process, and they
take turns, about 60 ms each: see bench.py. `--python` is the interpreter for onnxruntime and
OpenVINO, where they live in an environment of their own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

VARIANTS = [("unstructured", 0.8), ("unstructured", 0.9), ("unstructured", 0.95), ("8x1", 0.9)]
COUNTED = "gradual_gap-global/0.9/seed0"
"""The run of `--counts`."""
FEW = [("unstructured", 0.9), ("8x1", 0.9)]
"""For networks that are no gate."""
MUST = {
    "resnet50": dict(zip(VARIANTS, (1.4, 2.0, 2.5, 2.4), strict=True)),
    "encoder": dict(zip(VARIANTS, (2.2, 2.7, 3.5, 3.2), strict=True)),
}
"""What a prototype measured, times as fast as the best dense engine; a gate sits 20 % below."""


def load(
    network: str, pattern: str, sparsity: float, seconds: float, small: bool
) -> tuple[Any, Any, Callable[[], Any]]:
    """A model with random masks, an example, and what deploys it. Each engine calls it in its own process."""
    import torch

    import growprune as gp

    torch.manual_seed(0)
    model, example, keep_dense = NETWORKS[network](small)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sparse = gp.SparseModel(model.eval(), sparsity=sparsity, pattern=pattern, keep_dense=keep_dense)
        sparse.prune(by=gp.By.RANDOM)
    if example is None:
        plain = sparse.to_dense_()
        return (*translating(plain), lambda: deployed_translator(plain, seconds))
    return sparse, example, lambda: gp.deploy(sparse, example, seconds=seconds)


def load_run(folder: str, seconds: float, batch: int) -> tuple[Any, Any, Callable[[], Any]]:
    """The same of a finished run; of a translator, what translates a sentence."""
    import torch

    import growprune as gp
    from growprune.tasks.translation.transformer import Transformer

    torch.manual_seed(0)
    model, example, _ = of_file("bench", "open_model")(folder, "", "")
    if not isinstance(model, Transformer):
        example = torch.randn(batch, *example.shape[1:])
        return model, example, lambda: gp.deploy(model, example, seconds=seconds)
    return (*translating(model), lambda: deployed_translator(model, seconds))


def load_counts(file: str, seconds: float) -> tuple[Any, Any, Callable[[], Any]]:
    """The ResNet-18 of half the width for CIFAR-10, each layer with as many weights as training by gradual_gap left."""
    import torch

    import growprune as gp
    from growprune.runs.record import read_packed
    from growprune.tasks.classification.resnet import ResNet

    torch.manual_seed(0)
    model, example = ResNet("resnet18", stem="cifar", width=32, num_classes=10).eval(), torch.randn(1, 3, 32, 32)
    for row in read_packed(Path(file))[0][COUNTED]["sparsity"]["rows"]:
        weight = model.get_parameter(row["name"]).data
        dead = torch.randperm(weight.numel())[row["alive"] :]
        weight.view(-1)[dead] = 0
    return model, example, lambda: gp.deploy(model, example, seconds=seconds)


def translating(model: Any) -> tuple[Any, Any]:
    """What takes sentences and gives their greedy translations, and a sentence."""
    import torch
    from torch import nn

    from growprune.tasks.translation.transformer import EOS, beam_search

    num_pieces = model.embedding.num_embeddings

    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, source: Any) -> Any:
            options: dict[str, Any] = {"beam": 1, "length_penalty": 1.0, "max_length": 32, "num_pieces": num_pieces}
            return beam_search(self.model, source, **options)

    sentence = torch.cat([torch.randint(EOS + 2, num_pieces, (1, 24)), torch.full((1, 1), EOS)], 1)
    return Translator().eval(), sentence


def deployed_translator(model: Any, seconds: float) -> Any:
    import torch

    import growprune as gp
    from growprune.tasks.translation.transformer import EOS

    example = torch.full((1, 24), EOS), torch.full((1, 1), EOS)
    return translating(gp.deploy(model, example, seconds=seconds, whole=False).module)[0]


def resnet50(small: bool, batch: int = 1) -> tuple[Any, Any, list[str]]:
    """The stem stays dense."""
    import torch

    from growprune.tasks.classification.resnet import ResNet

    size = 32 if small else 224
    return ResNet("resnet50", width=8 if small else 64), torch.randn(batch, 3, size, size), ["conv1"]


def resnet18(small: bool) -> tuple[Any, Any, list[str]]:
    """That for CIFAR-10."""
    import torch

    from growprune.tasks.classification.resnet import ResNet

    model = ResNet("resnet18", stem="cifar", width=8 if small else 64, num_classes=10)
    return model, torch.randn(1, 3, 32, 32), ["conv1"]


def translator(small: bool) -> tuple[Any, Any, list[str]]:
    """That for Multi30k."""
    from dataclasses import replace

    from growprune.recipes.translation import SMALL

    task = replace(SMALL, vocab_size=64, d_model=32, ffn=64) if small else SMALL
    return task.build_model(), None, []


def encoder(small: bool, batch: int = 1) -> tuple[Any, Any, list[str]]:
    """6 layers, 512/2048, 64 tokens."""
    import torch
    from torch import nn

    sizes = (32, 4, 64) if small else (512, 8, 2048)
    layer = nn.TransformerEncoderLayer(*sizes, dropout=0.0, batch_first=True)
    depth = 2 if small else 6
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False), torch.randn(batch, 64, sizes[0]), []


def mobilenet(small: bool, batch: int = 1) -> tuple[Any, Any, list[str]]:
    """Inverted residuals with depthwise convolutions and ReLU6, as MobileNetV2 has them; stem and depthwise dense."""
    from torch import randn

    size = 32 if small else 160
    model = of_file("small_networks", "MobileNet")(0.25 if small else 1.0)
    return model, randn(batch, 3, size, size), model.dense_layers()


def unet(small: bool) -> tuple[Any, Any, list[str]]:
    """Four levels down and up, with what was found on the way down beside it; the first and last layers stay dense."""
    from torch import randn

    size = 32 if small else 128
    return of_file("small_networks", "UNet")(8 if small else 32), randn(1, 3, size, size), ["stem.0", "head"]


def of_file(file: str, name: str) -> Any:
    """A name of a file here, by its path, since engines do not have this folder among their imports."""
    return runpy.run_path(str(Path(__file__).with_name(f"{file}.py")))[name]


NETWORKS: dict[str, Callable[[bool], tuple[Any, Any, list[str]]]] = {
    "resnet50": resnet50,
    "encoder": encoder,
    "resnet50-batch-8": partial(resnet50, batch=8),
    "encoder-batch-8": partial(encoder, batch=8),
    "cifar-resnet18": resnet18,
    "mobilenet": mobilenet,
    "mobilenet-batch-7": partial(mobilenet, batch=7),
    "unet": unet,
    "translator-end-to-end": translator,
}


def rows_of(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What is measured, one row after another."""
    from growprune.runs.record import read_packed

    for folder in arguments.run:
        yield from of_run(folder, arguments)
    if arguments.counts:
        settings = {"file": str(arguments.counts.resolve()), "seconds": arguments.seconds}
        totals = read_packed(arguments.counts)[0][COUNTED]["sparsity"]["totals"]
        about = {
            "network": "cifar-resnet18-half",
            "mask": "half of the width, random masks with the counts of a trained one",
            "batch": 1,
        }
        about |= {"test": None, "operations": totals["flops_sparse"] / totals["flops_dense"]}
        yield measure("load_counts", settings, about, None, arguments)
    names = (
        []
        if (arguments.run or arguments.counts) and arguments.only is None
        else (arguments.only or "resnet50,encoder").split(",")
    )
    for network in NETWORKS if names == ["all"] else names:
        for pattern, sparsity in (VARIANTS if network in MUST else FEW)[: 1 if arguments.small else None]:
            must = None if arguments.small else MUST.get(network, {}).get((pattern, sparsity))
            settings = {"network": network, "pattern": pattern, "sparsity": sparsity, "small": arguments.small}
            about = {"network": network, "mask": f"{pattern} {100 * sparsity:g}"}
            yield measure("load", {**settings, "seconds": arguments.seconds}, about, must, arguments)


def of_run(folder: Path, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    from growprune.runs import read_run

    record = read_run(folder)
    recipe, power = record.recipe, record.recipe.get("cost_power") or 0
    mask = f"{record.method}, {recipe['allocation']}" + (f", cost_power={power:g}" if power else "")
    about = {"network": recipe["task"]["name"], "mask": mask, "seed": record.seed, "sparsity": record.reached}
    about |= {"metric": record.metric.name, "test": record.test, "operations": record.inference_flops}
    for batch in map(int, arguments.batch.split(",")):
        settings = {"folder": str(folder.resolve()), "seconds": arguments.seconds, "batch": batch}
        yield measure("load_run", settings, {**about, "batch": batch}, None, arguments)


def measure(
    loader: str,
    settings: dict[str, Any],
    about: dict[str, Any],
    must: float | None,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    from bench import bench

    found = bench(
        f"{Path(__file__).resolve()}:{loader}",
        settings,
        threads=arguments.threads,
        rounds=arguments.rounds,
        busy=arguments.busy,
        python=arguments.python,
        engines=arguments.engines.split(","),
    )
    times = {timing.engine: timing.ms for timing in found if timing.ms is not None}
    dense = {name: ms for name, ms in times.items() if name != "deployed"}
    best = min(dense, key=lambda name: dense[name]) if dense else None
    ratio = dense[best] / times["deployed"] if best is not None and "deployed" in times else None
    return {**about, "best": best, "ratio": ratio, "must": must, "engines": [dataclasses.asdict(t) for t in found]}


def print_row(row: dict[str, Any]) -> None:
    by_name = {timing["engine"]: timing for timing in row["engines"]}
    cells = []
    for timing in by_name.values():
        ms, spread = timing["ms"], timing["spread"]
        cells.append("-" if ms is None else f"{ms:.2f} ({spread:.0%})")
    ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
    error = by_name.get("deployed", {}).get("error")
    if "test" in row:
        score = "-" if row["test"] is None else f"{row['test']:.2f}"
        cells = [score, f"{row['operations']:.2f}", str(row["batch"]), *cells]
    tail = [str(row["best"]), ratio, str(row["must"] or "-"), "-" if error is None else f"{error:.1e}"]
    print(f"| {' | '.join([row['network'], row['mask'], *cells, *tail])} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--busy", type=int, default=0, help="other processes that compute beside the engines")
    parser.add_argument("--seconds", type=float, default=20.0, help="for tuning")
    parser.add_argument("--only", help=f"all, or some of {', '.join(NETWORKS)}; resnet50,encoder by default")
    parser.add_argument("--run", type=Path, action="append", default=[], metavar="FOLDER", help="a finished run")
    parser.add_argument("--batch", default="1", help="of the runs: 1,16, say")
    parser.add_argument("--counts", type=Path, metavar="FILE", help="experiments/compare/cifar10-width32/results.json")
    parser.add_argument("--engines", default="deployed,torch,compile,onnxruntime,openvino")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--small", action="store_true", help="tiny networks, to see that it runs")
    arguments = parser.parse_args()
    names = arguments.engines.split(",")
    beside = f", beside {arguments.busy} busy processes" if arguments.busy else ""
    cpu = of_file("bench", "cpu_name")()
    print(f"{cpu}, {arguments.threads} threads, float32, ms (spread){beside}:\n")
    columns = [
        "network",
        "mask",
        *(["test", "operations", "batch"] if arguments.run or arguments.counts else []),
        *names,
    ]
    print(f"| {' | '.join(columns)} | best dense | times as fast | prototype | error |")
    print("|" + "---|" * (len(columns) + 4))
    rows = []
    for row in rows_of(arguments):
        rows.append(row)
        print_row(row)
    missing = {timing["engine"]: timing["why"] for row in rows for timing in row["engines"] if timing["ms"] is None}
    for name, why in missing.items():
        print(f"\n{name} was not measured: {why}")
    if arguments.json:
        content = {"cpu": cpu, "threads": arguments.threads, "busy": arguments.busy, "rows": rows}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
