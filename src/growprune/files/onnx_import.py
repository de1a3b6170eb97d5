"""Read an ONNX file as a torch module, whatever wrote it, so that what is pruned in it can run on sparse kernels.

`OnnxModel` goes through the nodes of the graph in their order. Products with stored weights are modules of torch
(nn.Linear, nn.Conv2d), whose zeros `gp.deploy` finds. What depends only on stored numbers and on shapes is computed by
onnx itself, in numpy; everything else by the functions of `OPERATIONS`, in torch.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growprune.errors import GrowpruneError, need, shorten, warn

Operation = Callable[..., Any]
OPSET = 18
"""Older graphs are converted to it by onnx."""
ALIKE = 1e-3
"""How far outputs may be from those of onnxruntime, of the largest number."""


def from_onnx(path: str | os.PathLike[str]) -> OnnxModel:
    """Return the model of an ONNX file as a torch module in eval mode. It computes what the file does.

    Weights of linear layers and convolutions are parameters: prune, fine-tune, save or deploy them as any other. Its
    `example` are inputs of the shapes in the file.

    Args:
        path: an ONNX file. Data beside it is read too.

    Examples:
        >>> model = from_onnx("pruned.onnx")  # doctest: +SKIP
        >>> fast = deploy(model, model.example)  # doctest: +SKIP
    """
    onnx = need("onnx", "onnx", "growprune needs the package onnx to read ONNX")
    path = Path(path)
    if not path.is_file():
        raise GrowpruneError(f"{path} does not exist. Give an ONNX file")
    try:
        model = onnx.load(path)
        onnx.checker.check_model(path)  # by its path, since a model of over 2 GB cannot be checked in memory
        if _opset(model) < OPSET:
            import onnx.version_converter

            model = onnx.version_converter.convert_version(model, OPSET)
    except Exception as error:  # protobuf's, the checker's, the converter's, and those of files beside it
        raise GrowpruneError(f"{path} is not an ONNX file that can be read ({_in_a_line(error)})") from error
    return OnnxModel(model, str(path)).eval()


class OnnxModel(nn.Module):
    """The module of an ONNX graph. It takes the inputs of the graph, and returns its output, or a tuple of them."""

    def __init__(self, model: Any, path: str) -> None:
        from onnx import helper, numpy_helper

        super().__init__()
        self.path, self.opset = path, _opset(model)
        known = {one.name: numpy_helper.to_array(one) for one in model.graph.initializer}
        for one in model.graph.sparse_initializer:  # whose indices are those of the flat array, or of each axis
            values, indices = numpy_helper.to_array(one.values), numpy_helper.to_array(one.indices)
            dense = known[one.values.name] = np.zeros(list(one.dims), values.dtype)
            dense[np.unravel_index(indices, dense.shape) if indices.ndim == 1 else tuple(indices.T)] = values
        given = [one for one in model.graph.input if one.name not in known]
        self.inputs = {one.name: copy.deepcopy(one.type.tensor_type) for one in given}
        self.outputs = [one.name for one in model.graph.output]
        used = {*self.outputs, *(name for node in model.graph.node for name in node.input if name)}
        left, sizes, unread = list[Any](), set[str](), set[str]()  # sizes are known when the shapes of the inputs are
        for node in model.graph.node:
            kind, operands = node.op_type, {*node.input} - {""}
            if any(one.type in (one.GRAPH, one.GRAPHS) for one in node.attribute):
                raise GrowpruneError(f"{path} has control flow ({kind}), which is not read: export it without")
            is_standard = node.domain in ("", "ai.onnx")
            if is_standard and not kind.startswith("Random") and operands <= known.keys():  # as weights of sparse files
                known |= _by_name(node, _in_numpy(node, [known.get(name) for name in node.input], self.opset))
                continue
            left.append(copy.deepcopy(node))  # a node of the file would keep all of it in memory
            if kind == "Shape" or (operands and all(name in known or name in sizes for name in operands)):
                sizes.update(node.output)
            elif kind not in {*OPERATIONS, *LAYERS} or not is_standard:
                unread.add(kind)
            elif kind != "Split" and used.intersection(node.output[1:]):
                unread.add(f"{kind} with several outputs")
        if unread:
            raise GrowpruneError(f"{path} has operations that are not read: {', '.join(sorted(unread))}")

        self.layers, self.nodes = nn.ModuleDict(), list[tuple[Any, dict[str, Any], str]]()
        shared: dict[str, nn.Parameter] = {}
        for node in left:
            attributes = {one.name: helper.get_attribute_value(one) for one in node.attribute}
            attributes = {name: v.decode() if isinstance(v, bytes) else v for name, v in attributes.items()}
            stored = [known.get(name) for name in node.input[1:] if name]
            if node.op_type == "Conv" and stored[0] is not None:
                attributes["kernel_shape"] = stored[0].shape[2:]
            name = ""
            if node.op_type in LAYERS and stored[0] is not None and all(x is not None for x in stored):
                layer = LAYERS[node.op_type](*stored, **attributes)
                if layer is not None:
                    how = [attributes.get(one) for one in ("transB", "alpha")] if node.op_type == "Gemm" else []
                    layer.weight = shared.setdefault(f"{node.op_type} {how} {node.input[1]}", layer.weight)
                    name = f"{len(self.layers)}_{node.input[1]}".replace(".", "_")
                    self.layers[name] = layer
            elif node.op_type == "Conv":
                raise GrowpruneError(f"{path} has a convolution whose weights are computed, which is not read")
            self.nodes.append((node, attributes, name))

        read = {name for node, _, layer in self.nodes for name in (node.input[:1] if layer else node.input)}
        self.numbers, self.buffer_of = dict[str, Any](), dict[str, str]()
        for name in sorted((read | {*self.outputs}) & known.keys()):
            if _is_float(known[name]):
                self.buffer_of[name] = f"stored_{len(self.buffer_of)}"
                self.register_buffer(self.buffer_of[name], _tensor(known[name]))
            else:
                self.numbers[name] = known[name]

    def forward(self, *inputs: Tensor, **named: Tensor) -> Any:
        given = dict(zip(self.inputs, inputs, strict=False)) | named
        if given.keys() != self.inputs.keys() or len(inputs) > len(self.inputs):
            raise GrowpruneError(f"{self.path} takes {', '.join(self.inputs)}; got {len(inputs) + len(named)} inputs")
        stored = {name: getattr(self, buffer) for name, buffer in self.buffer_of.items()}
        values: dict[str, Any] = self.numbers | stored | given
        for node, attributes, layer in self.nodes:
            operands: list[Any] = [values.get(name) for name in node.input]
            found: Any
            if layer:
                before = _padding(attributes)[1] if node.op_type == "Conv" else []
                x = _tensor(operands[0])
                found = self.layers[layer](F.pad(x, before) if before else x)
            elif node.op_type == "Shape":
                sizes = np.array(operands[0].shape, np.int64)
                found = sizes[attributes.get("start", 0) : attributes.get("end")]
            elif not any(isinstance(value, Tensor) for value in operands):
                found = _in_numpy(node, operands, self.opset)
            else:
                found = OPERATIONS[node.op_type](*operands, **attributes)
            found = found if isinstance(found, (tuple, list)) else (found,)
            values |= _by_name(node, found)
        outputs = tuple(_tensor(values[name]) for name in self.outputs)
        return outputs[0] if len(outputs) == 1 else outputs

    @property
    def example(self) -> tuple[Tensor, ...]:
        """Inputs of the shapes in the file, random ones. Sizes that it leaves open are 1."""
        generator, made = torch.Generator().manual_seed(0), []
        for name, kind in self.inputs.items():
            if not kind.HasField("shape"):
                raise GrowpruneError(f"{self.path} does not say the shape of its input {name}: give an example")
            numbers = torch.randn([one.dim_value or 1 for one in kind.shape.dim], generator=generator)
            dtype = _dtype(kind.elem_type)
            made.append(numbers.to(dtype) if dtype.is_floating_point else numbers.gt(0).to(dtype))
        return tuple(made)


@torch.no_grad()
def check_like_onnxruntime(
    path: str | os.PathLike[str], module: Callable[..., Any], args: Sequence[Tensor], kwargs: Mapping[str, Tensor]
) -> None:
    """Raise if a module does not compute what onnxruntime computes with a file. Without onnxruntime, do nothing."""
    try:
        import onnxruntime
    except ImportError:
        return
    try:
        options = onnxruntime.SessionOptions()  # without what would quantize products with quantized weights
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = onnxruntime.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])
        given = {one.name: x.numpy() for one, x in zip(session.get_inputs(), args, strict=not kwargs)}
        given |= {name: x.numpy() for name, x in kwargs.items()}
        found = session.run(None, given)
    except Exception as error:  # its own, which have no class in common, for what it does not run
        warn(f"{os.fspath(path)} is not compared with onnxruntime, which does not run it ({_in_a_line(error)})")
        return
    outputs = module(*args, **kwargs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    for ours, theirs in zip(outputs, found, strict=True):
        expected = torch.as_tensor(theirs)
        close = ALIKE * max(1.0, float(expected.double().abs().max())) if expected.numel() else 0.0
        if ours.shape != expected.shape or not torch.allclose(
            ours.double(), expected.double(), rtol=0, atol=close, equal_nan=True
        ):
            raise GrowpruneError(f"{os.fspath(path)} gives other outputs here than in onnxruntime: please report it")


def _in_a_line(error: Exception) -> str:
    return shorten(" ".join(str(error).split()), 200)


def _opset(model: Any) -> int:
    return next((int(one.version) for one in model.opset_import if one.domain in ("", "ai.onnx")), OPSET)


def _dtype(kind: int) -> torch.dtype:
    from onnx import helper

    return _tensor(np.zeros(0, helper.tensor_dtype_to_np_dtype(kind))).dtype


def _is_float(array: Any) -> bool:
    return bool(array.dtype.kind == "f" or array.dtype.name == "bfloat16")


def _by_name(node: Any, found: Sequence[Any]) -> dict[str, Any]:
    """The outputs of a node, without those that it leaves out."""
    return {name: value for name, value in zip(node.output, found, strict=False) if name}


def _in_numpy(node: Any, values: Sequence[Any], opset: int) -> list[Any]:
    from onnx.reference import ReferenceEvaluator

    if node.op_type == "GatherElements":  # onnx's own fails on some shapes
        axis = next((one.i for one in node.attribute), 0)
        return [OPERATIONS["GatherElements"](*values, axis=axis).numpy()]
    given = {name: np.asarray(value) for name, value in zip(node.input, values, strict=True) if name}
    try:
        return list(ReferenceEvaluator(node, opsets={"": opset}).run(None, given))
    except Exception as error:  # of numpy, and its own
        raise GrowpruneError(f"onnx cannot compute a {node.op_type} of the file ({_in_a_line(error)})") from error


# Layers: products with stored weights


def _conv(weight: Any, bias: Any = None, *, group: int = 1, **attributes: Any) -> nn.Module:
    axes = weight.ndim - 2
    kind: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
    even, _ = _padding(attributes)
    layer = kind(
        *(weight.shape[1] * group, weight.shape[0], weight.shape[2:]),
        stride=tuple(attributes.get("strides") or [1] * axes),
        dilation=tuple(attributes.get("dilations") or [1] * axes),
        padding=tuple(even),
        groups=group,
        bias=bias is not None,
    )
    return _filled(layer, weight, bias)


def _gemm(
    weight: Any, bias: Any = None, *, alpha: float = 1.0, beta: float = 1.0, transA: int = 0, transB: int = 0
) -> nn.Module | None:
    """A module of torch, if nn.Linear computes it."""
    rows = weight if transB else weight.T
    if transA or weight.ndim != 2 or not _is_float(weight):
        return None
    if bias is not None and (bias.size != rows.shape[0] or bias.shape[-1:] not in ((), (bias.size,))):
        return None
    rows = rows if alpha == 1 else (alpha * rows).astype(weight.dtype)
    bias = None if bias is None else (beta * bias.reshape(-1)).astype(weight.dtype)
    return _filled(nn.Linear(rows.shape[1], rows.shape[0], bias=bias is not None), rows, bias)


def _filled(layer: Any, weight: Any, bias: Any) -> nn.Module:
    layer.weight = nn.Parameter(_tensor(weight))
    if bias is not None:
        layer.bias = nn.Parameter(_tensor(bias))
    return layer  # type: ignore[no-any-return]


def _padding(attributes: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """The padding of a convolution or a pool: what it can do itself, and what F.pad must do before."""
    if attributes.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise GrowpruneError("the ONNX file pads by auto_pad, which is not read: export it with explicit pads")
    axes = len(attributes["kernel_shape"])
    pads = list(attributes.get("pads") or [0] * 2 * axes)
    if pads[:axes] == pads[axes:] and all(
        2 * n <= size for n, size in zip(pads, attributes["kernel_shape"], strict=False)
    ):
        return pads[:axes], []
    return [0] * axes, [pads[axis + side * axes] for axis in reversed(range(axes)) for side in (0, 1)]


# Operations. Sizes and axes come as arrays of numpy, tensors as torch's, attributes by keyword


def _tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    array = np.array(value, order="C")
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise GrowpruneError(f"the ONNX file has numbers of type {array.dtype}, which are not read") from error


def _ints(value: Any) -> list[int]:
    if isinstance(value, Tensor):
        raise GrowpruneError("the ONNX file has a size that depends on the numbers of an input, which is not read")
    return [int(one) for one in np.asarray(value).reshape(-1)]


def _batch_norm(x: Tensor, *stored: Tensor, epsilon: float = 1e-5, training_mode: int = 0, **_: Any) -> Tensor:
    if training_mode:
        raise GrowpruneError("the ONNX file has a BatchNormalization in training mode: export it in eval mode")
    scale, shift, mean, var = stored
    return F.batch_norm(x, mean, var, scale, shift, eps=epsilon)


def _layer_norm(
    x: Tensor, scale: Tensor, shift: Any = None, *, axis: int = -1, epsilon: float = 1e-5, **_: Any
) -> Tensor:
    sizes = x.shape[axis:]
    return F.layer_norm(x, sizes, scale.expand(sizes), None if shift is None else shift.expand(sizes), epsilon)


def _over(function: Operation) -> Operation:
    """A reduction over axes, or over all."""

    def reduced(x: Tensor, axes: Any = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Any:
        found = [] if axes is None else _ints(axes)
        if not found and noop_with_empty_axes:
            return x
        return function(x, found or list(range(x.dim())), keepdim=bool(keepdims))

    return reduced


def _clip(x: Tensor, low: Any = None, high: Any = None) -> Tensor:
    number = float if x.is_floating_point() else int
    return x.clamp(None if low is None else number(low), None if high is None else number(high))


def _reshape(x: Tensor, shape: Any, *, allowzero: int = 0) -> Tensor:
    sizes = _ints(shape)
    return x.reshape([x.shape[i] if size == 0 and not allowzero else size for i, size in enumerate(sizes)])


def _unsqueeze(x: Tensor, axes: Any) -> Tensor:
    found = _ints(axes)
    for axis in sorted(axis % (x.dim() + len(found)) for axis in found):
        x = x.unsqueeze(axis)
    return x


def _split(x: Tensor, sizes: Any = None, *, axis: int = 0, num_outputs: int = 0) -> Any:
    return torch.split(x, -(-x.shape[axis] // num_outputs) if sizes is None else _ints(sizes), axis)


def _slice(x: Tensor, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> Tensor:
    begins = _ints(starts)
    of = range(len(begins)) if axes is None else [axis % x.dim() for axis in _ints(axes)]
    by = [1] * len(begins) if steps is None else _ints(steps)
    for axis, start, end, step in zip(of, begins, _ints(ends), by, strict=True):
        kept = range(x.shape[axis])[start:end:step]
        if step == 1:
            x = x.narrow(axis, kept.start, len(kept))
        else:
            x = x.index_select(axis, torch.tensor(kept, dtype=torch.long))
    return x


def _gather(x: Any, indices: Any, *, axis: int = 0) -> Tensor:
    x, axis = _tensor(x), axis % _tensor(x).dim()
    if not isinstance(indices, Tensor) and np.ndim(indices) == 0:
        return x.select(axis, int(indices))  # type: ignore[no-any-return]
    at = _tensor(indices).long()
    at = torch.where(at < 0, at + x.shape[axis], at)
    return x.index_select(axis, at.reshape(-1)).reshape(*x.shape[:axis], *at.shape, *x.shape[axis + 1 :])  # type: ignore[no-any-return]


def _gather_nd(x: Any, indices: Any, *, batch_dims: int = 0) -> Tensor:
    if batch_dims:
        raise GrowpruneError("the ONNX file has a GatherND with batch_dims, which is not read")
    return _tensor(x)[_tensor(indices).long().unbind(-1)]


def _cumsum(x: Tensor, axis: Any, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    (of,) = _ints(axis)
    x = x.flip(of) if reverse else x
    sums = x.cumsum(of) - x if exclusive else x.cumsum(of)
    return sums.flip(of) if reverse else sums


def _pad(x: Tensor, pads: Any, value: Any = None, axes: Any = None, *, mode: str = "constant") -> Tensor:
    if mode != "constant":
        raise GrowpruneError(f"the ONNX file pads in mode {mode!r}, which is not read")
    sizes, of = _ints(pads), range(x.dim()) if axes is None else [axis % x.dim() for axis in _ints(axes)]
    both = {axis: (sizes[i], sizes[i + len(of)]) for i, axis in enumerate(of)}
    amounts = [size for axis in reversed(range(x.dim())) for size in both.get(axis, (0, 0))]
    return F.pad(x, amounts, value=0.0 if value is None else float(value))


def _max_pool(x: Tensor, *, ceil_mode: int = 0, **attributes: Any) -> Tensor:
    even, before = _padding(attributes)
    kernel = attributes["kernel_shape"]
    function: Any = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(kernel) - 1]
    x = F.pad(x, before, value=-torch.inf) if before else x
    strides, dilations = (attributes.get(name) or [1] * len(kernel) for name in ("strides", "dilations"))
    return function(x, kernel, strides, even, dilations, bool(ceil_mode))  # type: ignore[no-any-return]


def _average_pool(x: Tensor, *, ceil_mode: int = 0, count_include_pad: int = 0, **attributes: Any) -> Tensor:
    even, before = _padding(attributes)
    if before and not count_include_pad:
        raise GrowpruneError("the ONNX file has an AveragePool with uneven or large padding, which is not read")
    if any(one != 1 for one in attributes.get("dilations") or ()):
        raise GrowpruneError("the ONNX file has an AveragePool with dilations, which is not read")
    kernel = attributes["kernel_shape"]
    function: Any = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[len(kernel) - 1]
    x, strides = F.pad(x, before) if before else x, attributes.get("strides") or [1] * len(kernel)
    return function(x, kernel, strides, even, bool(ceil_mode), bool(count_include_pad))  # type: ignore[no-any-return]


def _on_tensors(function: Operation) -> Operation:
    """A function of tensors that takes numpy's arrays too."""
    return lambda *xs, **attributes: function(*(None if x is None else _tensor(x) for x in xs), **attributes)


