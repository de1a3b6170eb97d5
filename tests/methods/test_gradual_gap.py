"""Gradual grow-and-prune, by hand: its sparsities, its parts, its memory."""

import re
from itertools import pairwise
from typing import Any

import pytest
from plan_cases import phases_of
from torch import nn

import growprune as gp
from growprune.masks.partition import Balanced, Partition, parse_parts
from growprune.methods import gradual_gap, granet, parallel_gradual_gap
from growprune.methods.gradual_gap import FIRST_EDITION
from growprune.plan import Action, Fork, Part, Phase, grow, prune, walk
from growprune.sparse.cursor import Cursor

FIRST: dict[str, Any] = FIRST_EDITION
FOUR = Partition(tuple(Part(f"S{i}", (f"{i}.weight",)) for i in range(4)))


def lines(plan: Any) -> list[str]:
    return [f"{stage}: {stage.iterations}" if isinstance(stage, Phase) else "fork" for stage in plan]


def test_the_sparsity_rises_evenly_while_the_parts_grow_in_turns() -> None:
    plan = gradual_gap(FOUR, sparsity=0.9, iterations=20, every=3, start=0.5, until=0.6, **FIRST)
    assert lines(plan) == [
        "prune all to 0.5 by random: 0",
        "prune all to 0.5, grow S0 to dense: 3",
        "prune all to 0.6, grow S1 to dense: 3",
        "prune all to 0.7, grow S2 to dense: 3",
        "prune all to 0.8, grow S3 to dense: 3",
        "prune all to 0.9: 8",
    ]


def test_the_first_sparsity_is_held_until_begin_while_the_parts_grow() -> None:
    plan = gradual_gap(FOUR, sparsity=0.9, iterations=20, every=3, start=0.5, until=0.9, **FIRST | {"begin": 0.3})
    # held for 6 of 20 iterations, then from 0.5 to 0.9 in the next 12
    assert lines(plan) == [
        "prune all to 0.5 by random: 0",
        "prune all to 0.5, grow S0 to dense: 3",
        "prune all to 0.5, grow S1 to dense: 3",
        "prune all to 0.5, grow S2 to dense: 3",
        "prune all to 0.6, grow S3 to dense: 3",
        "prune all to 0.7, grow S0 to dense: 3",
        "prune all to 0.8, grow S1 to dense: 3",
        "prune all to 0.9: 2",
    ]


def test_it_holds_a_sparse_start_until_gmps_curve_passes_it_and_grows_early_if_nothing_is_said() -> None:
    plan = gradual_gap(FOUR, sparsity=0.8, iterations=40, every=4)
    # a quarter is grown within 0.6, so 0.4 / 0.75 of the rest are zero at first; parts grow for 0.3 * 40 iterations
    held = ["prune all to 0.5333 by random: 0"]
    held += [f"prune all to 0.5333, grow S{i} to dense within 0.6: 4" for i in range(3)]
    # the curve goes from 0 at 4 to 0.8 at 30; after 12 and 16 it is at 0.8 (1 - (18/26)^3) and 0.8 (1 - (14/26)^3)
    assert lines(plan)[:6] == [*held, "prune all to 0.5345: 4", "prune all to 0.6751: 4"]
    assert lines(plan)[-1] == "prune all to 0.8: 10"


def test_a_model_that_cannot_keep_to_the_usual_peak_comes_as_near_as_it_can() -> None:
    assert lines(gradual_gap(FOUR, sparsity=0.5, iterations=12))[0] == "prune all to 0.5 by random: 0"
    whole = Partition((Part("S0", ("0.weight",)),))
    assert lines(gradual_gap(whole, sparsity=0.5, iterations=12))[0] == "prune all to dense by random: 0"


@pytest.mark.parametrize(("iterations", "every"), [(6000, 100), (3000, 50), (1470, 50), (1000, 50), (400, 20), (40, 2)])
def test_a_step_is_a_sixtieth_of_the_training_but_not_less_than_50_iterations(iterations: int, every: int) -> None:
    plan = list(gradual_gap(FOUR, sparsity=0.9, iterations=iterations))
    assert {phase.iterations for phase in plan[1:-2]} == {every}  # type: ignore[union-attr]
    assert sum(phase.iterations or 0 for phase in plan) == iterations  # type: ignore[union-attr]
    assert not any(phase.restart for phase in plan)  # type: ignore[union-attr]


