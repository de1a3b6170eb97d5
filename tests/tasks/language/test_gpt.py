"""The GPT, against formulas written out."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import growprune as gp
from growprune.masks.layers import prunable_weights
from growprune.sparse.flops import count_flops
from growprune.tasks.language import GPT, Language

SMALL = Language(vocab_size=11, context=6, d_model=8, ffn=12, heads=2, layers=2, dropout=0.0)


def seeded(shape: Language = SMALL) -> GPT:
    torch.manual_seed(0)
    model = GPT(shape).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.7, 0.7)
    return model


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 11, shape, generator=torch.Generator().manual_seed(seed))


def normed(x: Tensor, norm: torch.nn.LayerNorm) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight + norm.bias


def logits_by_hand(model: GPT, ids: list[int]) -> Tensor:
    """One piece, position by position and head by head."""
    x = torch.stack([model.embedding.weight[token] + model.positions.weight[t] for t, token in enumerate(ids)])
    for layer in model.layers:
        y = normed(x, layer.attention_norm)
        q, k, v = (y @ getattr(layer.attention, name).weight.T for name in ("q", "k", "v"))
        found = torch.zeros_like(x)
        for t in range(len(ids)):
            for head in (slice(0, 4), slice(4, 8)):
                shares = (k[: t + 1, head] @ q[t, head] / math.sqrt(4)).softmax(0)
                found[t, head] = shares @ v[: t + 1, head]
        x = x + found @ layer.attention.out.weight.T
        x = x + F.gelu(normed(x, layer.ffn_norm) @ layer.fc1.weight.T) @ layer.fc2.weight.T
    return normed(x, model.norm) @ model.embedding.weight.T


def test_logits_are_those_of_the_formula() -> None:
    model, ids = seeded(), tokens(3, 6)
    with torch.no_grad():
        expected = torch.stack([logits_by_hand(model, piece.tolist()) for piece in ids])
        assert torch.allclose(model(ids), expected, atol=1e-5)


def test_the_model_of_the_recipe_has_sizes_that_blocks_fill() -> None:
    task = Language()
    with torch.device("meta"):
        model = task.build_model()
        flops = count_flops(model, task.example())
    weights = prunable_weights(model)
    assert sum(weight.numel for weight in weights) == 6 * 12 * 384**2
    assert {weight.name.split(".", 2)[2] for weight in weights} == {
        *(f"attention.{name}.weight" for name in ("q", "k", "v", "out")),
        *("fc1.weight", "fc2.weight"),
    }
    assert all(size % 128 == 0 for weight in weights for size in model.get_parameter(weight.name).shape)
    dense = 256 * 384 + 256 * 384 + 13 * 2 * 384  # bytes, positions, and 13 norms
    assert sum(p.numel() for p in model.parameters()) == 6 * 12 * 384**2 + dense
    attention = 6 * 2 * 2 * 256 * 256 * 384  # six layers, two products each
    assert flops.dense == 2 * 256 * (6 * 12 * 384**2 + 256 * 384) + attention


def test_layers_whose_outputs_add_up_start_with_less() -> None:
    model = GPT(Language(vocab_size=256, context=64, d_model=128, ffn=512, heads=2, layers=2))
    found = {name: float(p.detach().std()) for name, p in model.named_parameters() if p.dim() > 1}
    for name, std in found.items():
        assert std == pytest.approx(0.01 if name.endswith(("out.weight", "fc2.weight")) else 0.02, rel=0.05), name


def test_it_is_deployed_in_one_line_and_gives_the_same() -> None:
    model, ids = seeded(), tokens(2, 6)
    sparse = gp.SparseModel(model, sparsity=0.75)
    sparse.prune()
    deployed = gp.deploy(sparse, (ids,), seconds=0)
    with torch.no_grad():
        assert torch.allclose(deployed(ids), model(ids), atol=1e-5)
    assert len(deployed.table) == 12
