"""Run Triton kernels on a CPU, through Triton's interpreter."""

import importlib.util
from typing import Any

import pytest
import torch

on_the_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run kernels that are made from here on in the interpreter."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed, whose interpreter would run the kernels")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, and kernels are made for one or the other")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    mend_interpreter(monkeypatch)


def mend_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scalars are arrays of one element, which numpy from 2.4 on does not take for integers; and it multiplies
    matrices of bfloat16 as if their bits were integers."""
    from triton.runtime import interpreter

    patch_tensor, create_dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, *(as_float32(x, interpreter) for x in (a, b)), *rest)

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


def as_float32(handle: Any, interpreter: Any) -> Any:
    if handle.dtype.scalar != interpreter.tl.bfloat16:
        return handle
    floats = (handle.data.astype("uint32") << 16).view("float32")
    return interpreter.TensorHandle(floats, interpreter.tl.float32)
