"""`generate` of transformers on a model that is deployed for a GPU.

Without one, a recording of torch's operations stands in for the graph. It runs no Python of the model when it is
replayed, as a CUDA graph does not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from triton_interpreter import on_the_gpu

import growprune as gp
from growprune.deployment.api import deploy_on_gpu
from growprune.deployment.cuda.linear import SparseLinear
from growprune.deployment.cuda.products import Matrix, Tile, product
from growprune.deployment.example import Example

transformers = pytest.importorskip("transformers")
ALSO_ON_A_CPU = transformers.CompileConfig()
ALSO_ON_A_CPU._compile_all_devices = True


class Recorded:
    """A stand-in for `Graphed`: operations on fixed memory, without the Python between them."""

    count = 0

    def __init__(self, step: Callable[..., Any], *example: Tensor, put_back: Callable[[], object]) -> None:
        Recorded.count += 1
        self._inputs = [tensor.clone() for tensor in example]
        with torch.no_grad():
            for _ in range(3):
                step(*self._inputs)
                put_back()
            outputs: list[Any] = []

            def flat(*tensors: Tensor) -> list[Tensor]:
                leaves, spec = pytree.tree_flatten(step(*tensors).logits)
                outputs[:] = [spec]
                return leaves

            self._graph = make_fx(flat)(*self._inputs)
            put_back()
        self._outputs: list[Tensor] | None = None
        self._spec = outputs[0]

    def __call__(self, *inputs: Tensor) -> Any:
        for mine, given in zip(self._inputs, inputs, strict=True):
            mine.copy_(given)
        with torch.no_grad():
            (logits,) = self._graph(*self._inputs)
        if self._outputs is None:
            self._outputs = [logits]
        self._outputs[0].copy_(logits)  # the same memory each time
        return transformers.modeling_outputs.CausalLMOutputWithPast(logits=self._outputs[0])


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> type[Recorded]:
    monkeypatch.setattr("growprune.deployment.cuda.generation.graphed", Recorded)
    monkeypatch.setattr(Recorded, "count", 0)
    return Recorded


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, eos_token_id=None, bos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    sparse = gp.SparseModel(model, sparsity=0.8, keep_dense=["lm_head"])
    sparse.prune()
    return sparse.to_dense_()


def deployed(model: nn.Module, device: str = "cpu") -> Any:
    example = Example.of({"input_ids": torch.ones(1, 1, dtype=torch.long)})
    fast = deploy_on_gpu(model, example, device=torch.device(device), seconds=0, known={}).module
    assert isinstance(fast.model.layers[0].mlp.up_proj, SparseLinear)
    return fast


PROMPT = torch.tensor([[5, 9, 33, 2], [7, 7, 1, 60]])
MODES = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 8, "temperature": 1.5},
    "beams": {"num_beams": 3, "do_sample": False},
}


def tokens(model: Any, prompt: Tensor = PROMPT, **options: Any) -> list[list[int]]:
    torch.manual_seed(1)
    mask = torch.ones_like(prompt)
    found: Tensor = model.generate(prompt, attention_mask=mask, max_new_tokens=12, **options)
    return found.tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("mode", MODES)
def test_the_tokens_are_those_of_the_model(mode: str, recorded: type[Recorded]) -> None:
    model = llama()
    fast, compiled = deployed(model), {} if mode == "beams" else {"compile_config": ALSO_ON_A_CPU}
    expected = tokens(model, **MODES[mode])
    assert tokens(fast, **MODES[mode], **compiled) == expected
    assert recorded.count == (0 if mode == "beams" else 1)
    assert tokens(fast, **MODES[mode], **compiled) == expected  # with another cache, and so another graph
    assert recorded.count == (0 if mode == "beams" else 2)


def test_a_cache_that_is_kept_keeps_its_graph(recorded: type[Recorded]) -> None:
    model = llama()
    fast, cache = deployed(model), transformers.StaticCache(config=model.config, max_cache_len=20)
    options: Any = {"do_sample": False, "compile_config": ALSO_ON_A_CPU}
    for prompt in (PROMPT, PROMPT.flip(1), PROMPT.flip(0)):
        cache.reset()
        found = tokens(fast, prompt, past_key_values=cache, cache_implementation=None, **options)
        assert found == tokens(model, prompt, do_sample=False)
    assert recorded.count == 1


def test_a_graph_is_recorded_for_each_number_of_samples(recorded: type[Recorded]) -> None:
    model = llama()
    fast = deployed(model)
    for i, prompt in enumerate((PROMPT[:1], PROMPT, PROMPT[:1]), 1):
        assert tokens(fast, prompt, do_sample=False, compile_config=ALSO_ON_A_CPU) == tokens(
            model, prompt, do_sample=False
        )
        assert recorded.count == i


@pytest.mark.parametrize(("samples", "graphs"), [(16, 1), (20, 1), (65, 0)])
def test_batches_larger_than_that_of_the_example_give_the_tokens_of_the_model(
    samples: int, graphs: int, recorded: type[Recorded]
) -> None:
    model, prompt = llama(), torch.randint(1, 64, (samples, 4), generator=torch.Generator().manual_seed(0))
    found = tokens(deployed(model), prompt, do_sample=False, compile_config=ALSO_ON_A_CPU)
    assert found == tokens(model, prompt, do_sample=False)
    assert recorded.count == graphs


def test_layers_that_read_the_same_tensor_are_one_in_the_graph(
    recorded: type[Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []

    def noted(matrix: Matrix, x: Tensor, tile: Tile | None = None) -> Tensor:
        rows.append(matrix.rows)
        return product(matrix, x, tile)

    monkeypatch.setattr("growprune.deployment.cuda.linear.product", noted)
    tokens(deployed(llama()), PROMPT, do_sample=False, compile_config=ALSO_ON_A_CPU)
    assert recorded.count == 1
    assert rows[-8:] == [64 + 32 + 32, 64, 96 + 96, 64] * 2  # q, k and v; o; gate and up; down


@torch.no_grad()
def test_other_arguments_for_the_same_cache_are_recorded_anew(recorded: type[Recorded]) -> None:
    fast, cache = deployed(llama()), transformers.StaticCache(config=llama().config, max_cache_len=8)
    fast(PROMPT, past_key_values=cache)
    step, last = fast.get_compiled_call(None), PROMPT[:, -1:]
    more: list[dict[str, Any]] = [{}, {}, {"position_ids": torch.full((2, 1), 6)}, {"logits_to_keep": 1}]
    for count, options in zip((1, 1, 2, 3), more, strict=True):
        step(input_ids=last, past_key_values=cache, **options)
        assert recorded.count == count
    assert [int(layer.cumulative_length) for layer in cache.layers] == [8, 8]  # each step counts once


def test_padded_prompts_are_masked_in_the_graph(recorded: type[Recorded]) -> None:
    model, prompt = llama(), torch.tensor([[0, 0, 5, 9], [7, 7, 1, 60]])
    options: Any = {"attention_mask": (prompt != 0).long(), "max_new_tokens": 8, "do_sample": False}
    found = deployed(model).generate(prompt, **options, compile_config=ALSO_ON_A_CPU)
    assert found.tolist() == model.generate(prompt, **options).tolist()  # type: ignore[operator]
    assert recorded.count == 1


def test_what_cannot_be_recorded_runs_without_a_graph(recorded: type[Recorded]) -> None:
    model = llama()
    fast = deployed(model)
    options: Any = {"do_sample": False, "compile_config": ALSO_ON_A_CPU}
    many = PROMPT[:1].expand(65, 4)  # more than 16 at a time: weights are made dense for the call
    assert tokens(fast, many, **options)[64] == tokens(model, PROMPT[:1], do_sample=False)[0]
    more = fast.generate(PROMPT, max_new_tokens=3, output_hidden_states=True, return_dict_in_generate=True, **options)
    assert len({states[0].data_ptr() for states in more.hidden_states}) == 3  # each is its own
    assert recorded.count == 0


def test_the_model_itself_is_left_as_it_is() -> None:
    model = llama()
    before = copy.deepcopy(model.generation_config.to_dict())  # type: ignore[operator,union-attr]
    fast = deployed(model)
    assert fast.generation_config.cache_implementation == "static"
    assert model.generation_config.to_dict() == before  # type: ignore[operator,union-attr]
    assert "get_compiled_call" not in vars(model)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_the_gpu)])
def test_the_tokens_on_a_gpu_are_those_of_the_model(mode: str, device: str) -> None:
    model = llama()
    fast = deployed(model, device)
    expected = tokens(model.to(device), PROMPT.to(device), **MODES[mode])
    for _ in range(2):
        assert tokens(fast, PROMPT.to(device), **MODES[mode]) == expected