def model() -> nn.Sequential:
    """Layers of 24, 16, 8 and 4 weights: 52 in all."""
    return nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(2, 2))


def test_balanced_parts_take_the_largest_layer_first() -> None:
    S = Partition.balanced(model(), 2)
    assert [part.tensors for part in S] == [("0.weight", "0.bias", "3.weight", "3.bias"), S[1].tensors]
    assert S.sizes == (28, 24)
    assert S.largest_share == 28 / 52
    assert FOUR.largest_share == 0.25, "parts of unknown size count as equal"


@pytest.mark.parametrize("control", [None, "peak"])
@pytest.mark.parametrize("kappa", [1, 2, 4])
def test_no_more_weights_live_than_the_peak_density_allows(kappa: int, control: Any) -> None:
    net = nn.Sequential(*(nn.Linear(20, 20) for _ in range(4)))
    sparse = gp.SparseModel(net, sparsity=0.9, allocation="uniform")
    S = Partition.balanced(net, kappa)
    peak = 1.0 if kappa == 1 else 0.75
    plan = gradual_gap(S, sparsity=0.9, iterations=40, every=2, peak_density=peak, control=control)
    alive = [sparse.num_alive / sparse.num_prunable for _ in phases_of(sparse, plan)]
    assert max(alive[1:]) == pytest.approx(peak, abs=0.002)
    assert alive[-1] == pytest.approx(0.1)


def test_controls_never_grow_from_the_same_start_or_the_same_peak() -> None:
    options: dict[str, Any] = {"sparsity": 0.9, "iterations": 8, "every": 4, "start": 0.4, "until": 1.0, **FIRST}
    assert lines(gradual_gap(FOUR, **options, control="start")) == [
        "prune all to 0.4 by random: 0",
        "prune all to 0.4: 4",
        "prune all to 0.65: 4",
        "prune all to 0.9: 0",
    ]
    # 0.6 + 0.4 / 4 of the weights live at the peak
    assert lines(gradual_gap(FOUR, **options, control="peak"))[:3] == [
        "prune all to 0.3 by random: 0",
        "prune all to 0.3: 4",
        "prune all to 0.6: 4",
    ]


def test_a_peak_density_is_exact_for_parts_that_differ() -> None:
    net = model()
    sparse = gp.SparseModel(net, sparsity=0.75, allocation="uniform")
    plan = gradual_gap(Partition.balanced(net, 2), sparsity=0.75, iterations=4, every=1, peak_density=0.8, until=1.0)
    # 28 of 52 are grown: (1 - 0.8) / (1 - 28 / 52) of all are zero at first
    assert str(next(iter(plan))) == "prune all to 0.4333 by random"
    alive = [sparse.num_alive for _ in phases_of(sparse, plan)]
    assert alive[1] == 28 + 9 + 5  # of 16 and 8, as many as rounding leaves; 0.8 of 52 is 41.6


def test_the_parallel_form_rises_as_the_other_does() -> None:
    def sparsities(method: Any) -> list[float]:
        stages = method(FOUR, sparsity=0.9, iterations=40, every=5, **FIRST if method is gradual_gap else {})
        edits = [edit for stage in stages if isinstance(stage, Phase) for edit in stage.edits]
        return [edit.to for edit in edits if edit.action is Action.PRUNE]

    assert sparsities(parallel_gradual_gap) == sparsities(gradual_gap)


