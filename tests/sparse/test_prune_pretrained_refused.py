"""gp.prune_pretrained on bad input: one line each; and what is left if it stops half-way."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import growprune as gp
from growprune.errors import GrowpruneError
from growprune.sparse import calibration


def chain(depth: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(depth)))


def inputs(count: int = 20) -> Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(1))


def refused(model: nn.Module, batches: Any, match: str, **options: Any) -> None:
    """The call is refused in one line, and the model is as it was."""
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(GrowpruneError, match=match) as caught:
        gp.prune_pretrained(model, batches, **options)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items() if not tensor.is_meta)
    assert all(module.training for module in model.modules())


def test_a_generator_that_is_used_up() -> None:
    batches = (batch for batch in [inputs()])
    gp.prune_pretrained(chain(), batches)
    refused(
        chain(), batches, "calibration must have .*A generator can be read only once: create it again, or pass a list"
    )


@pytest.mark.parametrize(
    ("batches", "match"),
    [
        ([], "calibration must have at least one batch, got none"),
        *(
            (given, rf"calibration must be an iterable of batches, such as \[batch\], got {what}")
            for given, what in ((inputs(), "one batch"), ({"x": inputs()}, "one batch"), (None, "None"), (3, "3"))
        ),
        (
            [inputs(), (inputs(), torch.zeros(20))],
            "cannot compute batch 1 .*, a tuple .*pass forward=lambda model, batch",
        ),
    ],
)
def test_what_is_no_calibration(batches: Any, match: str) -> None:
    refused(chain(), batches, match)


def test_a_calibration_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless() -> Iterator[Tensor]:
        while True:
            yield inputs()

    monkeypatch.setattr(calibration, "LIMIT", 1 << 30)
    monkeypatch.setattr(calibration, "_tensors", lambda batch: [torch.empty(1 << 28)])
    refused(chain(), endless(), "more than 1 GiB in 2 batches.*islice")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_activations_that_are_not_finite_name_the_layer_and_the_batch(bad: float) -> None:
    class Spoiled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.where(x.abs() > 50, bad, x)

    model = nn.Sequential(nn.Linear(8, 8), Spoiled(), nn.Linear(8, 8))
    refused(model, [inputs(), 1e4 * inputs()], r"the input of 2.weight has NaN or infinity in batch 1", keep_dense=[])


def test_weights_that_are_not_finite() -> None:
    model = chain()
    model[1].weight.data[0, 0] = float("inf")
    refused(model, [inputs()], "1.weight has NaN or infinity")


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.used(x))


def test_layers_that_are_not_reached_are_named_or_pruned_by_magnitude_if_asked() -> None:
    refused(Branching(), [inputs()], "no calibration input reaches unused.weight: pass batches that do")
    model = Branching()
    expected = gp.prune_pretrained(copy.deepcopy(model.unused), by="magnitude").masks["weight"]
    sparse = gp.prune_pretrained(model, [inputs()], unreached="magnitude")
    assert torch.equal(sparse.masks["unused.weight"], expected)
    assert sparse.is_at_target


def test_a_layer_that_is_no_longer_reached_is_said_to_go_by_magnitude() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.rare = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
            self.gate.weight.data = torch.full((8, 8), 0.1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.gate(x)
            return self.rare(x) if bool((x > 0.79).any()) else x  # 0.8 while dense

    with pytest.warns(UserWarning, match="rare.weight had no input after earlier layers were pruned"):
        sparse = gp.prune_pretrained(Routed(), [torch.ones(1, 8)], by="wanda", keep_dense=[])
    assert sparse.is_at_target


def test_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = chain()
    refused(model, [inputs()], "0.weight is on the meta device and has no values: load the model first")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"by": "obs"}, "by must be one of sparsegpt, wanda, magnitude, got 'obs'"),
        ({"unreached": "skip"}, "unreached must be one of error, magnitude, got 'skip'"),
        ({"allocation": "global"}, "allocation='global' ranks all layers together, but by='sparsegpt'"),
        ({"allocation": "fair"}, "allocation must be one of uniform, erk, global, global_no_floor, got 'fair'"),
        ({"sparsity": 50}, "sparsity"),
        ({"pattern": "2:4", "sparsity": 0.3}, "sparsity must be >= 0.5 for pattern 2:4 .*, got 0.3"),
        ({"keep_dense": ["nothing"]}, "keep_dense has 'nothing', which matches no parameter"),
    ],
)
def test_settings_that_do_not_exist_or_do_not_fit(options: dict[str, Any], match: str) -> None:
    refused(chain(), [inputs()], match, **options)


def test_a_batch_that_the_model_cannot_compute() -> None:
    match = "the model cannot compute batch 1 of the calibration, a tuple .*pass forward=lambda model, batch"
    refused(chain(), [inputs(), (inputs(), torch.zeros(20))], match)


def test_a_hessian_that_cannot_be_inverted_is_dampened_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = torch.linalg.cholesky_ex, []

    def failing_at_first(matrix: Tensor) -> Any:
        lower, info = real(matrix)
        calls.append(matrix)
        return lower, info + (len(calls) % 2)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", failing_at_first)
    with pytest.warns(UserWarning, match="Hessian of 0.weight, 1.weight .*dampened by 10%") as seen:
        assert gp.prune_pretrained(chain(), [inputs()]).is_at_target
    assert len(seen) == 1


class FailsLater(nn.Module):
    """Raises as soon as the layer before it is pruned."""

    def __init__(self, error: BaseException, before: nn.Linear) -> None:
        super().__init__()
        self.error, self.before = error, [before]

    def forward(self, x: Tensor) -> Tensor:
        if bool((self.before[0].weight == 0).any()):
            raise self.error
        return x


def half_way(error: BaseException) -> nn.Sequential:
    first, second, third = chain()
    return nn.Sequential(first, FailsLater(error, first), second, third)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA"), KeyboardInterrupt()])
def test_an_error_of_the_model_is_passed_on_with_a_note_of_what_is_done(error: BaseException) -> None:
    model = half_way(error)
    state = torch.get_rng_state()
    with pytest.raises(type(error)) as caught:
        gp.prune_pretrained(model, [inputs()], keep_dense=[])
    assert caught.value.__notes__ == [
        "growprune: 1 of 3 weights are already pruned, up to 0.weight: load the model again before you prune it again"
    ]
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.backends.mha.get_fastpath_enabled()
    model[1] = nn.Identity()
    model(inputs()).sum().backward()  # nothing watches any more
