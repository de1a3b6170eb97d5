"""Deployed models give what torch gives, however they are stored, shaped and taken apart."""

import copy
import io
import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import growprune as gp
from growprune.deployment.api import deploy_on_gpu
from growprune.deployment.cpu import library, tuning
from growprune.deployment.example import Example
from growprune.deployment.graph.places import Strides, as_matrix, feature_major
from growprune.deployment.graph.program import assign
from growprune.deployment.layer_table import Table
from growprune.deployment.parts import MOST_PLANS, LinearPart, Part
from growprune.deployment.skeleton import skeleton_of
from growprune.tasks.classification.resnet import ResNet
from growprune.tasks.translation import Translation

TOLERANCE = 1e-5


def sparse_of(model: nn.Module, sparsity: float = 0.8, **settings: Any) -> gp.SparseModel:
    """The model in eval mode with random masks, and norms that have seen something."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor, low, high in (
                (module.running_mean, -0.3, 0.3),
                (module.running_var, 0.5, 2.0),
                (module.weight.data, 0.5, 1.5),
                (module.bias.data, -0.3, 0.3),
            ):
                tensor.uniform_(low, high)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of small layers
        sparse = gp.SparseModel(model.eval(), sparsity=sparsity, **settings)
        sparse.prune(by=gp.By.RANDOM)
    return sparse


def assert_same(found: Any, expected: Any) -> None:
    """The same structure of tensors, as close as sums in another order can be."""
    (these, spec), (those, expected_spec) = pytree.tree_flatten(found), pytree.tree_flatten(expected)
    assert spec == expected_spec
    for a, b in zip(these, those, strict=True):
        if isinstance(b, Tensor):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            assert (a - b).abs().max() <= TOLERANCE * b.abs().max()
        else:
            assert type(a) is type(b)


def check(model: nn.Module, example: Any, **options: Any) -> gp.Deployed:
    """Deploy with random masks; both give the same, twice, and again with other numbers."""
    sparse = sparse_of(model, **options)
    deployed = gp.deploy(sparse, example, seconds=0)
    args, kwargs = ((), example) if isinstance(example, dict) else (example, {})
    args = args if isinstance(args, tuple) else (args,)
    for _ in range(2):
        with torch.no_grad():
            assert_same(deployed(*args, **kwargs), model(*args, **kwargs))
        args = tuple(torch.randn_like(x) if x.is_floating_point() else x.flip(-1) for x in args)
    return deployed


def choices(deployed: gp.Deployed) -> set[str]:
    return {row.choice for row in deployed.table}


# Networks of images


def test_resnet18_deploys_without_convolutions_or_norms_in_torch() -> None:
    torch.manual_seed(0)
    model = ResNet("resnet18", stem="cifar", width=16, num_classes=10)
    deployed = check(model, torch.randn(2, 3, 16, 16), keep_dense=["conv1", "fc"])
    assert [row.choice for row in deployed.table].count("sparse") == 19  # four stages of four, and three shortcuts
    assert deployed.table[0].layer == "conv1" and deployed.table[0].choice == "dense"
    assert "conv2d" not in deployed.table.in_torch and "batch_norm" not in deployed.table.in_torch


def test_resnet50_deploys_in_blocks_with_nothing_in_torch() -> None:
    torch.manual_seed(0)
    deployed = check(ResNet("resnet50", width=8, num_classes=10), torch.randn(1, 3, 40, 36), pattern="8x1")
    assert choices(deployed) == {"sparse"} and deployed.table.in_torch == ()


class Odd(nn.Module):
    """Things around convolutions that not every network has."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding="same", bias=True)
        self.norm = nn.BatchNorm2d(16)
        self.wide = nn.Conv2d(16, 24, (1, 3), stride=(2, 1), padding=(0, 2), dilation=(1, 2))
        self.grouped = nn.Conv2d(24, 24, 3, groups=4, padding=1)
        self.last = nn.Conv2d(24, 8, 1)
        self.head = nn.Linear(8 * 4, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        x = F.relu_(self.norm(F.gelu(self.first(x))))  # a norm that nothing can be folded to
        y = F.leaky_relu(self.wide(x), 0.1)
        y = F.avg_pool2d(y, 3, stride=2, padding=1)
        z = self.last(torch.cat([self.grouped(y)[:, :12], y[:, 12:]], 1))
        z += z * 0.5
        pooled = F.adaptive_avg_pool2d(F.pad(z, (0, z.shape[3] % 2, 0, z.shape[2] % 2)), 2)
        return self.head(pooled.flatten(1)), {"z": z, "y": y}


@pytest.mark.parametrize("pattern", ["unstructured", "8x1"])
def test_taps_that_only_see_padding_are_left_out(pattern: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(8, 16, 5, padding=2), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2, padding=1)),
        *(nn.Conv2d(16, 8, 3, padding=2, dilation=2), nn.Conv2d(8, 8, 3, padding=1)),
    )
    x, sparse = torch.randn(3, 8, 2, 2), sparse_of(model, pattern=pattern)
    expected, edge = model(x), model[0].weight.data[:, :, 0]
    edge[edge != 0] = torch.inf  # times padding, that would be NaN
    assert_same(gp.deploy(sparse, x, seconds=0)(x), expected)


