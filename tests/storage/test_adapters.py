"""Adapters: never pruned, and merged into what lives. With a small LoRA like PEFT's, and with PEFT where it is."""

import copy
import functools
import io
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import growprune as gp

pytestmark = pytest.mark.filterwarnings("ignore:.* of the adapter's change, which fell on pruned weights")


class Lora(nn.Module):
    """Written like the LoRA layer of PEFT, as far as merging goes."""

    adapter_layer_names = ("lora_A", "lora_B")

    def __init__(self, base_layer: nn.Module, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.in_features, self.out_features = base_layer.in_features, base_layer.out_features
        self.lora_A = nn.ModuleDict({"default": nn.Linear(self.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, self.out_features, bias=False)})
        self.merged = False

    def get_base_layer(self) -> Any:
        layer: Any = self
        while hasattr(layer, "base_layer"):
            layer = layer.base_layer
        return layer

    def change(self) -> Tensor:
        return self.lora_B["default"].weight @ self.lora_A["default"].weight

    def merge(self, safe_merge: bool = False) -> None:
        weight = self.get_base_layer().weight
        if safe_merge:
            new = weight.data.clone() + self.change()
            if not torch.isfinite(new).all():
                raise ValueError("NaNs detected in the merged weights")
            weight.data = new
        else:
            weight.data += self.change()
        self.merged = True

    def unmerge(self) -> None:
        self.get_base_layer().weight.data -= self.change()
        self.merged = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.base_layer(x)
        return y if self.merged else y + self.lora_B["default"](self.lora_A["default"](x))


def base() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def adapted(model: nn.Sequential) -> nn.Sequential:
    for i in (0, 2):
        model[i] = Lora(model[i])
    return model


def made(order: str, storage: str) -> gp.SparseModel:
    """A sparse model with adapters, which were there before it was sparse, or come after."""
    model = adapted(base()) if order == "before" else base()
    sparse = gp.SparseModel(model, sparsity=0.9, storage=storage)
    sparse.prune()
    if order == "after":
        adapted(model)
    return sparse


def weights(model: nn.Module) -> list[Tensor]:
    return [t.clone() for n, t in model.state_dict().items() if n.endswith("base_layer.weight")]


orders = pytest.mark.parametrize("order", ["before", "after"])
storages = pytest.mark.parametrize("storage", ["masked", "compact"])


def test_adapters_are_never_pruned() -> None:
    model = adapted(base())
    assert [w.name for w in gp.SparseModel(model, sparsity=0.9).weights] == [
        "0.base_layer.weight",
        "2.base_layer.weight",
    ]
    assert gp.SparseModel(model, sparsity=0.9, include=["0.*"]).num_prunable == 32 * 16 + 4 * 32
    with pytest.raises(ValueError, match=r"include has '0.lora_A', which matches no parameter"):
        gp.SparseModel(model, sparsity=0.9, include=["0.lora_A"])
    assert [len(part.tensors) for part in gp.Partition.per_layer(model)] == [4, 4]


def test_adapters_upon_adapters_are_never_pruned() -> None:
    model = nn.Sequential(Lora(Lora(nn.Linear(8, 8))))
    assert [w.name for w in gp.SparseModel(model, sparsity=0.9).weights] == ["0.base_layer.base_layer.weight"]


@orders
@storages
@pytest.mark.parametrize("safe_merge", [False, True])
def test_merging_changes_what_lives_and_nothing_else(order: str, storage: str, safe_merge: bool) -> None:
    sparse = made(order, storage)
    model, masks, before = sparse.model, sparse.masks, weights(sparse.model)
    for i in (0, 2):
        model[i].merge(safe_merge=safe_merge)
    for old, new, mask, i in zip(before, weights(model), masks.values(), (0, 2), strict=True):
        assert torch.equal(new, torch.where(mask, old + model[i].change(), 0))
    sparse.check()
    assert all(torch.equal(mask, masks[name]) for name, mask in sparse.masks.items())
    for i in (0, 2):
        model[i].unmerge()
    assert all(torch.allclose(old, new, atol=1e-6) for old, new in zip(before, weights(model), strict=True))
    assert sum(int(w.count_nonzero()) for w in weights(model)) == sparse.num_alive == 64


@storages
def test_merge_warns_of_the_share_that_is_dropped(storage: str) -> None:
    layer = nn.Linear(4, 1, bias=False)
    layer.weight.data = torch.tensor([[4.0, 3.0, 2.0, 1.0]])
    sparse = gp.SparseModel(layer, sparsity=0.5, storage=storage)
    sparse.prune()
    adapter = Lora(layer, rank=1)
    adapter.lora_A["default"].weight.data = torch.tensor([[1.0, 2.0, 3.0, -4.0]])  # 7 of 10 fall on pruned weights
    adapter.lora_B["default"].weight.data = torch.tensor([[0.5]])
    with pytest.warns(UserWarning) as caught:
        adapter.merge()
    assert len(caught) == 1
    assert "dropped 70 % of the adapter's change" in str(caught[0].message)
    assert adapter.base_layer.weight.tolist() == [[4.5, 4.0, 0.0, 0.0]]
    adapter.unmerge()  # which warns of nothing, as the next merge
    adapter.lora_A["default"].weight.data = torch.tensor([[1.0, 2.0, 0.0, 0.0]])
    adapter.merge()
    assert adapter.base_layer.weight.tolist() == [[4.5, 4.0, 0.0, 0.0]]


@storages
def test_merge_into_a_dense_layer_warns_of_nothing(storage: str) -> None:
    model = adapted(base())
    gp.SparseModel(model, sparsity=0.9, storage=storage)
    model[0].merge()


@orders
@storages
def test_a_merge_that_fails_changes_nothing(order: str, storage: str) -> None:
    sparse = made(order, storage)
    before = weights(sparse.model)
    nn.init.constant_(sparse.model[0].lora_A["default"].weight, torch.nan)
    with pytest.raises(ValueError, match="NaNs detected"):
        sparse.model[0].merge(safe_merge=True)
    assert all(torch.equal(old, new) for old, new in zip(before, weights(sparse.model), strict=True))
    assert sparse.model(torch.zeros(1, 16)).shape == (1, 4)
    assert sparse.num_alive == 64


@orders
@storages
def test_training_goes_on_after_a_merge(order: str, storage: str) -> None:
    sparse = made(order, storage)
    optimizer = sparse.attach(torch.optim.Adam(sparse.model.parameters(), lr=0.1))
    for _ in range(3):
        sparse.model(torch.randn(8, 16)).square().sum().backward()
        optimizer.step()
        sparse.model[0].merge()
        sparse.model[0].unmerge()
    assert sum(int(w.count_nonzero()) for w in weights(sparse.model)) == 64


@orders
@storages
def test_a_copy_merges_into_itself(order: str, storage: str) -> None:
    sparse = made(order, storage)
    before = weights(sparse.model)
    clone = copy.deepcopy(sparse)
    if order == "before":
        clone.grow()
        clone.prune(to=0.75)
    clone.model[0].merge()
    assert int(weights(clone.model)[0].count_nonzero()) == (128 if order == "before" else 51)
    alone = copy.deepcopy(sparse.model)
    alone[0].merge()
    assert int(weights(alone)[0].count_nonzero()) == 51
    assert all(torch.equal(old, new) for old, new in zip(before, weights(sparse.model), strict=True))


@orders
def test_a_model_that_outlives_its_handle_keeps_its_masks_in_a_merge(order: str) -> None:
    model = made(order, "masked").model
    model[0].merge()
    assert int(weights(model)[0].count_nonzero()) == 51


def test_a_masked_model_with_adapters_can_still_be_pickled() -> None:
    sparse = made("before", "masked")
    file = io.BytesIO()
    torch.save(sparse.model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    again[0].merge()
    assert int(weights(again)[0].count_nonzero()) == 512
    assert int(weights(sparse.model)[0].count_nonzero()) == 51


def test_of_two_sparse_models_the_last_decides_what_a_merge_keeps() -> None:
    model = adapted(base())
    first = gp.SparseModel(model, sparsity=0.9)
    first.prune()
    second = gp.SparseModel(model, sparsity=0.5)
    second.prune(to=0.95)
    model[0].merge()
    assert torch.equal(model[0].base_layer.weight != 0, second.masks["0.base_layer.weight"])
    assert first.num_alive == 64


@orders
def test_an_adapter_of_a_compact_parameter_itself_is_refused(order: str) -> None:
    class OfParameter(Lora):
        def __init__(self, base_layer: nn.Module) -> None:
            self.parameter_name = "weight"
            super().__init__(base_layer)

    model = nn.Sequential(OfParameter(nn.Linear(4, 4)) if order == "before" else nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"weight has its own adapter .*target_parameters.*: use storage='masked'"):
        sparse = gp.SparseModel(model, sparsity=0.5, storage="compact")
        OfParameter(sparse.model[0])
    if order == "after":
        sparse.to_dense_()  # a model belongs to one SparseModel at a time
    assert [w.shape for w in gp.SparseModel(model, sparsity=0.5).weights] == [(4, 4)]


@storages
def test_an_adapter_that_writes_when_it_is_made_keeps_the_mask(storage: str) -> None:
    class Residual(Lora):
        """As PiSSA: the layer keeps what the adapter does not take."""

        def __init__(self, base_layer: nn.Module) -> None:
            super().__init__(base_layer)
            self.update_layer()

        def update_layer(self) -> None:
            self.base_layer.weight.data = self.base_layer.weight.data - self.change()

    sparse = made("neither", storage)
    before = sparse.model[0].weight.detach().clone()
    model = Residual(sparse.model[0])
    expected = torch.where(sparse.masks["0.weight"], before - model.change(), 0)
    assert torch.equal(model.base_layer.weight, expected)


def test_assigning_the_dense_weight_of_a_compact_layer_takes_in_what_lives() -> None:
    sparse = made("neither", "compact")
    layer, mask = sparse.model[0], sparse.masks["0.weight"]
    parameter = layer._parameters["weight"]
    layer.weight = layer.weight  # as PEFT does when it unloads
    layer.weight = layer.weight.detach() + 1
    assert layer._parameters["weight"] is parameter
    assert torch.equal(layer.weight != 0, mask)
    sparse.check()


# With PEFT itself


def peft_model(model: nn.Module, **options: Any) -> Any:
    peft = pytest.importorskip("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(model, peft.LoraConfig(**({"target_modules": ["0", "2"], "r": 2} | options)))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return model


def llama() -> nn.Module:
    hf = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    return hf.LlamaForCausalLM(hf.LlamaConfig(num_hidden_layers=2, vocab_size=20, **sizes))


def gpt2() -> nn.Module:
    hf = pytest.importorskip("transformers")
    return hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=20, n_positions=8))


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2))


