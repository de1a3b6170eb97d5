"""Several calls of `growprune compare` into one folder: what is reused, what runs again, and what is added."""

import hashlib
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import report_runs
from paths import TOY as TOY_FILE
from typer.testing import CliRunner

from growprune.cli import app
from growprune.compare import Request
from growprune.engine import override
from growprune.engine.recipe import describe
from growprune.errors import GrowpruneError

TOY = f"{TOY_FILE}:cyclic"
OWN = """
from pathlib import Path
from growprune import Phase, method, prune
{imports}
with open({count!r}, "a") as file:
    file.write("x")

def recipe():
    from toy import cyclic
    return cyclic()

@method
def late(S, *, sparsity, iterations):
    "Prune at the end."
    yield Phase(iterations=iterations)
    yield Phase(prune(S.whole, to=sparsity))
"""


def own(folder: Path, name: str = "own.py", imports: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(OWN.format(count=str(folder / "count"), imports=imports))
    return folder / name


def request(out: Path, methods: str, seeds: str = "0,1", base: str = TOY, **more: Any) -> Request:
    return Request.parse([base], methods, "0.8", seeds, 6, out, **more)


def typed(out: Path, methods: str, *more: str, seeds: str = "0,1", base: str = TOY, epochs: int = 6) -> Any:
    words = ["compare", base, "--methods", methods, "--sparsities", "0.8", "--seeds", seeds, "--epochs", str(epochs)]
    return CliRunner().invoke(app, [*words, "--out", str(out), *more], env={"COLUMNS": "200"})


def finish(asked: Request) -> None:
    """Results as if all runs had been trained."""
    jobs = asked.jobs()
    asked.prepare(jobs)
    for job in jobs:
        plain = json.loads(json.dumps(describe(job.recipe)))
        origin = json.loads((job.folder / "recipe.json").read_text())
        content = report_runs.result(plain, 50.0, report_runs.history([1000] * 6), origin=origin)
        report_runs.write_bare(job.folder / "result.json", content)


# The user's own files


def test_a_users_file_is_executed_once_for_all_its_rows_recipes_and_jobs(tmp_path: Path) -> None:
    path = own(tmp_path / "a")
    asked = request(tmp_path / "out", f"dense,{path}:late,{path}:late:erk", "0,1,2", f"{path}:recipe")
    assert len([job.name for job in asked.jobs()]) == 9
    asked.prepare(asked.jobs())
    assert (tmp_path / "a" / "count").read_text() == "x"


def test_two_files_of_one_name_do_not_share_a_module_and_a_changed_one_is_read_again(tmp_path: Path) -> None:
    paths = [tmp_path / name / "own.py" for name in "ab"]
    for value, path in enumerate(paths):
        path.parent.mkdir()
        path.write_text(f"def number():\n    return NUMBER\nNUMBER = {value}\n")
    found = [override.load(f"{path}:number", "task") for path in paths]
    assert [number() for number in found] == [0, 1]
    assert found[0].__module__ != found[1].__module__
    paths[0].write_text(paths[0].read_text().replace("= 0", "= 7"))
    assert override.load(f"{paths[0]}:number", "task")() == 7


def test_digests_are_of_the_file_and_of_the_users_modules_that_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("near", "far", "unused", "package/__init__", "package/deep", "package/sibling"):
        (tmp_path / f"{name}.py").parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text("")
    (tmp_path / "near.py").write_text("import json, torch\ndef later():\n    from far import anything\n")
    (tmp_path / "package" / "deep.py").write_text("from . import sibling\nfrom .nowhere import x\n")
    path = own(tmp_path, imports="import near, package.deep, growprune.methods")
    names = ["far.py", "near.py", "own.py", "package/__init__.py", "package/deep.py", "package/sibling.py", "toy.py"]
    before = override.digests(f"{path}:late", "gmp", "digits/dense")
    assert [*before] == names
    (tmp_path / "far.py").write_text("anything = 1")
    after = override.digests(f"{path}:late")
    assert [name for name in names if after[name] != before[name]] == ["far.py"]
    assert override.digests("gmp", "digits/dense") == {}


def test_finished_runs_of_a_changed_file_run_again_and_the_old_ones_are_kept(tmp_path: Path) -> None:
    path, out = own(tmp_path), tmp_path / "out"
    finish(request(out, f"rigl,{path}:late"))
    assert typed(out, f"rigl,{path}:late", "--print-jobs").stdout == ""
    path.write_text(path.read_text() + "# changed")
    done = typed(out, f"rigl,{path}:late", "--print-jobs")
    assert f"own.py changed since these runs: 2 run again. The old ones are in {out / '.earlier'}" in done.stderr
    folders = [Path(shlex.split(line)[2]) for line in done.stdout.splitlines()]
    assert folders == [out / "late-uniform" / "0.8" / f"seed{seed}" for seed in (0, 1)]
    assert not any((folder / "result.json").exists() for folder in folders)
    assert len([*(out / ".earlier" / "late-uniform" / "0.8").glob("seed*-1/result.json")]) == 2
    again = typed(out, f"rigl,{path}:late", "--print-jobs")
    assert again.stdout == done.stdout and "changed" not in again.stderr


def test_an_error_in_a_users_file_has_its_file_and_line_and_leaves_no_folder(tmp_path: Path) -> None:
    path = own(tmp_path)
    path.write_text(
        path.read_text().replace("    yield Phase(prune", "    raise KeyError('mine')\n    yield Phase(prune")
    )
    done = typed(tmp_path / "out", f"{path}:late")
    line = 1 + path.read_text().splitlines().index("    raise KeyError('mine')")
    assert (done.exit_code, (tmp_path / "out").exists()) == (1, False)
    assert done.stderr.startswith(f"growprune: {path}, line {line}: KeyError: 'mine'")


# One folder, several calls


def content(out: Path) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads((out / "comparison.json").read_text())
    return found


def test_a_second_call_adds_its_rows_and_seeds(tmp_path: Path) -> None:
    finish(request(tmp_path, "dense,rigl", "0"))
    assert typed(tmp_path, "dense,rigl", seeds="0").exit_code == 0
    finish(request(tmp_path, "rigl,gmp", "1"))
    assert typed(tmp_path, "rigl,gmp", seeds="1").exit_code == 0
    rows = {row["name"]: [run["seed"] for run in row["runs"]] for row in content(tmp_path)["rows"]}
    assert rows == {"rigl:erk": [1, 0], "gmp:global": [1], "dense": [0]}


def test_rows_that_cannot_stand_beside_those_of_an_earlier_call_are_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    finish(request(tmp_path, "dense", "0"))
    done = typed(tmp_path, "gmp", epochs=7)
    assert done.exit_code == 2 and "epochs differ: 7 in gmp:global 0.8; 6 in dense/0/seed0" in done.stderr
    assert not (tmp_path / "gmp-global").exists()


def test_two_calls_at_once_into_one_folder_are_one_line(tmp_path: Path) -> None:
    with request(tmp_path, "dense").locked():
        done = typed(tmp_path, "gmp")
        assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
        assert f"{tmp_path} is in use by another growprune compare" in done.stderr
    with request(tmp_path, "dense").locked():
        pass


@pytest.mark.parametrize("missing", ["result.json", "all"])
def test_the_exit_code_says_that_a_row_is_incomplete(missing: str, tmp_path: Path) -> None:
    finish(request(tmp_path, "dense,rigl"))
    assert CliRunner().invoke(app, ["compare", str(tmp_path)]).exit_code == 0
    (tmp_path / "rigl-erk" / "0.8" / "seed1" / "result.json").unlink()
    if missing == "all":
        (tmp_path / "rigl-erk" / "0.8" / "seed1" / "recipe.json").unlink()
    done = CliRunner().invoke(app, ["compare", str(tmp_path)])
    assert done.exit_code == (1 if missing == "result.json" else 0)
    assert ("rigl:erk 0.8 seed 1 is unfinished" in done.stdout) == (missing == "result.json")


def test_recipes_of_jobs_have_absolute_paths_of_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = request(tmp_path / "out", "dense", "0", settings=["weights=here/w.safetensors"])
    asked.prepare(asked.jobs())
    stored = json.loads((tmp_path / "out/dense/0/seed0/recipe.json").read_text())
    assert stored["settings"]["weights"] == stored["recipe"]["weights"] == str(tmp_path / "here/w.safetensors")
    assert stored["row"] == "dense"


@pytest.mark.parametrize("done", ["begun", "finished"])
def test_runs_that_began_with_other_weights_are_not_reused(done: str, tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("a.safetensors", "same.safetensors", "b.safetensors")}
    for name, path in files.items():
        path.write_bytes(b"b" if name[0] == "b" else b"a")
    asked = {n: request(tmp_path / "out", "dense", "0", settings=[f"weights={path}"]) for n, path in files.items()}
    jobs = asked["a.safetensors"].jobs()
    asked["a.safetensors"].prepare(jobs)
    if done == "finished":
        plain = json.loads(json.dumps(describe(jobs[0].recipe)))
        made = report_runs.result(plain, 50.0, report_runs.history([1000] * 6))
        weights = {"file": "a.safetensors", "sha256": hashlib.sha256(b"a").hexdigest()}
        report_runs.write_bare(jobs[0].folder / "result.json", {**made, "weights": weights})
    assert asked["same.safetensors"].jobs()
    with pytest.raises(GrowpruneError, match=r"a\.safetensors.*b\.safetensors"):
        asked["b.safetensors"].jobs()


def test_an_edge_of_the_grid_is_named_and_a_value_inside_is_not(tmp_path: Path) -> None:
    asked = request(tmp_path, "rigl,gmp", "0", tune=["optimizer.lr=x1,x2,x4"])
    best = {"rigl": 0.2, "gmp": 0.1}
    for job in asked.jobs():
        plain = json.loads(json.dumps(describe(job.recipe)))
        score = 90.0 if job.recipe.optimizer.lr == best[job.row.source] else 50.0
        report_runs.write_bare(
            job.folder / "result.json", report_runs.result(plain, score, report_runs.history([1000] * 6))
        )
    asked.write_choices()
    (note,) = [note for note in asked.table(asked.jobs()).notes if "of the grid" in note and "best" in note]
    assert note.startswith("the best optimizer.lr is the largest of the grid for rigl:erk 0.8 (0.2): ")
