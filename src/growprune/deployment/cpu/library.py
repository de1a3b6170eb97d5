"""The library of C++ kernels, which is built on the machine that runs it, once for each kind of CPU.

The library is kept in the user's cache folder. Its name is a digest of everything that it depends on: sources,
compiler, flags, and the CPU. So a library for another CPU is never loaded. If several processes build it at the same
time, each one moves a complete file into place.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import secrets
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from growprune.deployment.cpu.geometry import Geometry
from growprune.deployment.cpu.matrix import SparseMatrix
from growprune.errors import GrowpruneError
from growprune.files.disk import replacing

SOURCES = Path(__file__).parent / "native"
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fopenmp", "-pthread"),
    *("-shared", "-fPIC", "-fvisibility=hidden", "-Wno-psabi"),
    *("-ffp-contract=fast", "-fno-math-errno"),  # allows fused multiply-adds, keeps NaN and infinity
)
COMPILERS = ("c++", "g++", "clang++")
"""Compilers to try, in this order, if the environment variable CXX is not set."""
SECONDS = 300
"""Time limit for the compiler."""


class _Matrix(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("rows", "columns")),
        *((name, c_int32) for name in ("height", "width")),
        *((name, c_void_p) for name in ("starts", "places", "values")),
    )


class _Geometry(ctypes.Structure):
    """The C++ struct of a Geometry. Each of the last five fields holds two C++ fields, for height and width."""

    _fields_ = (
        *((name, c_int32) for name in ("channels", "batch", "height", "width")),
        *((name, 2 * c_int32) for name in ("kernel", "stride", "padding", "dilation", "out")),
    )


class BoundLayer(ctypes.Structure):
    """A layer of the library, and the address and row stride of x, out and residual."""

    _fields_ = (
        ("layer", c_void_p),
        *((name, kind) for x in ("x", "out", "residual") for name, kind in ((x, c_void_p), (f"{x}_stride", c_int64))),
    )


@dataclass(frozen=True)
class Tile:
    """How the work of a product is divided. It affects only the speed of a layer and the rounding of its sums."""

    lanes: int
    """Floats in a vector: as many as the CPU's registers hold, fewer for few columns, 1 for a single column."""
    vectors: int
    """Vectors in a panel of columns."""
    k_block: int
    """Rows of the input that are packed at once."""
    row_chunks: int
    """Number of chunks of matrix rows. Threads share the chunks, and the panels of columns in each."""
    threads: int


class TileStruct(ctypes.Structure):
    _fields_ = tuple((field.name, c_int32) for field in fields(Tile))