TOKENS = {"input_ids": torch.arange(12).view(2, 6)}
MODELS: dict[str, tuple[Any, list[str], Any]] = {
    "linear": (base, ["0", "2"], (torch.linspace(-1, 1, 64).view(4, 16),)),
    "convolution": (convolutions, ["0", "2"], (torch.linspace(-1, 1, 96).view(2, 3, 4, 4),)),
    "llama": (llama, ["q_proj", "k_proj", "v_proj", "up_proj"], TOKENS),
    "gpt2": (gpt2, ["c_attn", "c_fc"], TOKENS),
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rank-stabilised": {"use_rslora": True, "lora_alpha": 4},
    "dropout": {"lora_dropout": 0.5},
    "bias": {"lora_bias": True},
}


def computed(model: nn.Module, example: Any) -> Tensor:
    with torch.no_grad():
        found = model(**example) if isinstance(example, dict) else model(*example)
    return found if isinstance(found, Tensor) else found.logits


@orders
@storages
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_adapter_merges_without_loss(name: str, kind: str, order: str, storage: str) -> None:
    build, targets, example = MODELS[name]
    if kind == "bias" and name in ("llama", "convolution"):
        pytest.skip("PEFT merges a bias only into a layer that has one")
    torch.manual_seed(0)
    adapt = functools.partial(peft_model, target_modules=targets, r=4, **KINDS[kind])
    model = adapt(build()) if order == "before" else build()
    sparse = gp.SparseModel(model, sparsity=0.8, storage=storage)
    sparse.prune()
    adapter = model if order == "before" else adapt(model)
    masks = sparse.masks
    optimizer = torch.optim.SGD([p for p in adapter.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        found = adapter(**example) if isinstance(example, dict) else adapter(*example)
        (found if isinstance(found, Tensor) else found.logits).square().mean().backward()
        optimizer.step()
    adapter.eval()
    before = computed(adapter, example)
    with adapter.disable_adapter():
        without = computed(adapter, example)
    assert not torch.allclose(before, without, atol=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        merged = adapter.merge_and_unload()
    torch.testing.assert_close(computed(merged, example), before, rtol=1e-4, atol=1e-5)
    state = merged.state_dict()
    names = [name.replace("base_model.model.", "").replace("base_layer.", "") for name in masks]
    assert all(torch.equal(state[name] != 0, mask) for name, mask in zip(names, masks.values(), strict=True))


@storages
def test_what_an_adapter_would_add_at_pruned_weights_has_no_effect_and_no_gradient(storage: str) -> None:
    layer = nn.Linear(4, 1, bias=False)
    layer.weight.data = torch.tensor([[4.0, 3.0, 2.0, 1.0]])
    sparse = gp.SparseModel(nn.Sequential(layer), sparsity=0.5, storage=storage)
    sparse.prune()
    adapter = peft_model(sparse.model, target_modules=["0"], r=1, lora_alpha=1)
    lora = adapter.base_model.model[0]
    lora.lora_A["default"].weight.data = torch.tensor([[1.0, 2.0, 3.0, -4.0]])
    lora.lora_B["default"].weight.data = torch.tensor([[0.5]])
    found = adapter(torch.ones(1, 4))
    assert found.tolist() == [[4.5 + 4.0]]  # 4 + 0.5 and 3 + 1, and nothing of the others
    found.sum().backward()
    assert lora.lora_A["default"].weight.grad.tolist() == [[0.5, 0.5, 0.0, 0.0]]
    assert lora.lora_B["default"].weight.grad.tolist() == [[3.0]]


def test_two_adapters_at_once_merge_without_loss() -> None:
    sparse = made("neither", "masked")
    adapter = peft_model(sparse.model)
    peft = pytest.importorskip("peft")
    adapter.add_adapter("second", peft.LoraConfig(target_modules=["0"], r=3, lora_dropout=0.5))
    nn.init.normal_(adapter.base_model.model[0].lora_B["second"].weight)
    adapter.base_model.set_adapter(["default", "second"])
    adapter.eval()
    x = torch.randn(3, 16)
    before = computed(adapter, (x,))
    torch.testing.assert_close(computed(adapter.merge_and_unload(["default", "second"]), (x,)), before)


def test_dora_and_mixed_batches_are_refused() -> None:
    dora = made("neither", "masked")
    adapter = peft_model(dora.model, use_dora=True)
    with pytest.raises(gp.GrowpruneError, match="DoraLinearVariant"):
        adapter(torch.zeros(1, 16))
    with pytest.raises(gp.GrowpruneError, match="DoraLinearVariant"):
        adapter.merge_and_unload()
    mixed = peft_model(made("neither", "masked").model).eval()
    with pytest.raises(gp.GrowpruneError, match="'default', '__base__'"):
        mixed(torch.zeros(2, 16), adapter_names=["default", "__base__"])


@orders
@storages
@pytest.mark.parametrize("name", ["IA3Config", "LoHaConfig", "OFTConfig"])
def test_adapters_of_other_kinds_merge_and_unload_what_lives(order: str, storage: str, name: str) -> None:
    peft = pytest.importorskip("peft")
    options = {"IA3Config": {"feedforward_modules": ["2"]}, "LoHaConfig": {"r": 2}, "OFTConfig": {"oft_block_size": 4}}
    config = getattr(peft, name)(target_modules=["0", "2"], **options[name])
    model = peft.get_peft_model(base(), config) if order == "before" else base()
    sparse = gp.SparseModel(model, sparsity=0.9, storage=storage)
    assert sparse.num_prunable == 640
    sparse.prune()
    adapter = model if order == "before" else peft.get_peft_model(model, config)
    before = [t for n, t in adapter.state_dict().items() if n.endswith("base_layer.weight")]
    before = [t.clone() for t in before]
    for parameter in adapter.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.1)
    merged = adapter.merge_and_unload()
    found = [t for n, t in merged.state_dict().items() if n.endswith("weight")]
    assert [int(t.count_nonzero()) for t in found] == [51, 13]
    assert not any(torch.equal(old, new) for old, new in zip(before, found, strict=True))