def test_layers_among_operations_that_stay_in_torch() -> None:
    torch.manual_seed(0)
    deployed = check(Odd(), torch.randn(2, 3, 13, 11))
    assert {"pad", "batch_norm"} <= set(deployed.table.in_torch)
    assert {row.layer: row.choice for row in deployed.table} == {
        "first": "sparse",
        "wide": "sparse",
        "grouped": "torch",
        "last": "sparse",
        "head": "sparse",
    }


@settings(max_examples=10, phases=[Phase.explicit, Phase.generate])  # shrinking would take minutes
@given(data=st.data())
def test_deployed_random_convolution_networks_compute_the_same(data: st.DataObject) -> None:
    """Random channels, kernels, strides, norms, activations, pools and shortcuts."""
    torch.manual_seed(data.draw(st.integers(0, 99)))
    channels, layers = 3, []
    depth = data.draw(st.integers(1, 4))
    for layer in range(depth):
        # the last has several outputs: all that one gives may be what is left of larger numbers that cancel
        widths = [5, 8, 16, 19] if layer == depth - 1 else [1, 5, 8, 16, 19]
        width, kernel = data.draw(st.sampled_from(widths)), data.draw(st.sampled_from([1, 2, 3]))
        stride, padding = data.draw(st.integers(1, 2)), data.draw(st.integers(0, 1))
        layers += [nn.Conv2d(channels, width, kernel, stride, padding, bias=data.draw(st.booleans()))]
        layers += [nn.BatchNorm2d(width)] * data.draw(st.booleans())
        layers += [data.draw(st.sampled_from([nn.ReLU(inplace=True), nn.GELU(), nn.Sigmoid(), nn.Identity()]))]
        layers += [nn.MaxPool2d(2, 1, 1)] * data.draw(st.booleans())
        if stride == 1 and kernel == 3 and padding == 1:
            layers += [Shortcut(nn.Conv2d(width, width, 3, padding=1))]
        channels = width
    model = nn.Sequential(*layers)
    if all(len(p) < 2 for p in model.parameters()):
        return
    least = max(12, 2 ** (depth + 1) - 1)  # of which kernels of 3 and strides of 2 leave something in every layer
    size = data.draw(st.integers(least, least + 5))
    check(
        model, torch.randn(data.draw(st.integers(1, 3)), 3, size, size), sparsity=data.draw(st.sampled_from([0.5, 0.9]))
    )


class Shortcut(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.inner(x))


# Transformers


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(("batch_first", "activation"), [(True, "relu"), (False, "gelu")])
def test_torch_transformer_encoder_deploys_sparse(norm_first: bool, batch_first: bool, activation: Any) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.1, activation, batch_first=batch_first, norm_first=norm_first)
    deployed = check(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(3, 7, 32))
    assert choices(deployed) == {"sparse"}
    assert set(deployed.table.in_torch) <= {"layer_norm"}  # the first, if it comes before any layer