class Library:
    """The functions of the library with their argument and result types."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.lanes = int(library.gp_lanes())
        self.prepare = _typed(
            library.gp_prepare, c_void_p, POINTER(_Matrix), POINTER(_Geometry), POINTER(TileStruct), c_void_p, c_int
        )
        self.run = _typed(library.gp_run, None, POINTER(BoundLayer), c_int)
        self.free = _typed(library.gp_free, None, c_void_p)
        self.prepare_windows = _typed(
            library.gp_prepare_windows, c_void_p, POINTER(_Geometry), c_void_p, c_void_p, c_int, c_int, c_int
        )
        self.begin_alone = _typed(library.gp_begin_alone, c_int)
        self.end_alone = _typed(library.gp_end_alone, None, c_int)


def _typed(function: Any, result: Any, *arguments: Any) -> Callable[..., Any]:
    function.restype, function.argtypes = result, arguments
    return function  # type: ignore[no-any-return]


def matrix_struct(matrix: SparseMatrix) -> _Matrix:
    """Return the C++ struct of a matrix. The matrix must outlive it, because it holds pointers."""
    tensors = (matrix.starts, matrix.places, matrix.values)
    assert all(tensor.is_contiguous() for tensor in tensors)
    return _Matrix(matrix.rows, matrix.columns, matrix.height, matrix.width, *(t.data_ptr() for t in tensors))


def geometry_struct(geometry: Geometry) -> _Geometry:
    g = geometry
    return _Geometry(g.channels, g.batch, g.height, g.width, g.kernel, g.stride, g.padding, g.dilation, g.out_size)


def strided(tensor: Tensor | None) -> tuple[int | None, int]:
    """Return the address and row stride of a tensor; (None, 0) for None."""
    return (None, 0) if tensor is None else (tensor.data_ptr(), tensor.stride(0))


# Loading and building


class BuildError(GrowpruneError):
    """Raised when the kernels cannot be built. The message gives the reason, but no remedy."""


@dataclass(frozen=True)
class Compiler:
    command: tuple[str, ...]
    version: str


def library() -> Library:
    """Return the library, and build it if necessary. Raise BuildError if it cannot be built."""
    if isinstance(found := found_once(), BuildError):
        raise found
    return found


@functools.cache
def found_once() -> Library | BuildError:
    """Return the library, or the error of its build. A failed build is not tried again in this process."""
    try:
        return Library(open_or_build())
    except BuildError as error:
        return error


def open_or_build() -> ctypes.CDLL:
    """Load the library from the user's cache folder, or build it there; if that is read-only, in a temporary folder.

    It is loaded after torch, so that both share one OpenMP: two in one process would compete for the cores.
    """
    compiler = find_compiler()
    name = f"kernels-{digest(compiler)}.so"
    tried = [Path(tempfile.gettempdir()) / f"growprune-kernels-{secrets.token_hex(8)}"]
    with contextlib.suppress(RuntimeError):  # there is no home folder
        given = os.environ.get("XDG_CACHE_HOME")
        tried.insert(0, (Path(given) if given else Path.home() / ".cache") / "growprune" / "kernels")
    for folder in tried:
        with contextlib.suppress(OSError):  # the file is missing or damaged
            return ctypes.CDLL(str(folder / name))
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return ctypes.CDLL(str(compile_to(folder / name, compiler)))
    raise BuildError(f"no folder could be written for the sparse kernels, tried {', '.join(map(str, tried))}")


def find_compiler() -> Compiler:
    given = os.environ.get("CXX")
    for words in [shlex.split(given)] if given else [[name] for name in COMPILERS]:
        if words and (path := shutil.which(words[0])):
            command = (path, *words[1:])
            failure, output = _run([*command, "--version"])
            if failure:
                asked = f"{shlex.join(command)} --version"
                raise BuildError(f"the C++ compiler for the sparse kernels does not work: {asked} {failure}")
            return Compiler(command, output.decode(errors="replace"))
    tried = f"CXX, which is {given!r}" if given else ", ".join(COMPILERS)
    raise BuildError(f"no C++ compiler was found for the sparse kernels (looked for {tried})")


def digest(compiler: Compiler) -> str:
    texts = [*(path.name + path.read_text(encoding="utf-8") for path in sorted(SOURCES.iterdir()) if path.is_file())]
    texts += [*compiler.command, compiler.version, *FLAGS, cpu_model()]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:32]


def cpu_model() -> str:
    """Return the model of the CPU and its features."""
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU architecture", "CPU variant", "CPU part")
    lines = {platform.machine(), platform.processor()}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.partition("\t")[0].rstrip(": ") in wanted:
                lines.add(line)
    return "\n".join(sorted(lines))


def compile_to(path: Path, compiler: Compiler) -> Path:
    """Build the library. The file appears only when it is complete."""
    with replacing(path) as file:
        command = [*compiler.command, *FLAGS, str(SOURCES / "api.cpp"), "-o", file.name]
        failure, output = _run(command)
        if failure:
            shown, log = shlex.join(command), path.with_suffix(".log")
            log.write_bytes(shown.encode() + b"\n" + output)
            raise BuildError(f"the sparse kernels could not be built: {shown} {failure}, its log is {log}")
    return path


def _run(command: Sequence[str]) -> tuple[str, bytes]:
    """Run a command. Return how it failed (empty if it succeeded), and its output."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=SECONDS, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        return f"took over {SECONDS} seconds", (error.stdout or b"") + (error.stderr or b"")
    except OSError as error:
        return f"cannot be run ({error})", b""
    return f"ended with {done.returncode}" if done.returncode else "", done.stdout + done.stderr
