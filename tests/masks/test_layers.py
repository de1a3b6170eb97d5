"""Which weights of a model may become sparse."""

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from growprune.masks import layers
from growprune.masks.layers import LAYERS, Weight, layer_weights, matches, matching, prunable_weights


class Language(nn.Module):
    """An embedding, a body, and an output layer that may share the embedding's matrix."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 4)
        self.norm = nn.LayerNorm(4)
        self.body = nn.Linear(4, 4)
        self.out = nn.Linear(4, 12)
        if tied:
            self.out.weight = self.embed.weight


class Scaled(nn.Module):
    """A layer torch does not know: a bare matrix, and a bare number."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.matrix = nn.Parameter(torch.ones(4, 4))
        self.vector = nn.Parameter(torch.ones(4))
        self.number = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) @ self.matrix * self.vector * self.number


def names(model: nn.Module, **options: list[str]) -> list[str]:
    return [weight.name for weight in prunable_weights(model, **options)]


def test_attention_has_its_query_key_and_value_matrices_apart() -> None:
    assert prunable_weights(nn.MultiheadAttention(4, 2)) == (
        Weight("in_proj_weight[q]", "in_proj_weight", (4, 4), rows=(0, 4)),
        Weight("in_proj_weight[k]", "in_proj_weight", (4, 4), rows=(4, 8)),
        Weight("in_proj_weight[v]", "in_proj_weight", (4, 4), rows=(8, 12)),
        Weight("out_proj.weight", "out_proj.weight", (4, 4)),
    )


def test_the_rows_of_a_query_matrix_are_a_view() -> None:
    attention = nn.MultiheadAttention(2, 1)
    key = prunable_weights(attention)[1]
    with torch.no_grad():
        key.of(attention.in_proj_weight).fill_(7)
    assert (attention.in_proj_weight == 7).all(dim=1).tolist() == [False, False, True, True, False, False]


def test_attention_over_other_dimensions_has_three_parameters() -> None:
    attention = nn.MultiheadAttention(4, 2, kdim=6, vdim=8, add_bias_kv=True)
    assert [(w.name, w.shape) for w in prunable_weights(attention)] == [
        ("q_proj_weight", (4, 4)),
        ("k_proj_weight", (4, 6)),
        ("v_proj_weight", (4, 8)),
        ("out_proj.weight", (4, 4)),
    ]


@pytest.mark.parametrize(
    ("model", "options", "expected"),
    [
        (
            nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(4), nn.PReLU(4)),
            {},
            ["1.weight"],
        ),
        (nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(2, 4)), {}, ["0.weight"]),
        (Language(tied=False), {}, ["body.weight", "out.weight"]),
        (Language(tied=True), {}, ["body.weight"]),  # whose output layer is the embedding, too
        (Language(tied=True), {"include": ["embed"]}, ["body.weight", "embed.weight"]),
        # what a parametrization makes is no parameter
        (nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 2)), {}, ["1.weight"]),
        # a module is not a prefix of letters
        (nn.ModuleDict({"fc": nn.Linear(4, 4), "fc2": nn.Linear(4, 4)}), {"keep_dense": ["fc"]}, ["fc2.weight"]),
        # what is dense anyway may be named
        (nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), {"keep_dense": ["1", "0.bias"]}, ["0.weight"]),
        (
            nn.MultiheadAttention(4, 2),
            {"keep_dense": ["in_proj_weight[q]"]},
            ["in_proj_weight[k]", "in_proj_weight[v]", "out_proj.weight"],
        ),
        (Scaled(), {}, ["fc.weight"]),
        (Scaled(), {"include": ["matrix"]}, ["fc.weight", "matrix"]),
        (Scaled(), {"include": ["matrix", "mat*", "fc.weight"]}, ["fc.weight", "matrix"]),  # each once
        (Scaled(), {"include": ["*"]}, ["fc.weight", "matrix"]),  # the matrices of what a glob matches
    ],
)
def test_what_is_pruned_of_a_model(model: nn.Module, options: dict[str, list[str]], expected: list[str]) -> None:
    assert names(model, **options) == expected


def test_a_weight_of_two_layers_counts_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    assert names(model) == ["0.weight"]