def test_deployed_attention_takes_boolean_additive_and_causal_masks() -> None:
    """A padding mask of booleans, an additive one, and none but causal; a row that may look nowhere is zero."""
    torch.manual_seed(0)

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))

        def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            q, k, v = (f(x).unflatten(2, (4, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
            found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            causal = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
            return self.out(found.transpose(1, 2).flatten(2)), causal

    model, x = Attention(), torch.randn(2, 5, 16)
    sparse = sparse_of(model)
    mask = torch.rand(2, 1, 5, 5) < 0.6
    mask[1, 0, 2] = False
    for given_mask in (mask, torch.randn(2, 4, 5, 5), torch.randn(5, 5)):
        deployed = gp.deploy(sparse, (x, given_mask), seconds=0)
        with torch.no_grad():
            assert_same(deployed(x, given_mask), model(x, given_mask))
        assert deployed.table.in_torch == ()


def translation() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    task = Translation(vocab_size=50, d_model=32, ffn=64, heads=4, encoder_layers=2, decoder_layers=2)
    torch.manual_seed(0)
    source, target = torch.randint(4, 50, (3, 9)), torch.randint(4, 50, (3, 6))
    source[1, 6:] = 0  # padding
    return task.build_model(), (source, target)


def test_translation_transformer_deploys_all_layers_sparse() -> None:
    model, example = translation()
    deployed = check(model, example)
    assert len(deployed.table) == 2 * 6 + 2 * 10 and choices(deployed) == {"sparse"}


def test_beam_search_runs_on_a_model_deployed_layer_by_layer() -> None:
    """By its layers it has its own methods, which beam search uses, at any length."""
    from growprune.tasks.translation.transformer import beam_search

    model, (source, _) = translation()
    sparse = sparse_of(model)
    deployed = gp.deploy(sparse, (source, source), seconds=0, whole=False)
    options: dict[str, Any] = {"beam": 2, "length_penalty": 1.0, "max_length": 12, "num_pieces": 50}
    found = beam_search(deployed.module, source, **options)  # type: ignore[arg-type]
    assert torch.equal(found, beam_search(model, source, **options))  # type: ignore[arg-type]
    assert sum(isinstance(module, LinearPart) for module in deployed.modules()) == 32


def gpt2() -> tuple[nn.Module, Tensor]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=50, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2Model(config), torch.randint(0, 50, (2, 8))


def test_gpt2_from_transformers_deploys_sparse() -> None:
    model, ids = gpt2()
    deployed = check(model, {"input_ids": ids, "use_cache": False})
    assert len(deployed.table) == 8 and choices(deployed) == {"sparse"}


def test_a_model_that_cannot_be_traced_is_deployed_part_by_part() -> None:
    """With its cache, which is no tensor, only parts of GPT-2 can be: all its layers."""
    model, ids = gpt2()
    deployed = gp.deploy(sparse_of(model), ids, seconds=0)
    with torch.no_grad():
        assert_same(deployed(ids).last_hidden_state, model(ids).last_hidden_state)
    assert type(deployed.module) is type(model) and len(deployed.table) == 8 and choices(deployed) == {"sparse"}
    assert deployed.table.in_torch[0].startswith("GPT2Model as a whole (")
    assert isinstance(deployed.module.h[0].mlp, Part)  # type: ignore[index, union-attr]


# Storage, files and folders


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(4, 16, 3), nn.BatchNorm2d(16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))  # type: ignore[no-any-return]


def test_the_model_is_left_as_it_is() -> None:
    torch.manual_seed(0)
    model, x = Small(), torch.randn(2, 4, 8, 8)
    sparse = sparse_of(model, storage="compact")
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    kind = type(model.conv)
    deployed = gp.deploy(sparse, x, seconds=0)
    assert model.training and type(model.conv) is kind
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    model.eval()
    with torch.no_grad():
        assert_same(deployed(x), model(x))
    assert sum(p.untyped_storage().nbytes() for p in deployed.module.conv.parameters()) < 200  # type: ignore[union-attr]


def test_a_plain_model_with_zeros_in_blocks_runs_in_blocks() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16)), torch.randn(4, 32)
    sparse_of(model, pattern="8x1").to_dense_()
    deployed = gp.deploy(model, x, seconds=0)
    assert {matrix.height for matrix in skeleton_of(model).matrices.values()} == {8}
    with torch.no_grad():
        assert_same(deployed(x), model(x))


def test_sparse_file_is_deployed_with_the_code_of_a_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Small(), torch.randn(2, 4, 8, 8)
    gp.save(sparse_of(model), tmp_path / "model.safetensors")
    deployed = gp.deploy(tmp_path / "model.safetensors", x, into=Small().eval(), seconds=0)
    with torch.no_grad():
        assert_same(deployed(x), model(x))
    with pytest.raises(gp.GrowpruneError, match="no code"):
        gp.deploy(tmp_path / "model.safetensors", x)


