"""Engines that time matrix products, one process each, so that their threads do not fight: what inference.py starts.

    python benchmarks/engines.py growprune|onnxruntime|openvino THREADS

Reads a JSON object a line and answers each with one. {"rows", "columns", "n", "variants"} makes products Y = W X and
answers with their names, or with nothing where the engine is not installed; {"block": name} runs one for about 5 ms and
answers with the mean milliseconds of a call.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Products = dict[str, Callable[[], object]]
WORKER = runpy.run_path(str(Path(__file__).with_name("bench_worker.py")))
"""What bench.py runs, by its path, as growprune need not be installed where OpenVINO is."""
BLOCK_SECONDS = 0.005


def growprune(rows: int, columns: int, n: int, variants: list[Any], threads: int) -> Products:
    """Our kernels, with each pattern and sparsity, and torch in the same process."""
    import torch

    from growprune.deployment.cpu.geometry import Geometry
    from growprune.deployment.cpu.matrix import block_of, from_dense
    from growprune.deployment.cpu.prepared import LayerSpec, NativeLayer
    from growprune.deployment.cpu.tuning import fastest_tile

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    weight, x, out = torch.randn(rows, columns), torch.randn(columns, n), torch.empty(rows, n)
    tokens = x.t().contiguous()
    made: Products = {
        "torch mm": lambda: torch.mm(weight, x, out=out),
        "torch linear": lambda: torch.nn.functional.linear(tokens, weight),
    }
    for pattern, sparsity in variants:
        height, width = block_of(pattern)
        alive = torch.rand(-(-rows // height), -(-columns // width)) >= sparsity
        mask = alive.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
        matrix, geometry = from_dense(weight * mask, mask, pattern=pattern), Geometry.linear(columns, n)
        spec = LayerSpec("", matrix, geometry)
        made[f"{pattern} {sparsity:g}"] = call = NativeLayer(spec, fastest_tile(spec, threads, 0.5)).bind(x, out)
        call()
        expected = (weight * mask).double() @ x.double()
        assert (out.double() - expected).abs().max() <= 1e-5 * expected.abs().max()
    return made


def onnxruntime(rows: int, columns: int, n: int, variants: list[Any], threads: int) -> Products:
    """With the weight a constant on the right, which it packs beforehand, and its arrays bound."""
    import onnxruntime as ort

    del variants
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    session = ort.InferenceSession(onnx_product(rows, columns, n), options, providers=["CPUExecutionProvider"])
    bound = session.io_binding()
    bound.bind_ortvalue_input("x", ort.OrtValue.ortvalue_from_numpy(random(n, columns)))
    bound.bind_ortvalue_output("y", ort.OrtValue.ortvalue_from_numpy(random(n, rows)))
    return {"onnxruntime": lambda: session.run_with_iobinding(bound)}


def openvino(rows: int, columns: int, n: int, variants: list[Any], threads: int) -> Products:
    """With the settings of bench.py."""
    import openvino as ov

    del variants
    core, settings = ov.Core(), WORKER["openvino_settings"](threads)
    compiled = core.compile_model(core.read_model(onnx_product(rows, columns, n)), "CPU", settings)
    request = compiled.create_infer_request()
    request.set_input_tensor(ov.Tensor(random(n, columns)))
    return {"openvino": request.infer}


def onnx_product(rows: int, columns: int, n: int) -> bytes:
    from onnx import TensorProto, helper, numpy_helper

    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [n, columns])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [n, rows])
    weight = numpy_helper.from_array(random(columns, rows), "weight")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "weight"], ["y"])], "product", [x], [y], [weight])
    opset = [helper.make_opsetid("", 17)]
    made: bytes = helper.make_model(graph, opset_imports=opset, ir_version=8).SerializeToString()
    return made


def random(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


ENGINES = {"growprune": growprune, "onnxruntime": onnxruntime, "openvino": openvino}


def main() -> None:
    make, threads = ENGINES[sys.argv[1]], int(sys.argv[2])
    products: Products = {}
    repeats: dict[str, list[int]] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        answer: dict[str, Any]
        if "block" in asked:
            name = asked["block"]
            answer = {"ms": WORKER["block"](products[name], repeats[name], BLOCK_SECONDS)}
        else:
            try:
                products = make(**asked, threads=threads)
            except ImportError:
                products = {}
            repeats = {name: [] for name in products}
            answer = {"products": list(products)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
