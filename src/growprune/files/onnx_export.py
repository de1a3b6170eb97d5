"""Export to ONNX: dense graphs with exact zeros, or sparse ones that any runtime reads.

A sparse graph stores the non-zero values of a weight and one bit per weight. Standard operators, which runtimes compute
once when they load the file, make the weight of them:

    bits     BitwiseAnd, Greater, Cast    1 where a weight is not zero     (BitShift is wrong on uint8 in OpenVINO)
    places   CumSum, Mul                  the place of its value; 0 where it is zero
    weight   Gather, Reshape              values are stored behind a zero, at place 0
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from growprune.errors import GrowpruneError, need, shorten, warn
from growprune.files.disk import meant
from growprune.files.exporters import plain, quiet, to_be_moved
from growprune.masks.layers import tensors_of
from growprune.sparse.model import SparseModel

MAX_BYTES = 1 << 30
"""Above it, weights are written beside the graph, to NAME.onnx.data: protobuf files hold less than 2 GiB."""
OVERHEAD = 1024
"""The bytes that operators for a sparse weight take in the file."""
OPSET = 18
"""The first with BitwiseAnd."""


def export_onnx(
    model: SparseModel | nn.Module,
    path: str | os.PathLike[str],
    example: Any,
    *,
    sparse: bool = False,
    **options: Any,
) -> None:
    """Write an ONNX graph, with exactly the zeros of the model. The batch may have any size, and texts any length.

    Args:
        model: a SparseModel, or a module with zeros.
        path: the file to write, such as model.onnx.
        example: an input, a tuple of positional arguments or a dict of keyword arguments.
        sparse: store only the non-zero weights. Runtimes make the weights dense when they load the file.
        options: further arguments of `torch.onnx.export`. dynamic_shapes=None fixes all shapes to those of the
            example.

    Examples:
        >>> import tempfile
        >>> sparse = SparseModel(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), sparsity=0.9)
        >>> sparse.prune()
        >>> with tempfile.TemporaryDirectory() as folder:  # doctest: +SKIP
        ...     export_onnx(sparse, f"{folder}/model.onnx", torch.randn(1, 64), sparse=True)
    """
    path = meant(Path(path))
    onnx = need("onnx", "onnx", "growprune needs the package onnx to write ONNX")
    need("onnxscript", "onnx", "growprune needs the package onnxscript to write ONNX")
    with plain(model) as module, to_be_moved(path) as folder:
        tensors = tensors_of(module)[0]
        graph = _exported(module, example, options).model_proto
        _check_counts(graph.graph, tensors, path)
        for node in graph.graph.node:
            del node.metadata_props[:]  # the lines of Python it comes from, with paths of this machine
        expected = _make_sparse(graph) if sparse else {}
        is_large = sum(len(stored.raw_data) for stored in graph.graph.initializer) > MAX_BYTES
        onnx.save(graph, folder / path.name, save_as_external_data=is_large, location=f"{path.name}.data")
        _check_sparse(onnx.load(folder / path.name), expected, path)


def _exported(module: nn.Module, example: Any, options: dict[str, Any]) -> Any:
    """Return the ONNXProgram: with a dynamic batch and length if the model can, else with the shapes of the example."""
    example = example if isinstance(example, dict | tuple) else (example,)
    attempts = [(example, options)]
    if "dynamic_shapes" not in options:
        shapes = pytree.tree_map(_dynamic_sizes, example)
        attempts.insert(0, (pytree.tree_map(_of_dynamic_sizes, example), {**options, "dynamic_shapes": shapes}))
    config = getattr(module, "config", None)
    had_cache = getattr(config, "use_cache", None)
    failed: Exception | None = None
    try:
        if config is not None and had_cache is not None:
            config.use_cache = False  # past keys and values are no tensors
        for given, chosen in attempts:
            args, kwargs = ((), given) if isinstance(given, dict) else (given, None)
            try:
                with quiet("torch.onnx._internal.exporter._registration", "onnxscript", "torch.export"):
                    program = torch.onnx.export(module, args, kwargs=kwargs, dynamo=True, verbose=False, **chosen)
            except Exception as error:  # whatever exporters raise, in pages
                failed = error
                continue
            if failed is not None:
                warn(f"the graph takes inputs of the example's shapes only ({_in_a_line(failed)})")
            return program
    finally:
        if config is not None and had_cache is not None:
            config.use_cache = had_cache
    assert failed is not None
    raise GrowpruneError(
        f"torch.onnx.export failed on {type(module).__name__} ({_in_a_line(failed)}): give an example that the model "
        f"takes, or another --to"
    ) from failed


def _in_a_line(error: BaseException) -> str:
    """Return the first line of the first cause of an error."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines() or [""]
    return shorten(f"{type(error).__name__}: {lines[0]}", 300)


