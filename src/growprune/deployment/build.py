"""Making a library of the kernels on the machine they are to run on, once for each of its kind.

The library is kept in the user's cache folder, under a name that is a digest of all that it depends on: sources,
compiler, flags, and the CPU. So one that was built for another CPU is not found, and never run. Processes that build it
at once do the same work and each put a whole file in place.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import secrets
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from growprune.errors import warn
from growprune.files.atomic import replacing

SOURCES = Path(__file__).parent / "native"
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-fvisibility=hidden", "-Wno-psabi"),
    *("-ffp-contract=fast", "-fno-math-errno"),  # multiply-adds, but NaN and infinity as ever
)
COMPILERS = ("c++", "g++", "clang++")
"""What is looked for where the environment has no CXX."""
SECONDS = 300
"""How long a compiler may take."""


class BuildError(Exception):
    """There is no library, and why. The message is a whole sentence without its end."""


@dataclass(frozen=True)
class Compiler:
    command: tuple[str, ...]
    version: str


_lock = threading.Lock()
_loaded: list[ctypes.CDLL | None] = []


def load() -> ctypes.CDLL | None:
    """The library; None where there can be none, and a warning says why the first time."""
    with _lock:
        if not _loaded:
            try:
                _loaded.append(open_or_build())
            except BuildError as error:
                _loaded.append(None)
                warn(f"{error}: products run on torch's CSR from 90 % sparsity on, and all else runs dense")
            if _loaded[0] is not None and not _loaded[0].gp_has_openmp():
                warn(f"the sparse kernels run on one thread, since {find_compiler().command[0]} has no OpenMP")
        return _loaded[0]


def open_or_build() -> ctypes.CDLL:
    """The library of this machine, from the cache or built now."""
    compiler = find_compiler()
    name = f"kernels-{digest(compiler)}"
    tried = folders()
    for folder in tried:
        with contextlib.suppress(OSError):  # not there, or not whole; and who cannot write here, builds elsewhere
            return open_library(folder / f"{name}.so")
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return open_library(compile_to(folder / f"{name}.so", compiler))
    raise BuildError(f"no folder could be written for the sparse kernels, tried {', '.join(map(str, tried))}")


def folders() -> list[Path]:
    """Where libraries are kept, and where they go if nothing can be written there."""
    found = [Path(tempfile.gettempdir()) / f"growprune-kernels-{secrets.token_hex(8)}"]
    with contextlib.suppress(RuntimeError):  # no home
        given = os.environ.get("XDG_CACHE_HOME")
        found.insert(0, (Path(given) if given else Path.home() / ".cache") / "growprune" / "kernels")
    return found


def find_compiler() -> Compiler:
    given = os.environ.get("CXX")
    for words in [shlex.split(given)] if given else [[name] for name in COMPILERS]:
        if words and (path := shutil.which(words[0])):
            command = (path, *words[1:])
            return Compiler(command, _output_of([*command, "--version"]))
    tried = f"CXX, which is {given!r}" if given else ", ".join(COMPILERS)
    raise BuildError(f"no C++ compiler was found for the sparse kernels (looked for {tried})")


def digest(compiler: Compiler) -> str:
    """Of everything that a library depends on."""
    texts = [*(path.name + path.read_text(encoding="utf-8") for path in sorted(SOURCES.iterdir()) if path.is_file())]
    texts += [*compiler.command, compiler.version, *FLAGS, cpu()]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:32]


def cpu() -> str:
    """The model of the CPU and what it can do."""
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU architecture", "CPU variant", "CPU part")
    lines = {platform.machine(), platform.processor()}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.partition("\t")[0].rstrip(": ") in wanted:
                lines.add(line)
    return "\n".join(sorted(lines))


def compile_to(path: Path, compiler: Compiler) -> Path:
    """Build the library; the file is there whole or not at all. Some compilers have no OpenMP: then without."""
    with replacing(path) as file:
        rest = [str(SOURCES / "api.cpp"), "-o", file.name]
        try:
            _compile([*compiler.command, *FLAGS, *rest], path.with_suffix(".log"))
        except BuildError as error:
            alone = [flag for flag in FLAGS if flag != "-fopenmp"]
            if _run([*compiler.command, *alone, *rest])[0]:
                raise error  # the first try tells more
    return path


def _compile(command: Sequence[str], log: Path) -> None:
    failure, output = _run(command)
    if failure:
        log.write_bytes(shlex.join(command).encode() + b"\n" + output)
        raise BuildError(f"the sparse kernels could not be built: {shlex.join(command)} {failure}, its log is {log}")


def _run(command: Sequence[str]) -> tuple[str, bytes]:
    """How it failed, if it did, and what it said."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=SECONDS, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        return f"took over {SECONDS} seconds", (error.stdout or b"") + (error.stderr or b"")
    return f"ended with {done.returncode}" if done.returncode else "", done.stdout + done.stderr


def _output_of(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, timeout=SECONDS, stdin=subprocess.DEVNULL, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(
            f"the C++ compiler for the sparse kernels does not work: {shlex.join(command)}: {error}"
        ) from None
    return done.stdout.decode(errors="replace")


def open_library(path: Path) -> ctypes.CDLL:
    """After torch, whose OpenMP it then shares: two of them in one process would fight for the cores."""
    assert torch.__version__
    return ctypes.CDLL(str(path))