def test_a_shared_module_counts_once() -> None:
    shared = nn.Linear(4, 4)
    assert names(nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(4, 2))) == ["0.weight", "3.weight"]


def test_layers_are_listed_in_the_order_of_registration() -> None:
    layers = layer_weights(nn.TransformerEncoderLayer(4, 2, dim_feedforward=8))
    assert list(layers) == ["self_attn", "self_attn.out_proj", "linear1", "linear2"]


@pytest.mark.parametrize(
    ("keep_dense", "left"),
    [
        (["0.weight"], ["1.0.weight", "1.2.weight", "2.weight"]),
        (["0"], ["1.0.weight", "1.2.weight", "2.weight"]),
        (["1"], ["0.weight", "2.weight"]),
        (["1.*"], ["0.weight", "2.weight"]),
        (["*.2.weight"], ["0.weight", "1.0.weight", "2.weight"]),
        (["0", "2"], ["1.0.weight", "1.2.weight"]),
        (["0", "0.weight"], ["1.0.weight", "1.2.weight", "2.weight"]),
    ],
)
def test_keep_dense_takes_parameters_modules_and_globs(keep_dense: list[str], left: list[str]) -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert names(nn.Sequential(nn.Linear(4, 4), inner, nn.Linear(4, 4)), keep_dense=keep_dense) == left


@pytest.mark.parametrize(("pattern", "meant"), [("number", "number"), ("vector", "vector"), ("fc.b*", "fc.bias")])
def test_include_refuses_what_matches_only_numbers_and_vectors(pattern: str, meant: str) -> None:
    expected = f"include has {pattern!r}, but {meant} cannot be pruned: weights need at least two dimensions"
    with pytest.raises(ValueError, match=re.escape(expected)):
        names(Scaled(), include=["matrix", pattern])


@pytest.mark.parametrize("argument", ["keep_dense", "include"])
def test_a_name_that_matches_nothing_is_an_error_that_lists_some(argument: str) -> None:
    with pytest.raises(ValueError, match=rf"{argument} has 'conv\*', which matches .* has weight, bias"):
        names(nn.Linear(4, 4), **{argument: ["conv*"]})


@pytest.mark.parametrize("argument", ["keep_dense", "include"])
def test_a_bare_text_instead_of_a_list_is_an_error(argument: str) -> None:
    with pytest.raises(ValueError, match=rf"{argument} must be a list of names or globs, got 'weight'"):
        names(nn.Linear(4, 4), **{argument: "weight"})


@pytest.mark.parametrize(
    ("model", "keep_dense", "match"),
    [
        (nn.Sequential(nn.Embedding(4, 4), nn.LayerNorm(4)), [], r"none of its layers \(Embedding, LayerNorm\) can be"),
        (nn.Linear(4, 4), ["*"], "the weights of Linear are all frozen or in keep_dense; remove some"),
        (
            nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)),
            ["1"],
            "the weights of Linear are all frozen or in keep_dense, and Embedding, LayerNorm cannot be pruned",
        ),
        (nn.ReLU(), [], "it has no parameters that can be pruned"),
    ],
)
def test_a_model_with_nothing_to_prune_says_why(model: nn.Module, keep_dense: list[str], match: str) -> None:
    with pytest.raises(ValueError, match=f"nothing to prune: {match}"):
        names(model, keep_dense=keep_dense)


@pytest.mark.parametrize("argument", ["keep_dense", "include"])
def test_names_may_be_an_iterator(argument: str) -> None:
    expected = {"keep_dense": ["1.weight"], "include": ["0.weight", "1.weight", "2.weight"]}[argument]
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Embedding(4, 4))
    name = {"keep_dense": "0", "include": "2.weight"}[argument]
    assert names(model, **{argument: (n for n in [name])}) == expected  # type: ignore[arg-type]


NAMES = st.lists(st.text("ab.[]1*", max_size=6), max_size=12)


@given(names=NAMES, patterns=st.lists(st.text("ab.[]1*?!-", max_size=5), max_size=6), data=st.data())
def test_patterns_match_as_if_each_were_tried_on_each_name(names: list[str], patterns: list[str], data: Any) -> None:
    some = data.draw(st.lists(st.sampled_from(names), max_size=3)) if names else []  # exact names, of which some match
    patterns = [*patterns, *some]
    expected = [[name for name in names if matches(name, pattern)] for pattern in patterns]
    assert list(matching(patterns, names)) == expected