def _free(x: Tensor) -> list[int]:
    """Return the dimensions of an input that may have any size: the batch, and the length of texts and sequences."""
    is_text = x.dim() == 2 and not x.is_floating_point()
    return [0, 1] if is_text or x.dim() == 3 else [0] if x.dim() else []


def _dynamic_sizes(x: Any) -> Any:
    """Return what torch.export may leave open of an input. AUTO: unless the model depends on it."""
    return dict.fromkeys(_free(x), torch.export.Dim.AUTO) if isinstance(x, Tensor) else None


def _of_dynamic_sizes(x: Any) -> Any:
    """Return an input whose free sizes are not 1, which torch.export would take to be 1 for ever."""
    if not isinstance(x, Tensor):
        return x
    return x.repeat([2 if i in _free(x) and size == 1 else 1 for i, size in enumerate(x.shape)])


def _check_counts(graph: Any, tensors: dict[str, Tensor], path: Path) -> None:
    """Raise if a weight lost or gained zeros. Weights of linear layers are transposed, under names of their own."""
    counts = {stored.name: _count(stored) for stored in graph.initializer if len(stored.dims) >= 2}
    of_size: dict[int, list[int]] = {}
    for stored in graph.initializer:
        if stored.name in counts and stored.name not in tensors:
            of_size.setdefault(int(np.prod(stored.dims)), []).append(counts[stored.name])
    alive = {name: int(torch.count_nonzero(tensor)) for name, tensor in tensors.items() if tensor.ndim >= 2}
    renamed: dict[int, list[str]] = {}
    for name in alive.keys() - counts.keys():
        renamed.setdefault(tensors[name].numel(), []).append(name)
    wrong = {name: counts[name] for name in alive.keys() & counts.keys() if counts[name] != alive[name]}
    for size, names in renamed.items():
        found = of_size.get(size, [])
        if len(found) >= len(names):  # otherwise the model does not use some of them
            wrong |= {name: min(found) for name in names if alive[name] not in found}
        elif strange := set(found) - {alive[name] for name in names}:
            wrong[min(names)] = min(strange)
    for name in sorted(wrong):
        raise GrowpruneError(
            f"the exporter changed {name} from {alive[name]} to {wrong[name]} non-zero weights: {path} was not written"
        )


def _array(stored: Any) -> Any:
    from onnx import numpy_helper

    return numpy_helper.to_array(stored)


def _count(stored: Any) -> int:
    return int(np.count_nonzero(_array(stored)))


