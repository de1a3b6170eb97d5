"""Run a trained sparse model on sparse kernels with `deploy`, or load such a model with `load_deployed`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from growprune.deployment.cpu.library import BuildError, Tile, library
from growprune.deployment.cpu.tuning import seconds_in_turns
from growprune.deployment.cuda.tuning import deploy_linears
from growprune.deployment.deployed import ABOUT, UNREADABLE, WEIGHTS, Deployed, Swapped, damaged, machine, read_folder
from growprune.deployment.example import Example, keeps_state, restored
from growprune.deployment.graph.trace import NotTraceable
from growprune.deployment.layer_table import Row, Table
from growprune.deployment.parts import Part, deploy_parts
from growprune.deployment.skeleton import Skeleton, blank_copy, module_of, skeleton_of
from growprune.errors import GrowpruneError, first_line, warn
from growprune.files import sparse_file as file
from growprune.files.onnx_import import check_like_onnxruntime, from_onnx
from growprune.files.writer import check_finished, settings_of
from growprune.sparse.model import SparseModel

SECONDS = 10.0
"""The default time for timing layers."""
SPINNING = 0.01
"""Seconds after which torch's threads have stopped spinning and are asleep."""


@torch.inference_mode(False)
def deploy(
    model: nn.Module | SparseModel | str | os.PathLike[str],
    example: Any = None,
    *,
    into: nn.Module | None = None,
    device: str | torch.device = "cpu",
    seconds: float = SECONDS,
    whole: bool | None = None,
) -> Deployed:
    """Make a trained sparse model run on sparse kernels. The model itself is not changed.

    Each layer is timed sparse and dense on this machine, and the faster version is used; see `table`. Unknown
    operations run in torch. A model that keeps a state between calls also runs in torch, with a warning.

    Args:
        model: a SparseModel, a module whose pruned weights are zero, or the path of a sparse file or of an ONNX file
            with zeros. If onnxruntime is installed, the outputs of an ONNX file are compared with its outputs.
        example: an input, a tuple of positional arguments or a dict of keyword arguments. The model is prepared for its
            shape; other shapes are prepared at their first call. An ONNX file contains the shapes of its inputs, so it
            needs no example; its dynamic sizes are then set to 1.
        into: for a file, the model that was saved. Only its code is used; it is not changed.
        device: "cpu" or "cuda". On a GPU only single linear layers are replaced, in the model's own dtype. They are
            timed with the number of samples (tokens) in the example, so give the input of a decode step. See also
            `graphed` in `growprune.deployment.cuda`.
        seconds: about how long layers may be timed. With 0 nothing is timed, and all sparse layers run sparse. On a
            GPU, compiling the kernels takes extra time.
        whole: False replaces only single layers, which take inputs of any shape. Use it for models that are called by
            other methods than forward, as in decoding, and call the `module` of the result. The default is False for
            models with a method `generate`.

    Examples:
        >>> sparse = SparseModel(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), sparsity=0.9)
        >>> sparse.prune()
        >>> x = torch.randn(8, 64)
        >>> fast = deploy(sparse, x, seconds=0)
        >>> torch.allclose(fast(x), sparse.model(x), atol=1e-6)
        True
    """
    where, onnx_file = checked_device(device), None
    if isinstance(model, (str, os.PathLike)) and os.fspath(model).endswith(".onnx"):
        if into is not None or where.type != "cpu":
            unused = "into" if into is not None else "device"
            raise GrowpruneError(f"{unused} does not go with an ONNX file, which has its code and runs on the CPU")
        onnx_file, model = os.fspath(model), from_onnx(model)
        if all(bool(p.all()) for p in model.layers.parameters() if p.dim() > 1):
            raise GrowpruneError(f"{onnx_file} has no weights that are zero: give a pruned model")
        example = model.example if example is None else example
    if example is None:
        raise GrowpruneError("deploy needs an example: an input of the model, such as torch.randn(1, 3, 224, 224)")
    given = Example.of(example).outside_inference_mode()
    if isinstance(model, (nn.Module, SparseModel)):
        found = model
    elif not isinstance(model, (str, os.PathLike)):
        raise GrowpruneError(
            f"deploy takes a SparseModel, a module or the path of a sparse file, got {type(model).__name__}"
        )
    elif into is None:
        raise GrowpruneError(
            f"{os.fspath(model)} is a file, which has no code: give into=model, the model that was saved"
        )
    else:
        found = _load_sparse(model, into)
    check_finished(found, "deployed")
    if where.type == "cuda":
        return deploy_on_gpu(found, given, device=where, seconds=seconds, known=())
    if elsewhere := [tensor.device for tensor in module_of(found).parameters() if tensor.device.type != "cpu"]:
        raise GrowpruneError(
            f"device is 'cpu', but the model is on {elsewhere[0]}: call model.cpu() first, or give device='cuda'"
        )
    whole = not callable(getattr(module_of(found), "generate", None)) if whole is None else whole
    deployed = _deploy_on_cpu(found, given, seconds=seconds, whole=whole, known=())
    if onnx_file is not None:
        check_like_onnxruntime(onnx_file, deployed, given.args, given.kwargs)
    return deployed


