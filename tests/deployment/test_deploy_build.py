"""The library of kernels: what it is kept by, and what happens where it cannot be built."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from growprune.deployment.cpu import library

BUILD = """
from growprune.deployment.cpu.library import open_or_build
found = open_or_build()
found.gp_lanes()
print(found._name)
"""


@pytest.fixture(scope="module")
def built() -> str:
    """A library that was built in earnest."""
    try:
        library.find_compiler()
    except library.BuildError as error:
        pytest.skip(f"the kernels cannot be built here: {error}")
    return library.open_or_build()._name


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and a process that has loaded nothing yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.found_once.cache_clear()
    yield tmp_path / "growprune" / "kernels"
    library.found_once.cache_clear()


@pytest.fixture
def compiler(built: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that notes that it was called, and is quick: it copies a library that was built before."""
    return fake_compiler(tmp_path, monkeypatch, f'sleep 0.1; cp "{built}" "$to"')


def fake_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, work: str) -> Path:
    """Made the one to use. Returns where it notes its calls."""
    script, calls = folder / "fake c++", folder / "calls"
    calls.touch()
    script.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --version ]; then echo "fake 1.0"; exit; fi\n'
        f'echo "$@" >> "{calls}"\n'
        "for to; do :; done\n"  # the last argument
        f"{work}\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", f"'{script}'")
    return calls


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_a_library_is_built_once_and_found_by_the_next_process(cache: Path, compiler: Path) -> None:
    library.open_or_build()
    assert library.open_or_build().gp_lanes() in (4, 8, 16)
    assert num_lines(compiler) == 1
    assert [path.suffix for path in cache.iterdir()] == [".so"]


@pytest.mark.parametrize("what", ["cpu", "flags", "compiler", "source"])
def test_a_library_for_another_cpu_compiler_flag_or_source_is_built_anew(
    what: str, cache: Path, compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.open_or_build()
    if what == "cpu":
        monkeypatch.setattr(library, "cpu_model", lambda: "another model")
    elif what == "flags":
        monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, "-g"))
    elif what == "compiler":
        script = tmp_path / "fake c++"
        script.write_text(script.read_text().replace("fake 1.0", "fake 2.0"))
    else:
        (tmp_path / "native").mkdir()
        (tmp_path / "native" / "api.cpp").write_text("// other")
        monkeypatch.setattr(library, "SOURCES", tmp_path / "native")
    library.open_or_build()
    assert num_lines(compiler) == 2
    assert len(list(cache.iterdir())) == 2


def test_the_cpu_is_known_by_its_model_and_what_it_can_do() -> None:
    assert len(library.cpu_model()) > 20
    assert library.cpu_model() == library.cpu_model()
    assert "MHz" not in library.cpu_model(), "what changes from minute to minute must not count"


def test_a_file_that_is_no_library_is_built_anew(cache: Path, compiler: Path) -> None:
    cache.mkdir(parents=True)
    (cache / f"kernels-{library.digest(library.find_compiler())}.so").write_bytes(b"\x7fELF")
    assert library.open_or_build().gp_lanes() in (4, 8, 16)
    assert num_lines(compiler) == 1


@pytest.mark.slow
def test_two_processes_that_build_at_once_both_get_a_whole_library(
    cache: Path, built: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_compiler(tmp_path, monkeypatch, f'sleep 1; cp "{built}" "$to"')
    command = [sys.executable, "-c", BUILD]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    names = {process.communicate(timeout=180)[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    targets = [line.split()[-1] for line in calls.read_text().splitlines()]
    assert len(set(targets)) == len(targets), "each builds a file of its own, which then takes the name"
    assert names == {str(path) for path in cache.iterdir()} and len(names) == 1


def test_a_compiler_that_fails_is_named_with_its_command_and_log(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_compiler(tmp_path, monkeypatch, 'echo "no such instruction" >&2; exit 3')
    with pytest.raises(library.BuildError, match=r"fake c\+\+' .*-O3 .* ended with 3, its log is ") as raised:
        library.library()
    with pytest.raises(library.BuildError):
        library.library()  # which does not try again
    (log,) = cache.iterdir()
    assert str(log) in str(raised.value) and num_lines(calls) == 1
    assert "no such instruction" in log.read_text() and "-march=native" in log.read_text()


def test_a_missing_compiler_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    with pytest.raises(library.BuildError, match=r"no C\+\+ compiler was found .*'no-such-compiler -m64'"):
        library.library()
    assert not cache.exists()


def test_a_compiler_that_does_not_even_say_its_version_is_a_reason_too(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(library.BuildError, match=r"does not work: .*false --version"):
        library.library()


def test_without_a_writable_cache_the_library_is_built_elsewhere(
    cache: Path, compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.parent.write_text("a file where the folder should be")
    monkeypatch.setattr(library.tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    assert library.open_or_build().gp_lanes() in (4, 8, 16)
    assert num_lines(compiler) == 1
    assert len(list((tmp_path / "temporary").glob("*/*.so"))) == 1


@pytest.mark.usefixtures("built")
def test_layers_share_the_openmp_of_torch() -> None:
    library.library()
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("only Linux tells what is loaded")
    loaded = {line.split()[-1] for line in maps.read_text().splitlines() if "libgomp" in line}
    assert len([path for path in loaded if "scikit" not in path]) <= 1, "of scikit-learn's we know nothing"
