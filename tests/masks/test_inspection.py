"""Output layers, found by following an example, or by registration."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growprune.errors import GrowpruneError
from growprune.masks.inspection import output_layers

X = torch.randn(2, 8)


class Net(nn.Module):
    """Three hidden layers, a head that is registered first, and further heads. `forward` is given."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.box, self.embedding = nn.Linear(8, 4), nn.Embedding(5, 8)
        self.norm = nn.LayerNorm(8)
        self._forward = forward

    def body(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu()).relu() + x

    def forward(self, x: Tensor) -> Any:
        return self._forward(self, x)


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        (lambda net, x: net.head(net.body(x)), ("head",)),
        (lambda net, x: net.head(net.body(x)).softmax(-1)[:, 1:], ("head",)),
        (lambda net, x: (net.head(net.body(x)), net.box(net.body(x))), ("head", "box")),
        (lambda net, x: {"classes": net.head(net.body(x)), "boxes": [net.box(net.body(x))]}, ("head", "box")),
        (lambda net, x: {"logits": net.head(net.body(x)), "hidden": net.body(x)}, ("head",)),
        (lambda net, x: torch.cat([net.head(net.body(x)), net.box(net.body(x))], -1), ("head", "box")),
        (lambda net, x: net.c(net.a(x)) + x, ("c",)),
        (lambda net, x: net.norm(x + net.b(x + net.a(x))), ("b",)),  # of a residual stream, the last block
        (lambda net, x: F.linear(net.body(x), net.embedding.weight), ()),  # tied to an embedding
        (lambda net, x: x, ()),
    ],
)
@pytest.mark.parametrize("is_frozen", [False, True])
def test_output_layers_follow_the_data(forward: Any, expected: tuple[str, ...], is_frozen: bool) -> None:
    net = Net(forward).requires_grad_(not is_frozen).train()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    assert output_layers(net, X)[0] == expected
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert net.training
    assert all(p.requires_grad is not is_frozen and p.grad is None for p in net.parameters())


def test_examples_are_tuples_and_dicts_too_and_buffers_stay() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    for example in (X, (X,), {"input": X}):
        assert output_layers(model, example)[0] == ("2",)
    assert int(model[1].num_batches_tracked) == 0


def test_without_an_example_the_last_registered_layer_counts() -> None:
    net = Net(lambda net, x: net.head(net.body(x)))
    assert output_layers(net)[0] == ("box",)
    assert output_layers(net, X)[1] != output_layers(net)[1]


def test_example_that_cannot_be_computed_is_refused_and_changes_nothing() -> None:
    net = Net(lambda net, x: net.head(net.body(x))).requires_grad_(False).train()
    with pytest.raises(GrowpruneError, match="cannot compute the example"):
        output_layers(net, torch.zeros(2, 7))
    assert net.training
    assert not any(p.requires_grad for p in net.parameters())


def test_rnn_and_attention_at_the_end_are_output_layers() -> None:
    assert output_layers(nn.Sequential(nn.Linear(8, 8), nn.MultiheadAttention(8, 2)), None)[0] == ("1.out_proj",)
    layers = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    assert output_layers(layers, torch.randn(1, 3, 8))[0] == ("linear2",)
    assert output_layers(nn.ModuleDict({"rnn": nn.LSTM(8, 4)}).rnn, torch.randn(3, 1, 8))[0] == ()
