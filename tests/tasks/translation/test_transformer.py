"""The Transformer, against torch's own attention and formulas written out."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from translation_cases import CPU, SMALL, seeded, tokens

from growprune.masks.layers import prunable_weights
from growprune.sparse.flops import count_flops
from growprune.tasks.translation import Translation
from growprune.tasks.translation.transformer import (
    EOS,
    PAD,
    Attention,
    Layer,
    Transformer,
    sinusoids,
)


def test_the_big_transformer_has_the_papers_weights() -> None:
    big = Translation(d_model=1024, ffn=4096, heads=16)
    with torch.device("meta"):
        model = big.build_model()
        flops = count_flops(model, big.example())
    weights = prunable_weights(model)
    assert len(weights) == 96
    assert sum(weight.numel for weight in weights) == 176_160_768
    assert model.embedding.weight.numel() == 33_712 * 1024
    biases = 6 * (4 * 1024 + 5120) + 6 * (8 * 1024 + 5120)
    norms = 2 * 1024 * (6 * 2 + 1 + 6 * 3 + 1)
    assert sum(p.numel() for p in model.parameters()) == 176_160_768 + 33_712 * 1024 + biases + norms
    attention = 18 * 2 * 2 * 64 * 64 * 1024  # 18 attentions, two products each
    assert flops.dense == 2 * 64 * (176_160_768 + 33_712 * 1024) + attention


def normed(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


def attended(attention: Attention, x: Tensor, memory: Tensor, *, is_causal: bool) -> Tensor:
    """Attention head by head and token by token, for one sentence."""
    q, k, v = attention.q(x), attention.k(memory), attention.v(memory)
    out = torch.zeros_like(q)
    for head, t in itertools.product(range(2), range(len(x))):
        own, end = slice(4 * head, 4 * head + 4), t + 1 if is_causal else len(memory)
        weights = torch.stack([q[t, own] @ k[s, own] / 2 for s in range(end)]).softmax(0)
        out[t, own] = sum(weights[s] * v[s, own] for s in range(end))
    return attention.out(out)


def fed_forward(layer: Any, x: Tensor) -> Tensor:
    return x + layer.fc2(layer.fc1(normed(x)).clamp(min=0))


def test_an_encoder_layer_is_pre_norm() -> None:
    layer, x = Layer(SMALL, is_decoder=False), torch.randn(4, 8)
    y = x + attended(layer.self_attention, normed(x), normed(x), is_causal=False)
    found = layer(x[None], torch.ones(1, 1, 1, 4, dtype=torch.bool))
    torch.testing.assert_close(found[0], fed_forward(layer, y))


def test_a_decoder_layer_is_pre_norm_and_does_not_normalise_the_source() -> None:
    layer, x, memory = Layer(SMALL, is_decoder=True), torch.randn(4, 8), 5 + 3 * torch.randn(6, 8)
    y = x + attended(layer.self_attention, normed(x), normed(x), is_causal=True)
    y = y + attended(layer.cross_attention, normed(y), memory, is_causal=False)
    mask = torch.ones(1, 1, 1, 6, dtype=torch.bool)
    found = layer(x[None], mask, layer.cross_attention.keys_values(memory[None]))
    torch.testing.assert_close(found[0], fed_forward(layer, y))


def test_positions_are_sines_then_cosines() -> None:
    found = sinusoids(3, 4, CPU)
    expected = [[math.sin(t), math.sin(t / 10_000), math.cos(t), math.cos(t / 10_000)] for t in range(3)]
    torch.testing.assert_close(found, torch.tensor(expected))


def test_embeddings_are_scaled_shared_and_the_output() -> None:
    model = Transformer(SMALL)
    source = tokens(1, 3)
    expected = model.embedding.weight[source] * math.sqrt(8) + sinusoids(3, 8, CPU)
    torch.testing.assert_close(model.embed(source), expected)
    x = torch.randn(1, 2, 8)
    torch.testing.assert_close(model.logits(x), normed(x) @ model.embedding.weight.T)
    assert [name for name, p in model.named_parameters() if 11 in p.shape] == ["embedding.weight"]


def test_a_model_starts_as_fairseqs_do() -> None:
    torch.manual_seed(0)
    model = Transformer(
        replace(SMALL, vocab_size=500, d_model=64, ffn=128, heads=4, encoder_layers=1, decoder_layers=1)
    )
    layer = model.encoder.layers[0]
    assert model.embedding.weight.std().item() == pytest.approx(1 / 8, rel=0.02)
    bounds = {layer.self_attention.q: (6 / 256) ** 0.5, layer.self_attention.out: (6 / 128) ** 0.5}
    bounds |= {layer.fc1: (6 / 192) ** 0.5, layer.fc2: (6 / 192) ** 0.5}
    for linear, bound in bounds.items():
        assert linear.weight.abs().max().item() == pytest.approx(bound, rel=0.02)
        assert not linear.bias.any()


def test_padding_has_no_influence() -> None:
    model, source, target = seeded(SMALL), tokens(2, 6), tokens(2, 5, seed=1)
    padded = F.pad(source, (0, 3), value=PAD), F.pad(target, (0, 2), value=PAD)
    torch.testing.assert_close(model(*padded)[:, :5], model(source, target))
    assert not torch.allclose(model(padded[0].clamp(min=EOS), padded[1])[:, :5], model(source, target))


@pytest.mark.parametrize("rate", ["dropout", "attention_dropout", "relu_dropout"])
def test_every_dropout_acts_in_training_only(rate: str) -> None:
    model, pair = seeded(replace(SMALL, **{rate: 0.5})), (tokens(2, 6), tokens(2, 5))
    assert torch.equal(model(*pair), model(*pair))
    model.train()
    assert not torch.allclose(model(*pair), model(*pair))
    assert torch.allclose(seeded(SMALL).train()(*pair), seeded(SMALL)(*pair))


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_is_that_of_torch(is_causal: bool) -> None:
    attention, oracle = Attention(SMALL), nn.MultiheadAttention(8, 2, batch_first=True)
    with torch.no_grad():
        for layer in (attention.q, attention.k, attention.v, attention.out):
            layer.bias.uniform_(-1, 1)
        oracle.in_proj_weight.copy_(torch.cat([attention.q.weight, attention.k.weight, attention.v.weight]))
        oracle.in_proj_bias.copy_(torch.cat([attention.q.bias, attention.k.bias, attention.v.bias]))
        oracle.out_proj.load_state_dict(attention.out.state_dict())
    x, memory = torch.randn(3, 5, 8), torch.randn(3, 5, 8)
    if is_causal:
        found = attention(x, *attention.keys_values(memory), is_causal=True)
        expected, _ = oracle(x, memory, memory, attn_mask=torch.ones(5, 5, dtype=torch.bool).triu(1))
    else:
        seen = torch.tensor([[True] * 5, [True] * 3 + [False] * 2, [True] + [False] * 4])
        found = attention(x, *attention.keys_values(memory), mask=seen[:, None, None, :])
        expected, _ = oracle(x, memory, memory, key_padding_mask=~seen)
    torch.testing.assert_close(found, expected)
