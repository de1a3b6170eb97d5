"""Export sparse models: to dense safetensors, and to ONNX, dense or sparse. Zeros stay exact.

A sparse ONNX graph stores the non-zero values of a weight and one bit per weight. Standard operators, which runtimes
compute once when they load the file, make the weight of them:

    bits     BitwiseAnd, Greater, Cast    1 where a weight is not zero     (BitShift is wrong on uint8 in OpenVINO)
    places   CumSum, Mul                  the place of its value; 0 where it is zero
    weight   Gather, Reshape              values are stored behind a zero, at place 0

Files are written completely or not at all.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import secrets
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from growprune.errors import GrowpruneError, first_line, need, warn
from growprune.files.disk import meant, replacing, sync
from growprune.files.reader import DTYPES
from growprune.files.writer import write_safetensors
from growprune.masks.layers import is_compact, tensors_of
from growprune.sparse.model import SparseModel

MAX_BYTES = 1 << 30
"""Above it, weights are written beside the graph, to NAME.onnx.data: protobuf files hold less than 2 GiB."""
OVERHEAD = 1024
"""The bytes that operators for a sparse weight take in the file."""
OPSET = 18
"""The first with BitwiseAnd."""


def to_dense(model: SparseModel | nn.Module, path: str | os.PathLike[str]) -> None:
    """Write dense safetensors under the plain names, as `safetensors.torch.load_model` reads them."""
    with plain(model) as module:
        state = module.state_dict()
        names, aliases = tensors_of(module)
        write_dense({name: state[name].detach() for name in names}, aliases, Path(path))


def write_dense(tensors: Mapping[str, Tensor], aliases: Mapping[str, str], path: Path) -> None:
    """Write tensors as safetensors. Other names of a tensor go to the metadata, as safetensors itself does it."""
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise GrowpruneError(f"{name} has dtype {tensor.dtype}, which cannot be written here: convert it first")
    with replacing(path) as file:
        shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in sorted(tensors.items())}
        write_safetensors(file, shapes, tensors.items(), {"format": "pt", **aliases})


@contextlib.contextmanager
def plain(model: SparseModel | nn.Module) -> Iterator[nn.Module]:
    """Yield the model with plain layers in eval mode, and restore it at the end. A compact model is copied."""
    module = model.model if isinstance(model, SparseModel) else model
    if isinstance(model, SparseModel) and model.storage == "compact":
        module = copy.deepcopy(model).to_dense_()
    elif any(map(is_compact, module.modules())):
        raise GrowpruneError("the model has storage='compact': pass its SparseModel instead")
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield module
    finally:
        for part in training:
            part.training = True


@contextlib.contextmanager
def quiet(*loggers: str) -> Iterator[None]:
    """Silence loggers, and the warnings of exporters about themselves and Python code in the model."""
    levels = {logger: logger.level for logger in map(logging.getLogger, loggers)}
    try:
        for logger in levels:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


@contextlib.contextmanager
def to_be_moved(path: Path) -> Iterator[Path]:
    """Yield a folder beside a path. Its files are moved into place when all are written, the path itself last."""
    folder = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    folder.mkdir(parents=True)
    try:
        yield folder
        for written in sorted(folder.iterdir(), key=lambda file: file.name == path.name):
            written.replace(path.with_name(written.name))
        sync(path.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# ONNX


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
        auto = torch.export.Dim.AUTO  # it leaves a size open, unless the model depends on it
        shapes = pytree.tree_map(lambda x: dict.fromkeys(_free(x), auto) if isinstance(x, Tensor) else None, example)
        attempts.insert(0, (pytree.tree_map(_without_ones, example), {**options, "dynamic_shapes": shapes}))
    config: Any = getattr(module, "config", None)
    had_cache = getattr(config, "use_cache", None)
    failed: BaseException | None = None
    try:
        if had_cache is not None:
            config.use_cache = False  # past keys and values are no tensors
        for given, chosen in attempts:
            args, kwargs = ((), given) if isinstance(given, dict) else (given, None)
            try:
                with quiet("torch.onnx._internal.exporter._registration", "onnxscript", "torch.export"):
                    program = torch.onnx.export(module, args, kwargs=kwargs, dynamo=True, verbose=False, **chosen)
            except Exception as error:  # whatever exporters raise, in pages
                failed = error
                while failed.__cause__ is not None:
                    failed = failed.__cause__
                continue
            if failed is not None:
                warn(f"the graph takes inputs of the example's shapes only ({first_line(failed, 300)})")
            return program
    finally:
        if had_cache is not None:
            config.use_cache = had_cache
    assert failed is not None
    raise GrowpruneError(
        f"torch.onnx.export failed on {type(module).__name__} ({first_line(failed, 300)}): give an example that the "
        f"model takes, or another --to"
    ) from failed


def _free(x: Tensor) -> list[int]:
    """Return the dimensions of an input that may have any size: the batch, and the length of texts and sequences."""
    is_text = x.dim() == 2 and not x.is_floating_point()
    return [0, 1] if is_text or x.dim() == 3 else [0] if x.dim() else []


def _without_ones(x: Any) -> Any:
    """Return an input whose free sizes are not 1, because torch.export would take a size of 1 to be fixed."""
    if not isinstance(x, Tensor):
        return x
    return x.repeat([2 if i in _free(x) and size == 1 else 1 for i, size in enumerate(x.shape)])


def _check_counts(graph: Any, tensors: dict[str, Tensor], path: Path) -> None:
    """Raise if a weight lost or gained zeros. Weights of linear layers are transposed, under names of their own."""
    matrices = (stored for stored in graph.initializer if len(stored.dims) >= 2)
    counts = {stored.name: int(np.count_nonzero(_array(stored))) for stored in matrices}
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


def _make_sparse(model: Any) -> dict[str, tuple[tuple[int, ...], int]]:
    """Replace the sparse initializers of a graph. Returns the shape and the number of non-zeros of each."""
    from onnx import TensorProto, helper, numpy_helper

    version = next(one.version for one in model.opset_import if one.domain in ("", "ai.onnx"))
    if version < OPSET:
        raise GrowpruneError(f"a sparse graph needs opset_version >= {OPSET}, got {version}")
    kinds = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
    graph, nodes, added, kept = model.graph, [], [], []
    made: dict[str, tuple[tuple[int, ...], int]] = {}

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
        bits = constant(f"{name}.bits", np.packbits(alive, bitorder="little").reshape(-1, 1))
        values = constant(f"{name}.values", np.concatenate([np.zeros(1, flat.dtype), flat[alive]]))
        bit = operator("BitwiseAnd", [bits, "sparse.powers"], f"{name}.bit")
        is_alive = operator("Greater", [bit, "sparse.zero"], f"{name}.is_alive")
        ones = operator("Cast", [is_alive], f"{name}.ones_by_byte", to=TensorProto.INT32)
        ones = operator("Reshape", [ones, "sparse.flat"], f"{name}.ones")
        size = constant(f"{name}.size", np.array([flat.size]))
        ones = operator("Slice", [ones, "sparse.first", size, "sparse.first"], f"{name}.ones_of_weights")
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