def test_each_machine_of_the_parallel_form_grows_another_part() -> None:
    plan = list(parallel_gradual_gap(FOUR, sparsity=0.9, iterations=10, every=4, start=0.5, until=0.8, power=1))
    assert lines(plan) == [
        "prune all to 0.5 by random: 0",
        "prune all to 0.5: 0",
        "fork",
        "prune all to 0.7: 0",
        "fork",
        "prune all to 0.9: 2",
    ]
    forks = [stage for stage in plan if isinstance(stage, Fork)]
    assert [[str(branch.phase) for branch in fork.branches] for fork in forks] == [
        [f"grow S{i} to dense" for i in range(4)]
    ] * 2
    assert all(branch.phase.iterations == 4 for fork in forks for branch in fork.branches)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": 0.95}, "start must be <= sparsity, got start=0.95 and sparsity=0.9"),
        ({"start": 0.5, "peak_density": 0.6}, r"pass start or peak_density, not both \(got 0.5 and 0.6\)"),
        ({"peak_density": 0.3}, "peak_density must be >= 0.325 at sparsity 0.9, because the largest part has 0.25"),
        ({"peak_density": 1.5}, r"peak_density must be in \[0, 1\], got 1.5"),
        ({"every": 0}, "every must be an integer >= 1, got 0"),
        ({"power": 0}, "power must be an integer >= 1, got 0"),
        ({"control": "both"}, "control must be 'start', 'peak' or None, got 'both'"),
        ({"until": 1.2}, r"until must be in \[0, 1\], got 1.2"),
        ({"begin": 0.8}, "begin must be <= until, got begin=0.8 and until=0.75"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(gp.GrowpruneError, match=message):
        gradual_gap(FOUR, sparsity=0.9, iterations=100, **options)


def test_a_partition_can_be_written_as_text() -> None:
    assert parse_parts("balanced(3)") == Balanced(3) == gp.balanced(3)
    assert parse_parts("per_layer()") == parse_parts("per_layer") == gp.per_layer()
    assert parse_parts('named([["0", "1"], ["2"]])') == gp.named([["0", "1"], ["2"]])


@pytest.mark.parametrize("text", ["named", "balanced(x)", "balanced(1, 2)", "thirds(3)", "balanced(4))"])
def test_a_text_that_is_no_partition_says_which_are(text: str) -> None:
    with pytest.raises(gp.GrowpruneError, match=r"parts must be a number, .*, a call such as balanced\(8\)"):
        parse_parts(text)


@pytest.mark.parametrize("method", [gradual_gap, parallel_gradual_gap])
@pytest.mark.parametrize("sparsity", [0.3, 0.5, 0.6, 0.9, 0.95, 2 / 3])
def test_the_least_peak_that_a_refusal_names_is_accepted(method: Any, sparsity: float) -> None:
    for sizes in [(28, 24), (7, 3, 1), (1, 1, 1), (11, 5, 5, 1)]:
        parts = Partition(tuple(Part(f"S{i}", (f"{i}.weight",)) for i in range(len(sizes))), sizes)
        with pytest.raises(gp.GrowpruneError, match="peak_density must be >= ") as refusal:
            method(parts, sparsity=sparsity, iterations=100, peak_density=0.01)
        named = re.search(r"must be >= ([0-9.]+) at sparsity", str(refusal.value))
        assert named
        assert 0 <= float(named[1]) - (1 - sparsity * (1 - parts.largest_share)) < 1.1e-4
        assert len(list(method(parts, sparsity=sparsity, iterations=100, peak_density=float(named[1])))) > 2


def test_growth_keeps_to_the_peak_as_it_was_given() -> None:
    """Not to 1 - (1 - 0.45) / (1 - 1/3) (1 - 1/3), which is a little less."""
    parts = Partition(FOUR[:3])
    phases = list(gradual_gap(parts, sparsity=0.9, iterations=12, peak_density=0.45))
    assert {edit.within for phase in phases for edit in phase.edits[1:]} == {0.45}  # type: ignore[union-attr]


def test_a_pattern_that_a_first_mask_cannot_have_names_the_options_that_make_it() -> None:
    """0.4 / 0.9 are zero at first, and of four weights two have to be."""
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(10)))
    parts = Partition.balanced(net, 10)
    sparse = gp.SparseModel(net, sparsity=0.9, pattern="2:4", allocation="global")
    with pytest.raises(gp.GrowpruneError) as refusal:
        next(iter(Cursor(sparse, gradual_gap(parts, sparsity=0.9, iterations=60))))
    assert str(refusal.value) == (
        "phase 0 (stage 0: prune all to 0.4444 by random), at iteration 0: sparsity must be >= 0.5 for pattern 2:4 "
        "(or 0), got 0.4444. If the method's sparsity rises, raise `start` or lower `peak_density`"
    )
    for options in ({"start": 0.5}, {"peak_density": 0.55}):  # 0.45 / 0.9 are a half, to a float's last digit
        fresh = gp.SparseModel(net, sparsity=0.9, pattern="2:4", allocation="uniform")
        assert next(iter(Cursor(fresh, gradual_gap(parts, sparsity=0.9, iterations=60, **options))))