def checked_device(device: str | torch.device) -> torch.device:
    """Return the device to deploy on. Raise unless it is "cpu", or "cuda" where torch sees a CUDA device."""
    try:
        found = torch.device(device)
    except RuntimeError:
        found = torch.device("meta")
    if found.type not in ("cpu", "cuda"):
        raise GrowpruneError(f"device must be 'cpu' or 'cuda', got {str(device)!r}")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise GrowpruneError(
            f"device is {str(device)!r}, but torch sees no CUDA device here: deploy where the GPU is, or on 'cpu'"
        )
    return found


def _load_sparse(path: str | os.PathLike[str], into: nn.Module) -> SparseModel:
    """Load a file into a copy of the model, in compact storage if possible, so that sparse weights are never dense."""
    blank = blank_copy(into)
    try:
        return file.load(path, blank, storage="compact")
    except GrowpruneError:  # some layers cannot be compact; any other error is raised again
        return file.load(path, blank)


@torch.inference_mode(False)
def load_deployed(folder: str | os.PathLike[str], model: nn.Module, *, seconds: float = SECONDS) -> Deployed:
    """Load a deployed model from a folder that `Deployed.save` wrote.

    Args:
        folder: its path.
        model: the model that was deployed. Only its code is used, so its weights may be on the meta device.
        seconds: how long layers may be timed if the folder comes from another kind of machine.
    """
    folder = Path(folder)
    about, table, example = read_folder(folder)
    device = checked_device(about["device"])
    sparse, is_same = _load_sparse(folder / WEIGHTS, model), about["machine"] == machine(device)
    if is_same and any(isinstance(row.tile, Tile) and row.tile.threads > torch.get_num_threads() for row in table):
        raise damaged(folder, "a layer has more threads than the machine it was measured on")
    options: Any = {"seconds": 0 if is_same else seconds, "known": table.rows if is_same else ()}
    try:
        if device.type == "cuda":
            deployed = deploy_on_gpu(sparse, example, device=device, **options)
        else:
            deployed = _deploy_on_cpu(sparse, example, whole=about["is_whole"], **options)
    except UNREADABLE as error:
        raise GrowpruneError(
            f"the model failed on the example in {folder / ABOUT} ({first_line(error)}): deploy the model again"
        ) from error
    if is_same:
        deployed.table = table
        if about["runs"] == "torch":
            deployed.stay_in_torch()
    return deployed


