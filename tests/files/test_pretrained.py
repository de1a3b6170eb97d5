"""Folders that others load dense and we load sparse; with transformers where it is."""

import gc
import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file
from torch import Tensor, nn

import growprune as gp
from growprune.files import importers
from growprune.files.convert import convert
from growprune.files.weights_file import weights_file

storages = pytest.mark.parametrize("storage", ["masked", "compact"])


class Net(nn.Module):
    """With a tied head, statistics, and a buffer that no file has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.norm = nn.Embedding(12, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.more, self.head = nn.Linear(8, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((8,), 0.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.more(self.norm(self.body(self.embed(x)) * self.scale)))


def saved(folder: Path, storage: str = "masked", **settings: Any) -> gp.SparseModel:
    torch.manual_seed(0)
    sparse = gp.SparseModel(Net(), **({"sparsity": 0.75} | settings), storage=storage)
    sparse.prune()
    sparse.model(torch.arange(12))  # changes the statistics
    sparse.model.eval()
    gp.save_pretrained(sparse, folder)
    return sparse


def check_same(found: gp.SparseModel, expected: gp.SparseModel) -> None:
    state = expected.model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in found.model.state_dict().items())
    assert all(torch.equal(mask, expected.masks[name]) for name, mask in found.masks.items())
    assert found.num_alive == expected.num_alive == found.num_prunable // 4


@storages
def test_the_dense_file_is_the_model_bit_for_bit_to_who_has_no_growprune(storage: str, tmp_path: Path) -> None:
    sparse, model = saved(tmp_path, storage), Net().eval()
    load_model(model, tmp_path / "model.safetensors")
    assert torch.equal(model(torch.arange(12)), sparse.model(torch.arange(12)))
    assert sorted(load_file(tmp_path / "model.safetensors")) == sorted(set(model.state_dict()) - {"head.weight"})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "growprune.json",
        "growprune.safetensors",
        "model.safetensors",
    ]


@storages
@pytest.mark.parametrize("other", ["masked", "compact"])
def test_what_is_loaded_is_what_was_saved_in_any_storage(storage: str, other: str, tmp_path: Path) -> None:
    sparse = saved(tmp_path, storage)
    for model in (Net(), Net):
        found = gp.from_pretrained(model, tmp_path, storage=other)
        check_same(found, sparse)
        assert found.storage == other
        assert found.model.head.weight is found.model.embed.weight
        assert torch.equal(found.model.eval()(torch.arange(12)), sparse.model(torch.arange(12)))
        optimizer = found.attach(torch.optim.SGD(found.model.parameters(), lr=0.1))
        found.model(torch.arange(12)).sum().backward()
        optimizer.step()
        assert found.num_alive == sparse.num_alive


def test_what_is_built_to_be_compact_never_has_its_dense_weights(tmp_path: Path) -> None:
    sparse = gp.SparseModel(nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))), sparsity=0.9)
    sparse.prune()
    gp.save_pretrained(sparse, tmp_path)
    real = []

    def build() -> nn.Module:
        model = nn.Sequential()
        for i in range(8):
            model.append(nn.Linear(64, 64))
            gc.collect()
            real.append(sum(p.numel() for p in model.parameters() if not p.is_meta))
            assert len(model) == i + 1
        return model

    found = gp.from_pretrained(build, tmp_path, storage="compact")
    assert real == [0] * 8
    assert sum(p.numel() for p in found.model.parameters()) == 8 * (410 + 64)


READERS: dict[str, Callable[[Path], Any]] = {
    "from_pretrained": lambda folder: gp.from_pretrained(Net, folder),
    "import": importers.read,
    "weights": weights_file,
    "convert": lambda folder: convert(folder, folder.with_suffix(".safetensors")),
}
readers = pytest.mark.parametrize("read", READERS.values(), ids=READERS)


@readers
def test_folder_with_another_safetensors_file_is_read_as_sparse(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    saved(tmp_path / "model")
    save_file({"a": torch.zeros(1)}, tmp_path / "model" / "adapter_model.safetensors")
    read(tmp_path / "model")
    assert weights_file(tmp_path / "model").name == "growprune.safetensors"


@readers
@pytest.mark.parametrize("change", ["overwritten", "replaced by several files", "interrupted"])
def test_folder_whose_sparse_file_may_be_out_of_date_is_refused(
    tmp_path: Path, change: str, read: Callable[[Path], Any]
) -> None:
    saved(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    if change == "overwritten":
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    elif change == "replaced by several files":
        path.rename(path.with_name("model-1-of-1.safetensors"))
    else:
        (tmp_path / "model" / "growprune.json").unlink()
    with pytest.raises(gp.GrowpruneError, match=r"model\.safetensors.*SparseModel.from_zeros"):
        read(tmp_path / "model")


@readers
def test_folder_with_only_the_sparse_file_is_read(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    saved(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    read(tmp_path / "model")
    assert weights_file(tmp_path / "model").name == "growprune.safetensors"


def test_a_folder_that_is_not_ours_or_not_whole_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(gp.GrowpruneError, match="is not a folder"):
        gp.from_pretrained(Net, tmp_path / "none")
    saved(tmp_path)
    about = tmp_path / "growprune.json"
    about.write_text(json.dumps([1]))
    with pytest.raises(gp.GrowpruneError, match=r"growprune.json is damaged"):
        gp.from_pretrained(Net, tmp_path)
    (tmp_path / "growprune.safetensors").unlink()
    with pytest.raises(gp.GrowpruneError, match=r"not written by growprune.save_pretrained, .*SparseModel.from_zeros"):
        gp.from_pretrained(Net, tmp_path)


def test_our_sparse_file_under_their_name_is_refused_with_the_reason(tmp_path: Path) -> None:
    sparse = saved(tmp_path)
    gp.save(sparse, tmp_path / "model.safetensors")
    reason = r"model.safetensors is a sparse file of growprune under the name of transformers' dense weights"
    with pytest.raises(gp.GrowpruneError, match=rf"{reason}.*: load it with growprune.load\("):
        gp.from_pretrained(Net, tmp_path)
    with pytest.raises(gp.GrowpruneError, match=f"{reason}.*: use another folder"):
        gp.save_pretrained(sparse, tmp_path)


def test_a_model_with_adapters_is_refused(tmp_path: Path) -> None:
    sparse = gp.SparseModel(Net(), sparsity=0.75)
    sparse.model.peft_config = {}
    with pytest.raises(gp.GrowpruneError, match="has adapters: merge them first"):
        gp.save_pretrained(sparse, tmp_path)


# Out of our hands: what torch itself exports


def pruned(storage: str) -> gp.SparseModel:
    torch.manual_seed(0)
    sparse = gp.SparseModel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), sparsity=0.75, storage=storage)
    sparse.prune()
    return sparse


def test_torch_exports_and_pickles_a_masked_model_as_it_is() -> None:
    sparse, x = pruned("masked"), torch.randn(2, 8)
    program = torch.export.export(sparse.model, (x,))
    assert torch.equal(program.module()(x), sparse.model(x))
    assert int(program.state_dict["0.weight"].count_nonzero()) == 16
    assert torch.equal(pickle.loads(pickle.dumps(sparse.model))(x), sparse.model(x))


def assign(model: nn.Module, x: Tensor) -> None:
    model[0].weight = nn.Parameter(torch.zeros(8, 8))  # as torchao does


WAYS_OUT: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "export": lambda model, x: torch.export.export(model, (x,)),
    "trace": lambda model, x: torch.jit.trace(model, (x,)),
    "script": lambda model, x: torch.jit.script(model),
    "pickle": lambda model, x: pickle.dumps(model),
    "save": lambda model, x: torch.save(model, io.BytesIO()),
    "assign": assign,
}


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("way", WAYS_OUT)
def test_a_compact_model_says_what_to_do_before_it_is_exported(way: str) -> None:
    sparse, x = pruned("compact"), torch.randn(2, 8)
    expected = sparse.model(x)
    with pytest.raises(gp.GrowpruneError, match=r"call sparse.to_dense_\(\) first"):
        WAYS_OUT[way](sparse.model, x)
    assert torch.equal(sparse.model(x), expected)
    WAYS_OUT[way](sparse.to_dense_(), x)


@storages
def test_torchao_quantizes_the_model_and_keeps_its_zeros(storage: str) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = pruned(storage).to_dense_()
    dead = model[0].weight == 0
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    assert torch.equal(model[0].weight.dequantize() == 0, dead)


# With transformers itself


def tiny(name: str) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    configs = {
        "bert": lambda: transformers.BertConfig(vocab_size=32, **small),
        "gpt2": lambda: transformers.GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2),
        "llama": lambda: transformers.LlamaConfig(vocab_size=32, num_key_value_heads=1, **small),
        "mixtral": lambda: transformers.MixtralConfig(
            vocab_size=32, num_key_value_heads=1, num_local_experts=4, **small
        ),
    }
    kinds = {"bert": "BertForSequenceClassification", "gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM"}
    kind = getattr(transformers, kinds.get(name, "MixtralForCausalLM"))
    return kind, kind(configs[name]()).eval()


@storages
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "mixtral"])
def test_transformers_loads_the_folder_exactly_and_we_load_it_sparse(name: str, storage: str, tmp_path: Path) -> None:
    kind, model = tiny(name)
    sparse = gp.SparseModel(model, sparsity=0.75, storage=storage)
    sparse.prune()
    ids = torch.arange(12).view(1, 12)
    with torch.no_grad():
        expected = model(ids).logits
    gp.save_pretrained(sparse, tmp_path)
    plain = kind.from_pretrained(tmp_path)
    state = model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in plain.state_dict().items())
    for other in ("masked", "compact"):
        found = gp.from_pretrained(kind, tmp_path, storage=other)
        check_same(found, sparse)
        assert not found.model.training
        with torch.no_grad():
            assert torch.equal(found.model(ids).logits, expected)


def test_an_auto_class_finds_the_model_and_its_dtype(tmp_path: Path) -> None:
    _, model = tiny("llama")
    transformers = pytest.importorskip("transformers")
    sparse = gp.SparseModel(model.to(torch.bfloat16), sparsity=0.75)
    sparse.prune()
    model.generation_config.max_new_tokens = 7
    gp.save_pretrained(sparse, tmp_path)
    found = gp.from_pretrained(transformers.AutoModelForCausalLM, tmp_path)
    check_same(found, sparse)
    assert found.model.dtype == torch.bfloat16
    assert found.model.generation_config.max_new_tokens == 7
    assert torch.get_default_dtype() == torch.float32