ALIKE_IN_TORCH = (
    *("Abs", "Add", "Cos", "Erf", "Exp", "IsNaN", "Log", "MatMul", "Mul", "Neg", "Reciprocal", "Relu"),
    *("Sigmoid", "Sin", "Sqrt", "Sub", "Tanh", "Where"),
)
"""Operations that torch has by the same name."""
LAYERS: Mapping[str, Operation] = {"Conv": _conv, "Gemm": _gemm, "MatMul": _gemm}
OF_TENSORS: Mapping[str, Operation] = {
    **{name: getattr(torch, name.lower()) for name in ALIKE_IN_TORCH},
    "Div": lambda a, b: a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc"),
    "Pow": lambda x, exponent: torch.pow(x, exponent).to(x.dtype),
    "Min": lambda *xs: functools.reduce(torch.minimum, xs),
    "Max": lambda *xs: functools.reduce(torch.maximum, xs),
    "Equal": torch.eq,
    "Less": torch.lt,
    "LessOrEqual": torch.le,
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
    "And": torch.logical_and,
    "Or": torch.logical_or,
    "Not": torch.logical_not,
    "Identity": lambda x: x,
    "Softplus": F.softplus,
    "HardSwish": F.hardswish,
    "LeakyRelu": lambda x, alpha=0.01: F.leaky_relu(x, alpha),
    "HardSigmoid": lambda x, alpha=0.2, beta=0.5: (alpha * x + beta).clamp(0, 1),
    "Gelu": lambda x, approximate="none": F.gelu(x, approximate=approximate),
    "PRelu": lambda x, slope: torch.where(x < 0, x * slope, x),
    "Gemm": lambda a, b, c=None, alpha=1.0, beta=1.0, transA=0, transB=0: (
        alpha * (a.T if transA else a) @ (b.T if transB else b) + (0 if c is None else beta * c)
    ),
    "Concat": lambda *xs, axis: torch.cat(xs, axis),
    "GatherElements": lambda x, at, axis=0: x.gather(axis, torch.where(at < 0, at + x.shape[axis], at)),
    "LayerNormalization": _layer_norm,
    "BatchNormalization": _batch_norm,
    "InstanceNormalization": lambda x, scale, shift, epsilon=1e-5: F.instance_norm(
        x, weight=scale, bias=shift, eps=epsilon
    ),
}
OPERATIONS: dict[str, Any] = {
    **{name: _on_tensors(function) for name, function in OF_TENSORS.items()},
    "ReduceMean": _over(torch.mean),
    "ReduceSum": _over(torch.sum),
    "ReduceMax": _over(torch.amax),
    "ReduceMin": _over(torch.amin),
    "ReduceL2": _over(lambda x, axes, keepdim: x.norm(dim=axes, keepdim=keepdim)),
    "Softmax": lambda x, axis=-1: x.softmax(axis),
    "LogSoftmax": lambda x, axis=-1: x.log_softmax(axis),
    "Clip": _clip,
    "Cast": lambda x, to, **_: x.to(_dtype(to)),
    "Reshape": _reshape,
    "Flatten": lambda x, axis=1: x.reshape(x.shape[:axis].numel(), x.shape[axis:].numel()),
    "Squeeze": lambda x, axes=None: x.squeeze() if axes is None else x.squeeze(_ints(axes)),
    "Unsqueeze": _unsqueeze,
    "Transpose": lambda x, perm=None: x.permute(perm or [*reversed(range(x.dim()))]),
    "Expand": lambda x, shape: x * torch.ones((), dtype=x.dtype).expand(_ints(shape)),
    "Tile": lambda x, repeats: x.tile(_ints(repeats)),
    "Split": _split,
    "Slice": _slice,
    "Gather": _gather,
    "GatherND": _gather_nd,
    "CumSum": _cumsum,
    "Pad": _pad,
    "Trilu": lambda x, k=None, upper=1: (x.triu if upper else x.tril)(0 if k is None else int(k)),
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    "GlobalAveragePool": lambda x: x.mean([*range(2, x.dim())], keepdim=True),
    "GlobalMaxPool": lambda x: x.amax([*range(2, x.dim())], keepdim=True),
    "Dropout": lambda x, *_, **__: x,
}