@pytest.mark.parametrize("whole", [True, False])
def test_saved_and_loaded_it_gives_the_same_bits(tmp_path: Path, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, example = translation()
    monkeypatch.setattr("growprune.deployment.api._times", lambda *_: (1.0, 2.0))
    taken = iter([(2e-3, 1e-3), (1e-3, 2e-3)] * 50)
    monkeypatch.setattr(tuning, "torch_and_our_seconds", lambda *_: next(taken))  # some sparse, some dense
    deployed = gp.deploy(sparse_of(model, storage="compact"), example, seconds=0.2, whole=whole)
    deployed.save(tmp_path / "out")
    loaded = gp.load_deployed(tmp_path / "out", translation()[0])
    assert torch.equal(loaded(*example), deployed(*example))
    assert loaded.table == deployed.table
    assert str(loaded.table) == str(deployed.table)


@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_loading_and_deploying_a_file_leave_the_given_model_as_it_is(tmp_path: Path, storage: str) -> None:
    torch.manual_seed(0)
    sparse, x = sparse_of(Small(), storage=storage), torch.randn(2, 4, 8, 8)
    gp.save(sparse, tmp_path / "model.safetensors")
    gp.deploy(sparse, x, seconds=0).save(tmp_path / "out")
    optimizer = sparse.attach(torch.optim.SGD(sparse.model.parameters(), lr=0.1))
    sparse.model(x).sum().backward()
    optimizer.step()
    kinds = [type(module) for module in sparse.model.modules()]
    parameters = dict(sparse.model.named_parameters())
    before = {name: tensor.clone() for name, tensor in sparse.model.state_dict().items()}
    loaded = gp.load_deployed(tmp_path / "out", sparse.model)
    assert_same(gp.deploy(tmp_path / "model.safetensors", x, into=sparse.model, seconds=0)(x), loaded(x))
    assert kinds == [type(module) for module in sparse.model.modules()]
    assert all(parameter is parameters[name] for name, parameter in sparse.model.named_parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in sparse.model.state_dict().items())
    gp.save(sparse, tmp_path / "again.safetensors")
    fresh = gp.load(tmp_path / "model.safetensors", Small())
    with torch.no_grad():
        assert_same(loaded(x), fresh.model.eval()(x))


def test_a_model_on_the_meta_device_is_enough_to_load_a_folder(tmp_path: Path) -> None:
    sparse, x = sparse_of(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))), torch.randn(2, 64)
    deployed = gp.deploy(sparse, x, seconds=0)
    deployed.save(tmp_path)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    assert torch.equal(gp.load_deployed(tmp_path, model)(x), deployed(x))
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_folder_of_another_machine_is_measured_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Small(), torch.randn(2, 4, 8, 8)
    gp.deploy(sparse_of(model), x, seconds=0).save(tmp_path)
    about = json.loads((tmp_path / "deployed.json").read_text())
    about["machine"]["cpu"] = "another"
    (tmp_path / "deployed.json").write_text(json.dumps(about))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "deployed, the model takes")
        loaded = gp.load_deployed(tmp_path, Small(), seconds=0.05)
    assert all(row.dense_ms is not None for row in loaded.table)
    with torch.no_grad():
        assert_same(loaded(x), model(x))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda about: "{", "is damaged"),
        (lambda about: {"format": 2}, "has format 2, but this growprune reads 3"),
        (lambda about: {"format": 3}, "is damaged"),
        (lambda about: about.update(device="tpu"), "is damaged .its device is 'tpu'"),
        (lambda about: about.update(device=2**64), "is damaged"),
        (lambda about: about["rows"][0].update(choice=[]), "is damaged .its rows.*.choice is"),
        (lambda about: about["rows"][0].update(layer=7), "is damaged .its rows.*.layer is 7"),
        (lambda about: about["rows"][0].update(dense_ms="1"), "is damaged .its rows.*.dense_ms is"),
        (lambda about: about["rows"][0]["tile"].update(threads=4096), "is damaged .a layer has more"),
        (lambda about: about.pop("runs") and None, "is damaged .it has no runs"),
        (lambda about: example_of(about).__setitem__(0, [1 << 20] * 2), "is damaged .ValueError: a tensor of"),
        (lambda about: about.update(example={}), "is damaged .KeyError: 'tensors'"),
        (lambda about: example_of(about).__setitem__(1, "load"), "is damaged .TypeError: a tensor is 4-dimensional"),
        (lambda about: example_of(about).__setitem__(0, [1, 5, 8, 8]), "the model failed on the example in"),
    ],
)
def test_what_a_folder_says_is_not_trusted(tmp_path: Path, change: Any, message: str) -> None:
    gp.deploy(sparse_of(Small()), torch.randn(1, 4, 8, 8), seconds=0).save(tmp_path)
    about = json.loads((tmp_path / "deployed.json").read_text())
    replaced = change(about)
    about = about if replaced is None else replaced
    (tmp_path / "deployed.json").write_text(about if isinstance(about, str) else json.dumps(about))
    with pytest.raises(gp.GrowpruneError, match=message) as raised:
        gp.load_deployed(tmp_path, Small())
    assert "\n" not in str(raised.value)


def example_of(about: dict[str, Any]) -> list[Any]:
    """The shape and dtype of its tensor."""
    found: list[Any] = about["example"]["tensors"]["0"]
    return found


def test_a_model_that_is_nearly_dense_in_all_is_saved_with_its_sparse_layer(tmp_path: Path) -> None:
    torch.manual_seed(0)

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2048))

    model, x = make(), torch.randn(4, 32)
    with torch.no_grad():
        model[0].weight.view(-1)[:921] = 0  # type: ignore[operator,union-attr]
    deployed = gp.deploy(model, x, seconds=0)
    deployed.save(tmp_path)
    sparse = gp.load(tmp_path / "model.safetensors", make())
    assert sparse.alive_by_weight() == {"0.weight": 1024 - 921, "2.weight": 32 * 2048}
    assert sparse.target_sparsity == pytest.approx(921 / (1024 + 32 * 2048))
    assert sparse.allocation == "global"
    assert_same(gp.load_deployed(tmp_path, make())(x), deployed(x))


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(gp.GrowpruneError, match="holds no deployed model"):
        gp.load_deployed(tmp_path, Small())


# What a model may do


class Doing(nn.Module):
    """Two layers, and what a function does with them."""

    def __init__(self, does: Any) -> None:
        super().__init__()
        self.first, self.second, self._does = nn.Linear(16, 16), nn.Linear(16, 16), does

    def forward(self, x: Tensor) -> Any:
        return self._does(self, x)


