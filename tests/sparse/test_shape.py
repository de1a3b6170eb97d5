"""What there is to know: the public members of a SparseModel, and the files that one step with an edit passes."""

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import growprune as gp

SOURCE = Path(gp.__file__).parent


def network() -> nn.Sequential:
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*layers)


class Trace:
    """The calls of functions of growprune, as (file, name)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def __call__(self, frame: Any, event: str, arg: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and SOURCE in path.parents:
            self.calls.append((path.relative_to(SOURCE).as_posix(), frame.f_code.co_name))


@pytest.mark.parametrize(("storage", "most_changes", "most_files"), [("masked", 260, 14), ("compact", 400, 18)])
def test_a_step_with_an_edit_is_direct(storage: str, most_changes: int, most_files: int) -> None:
    """Where nothing is sharded, nothing of sharding is called, even if FSDP2 is loaded."""
    import torch.distributed.fsdp

    model = network()
    sparse = gp.SparseModel(model, sparsity=0.9, storage=storage, allocation="uniform")
    plan = gp.methods.gradual_gap(gp.Partition.balanced(model, 4), sparsity=0.9, iterations=40)
    optimizer = gp.Cursor(sparse, plan).attach(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    for _ in range(9):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        trace, before = Trace(), sys.getprofile()
        sys.setprofile(trace)
        try:
            optimizer.step()  # which edits at each iteration here
        finally:
            sys.setprofile(before)
    files = [file for file, _ in trace.calls]
    assert not [file for file in files if file.startswith("sharding/")]
    assert len(set(files)) <= most_files
    assert sum(a != b for a, b in itertools.pairwise(files)) <= most_changes
    assert sum(name == "num_alive" for _, name in trace.calls) <= 2, "each of the two edits counts once"