def _make_sparse(model: Any) -> dict[str, tuple[tuple[int, ...], int]]:
    """Replace the sparse initializers of a graph. Returns the shape and the number of non-zeros of each."""
    from onnx import TensorProto, helper, numpy_helper

    version = next(one.version for one in model.opset_import if one.domain in ("", "ai.onnx"))
    if version < OPSET:
        raise GrowpruneError(f"a sparse graph needs opset_version >= {OPSET}, got {version}")
    kinds = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
    graph, nodes, added, kept = model.graph, [], [], []
    made: dict[str, tuple[tuple[int, ...], int]] = {}
    matrices: dict[tuple[int, ...], list[tuple[str, Any]]] = {}

    def operator(kind: str, inputs: list[str], name: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(kind, inputs, [name], **attributes))
        return name

    def constant(name: str, array: Any) -> str:
        added.append(numpy_helper.from_array(array.copy(order="C"), name))
        return name

    for stored in graph.initializer:
        dense = _array(stored) if len(stored.dims) >= 2 and stored.data_type in kinds else np.zeros(0)
        flat = dense.reshape(-1)
        alive = flat != 0
        num_alive = int(alive.sum())
        if dense.nbytes <= OVERHEAD + num_alive * dense.itemsize + flat.size // 8:
            kept.append(stored)
            continue
        name = stored.name
        made[name] = (dense.shape, num_alive)
        twins = matrices.setdefault(dense.shape[::-1], [])
        twin = next((other for other, array in twins if dense.ndim == 2 and np.array_equal(array.T, dense)), None)
        if twin is not None:  # tied weights, of which the exporter transposed one
            operator("Transpose", [twin], name)
            continue
        matrices.setdefault(dense.shape, []).append((name, dense))
        bits = constant(f"{name}.bits", np.packbits(alive, bitorder="little").reshape(-1, 1))
        values = constant(f"{name}.values", np.concatenate([np.zeros(1, flat.dtype), flat[alive]]))
        bit = operator("BitwiseAnd", [bits, "sparse.powers"], f"{name}.bit")
        is_alive = operator("Greater", [bit, "sparse.zero"], f"{name}.is_alive")
        ones = operator("Cast", [is_alive], f"{name}.ones_by_byte", to=TensorProto.INT32)
        ones = operator("Reshape", [ones, "sparse.flat"], f"{name}.ones")
        if flat.size % 8:
            ends = [constant(f"{name}.size", np.array([flat.size])), "sparse.first"]
            ones = operator("Slice", [ones, "sparse.first", *ends], f"{name}.ones_of_weights")
        sums = operator("CumSum", [ones, "sparse.axis"], f"{name}.sums")
        places = operator("Mul", [sums, ones], f"{name}.places")
        weights = operator("Gather", [values, places], f"{name}.weights")
        operator("Reshape", [weights, constant(f"{name}.shape", np.array(dense.shape))], name)
    if not made:
        warn("no weight has enough zeros to be smaller when sparse: the graph is dense")
        return made
    constant("sparse.powers", (1 << np.arange(8)).astype(np.uint8).reshape(1, 8))
    constant("sparse.zero", np.array(0, np.uint8))
    constant("sparse.flat", np.array([-1]))
    if any("sparse.first" in node.input for node in nodes):
        constant("sparse.first", np.array([0]))
    constant("sparse.axis", np.array(0))
    nodes += graph.node
    del graph.initializer[:], graph.node[:]
    graph.initializer.extend([*kept, *added])
    graph.node.extend(nodes)
    return made


def _check_sparse(model: Any, expected: dict[str, tuple[tuple[int, ...], int]], path: Path) -> None:
    """Compute each weight of a written graph, as onnx itself does, and raise if its shape or zeros are others."""
    from onnx import helper
    from onnx.reference import ReferenceEvaluator

    stored = {one.name: one for one in model.graph.initializer}
    for name, (shape, alive) in expected.items():
        nodes, needed = list[Any](), {name}
        for node in reversed(model.graph.node):
            if not needed.isdisjoint(node.output):
                nodes.insert(0, node)
                needed.update(node.input)
        output = helper.make_value_info(name, helper.make_tensor_type_proto(1, shape))
        part = helper.make_graph(nodes, "weight", [], [output], [stored[one] for one in needed & stored.keys()])
        evaluator: Any = ReferenceEvaluator(helper.make_model(part, opset_imports=model.opset_import))
        (weight,) = evaluator.run(None, {})
        if weight.shape != shape or int(np.count_nonzero(weight)) != alive:
            raise GrowpruneError(
                f"{name} has {int(np.count_nonzero(weight))} non-zero weights in {path}, not {alive}: the file was "
                f"not written"
            )