@pytest.mark.parametrize("tokens", [8, 5], ids=["as many as features", "fewer"])
def test_a_norm_over_another_dimension_than_the_features_is_not_folded_to_them(tokens: int) -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(tokens)
    for tensor in (norm.running_mean, norm.weight.data, norm.bias.data):
        tensor.normal_()
    check(nn.Sequential(nn.Linear(16, 8), norm), torch.randn(4, tokens, 16))


def written(view: Any) -> Any:
    def does(model: Any, x: Tensor) -> Tensor:
        y = model.first(x)
        view(y).add_(1)
        return model.second(y)

    return does


def heads(x: Tensor) -> Tensor:
    return x.view(x.shape[0], -1, 4, 4).transpose(1, 2)


def shared_values(model: Any, x: Tensor) -> Tensor:
    query = heads(model.first(x))
    return F.scaled_dot_product_attention(query, query, heads(model.second(x[:1])))


def mean_of_values(model: Any, x: Tensor) -> Tensor:
    query = heads(model.first(x))
    return F.scaled_dot_product_attention(query, query, heads(model.second(x)), scale=0.0)


DOES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "writes to its diagonal": (written(Tensor.diagonal), (16, 16)),
    "writes to a part of it": (written(lambda y: y[:, :4]), (16, 16)),
    "writes to its mT": (written(lambda y: y.mT), (16, 16)),
    "writes to what swapaxes gave": (written(lambda y: y.swapaxes(0, 1)), (16, 16)),
    "writes to what view_as gave": (written(lambda y: y.view_as(y)), (16, 16)),
    "writes to what unfold gave": (written(lambda y: y.unfold(0, 2, 2)), (16, 16)),
    "attends to values that all of a batch share": (shared_values, (2, 5, 16)),
    "attends with a scale of zero, which is a mean": (mean_of_values, (2, 5, 16)),
    "adds a bias that all features share": (
        lambda model, x: torch.addmm(model.second.bias[:1], x, model.first.weight.t()),
        (4, 16),
    ),
}


@pytest.mark.parametrize("name", DOES)
def test_operations_between_layers_compute_the_same_when_deployed(name: str) -> None:
    torch.manual_seed(0)
    does, shape = DOES[name]
    check(Doing(does), torch.randn(shape))


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.empty(16).uniform_(),
        lambda: torch.empty(16).exponential_(),
        lambda: torch.poisson(torch.full((16,), 9.0)),
        lambda: torch.randn(16),
    ],
    ids=["uniform", "exponential", "poisson", "normal"],
)
def test_what_a_model_draws_is_drawn_anew_in_each_call(draw: Any) -> None:
    deployed = gp.deploy(sparse_of(Doing(lambda model, x: model.first(x) + draw())), torch.randn(4, 16), seconds=0)
    x = torch.zeros(4, 16)
    assert not torch.equal(deployed(x), deployed(x))