def test_thousands_of_names_are_not_held_against_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr(layers, "matches", lambda name, pattern: tried.append(name) or matches(name, pattern))
    names = [f"blocks.{i}.weight" for i in range(5000)]
    assert list(matching([*names, "blocks.4?.*"], names)) == [*([name] for name in names), names[40:50]]
    assert len(tried) < 7000


# Kinds of layers


class Conv1D(nn.Module):
    """Like that of transformers: a Linear stored (in, out)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


class Experts(nn.Module):
    """Like those of transformers: every expert's matrix in one parameter of three dimensions."""

    def __init__(self, *, is_transposed: bool | None = None, hidden_size: int = 8, ffn: int = 6) -> None:
        super().__init__()
        self.num_experts, self.hidden_size = 3, hidden_size
        if is_transposed is not None:
            self.is_transposed = is_transposed
        up, down = (2 * ffn, hidden_size), (hidden_size, ffn)
        self.gate_up_proj = nn.Parameter(torch.randn(3, *(up[::-1] if is_transposed else up)))
        self.down_proj = nn.Parameter(torch.randn(3, *(down[::-1] if is_transposed else down)))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(3, 2 * ffn))


@pytest.mark.parametrize(
    ("layer", "shape", "is_transposed"),
    [
        (nn.Linear(3, 5), (5, 3), False),
        (nn.Bilinear(4, 5, 3), (3, 4, 5), False),
        (nn.Conv1d(4, 6, 3), (6, 4, 3), False),
        (nn.Conv2d(4, 6, (3, 5)), (6, 4, 3, 5), False),
        (nn.Conv3d(4, 6, 3), (6, 4, 3, 3, 3), False),
        (nn.Conv2d(4, 6, 3, groups=2), (6, 2, 3, 3), False),
        (nn.Conv2d(4, 4, 3, groups=4), (4, 1, 3, 3), False),
        # stored inputs first
        (Conv1D(6, 4), (4, 6), True),
        (nn.ConvTranspose1d(4, 6, 3), (4, 6, 3), True),
        (nn.ConvTranspose2d(4, 6, 3, groups=2), (4, 3, 3, 3), True),
        (nn.ConvTranspose3d(4, 6, 3), (4, 6, 3, 3, 3), True),
    ],
)
def test_a_layer_has_its_weight_and_not_its_bias(layer: nn.Module, shape: tuple[int, ...], is_transposed: bool) -> None:
    assert prunable_weights(layer) == (Weight("weight", "weight", shape, transposed=is_transposed),)


def test_each_expert_is_a_matrix() -> None:
    assert prunable_weights(Experts()) == (
        *(Weight(f"gate_up_proj[{i}]", "gate_up_proj", (12, 8), rows=(i, i + 1)) for i in range(3)),
        *(Weight(f"down_proj[{i}]", "down_proj", (8, 6), rows=(i, i + 1)) for i in range(3)),
    )
    assert names(Experts(), keep_dense=["gate_up_proj[1]", "down_proj"]) == ["gate_up_proj[0]", "gate_up_proj[2]"]


@pytest.mark.parametrize("is_transposed", [True, False])
def test_experts_say_whether_they_are_stored_inputs_first(is_transposed: bool) -> None:
    assert {w.transposed for w in prunable_weights(Experts(is_transposed=is_transposed))} == {is_transposed}


def test_experts_that_do_not_say_are_known_by_the_hidden_size() -> None:
    model = Experts(is_transposed=True)
    del model.is_transposed
    assert {w.transposed for w in prunable_weights(model)} == {True}
    assert {w.transposed for w in prunable_weights(Experts(ffn=4))} == {False}  # square


def test_three_dimensions_without_a_number_of_experts_are_no_experts() -> None:
    model = Experts()
    del model.num_experts
    with pytest.raises(ValueError, match="nothing to prune"):
        names(model)


def test_a_kind_of_layer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAYERS, "scaled", lambda module, shapes: [Weight(n, n, shapes[n]) for n in shapes])
    assert names(Scaled()) == ["matrix", "fc.weight"]