@pytest.mark.parametrize("start", [0.06, 0.21, 0.29, 0.33, 0.34])
@pytest.mark.parametrize("make", [gradual_gap, parallel_gradual_gap, granet])
def test_sparsity_rises_from_exactly_start_to_exactly_the_target(make: Any, start: float) -> None:
    """0.9 + (0.33 - 0.9) is 0.32999999999999996, for which one weight more may have to live."""
    options = {"until": 0.5, "begin": 0.2} if make is granet else {"until": 0.5}
    plan = make(FOUR, sparsity=0.9, iterations=8, every=1, start=start, **options)
    rising = [edit.to for scheduled in walk(plan) for edit in scheduled.phase.edits if edit.to]
    assert rising[:2] == [start, start]
    assert rising[-1] == 0.9
    assert rising == sorted(rising)


def test_a_capped_curve_begins_at_zero_and_growth_has_a_span_of_its_own() -> None:
    plan = gradual_gap(
        FOUR, sparsity=0.8, iterations=8, every=1, start=0.5, begin=0.25, until=0.75, power=1, capped=True,
        grow_from=0.25, grow_until=0.5,
    )  # fmt: skip
    prunes = [edit.to for phase in plan for edit in phase.edits if edit.action is Action.PRUNE]
    # the curve goes from 0 at iteration 2 to 0.8 at 6: it passes 0.5 between 4 (0.4) and 5 (0.6)
    assert prunes == pytest.approx([0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.6, 0.8])
    grown = [t for t, phase in enumerate(list(plan)[1:]) if any(e.action is Action.GROW for e in phase.edits)]
    assert grown == [2, 3]
    with pytest.raises(gp.GrowpruneError, match=r"grow_until.* got 2"):
        gradual_gap(FOUR, sparsity=0.8, iterations=8, grow_until=2)


@pytest.mark.parametrize("power", [1, 3])
def test_every_number_of_the_first_edition_is_what_it_was(power: int) -> None:
    plan = list(gradual_gap(FOUR, sparsity=0.9, iterations=977, every=16, start=0.37, **FIRST | {"power": power}))
    phases = [Phase(prune(FOUR.whole, to=0.37, by="random"))]  # written down before there was a second
    for step, t in enumerate(range(0, 733, 16)):
        now = 0.9 + (0.37 - 0.9) * (1 - t / 733) ** power if t else 0.37
        phases.append(Phase(prune(FOUR.whole, to=now), grow(FOUR[step % 4]), iterations=min(16, 733 - t)))
    assert plan == [*phases, Phase(prune(FOUR.whole, to=0.9), iterations=244)]


def test_it_rises_as_gmp_does_with_a_power_of_three() -> None:
    plan = gradual_gap(
        FOUR, sparsity=0.9, iterations=12, every=6, start=0.1, until=1.0, control="start", **FIRST | {"power": 3}
    )
    # half way, an eighth of the way is left: 0.9 - 0.8 / 8
    assert lines(plan) == [
        "prune all to 0.1 by random: 0",
        "prune all to 0.1: 6",
        "prune all to 0.8: 6",
        "prune all to 0.9: 0",
    ]


@pytest.mark.parametrize("option", [{}, {"start": 0.2}, {"peak_density": 0.9}])
def test_sparsity_never_falls(option: dict[str, float]) -> None:
    plan = gradual_gap(FOUR, sparsity=0.3, iterations=100, **option)
    asked = [phase.edits[0].to for phase in plan]  # type: ignore[union-attr]
    assert all(a <= b for a, b in pairwise(asked))  # type: ignore[operator]