def hooked(model: nn.Sequential, kind: str) -> None:
    if kind == "after":
        model[0].register_forward_hook(lambda module, args, result: result + 1)
    elif kind == "before":
        model[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    else:
        model[0].forward = lambda x: F.linear(x, model[0].weight) * 3


@pytest.mark.parametrize("kind", ["after", "before", "forward"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_layer_does_what_hooks_and_a_forward_of_its_own_make_it_do(kind: str, whole: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.randn(4, 64)
    sparse = sparse_of(model)
    hooked(model, kind)
    with torch.no_grad():
        expected = model(x)
    assert_same(gp.deploy(sparse, x, seconds=0, whole=whole)(x), expected)
    on_gpu = deploy_on_gpu(sparse, Example.of(x), device=torch.device("cpu"), seconds=0, known={})
    assert_same(on_gpu(x), expected)


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(F.relu(self.first(x)))
        return found


def test_tied_weights_are_in_all_their_places_however_the_model_runs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Tied(), torch.randn(4, 16)
    sparse = sparse_of(model)
    whole, by_layer = (gp.deploy(sparse, x, seconds=0, whole=whole) for whole in (True, False))
    whole.save(tmp_path)
    with torch.no_grad():
        expected = model(x)
    assert_same(whole(x), expected)
    assert_same(by_layer(x), expected)
    assert_same(gp.load_deployed(tmp_path, Tied())(x), expected)
    whole.stay_in_torch()
    assert_same(whole(x), expected)


def test_tied_weights_outlive_a_measurement() -> None:
    torch.manual_seed(0)
    skeleton = skeleton_of(sparse_of(model := Tied()))
    skeleton.fill_in()
    assert skeleton.module.first.weight is skeleton.module.second.weight
    assert torch.equal(skeleton.module.second.weight, model.first.weight)
    skeleton.empty()
    assert {module.weight.untyped_storage().nbytes() for module in skeleton.module.children()} == {4}


# Inputs


def test_inputs_of_other_shapes_get_plans_of_their_own_untimed_which_is_said_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = Small()
    monkeypatch.setattr("growprune.deployment.api._times", lambda *_: (1.0, 2.0))
    deployed = gp.deploy(sparse_of(model), torch.randn(1, 4, 8, 8), seconds=0.1)
    monkeypatch.setattr(tuning, "seconds_in_turns", None)
    shapes = [(batch, 4, size, 9) for batch in (2, 5) for size in range(4, 9)]
    with pytest.warns(UserWarning, match="was deployed with other input shapes") as said, torch.no_grad():
        for shape in [*shapes, (1, 4, 8, 8)]:
            x = torch.randn(shape)
            assert_same(deployed(x), model(x))
    assert len(said) == 1
    assert len(deployed.module.plans) == MOST_PLANS  # type: ignore[arg-type]


def test_a_layer_by_itself_takes_any_number_of_tokens_and_measures_none_in_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32))
    deployed = gp.deploy(sparse_of(model), torch.randn(1, 3, 32), seconds=0.01, whole=False)
    assert [row.shape for row in deployed.table] == ["32x32 x 4", "32x32 x 1"]  # the example, and a step of decoding
    monkeypatch.setattr(tuning, "seconds_in_turns", None)
    (part,) = deployed.module
    with torch.no_grad():
        for count in [2, 4, 8, 16, 32, 48, 64, 80, 96, 112, 2, 112]:
            x = torch.randn(count, 32)
            assert_same(deployed(x), model(x))
    assert len(part.plans) == MOST_PLANS


def test_a_model_that_generates_is_deployed_layer_by_layer() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 9}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, eos_token_id=None)
    model = transformers.LlamaForCausalLM(config).eval()
    tokens = torch.randint(0, 50, (2, 5))
    deployed = gp.deploy(sparse_of(model), {"input_ids": tokens}, seconds=0)
    expected = model.generate(tokens, max_new_tokens=8, do_sample=False, pad_token_id=0)
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("error")
        assert torch.equal(deployed.generate(tokens, max_new_tokens=8, do_sample=False, pad_token_id=0), expected)
    lines = str(deployed.table).splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) < 24
    assert any("q_proj (9 layers)" in line for line in lines)
    with pytest.raises(gp.GrowpruneError, match="generate"):
        gp.deploy(sparse_of(nn.Sequential(nn.Linear(16, 16))), torch.ones(1, 16), seconds=0).generate(tokens)


def test_more_threads_give_the_same() -> None:
    torch.manual_seed(0)
    model, x = Small(), torch.randn(2, 4, 8, 8)
    deployed = gp.deploy(sparse_of(model), x, seconds=0)
    torch.set_num_threads(2)
    try:
        with pytest.warns(UserWarning, match="other input shapes"), torch.no_grad():
            assert_same(deployed(x), model(x))
    finally:
        torch.set_num_threads(1)


def test_what_was_returned_is_not_overwritten_by_the_next_call() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Flatten(0)), torch.randn(4, 16)
    deployed = gp.deploy(sparse_of(model), x, seconds=0)
    first = deployed(x)
    kept = first.clone()
    deployed(torch.randn(4, 16))
    assert torch.equal(first, kept)