def _deploy_on_cpu(
    model: nn.Module | SparseModel, example: Example, *, seconds: float, whole: bool, known: Sequence[Row]
) -> Deployed:
    """Deploy a model on the CPU. Layers with a row in `known` are not timed again."""
    skeleton = skeleton_of(model)
    in_torch = ""
    if not skeleton.matrices:
        others = {str(p.dtype) for p in skeleton.module.parameters() if p.dim() > 1 and p.is_floating_point()}
        others -= {"torch.float32"}
        of = f" in float32, which the CPU kernels need, but some in {', '.join(sorted(others))}" if others else ""
        warn(f"the model has no sparse weights{of}: it stays in torch as it is")
        in_torch = "the whole model"
    elif keeps_state(module_of(model), example) and whole:  # which raises if the model cannot take the example
        warn(
            "the model keeps a state from call to call (a second call with the same input gives another output): it "
            "stays in torch; with whole=False only its layers are replaced, and its own code keeps the state"
        )
        in_torch = "the whole model (it keeps a state)"
    else:
        try:
            library()
        except BuildError as error:
            warn(f"{error}: the model stays in torch")
            in_torch = "the whole model (there are no kernels)"
    swapped, deployed_ms, torch_ms = Swapped(skeleton.module, in_torch=[in_torch]), None, None
    if in_torch:
        skeleton.fill_in()
    else:
        with restored(skeleton.module.modules()):
            options: Any = {"seconds": seconds, "known": known}
            try:
                part = Part(skeleton.module, skeleton, **options)
                swapped = part.plan(example) if whole else deploy_parts(skeleton, example, by_layer=True, **options)
            except NotTraceable as error:
                reason = f"{type(skeleton.module).__name__} as a whole ({error})"
                swapped = deploy_parts(skeleton, example, reasons=[reason], **options)
            if seconds > 0:
                deployed_ms, torch_ms = _times(skeleton, swapped, example, seconds / 4)
    known_layers, rows = {row.layer for row in swapped.rows}, [*swapped.rows]
    for name, matrix in skeleton.matrices.items():  # sparse weights that are in no deployed part
        layer = name.removesuffix(".weight")
        if known_layers.isdisjoint((name, layer)):
            shape = f"{matrix.rows}x{matrix.columns}"
            rows.append(Row(layer, shape, matrix.sparsity, None, None, "torch"))
    table = Table(tuple(rows), deployed_ms, torch_ms, tuple(dict.fromkeys(swapped.in_torch)))
    settings = settings_of(model) if isinstance(model, SparseModel) else {}
    deployed = Deployed(swapped, skeleton, table, example, whole=whole, settings=settings)
    if whole and deployed_ms is not None and torch_ms is not None and deployed_ms > torch_ms:
        warn(f"deployed, the model takes {deployed_ms:.3g} ms, and in torch {torch_ms:.3g} ms: it stays in torch")
        deployed.stay_in_torch()
    return deployed


def deploy_on_gpu(
    model: nn.Module | SparseModel, example: Example, *, device: torch.device, seconds: float, known: Sequence[Row]
) -> Deployed:
    """Deploy a model on a GPU, layer by layer. The whole model is not timed, because it may later be `graphed`."""
    skeleton = skeleton_of(model, for_gpu=True)
    swapped = deploy_linears(skeleton, example, device=device, seconds=seconds, known=known)
    if not swapped.rows:
        warn("the model has no sparse linear layers: it stays in torch as it is")
    table = Table(tuple(swapped.rows), in_torch=tuple(swapped.in_torch) if swapped.rows else ("the whole model",))
    settings = settings_of(model) if isinstance(model, SparseModel) else {}
    return Deployed(swapped, skeleton, table, example, whole=False, settings=settings, device=device)


def _times(skeleton: Skeleton, swapped: Swapped, example: Example, seconds: float) -> tuple[float, float]:
    """Time the deployed model and the model in torch, in turns. Return the 30th percentile of each, in milliseconds."""
    skeleton.fill_in()

    def in_torch() -> None:
        swapped.put(deployed=False)
        example.call(skeleton.module)
        swapped.put(deployed=True)

    found = seconds_in_turns([lambda: example.call(swapped.module), in_torch], seconds, SPINNING)
    if isinstance(swapped.module, Part):
        skeleton.empty()
    deployed_ms, torch_ms = (1e3 * sorted(times)[int(0.3 * (len(times) - 1))] for times in found)
    return deployed_ms, torch_ms
