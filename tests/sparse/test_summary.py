"""What a report says and how it is printed."""

import json

import pytest
import torch
from torch import nn

from growprune.sparse.model import SparseModel
from growprune.sparse.summary import summarise


def two_layers(**options: object) -> SparseModel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 10))
    return SparseModel(model, sparsity=0.75, **options)  # type: ignore[arg-type]


def test_a_report_is_printed_as_a_table_that_has_flops_with_an_example() -> None:
    sparse = two_layers()
    sparse.prune()
    lines = str(summarise(sparse, torch.zeros(1, 2, 4, 4))).splitlines()
    assert lines == [
        "weight    shape    size  target  alive  sparsity  FLOPs dense  sparse",
        "0.weight  4x2x3x3    72  0.7500     18    0.7500          576     144",
        "3.weight  10x16     160  0.7500     40    0.7500          320      80",
        "prunable            232  0.7500     58    0.7500          896     224",
        "parameters: 254, of which 22 always dense; 80 left",
        # 22 dense parameters, the running mean and variance of 4 and an 8-byte count; the mask has 9 + 20 bytes
        "bytes: 1,056 dense, 389 in the sparse format",
        "FLOPs of the example, in theory: 896 dense, 224 sparse",
    ]
    assert str(summarise(sparse)).splitlines() == [line[:48] for line in lines[:4]] + lines[4:6]


def test_flops_of_what_is_kept_dense_are_in_the_total() -> None:
    sparse = two_layers(keep_dense=["0"])
    sparse.prune()
    found = summarise(sparse, torch.zeros(1, 2, 4, 4))
    assert [row.name for row in found.rows] == ["3.weight"]
    assert (found.flops_dense, found.flops_sparse) == (896, 576 + 80)
    assert (found.prunable, found.parameters) == (160, 254)


def test_a_dense_model_saves_nothing() -> None:
    found = summarise(two_layers(), torch.zeros(1, 2, 4, 4))
    assert (found.alive, found.sparsity) == (232, 0)
    assert found.bytes_dense == found.bytes_sparse == 1056
    assert found.flops_dense == found.flops_sparse == 896


def test_layers_ranked_together_have_a_target_only_in_total() -> None:
    sparse = two_layers(allocation="global")
    sparse.prune()
    found = summarise(sparse)
    assert [row.target for row in found.rows] == [None, None]
    assert (found.target, found.alive) == (0.75, 58)
    assert str(found).splitlines()[1].split()[3] == "-"


def test_a_report_can_be_written_as_json() -> None:
    sparse = two_layers()
    sparse.prune()
    written = json.loads(json.dumps(summarise(sparse, torch.zeros(1, 2, 4, 4)).to_dict()))
    counts = {"target": 0.75, "sparsity": 0.75}
    assert written["rows"] == [
        {"name": "0.weight", "shape": [4, 2, 3, 3], "size": 72, "alive": 18, "flops_dense": 576, "flops_sparse": 144}
        | counts,
        {"name": "3.weight", "shape": [10, 16], "size": 160, "alive": 40, "flops_dense": 320, "flops_sparse": 80}
        | counts,
    ]
    totals = {"prunable": 232, "alive": 58, "parameters": 254, "bytes_dense": 1056, "bytes_sparse": 389}
    assert written["totals"] == totals | {"flops_dense": 896, "flops_sparse": 224} | counts


def test_attention_has_a_row_each_for_q_k_and_v() -> None:
    sparse = SparseModel(nn.MultiheadAttention(8, 2), sparsity=0.5)
    sparse.prune()
    found = summarise(sparse, (torch.zeros(3, 1, 8), torch.zeros(7, 1, 8), torch.zeros(7, 1, 8)))
    assert [(row.alive, row.flops_sparse) for row in found.rows] == [(32, 192), (32, 448), (32, 448), (32, 192)]
    assert found.flops_sparse == 192 + 448 + 448 + 192 + 2 * 2 * 3 * 7 * 8


@pytest.mark.parametrize("pattern", ["unstructured", "1x4", "2:4"])
def test_alive_is_counted_and_not_assumed(pattern: str) -> None:
    sparse = SparseModel(nn.Linear(8, 4), sparsity=0.5, pattern=pattern)
    sparse.prune(to=0.75)
    found = summarise(sparse)
    assert (found.rows[0].target, found.rows[0].sparsity) == (0.5, 0.75)
    assert found.rows[0].alive == int(sparse.model.weight.count_nonzero())