class Every(nn.Module):
    """Keeps a view, which torch makes of what a layer gave, while other layers use the memory again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        view = x[:, ::2]
        for layer in self.layers[1:]:
            x = layer(x)
        return view + x[:, 1::2]


def test_a_view_that_torch_makes_outlives_the_memory_it_was_of() -> None:
    torch.manual_seed(0)
    assert set(check(Every(), torch.randn(8, 16)).table.in_torch) <= {"add"}


# What stays in torch


def test_a_model_with_nothing_sparse_works_and_says_so(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Small().eval(), torch.randn(2, 4, 8, 8)
    with pytest.warns(UserWarning, match="no sparse weights"):
        deployed = gp.deploy(model, x)
    with torch.no_grad():
        assert torch.equal(deployed(x), model(x))
    assert deployed.is_in_torch and len(deployed.table) == 0
    deployed.save(tmp_path)
    with pytest.warns(UserWarning, match="no sparse weights"):
        assert torch.equal(gp.load_deployed(tmp_path, Small())(x), deployed(x))


class Branches(nn.Module):
    """Looks at its data, which no tracer can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Sequential(nn.Linear(16, 16), nn.ReLU()), nn.Linear(16, 16)
        self.odd = nn.Bilinear(4, 4, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.second(y) if y.sum() > 0 else self.odd(y[:, :4], x[:, :4])  # type: ignore[no-any-return]


def test_what_cannot_be_run_stays_in_torch_and_is_listed() -> None:
    torch.manual_seed(0)
    model, x = Branches(), torch.randn(3, 16)
    deployed = gp.deploy(sparse_of(model), x, seconds=0)
    for inputs in (x, -10 * x, torch.zeros(3, 16) - 5):
        with torch.no_grad():
            assert_same(deployed(inputs), model(inputs))
    chosen = {row.layer: row.choice for row in deployed.table}
    assert chosen == {"first.0": "sparse", "second": "sparse", "odd": "torch"}
    assert "Branches as a whole" in str(deployed.table)


def test_a_model_that_torch_runs_faster_stays_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Small(), torch.randn(2, 4, 8, 8)
    sparse = sparse_of(model)
    monkeypatch.setattr("growprune.deployment.api._times", lambda *_: (2.0, 1.0))
    with pytest.warns(UserWarning, match="takes 2 ms, and in torch 1 ms: it stays in torch"):
        deployed = gp.deploy(sparse, x, seconds=0.01)
    assert deployed.is_in_torch
    with torch.no_grad():
        assert_same(deployed(x), model(x))


def test_the_faster_of_both_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what was measured, and by nothing else."""
    torch.manual_seed(0)
    sparse = sparse_of(Small())
    monkeypatch.setattr("growprune.deployment.api._times", lambda *_: (1.0, 2.0))
    for taken, choice in (((2e-3, 1e-3), "sparse"), ((1e-3, 2e-3), "dense")):
        monkeypatch.setattr(tuning, "torch_and_our_seconds", lambda *_, taken=taken: taken)
        deployed = gp.deploy(sparse, torch.randn(2, 4, 8, 8), seconds=0.01)
        assert [row.choice for row in deployed.table] == [choice, choice]
        assert deployed.table[0].dense_ms == 1e3 * taken[0] and deployed.table[0].sparse_ms == 1e3 * taken[1]


def test_without_a_compiler_it_stays_in_torch_which_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3)), torch.randn(4, 64)
    monkeypatch.setenv("CXX", "no-such-compiler")
    library.found_once.cache_clear()
    try:
        with pytest.warns(UserWarning, match="no C\\+\\+ compiler was found .*: the model stays in torch") as said:
            deployed = check(model, x, sparsity=0.95)
        assert len(said) == 1
    finally:
        library.found_once.cache_clear()
    assert deployed.is_in_torch
    assert {row.layer: row.choice for row in deployed.table} == {"0": "torch", "2": "torch"}


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (3, {}, "deploy takes a SparseModel, a module or the path of a sparse file, got int"),
        (nn.Linear(2, 2), {"device": "cuda"}, "device is 'cuda'"),
        (nn.Linear(2, 2, device="meta"), {}, "the model is on meta: call model.cpu"),
    ],
)
def test_what_cannot_be_deployed_is_refused(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(gp.GrowpruneError, match=message):
        gp.deploy(model, torch.randn(2, 2), **options)


# Places in memory


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_places_are_where_torch_has_its_views(shape: list[int], data: st.DataObject) -> None:
    """Permuted, reshaped and cut, a tensor has the numbers that torch's has."""
    numbers = torch.arange(torch.Size(shape).numel())
    place, tensor = Strides.contiguous(shape), numbers.view(shape)
    for _ in range(3):
        order = data.draw(st.permutations(range(tensor.dim())))
        place, tensor = place.permute(order), tensor.permute(order)
        flat = data.draw(st.booleans())
        wanted = [tensor.numel()] if flat else data.draw(st.permutations(list(tensor.shape)))
        if (found := place.reshape(wanted)) is not None:
            place, tensor = found, tensor.reshape(wanted)
        axis = data.draw(st.integers(0, tensor.dim() - 1))
        start = data.draw(st.integers(0, tensor.shape[axis] - 1))
        if (found := place.narrow(axis, start, tensor.shape[axis] - start)) is not None:
            place, tensor = found, tensor.narrow(axis, start, tensor.shape[axis] - start)
    atoms = place.reshape([size for dimension in place.dimensions for size, _ in dimension])
    assert atoms is not None and atoms.torch is not None
    assert torch.equal(numbers.as_strided(*atoms.torch, atoms.offset).reshape(tensor.shape), tensor)
    assert place.shape == tuple(tensor.shape)


def test_heads_are_split_off_features_and_merged_with_the_batch_without_a_copy() -> None:
    place = feature_major((2, 3, 8), 2)  # batch, tokens, features
    heads = place.reshape((2, 3, 4, 2))
    merged = heads.permute((0, 2, 1, 3)).reshape((8, 3, 2))
    assert merged is not None and merged.torch is None and merged.canonical[0] == ((2, 3), (4, 12))
    matrix = as_matrix(place, 2)
    assert matrix is not None and matrix.torch == ((8, 6), (6, 1))
    assert as_matrix(place.permute((1, 0, 2)), 2) == matrix  # a layer does not care in which order its columns are
    assert as_matrix(place.permute((1, 0, 2)), 2, ordered=True) is None  # but a convolution does


@given(st.lists(st.tuples(st.integers(1, 100), st.integers(0, 9), st.integers(0, 5)), max_size=12))
def test_buffers_that_are_needed_at_once_never_overlap(buffers: list[tuple[int, int, int]]) -> None:
    sizes, spans = [size for size, _, _ in buffers], [(first, first + length) for _, first, length in buffers]
    offsets, total = assign(sizes, spans)
    for i in range(len(buffers)):
        assert offsets[i] % 16 == 0 and offsets[i] + sizes[i] <= total
        for j in range(i):
            meets = spans[i][0] <= spans[j][1] and spans[j][0] <= spans[i][1]
            apart = offsets[i] + sizes[i] <= offsets[j] or offsets[j] + sizes[j] <= offsets[i]
            assert apart or not meets


def normed() -> nn.Sequential:
    """What a batch norm gives tells whether it is trained."""
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    nn.init.uniform_(model[1].running_mean, -1, 1)  # type: ignore[arg-type]
    return model


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is where to move it")
@pytest.mark.parametrize("change", [lambda d: d.cuda(), lambda d: d.to("cuda")])
def test_a_deployed_model_cannot_be_moved_to_a_gpu_that_is_not_there(change: Any) -> None:
    deployed = gp.deploy(sparse_of(normed()), torch.randn(4, 16), seconds=0)
    with pytest.raises(gp.GrowpruneError, match=r"cannot be converted \(.+\): change the original model") as error:
        change(deployed)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("whole", [True, False])
def test_what_changes_nothing_can_be_asked_of_a_deployed_model(whole: bool) -> None:
    x = torch.randn(4, 16)
    deployed = gp.deploy(sparse_of(normed()), x, seconds=0, whole=whole)
    before = deployed(x)
    assert not deployed.training
    for same in (deployed.float(), deployed.cpu(), deployed.to("cpu"), deployed.to(torch.float32), deployed.eval()):
        assert same is deployed
    assert deployed.to_empty(device="cpu").train(False) is deployed
    assert torch.equal(deployed(x), before)


def test_a_model_that_is_deployed_in_half_precision_stays_in_torch_and_in_that() -> None:
    model, x = sparse_of(normed()).model.half(), torch.randn(4, 16).half()
    with pytest.warns(UserWarning, match=r"no sparse weights in float32, .* but some in torch.float16: it stays"):
        deployed = gp.deploy(model, x)
    assert deployed.half()(x).dtype == torch.float16
    with pytest.raises(gp.GrowpruneError, match=r"cannot become torch.float32"):
        deployed.float()


def test_a_layer_in_the_place_of_another_has_its_attributes() -> None:
    deployed = gp.deploy(sparse_of(nn.Sequential(nn.Linear(16, 8))), torch.randn(2, 16), seconds=0, whole=False)
    layer = deployed.module[0]  # type: ignore[index]
    assert (layer.in_features, layer.out_features) == (16, 8)
    assert not hasattr(layer, "nothing")


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda d: d.half(), "cannot become torch.float16"),
        (lambda d: d.double(), "cannot become torch.float64"),
        (lambda d: d.to("meta"), "cannot become torch.float32 on meta"),
        (copy.deepcopy, "neither copied nor pickled"),
        (pickle.dumps, "neither copied nor pickled"),
        (lambda d: torch.save(d, io.BytesIO()), "neither copied nor pickled"),
        (lambda d: d.train(), "cannot be trained"),
        (lambda d: d.state_dict(), "has no state_dict"),
        (lambda d: d.load_state_dict({}), "has no state_dict"),
    ],
)
def test_deployed_model_refuses_to_be_changed_or_copied(change: Any, error: str, whole: bool) -> None:
    x = torch.randn(4, 16)
    deployed = gp.deploy(sparse_of(normed()), x, seconds=0, whole=whole)
    before = deployed(x)
    with pytest.raises(gp.GrowpruneError, match=error):
        change(deployed)
    if "become" in error or "copied" in error:
        with pytest.raises(gp.GrowpruneError, match=error):
            change(deployed.module)
    assert torch.equal(deployed(x), before)


def test_printed_table_shortens_what_stays_in_torch() -> None:
    reasons = tuple(f"layer {i} (ValueError: {'long ' * 30})" for i in range(10))
    table = Table((), in_torch=reasons)
    assert max(map(len, str(table).splitlines())) <= 260 and "layer 0" in str(table)
    assert table.to_dict()["in_torch"] == reasons


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.filterwarnings("ignore:.*was deployed with other input shapes")
def test_deployed_model_runs_under_inference_mode(whole: bool) -> None:
    """Also where a shape is first seen there, and called outside of it later."""
    model = normed().eval()
    sparse = sparse_of(model)
    with torch.inference_mode():
        deployed = gp.deploy(sparse, torch.randn(4, 16), seconds=0, whole=whole)
    for batch in (4, 7):
        x = torch.randn(batch, 16)
        with torch.inference_mode():
            found = deployed(x).clone()
        with torch.no_grad():
            assert_same(found, model(x))
            assert_same(deployed(x), model(x))
