"""Rows as a person types them, and the options with which each method spends a budget exactly."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import Toy, cyclic

from growprune import GrowpruneError, methods
from growprune.compare import Request
from growprune.compare.rows import Budget, Row, cut_as_usual, nearest, num_epochs, parse_rows, spend
from growprune.engine.cost import estimate
from growprune.engine.recipe import Recipe
from growprune.masks.partition import balanced, contiguous, per_layer
from growprune.methods import METHODS
from growprune.recipes.digits import tiny

OWN_METHOD = """
from growprune import Branch, Fork, Phase, method, prune

@method
def halves(S, *, sparsity, iterations, cuts=(0.5,)):
    "Prune at the half."
    yield Phase(iterations=iterations // 2)
    yield Phase(prune(S.whole, to=sparsity), iterations=iterations - iterations // 2)

@method
def short(S, *, sparsity, length=3):
    "Three epochs, whatever one wants."
    yield Phase(prune(S.whole, to=sparsity), epochs=length)

@method
def apart(S, *, sparsity, iterations):
    "Each machine counts its own iterations."
    yield Fork(*(Branch(Phase(iterations=iterations // 2), returns=P) for P in S))
    yield Phase(prune(S.whole, to=sparsity), iterations=iterations - iterations // 2)

def forgotten(S, *, sparsity):
    yield Phase()
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN_METHOD)
    return tmp_path / "own.py"


def bare(method: str, **options: Any) -> Recipe:
    """A recipe of the toy with a method that says nothing of its length."""
    return replace(cyclic(), task=Toy(depth=5), method=METHODS[method], options=options, parts=contiguous(4))


def test_a_row_without_an_allocation_has_the_usual_one_of_its_method() -> None:
    rows = parse_rows("dense, rigl,gmp:uniform ,cyclic_gap")
    assert [row.name for row in rows] == ["dense", "rigl:erk", "gmp:uniform", "cyclic_gap:uniform"]
    assert [row.takes_sparsity for row in rows] == [False, True, True, True]


def test_a_row_may_have_options_of_its_own_which_are_in_its_name_and_its_folder() -> None:
    (row,) = parse_rows("cyclic_gap:global restart=false steps=4")
    assert row == Row("cyclic_gap", methods.cyclic_gap, "global", (("restart", "false"), ("steps", "4")))
    assert row.name == "cyclic_gap:global restart=false steps=4"
    assert row.folder == "cyclic_gap-global-restart=false-steps=4"


def test_commas_in_brackets_do_not_end_a_row(own: Path) -> None:
    rows = parse_rows(f"dense,{own}:halves:erk cuts=[0.5,0.7],rigl")
    assert [row.name for row in rows] == ["dense", "halves:erk cuts=[0.5,0.7]", "rigl:erk"]


def test_controls_are_added_once_and_only_on_request() -> None:
    text, ours = "gradual_gap until=0.5,gmp,gradual_gap until=0.5 control=peak", "gradual_gap:global until=0.5"
    assert [row.name for row in parse_rows(text)] == [ours, "gmp:global", f"{ours} control=peak"]
    names = [row.name for row in parse_rows(text, with_controls=True)]
    assert names == [ours, f"{ours} control=start", f"{ours} control=peak", "gmp:global"]


@pytest.mark.parametrize(
    "text, says",
    [
        ("", "--methods must be one or more rows"),
        ("riggle", "there is no method 'riggle'; similar: rigl, or give path.py:function"),
        ("rigl:erx", "must be one of uniform, erk, global, global_no_floor, got 'erx'"),
        ("rigl every", "must be a method and key=value pairs, got 'every'"),
        ("rigl allocation=erk", "cannot set allocation. Use --methods, as in 'rigl:erk every=5'"),
        ("gmp every=1,gmp  every=1,gmp every=1.", "would share a folder"),
        ("none.py:x", r"method file .*none\.py does not exist"),
    ],
)
def test_a_row_that_cannot_be_is_refused(text: str, says: str) -> None:
    with pytest.raises(GrowpruneError, match=says):
        parse_rows(text)


def test_a_method_of_a_file_must_be_a_method(own: Path) -> None:
    with pytest.raises(GrowpruneError, match=r"Decorate it with @growprune.method"):
        parse_rows(f"{own}:forgotten")


# Lengths


@pytest.mark.parametrize(
    "method, epochs, options",
    [
        ("dense", 60, {"epochs": 60}),
        ("static_random", 60, {"epochs": 60}),
        ("one_shot", 25, {"epochs": 12, "finetune": 13}),
        ("cyclic_gap", 60, {"steps": 8, "epochs": 3, "finetune": 36}),
        ("parallel_gap", 60, {"steps": 2, "epochs": 3, "finetune": 36}),
        ("random_gap", 60, {"steps": 8, "epochs": 3, "finetune": 36, "kappa": 4}),
        ("cyclic_gap", 20, {"steps": 8, "epochs": 1, "finetune": 12}),
        ("cyclic_gap", 19, {"steps": 4, "epochs": 2, "finetune": 11}),  # two rounds would be more than 40 %
        ("cyclic_gap", 8, {"steps": 4, "epochs": 1, "finetune": 4}),
        ("parallel_gap", 4, {"steps": 1, "epochs": 1, "finetune": 0}),
        # 4 batches an epoch: 24 iterations have 40 edits only if there is one in each
        ("rigl", 6, {"epochs": 6, "every": 1}),
        ("rigl", 60, {"epochs": 60, "every": 6}),
        ("rigl", 2000, {"epochs": 2000, "every": 100}),
        ("acdc", 60, {"epochs": 60}),
    ],
)
def test_each_method_gets_the_form_that_fills_the_budget(method: str, epochs: int, options: dict[str, Any]) -> None:
    assert spend(bare(method), epochs, 4).options == options


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=20)  # of each of the methods
@given(epochs=st.integers(4, 130), parts=st.integers(1, 4))
def test_every_method_spends_every_budget_exactly(method: str, epochs: int, parts: int) -> None:
    needed = 2 if method == "random_gap" else 1  # it never grows a layer twice in a row
    recipe = cut_as_usual(replace(bare(method), parts=contiguous(max(needed, parts))))
    if method == "parallel_gradual_gap":  # an iteration more is one more on all machines, so a few are left over
        assert num_epochs(spend(recipe, epochs, 40), 40) == pytest.approx(epochs, abs=0.051)
        assert num_epochs(spend(recipe, epochs, 4), 4) == pytest.approx(epochs, abs=0.5)
    else:
        assert num_epochs(spend(recipe, epochs, 4), 4) == epochs


def test_a_method_that_draws_its_layers_is_given_all_of_them_and_the_others_parts() -> None:
    def cut(method: str, **parts: Any) -> Any:
        return cut_as_usual(replace(bare(method), **parts)).chosen()["parts"]

    assert cut("random_gap") == per_layer()
    assert cut("gradual_gap") == balanced(4)
    assert cut("cyclic_gap", parts=per_layer()) == contiguous(4)
    assert cut("gradual_gap", parts=contiguous(3)) == balanced(3)


def test_options_that_are_given_stay_and_the_others_fill_up() -> None:
    given = spend(bare("cyclic_gap", steps=4, restart=False), 20, 4).options
    assert given == {"steps": 4, "restart": False, "epochs": 2, "finetune": 12}
    assert spend(bare("cyclic_gap", finetune=4), 20, 4).options == {"finetune": 4, "steps": 8, "epochs": 2}
    assert spend(bare("one_shot", epochs=4), 20, 4).options == {"epochs": 4, "finetune": 16}
    assert spend(bare("rigl", every=3), 20, 4).options == {"epochs": 20, "every": 3}


def test_too_few_epochs_for_a_round_are_refused_with_what_would_do() -> None:
    with pytest.raises(GrowpruneError, match=r"needs 4 epochs for 4 steps, but the budget is 3.*contiguous\(2\)"):
        spend(bare("cyclic_gap"), 3, 4)


# Budgets


def at(method: str, allocation: str = "uniform") -> Any:
    base = replace(tiny(), method=METHODS[method], options={}, allocation=allocation)
    return lambda epochs: spend(base, epochs, 5)


@pytest.mark.parametrize("method", METHODS)
def test_equal_flops_are_met_within_one_epoch_by_every_method(method: str) -> None:
    budget = Budget("flops", 20, 400)
    epochs = budget.epochs_of(METHODS[method], at(method))
    dense = 3 * estimate(at("dense")(1)).dense_flops
    price = {n: abs(estimate(at(method)(n)).training_flops - 20 * dense) for n in (epochs - 1, epochs, epochs + 1)}
    assert price[epochs] <= dense
    assert price[epochs] == min(price.values())


@given(
    leaps=st.lists(st.sampled_from([0, 1, 2, 3, 50, 1000]), min_size=1, max_size=300),
    first=st.integers(0, 20),
    target=st.integers(0, 20_000),
)
def test_the_nearest_of_rising_prices_is_found_with_few_of_them(leaps: list[int], first: int, target: int) -> None:
    prices = dict(enumerate(itertools.accumulate(leaps, initial=first), 5))
    asked = []

    def price(epochs: int) -> int:
        asked.append(epochs)
        return prices[epochs]

    found = nearest(price, target, 5, max(prices))
    assert abs(prices[found] - target) == min(abs(price - target) for price in prices.values())
    assert len(asked) == len(set(asked)) <= 30  # of 300; two for each halving of them, and those beside


def test_equal_flops_stop_at_the_most_epochs_allowed() -> None:
    assert Budget("flops", 20, 30).epochs_of(methods.static_random, at("static_random")) == 30


def test_equal_flops_let_a_method_have_the_epochs_it_needs_if_they_are_no_more_than_allowed(tmp_path: Path) -> None:
    base = cut_as_usual(replace(bare("cyclic_gap"), parts=contiguous(4)))
    with pytest.raises(GrowpruneError, match="needs 4 epochs"):
        spend(base, 2, 4)
    prices = {n: estimate(spend(base, n, 4)).training_flops for n in range(4, 11)}
    target = 2 * 3 * estimate(spend(base, 4, 4)).dense_flops
    nearest = min(prices, key=lambda n: abs(prices[n] - target))
    assert Budget("flops", 2, 10).epochs_of(methods.cyclic_gap, lambda n: spend(base, n, 4)) == nearest
    with pytest.raises(GrowpruneError, match="needs 4 epochs for 4 steps, but the budget is 3"):
        Budget("flops", 2, 3).epochs_of(methods.cyclic_gap, lambda n: spend(base, n, 4))
    jobs = request("cyclic_gap", tmp_path, settings=["parts=contiguous(3)"], epochs=2, budget_kind="flops")
    assert {job.epochs >= 3 for job in jobs.jobs()} == {True}


def test_the_papers_ratio_is_four_times_as_long_for_the_gap_methods() -> None:
    budget = Budget("paper", 20, 100)
    assert budget.epochs_of(methods.cyclic_gap, at("cyclic_gap")) == 80
    assert budget.epochs_of(methods.rigl, at("rigl")) == 20


# Jobs


def request(methods: str, out: Path, **more: Any) -> Request:
    usual = {"recipes": ["digits/tiny"], "methods": methods, "sparsities": "0.8,0.9", "seeds": "0,1", "epochs": 6}
    return Request.parse(**{**usual, "out": out, **more})


def test_there_is_a_run_for_each_row_sparsity_and_seed_and_one_dense_for_each_seed(tmp_path: Path) -> None:
    jobs = request("dense,rigl", tmp_path).jobs()
    names = ["dense", "rigl:erk 0.8", "rigl:erk 0.9"]
    assert [job.name for job in jobs] == [f"{name} seed {seed}" for seed in (0, 1) for name in names]
    assert len({job.folder for job in jobs}) == 6
    assert {job.recipe.seed for job in jobs} == {0, 1}


def test_a_job_replaces_method_options_sparsity_allocation_and_partition_and_nothing_else(tmp_path: Path) -> None:
    for job in request("random_gap:erk restart=false", tmp_path).jobs():
        own = {"method": methods.random_gap, "allocation": "erk", "parts": 3}
        options = {"restart": False, "steps": 3, "epochs": 1, "finetune": 3, "kappa": 3}
        whole = {**own, "options": options, "sparsity": job.sparsity, "seed": job.seed}
        assert job.recipe == replace(tiny(), **whole)


def test_the_iterations_of_all_machines_make_the_budget(tmp_path: Path, own: Path) -> None:
    job = request(f"{own}:apart", tmp_path / "out").jobs()[0]
    # 5 batches an epoch and 3 parts: 15 of 30 iterations are 7 on each of 3 machines, and 8
    assert dict(job.recipe.options) == {"iterations": 15}
    assert job.epochs == 6


def test_a_plan_that_does_not_spend_the_budget_is_refused_unless_that_is_allowed(tmp_path: Path, own: Path) -> None:
    with pytest.raises(GrowpruneError, match=r"short trains for 3 epochs .*but the budget is 6"):
        request(f"{own}:short", tmp_path / "out").jobs()
    assert request(f"dense,{own}:short", tmp_path / "out", allow=["epochs"]).jobs()[1].epochs == 3
    with pytest.raises(GrowpruneError, match=r"rigl trains for 9 epochs .*budget is 6.*--allow epochs"):
        request("rigl epochs=9", tmp_path / "out").jobs()


@pytest.mark.parametrize(
    "more, says",
    [
        ({"seeds": "0,0"}, "one or more different values"),
        ({"seeds": ""}, "--seeds must be one or more different values"),
        ({"seeds": "x"}, "--seeds must be comma-separated integers, got 'x'"),
        ({"seeds": "1.5"}, "--seeds must be comma-separated integers, got '1.5'"),
        ({"sparsities": "x"}, "--sparsities must be comma-separated numbers, got 'x'"),
        ({"methods": "gmp sparsity=0.5"}, "the row 'gmp sparsity=0.5' cannot set sparsity. Use .* --sparsities"),
        ({"methods": "gmp options.until=0.5"}, "cannot set options.until. Use --methods, as in"),
        ({"methods": "gmp until=0.5 until=0.6"}, "has until twice"),
        ({"methods": "gmp =3"}, "must be a method and key=value pairs, got '=3'"),
        (
            {"methods": "gmp utnil=0.5"},
            "the row 'gmp:global utnil=0.5' has an unknown key 'utnil'. Options of gmp are: .* until",
        ),
        ({"sparsities": "1.5"}, "sparsity must be in"),
        ({"settings": ["method=rigl"]}, "rows of a comparison set it"),
        ({"settings": ["options.every=3"]}, "rows of a comparison set it"),
        ({"budget_kind": "hours"}, "must be one of epochs, flops, paper"),
        ({"max_epochs": 2}, "max_epochs must be an integer >= 6, got 2"),
        ({"out": None}, "--out is missing. Give a folder"),
        ({"recipes": []}, "needs exactly one recipe, got 0"),
        ({"data": "here"}, "--data is not used by the task"),
    ],
)
def test_what_makes_no_comparison_is_refused_before_anything_is_run(
    more: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(GrowpruneError, match=says):
        request(**{"methods": "rigl", "out": tmp_path / "out", **more}).jobs()
    assert not (tmp_path / "out").exists()


def test_without_epochs_the_recipes_own_are_taken(tmp_path: Path) -> None:
    assert request("dense", tmp_path, epochs=0).jobs()[0].epochs == 4


@pytest.mark.parametrize("more", ["", ":erk", " cuts=[0.5,0.7]"])
def test_the_path_of_a_method_may_have_spaces(own: Path, more: str) -> None:
    spaced = own.rename(own.with_name("my öwn file.py"))
    (row,) = parse_rows(f"{spaced}:halves{more}")
    assert row.source == f"{spaced}:halves"
    assert row.name == f"halves{':erk' if more == ':erk' else ':uniform'}{more if '=' in more else ''}"
