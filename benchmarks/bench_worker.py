"""One engine that times a model, in a process of its own: what bench.py starts, by its path.

Reads a JSON object a line, and answers each with one. The first says which model, and is answered when that is ready,
with its error against torch, or with why it cannot be; {"run": true} is answered with the mean milliseconds of a call.
onnxruntime and OpenVINO run what the `prepare` engine has exported, and need neither torch nor growprune.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

BLOCK_SECONDS, PAUSE_SECONDS = 0.06, 0.01
Call = Callable[[], Any]


class NotExported(Exception):
    """There is no graph of the model, and the text says why."""


def load(question: dict[str, Any]) -> Any:
    """What the loader gives: model, example, and what makes a Deployed."""
    source, _, function = question["loader"].rpartition(":")
    if source.endswith(".py"):
        spec = importlib.util.spec_from_file_location("bench_loader", source)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(source)
    return getattr(module, function)(**question["arguments"])


# Engines: each makes a call of the model


def prepare(question: dict[str, Any]) -> Call:
    """Write the inputs, torch's output, and the model for other engines."""
    import torch

    from growprune.deployment.example import Example

    model, example, _ = load(question)
    folder, model, given = Path(question["folder"]), plain(model), Example.of(example)
    arrays: Any = {f"{i}": leaf.numpy() for i, leaf in enumerate(given.leaves) if isinstance(leaf, torch.Tensor)}
    np.savez(folder / "inputs.npz", **arrays)
    np.save(folder / "expected.npy", first_output(given.call(model)))
    if question["onnx"]:
        try:
            torch.onnx.export(model, given.args, folder / "model.onnx", kwargs=given.kwargs, dynamo=True, verbose=False)
        except ImportError as error:
            (folder / "why").write_text(f"torch.onnx.export lacks {error.name}: pip install 'growprune[onnx]'")
        except Exception as error:
            reason = f"torch.onnx.export failed, {type(error).__name__}: {error}".splitlines()[0]
            (folder / "why").write_text(reason)
    return lambda: None


def plain(model: Any) -> Any:
    """The model as a user of torch has it."""
    from growprune.sparse.model import SparseModel

    return (model.to_dense_() if isinstance(model, SparseModel) else model).eval()


def in_torch(question: dict[str, Any], name: str) -> Call:
    """The model in this process: deployed, in torch, or compiled by it."""
    import torch

    from growprune.deployment.api import deploy
    from growprune.deployment.example import Example

    model, example, make = load(question)
    if name == "deployed":
        run = deploy(model, example) if make is None else make()
    else:
        run = torch.compile(plain(model)) if name == "compile" else plain(model)
    args, kwargs = (given := Example.of(example)).args, given.kwargs

    def call() -> Any:
        with torch.no_grad():
            return run(*args, **kwargs)

    return call


def exported(question: dict[str, Any]) -> tuple[str, list[Any]]:
    folder = Path(question["folder"])
    if not (folder / "model.onnx").is_file():
        raise NotExported((folder / "why").read_text())
    with np.load(folder / "inputs.npz") as inputs:
        return str(folder / "model.onnx"), [inputs[name] for name in inputs.files]


def onnxruntime(question: dict[str, Any], threads: int) -> Call:
    import onnxruntime as ort

    path, inputs = exported(question)
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feed = {one.name: array for one, array in zip(session.get_inputs(), inputs, strict=True)}
    return lambda: session.run(None, feed)


def openvino_settings(threads: int) -> dict[str, Any]:
    """For latency, in float32, and without pinning threads to cores that others use too."""
    return {
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
        "ENABLE_CPU_PINNING": False,
    }


def openvino(question: dict[str, Any], threads: int) -> Call:
    import openvino as ov

    path, inputs = exported(question)
    core = ov.Core()
    request = core.compile_model(core.read_model(path), "CPU", openvino_settings(threads)).create_infer_request()
    return lambda: [request.infer(dict(enumerate(inputs)))[0]]


def ready(name: str, question: dict[str, Any], threads: int) -> Call:
    if name == "prepare":
        return prepare(question)
    if name in OTHERS:
        return OTHERS[name](question, threads)
    return in_torch(question, name)


OTHERS: dict[str, Callable[[dict[str, Any], int], Call]] = {"onnxruntime": onnxruntime, "openvino": openvino}


# Answers


def first_output(found: Any) -> Any:
    """The first array, or tensor, of what a call gave."""
    if isinstance(found, list) and found and isinstance(found[0], np.ndarray):
        return found[0]
    import torch
    from torch.utils import _pytree as pytree

    leaves = pytree.tree_leaves(found)
    return next(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)).detach().numpy()


def error_of(call: Call, folder: str) -> float:
    expected = np.load(Path(folder) / "expected.npy")
    largest = float(np.abs(expected).max()) or 1.0
    return float(np.abs(first_output(call()) - expected).max()) / largest


def block(call: Call, repeats: list[int], seconds: float = BLOCK_SECONDS) -> float:
    """The mean milliseconds of as many calls as take about so many seconds; the first block finds out how many.

    The threads of the engine before must have gone to sleep, or they take cores by waiting for work; and ours must be
    awake.
    """
    time.sleep(PAUSE_SECONDS)
    call()
    if not repeats:
        start = time.perf_counter()
        call()
        repeats.append(min(1000, max(1, round(seconds / (time.perf_counter() - start)))))
    start = time.perf_counter()
    for _ in range(repeats[0]):
        call()
    return 1e3 * (time.perf_counter() - start) / repeats[0]


def why(name: str, error: Exception) -> str:
    """One line of why an engine cannot run a model."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed for {sys.executable}: pip install {error.name}"
    if isinstance(error, NotExported):
        return str(error)
    kinds = {type(cause).__name__ for cause in causes(error)}
    if name == "compile" and kinds & {"InvalidCxxCompiler", "CppCompileError"}:
        return "torch.compile needs a C++ compiler that works: install g++ or clang, or set CXX"
    lines = [line.strip() for line in f"{type(error).__name__}: {error}".splitlines() if line.strip()]
    return lines[0][:300]


def causes(error: BaseException | None) -> list[BaseException]:
    """An error, and what caused it."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return found


def main() -> None:
    name, threads = sys.argv[1], int(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines that print must not be taken for answers
    call: Call | None = None
    repeats: list[int] = []
    for line in sys.stdin:
        question = json.loads(line)
        answer: dict[str, Any]
        try:
            if call is not None:
                answer = {"ms": block(call, repeats)}
            else:
                call = ready(name, question, threads)
                answer = {} if name == "prepare" else {"error": error_of(call, question["folder"])}
        except Exception as error:
            answer = {"why": why(name, error)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
