"""What other tools left behind becomes the model it was: values, masks, and nothing guessed."""

import copy
import io
import json
import os
import pickle
import random
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from paths import ROOT
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import prune

import growprune as gp
from growprune.files import importers
from growprune.files.importers import IMPORTERS


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))


def pruned_by_torch() -> nn.Sequential:
    """The first layer at 75 %, with a live weight that is zero; what is hidden keeps its value, as torch has it."""
    model = mlp()
    prune.l1_unstructured(model[0], "weight", amount=36)
    alive = model[0].weight_mask.nonzero()[0]
    model[0].weight_orig.data[tuple(alive)] = 0.0
    return model


def zeroed() -> dict[str, Tensor]:
    state = mlp().state_dict()
    state["0.weight"][:, 2:] = 0.0
    return state


# One format after another


def test_torch_prune_gives_masks_with_live_zeros_and_what_is_hidden_is_zero() -> None:
    model = pruned_by_torch()
    for source in (model, model.state_dict(), {"state_dict": model.state_dict(), "epoch": 1}):
        found = importers.read(source)
        assert found.format == "torch-prune"
        assert sorted(found.tensors) == ["0.bias", "0.weight", "2.bias", "2.weight"]
        assert torch.equal(found.tensors["0.weight"], model[0].weight_orig * model[0].weight_mask)
        assert torch.equal(found.masks["0.weight"], model[0].weight_mask.bool())
        assert list(found.masks) == ["0.weight"]
        assert (found.num_alive, int(found.tensors["0.weight"].count_nonzero())) == (12, 11)


def test_a_checkpoint_of_torch_prune_computes_the_same_in_a_plain_model(tmp_path: Path) -> None:
    model = pruned_by_torch()
    torch.save(model.state_dict(), tmp_path / "pruned.pt")
    fresh = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
    sparse = importers.load(tmp_path / "pruned.pt", fresh)
    x = torch.randn(3, 8)
    assert torch.equal(fresh(x), model(x))
    assert sparse.alive_by_weight() == {"0.weight": 12, "2.weight": 24}
    assert sparse.target_sparsity == 0.5  # 36 dead of 72


def test_torch_prune_in_the_old_format_of_torch_save_and_wrapped_by_ddp(tmp_path: Path) -> None:
    state = {f"module.{name}": tensor for name, tensor in pruned_by_torch().state_dict().items()}
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    found = importers.read(tmp_path / "old.pt")
    assert (found.format, found.num_alive, "0.weight" in found.tensors) == ("torch-prune", 12, True)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "_orig_mod.module.", "module._orig_mod."])
def test_what_was_compiled_and_wrapped_has_its_plain_names(prefix: str) -> None:
    found = importers.read({f"{prefix}{name}": tensor for name, tensor in zeroed().items()})
    assert set(found.tensors) == set(zeroed())


def test_a_part_of_the_model_that_is_called_as_a_wrapping_is_keeps_its_name() -> None:
    found = importers.read({f"module.module.{name}": tensor for name, tensor in zeroed().items()})
    assert set(found.tensors) == {f"module.{name}" for name in zeroed()}


def test_a_pruned_bias_is_zero_where_its_mask_is_and_is_no_matrix() -> None:
    model = pruned_by_torch()
    prune.l1_unstructured(model[0], "bias", amount=4)
    found = importers.read(model)
    assert int(found.tensors["0.bias"].count_nonzero()) == 2
    assert list(found.masks) == ["0.weight"]


def test_a_nan_that_is_pruned_is_gone() -> None:
    model = pruned_by_torch()
    model[0].weight_orig.data[model[0].weight_mask == 0] = torch.nan
    assert not importers.read(model).tensors["0.weight"].isnan().any()


def test_a_plain_checkpoint_gives_its_zeros_and_a_few_of_them_are_none() -> None:
    state = zeroed()
    state["2.weight"][0, 0] = 0.0  # of 24: less than 5 %
    found = importers.read(state)
    assert (found.format, list(found.masks), found.num_alive, found.sparsity) == ("dense", ["0.weight"], 12, 0.75)


def test_what_lies_beside_the_tensors_of_a_checkpoint_is_left_out(tmp_path: Path) -> None:
    checkpoint = {"state_dict": zeroed(), "recipe": "modifiers:", "epoch": 3}  # as of SparseML
    torch.save(checkpoint, tmp_path / "checkpoint.pth")
    found = importers.read(tmp_path / "checkpoint.pth")
    assert (found.format, found.num_alive, set(found.tensors)) == ("dense", 12, set(zeroed()))


def test_names_of_one_tensor_are_kept_together(tmp_path: Path) -> None:
    state = zeroed()
    torch.save({**state, "tied.weight": state["0.weight"]}, tmp_path / "tied.pt")
    found = importers.read(tmp_path / "tied.pt")
    assert (dict(found.aliases), "tied.weight" in found.tensors) == ({"tied.weight": "0.weight"}, False)


# Lightning itself


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_permanent", [False, True])
def test_a_checkpoint_that_lightnings_modelpruning_saved_is_the_model_it_pruned(
    is_permanent: bool, tmp_path: Path
) -> None:
    pl = pytest.importorskip("lightning.pytorch")

    class Module(pl.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = mlp()

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            return self.model(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    pruning = pl.callbacks.ModelPruning(
        "l1_unstructured",
        parameters_to_prune=[(module.model[0], "weight")],
        amount=0.5,
        make_pruning_permanent=is_permanent,
        verbose=0,
    )
    quiet = {name: False for name in ("logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary")}
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", callbacks=[pruning], default_root_dir=tmp_path, **quiet)
    trainer.fit(module, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(4, 8)), batch_size=4))
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    fresh = mlp()
    sparse = importers.load(tmp_path / "model.ckpt", fresh)  # whose names lack "model."
    x = torch.randn(3, 8)
    assert importers.read(tmp_path / "model.ckpt").format == ("dense" if is_permanent else "torch-prune")
    assert torch.equal(fresh(x), module.model(x))
    assert sparse.alive_by_weight() == {"0.weight": 24, "2.weight": 24}


# Into a model


def test_what_is_imported_trains_on_and_keeps_its_zeros() -> None:
    sparse = importers.load(pruned_by_torch(), mlp())
    mask = sparse.masks["0.weight"]
    optimizer = sparse.attach(torch.optim.Adam(sparse.model.parameters()))
    sparse.model(torch.randn(5, 8)).square().sum().backward()
    optimizer.step()
    weight = sparse.model.get_parameter("0.weight")
    assert not weight[~mask].any()
    assert int(weight.count_nonzero()) == 12  # the live zero has learned


def test_compact_storage_takes_an_import() -> None:
    masked, compact = (importers.load(pruned_by_torch(), mlp(), storage=s) for s in ("masked", "compact"))
    x = torch.randn(3, 8)
    assert torch.allclose(masked.model(x), compact.model(x))
    assert torch.equal(masked.masks["0.weight"], compact.masks["0.weight"])


def test_blocks_live_where_any_of_their_weights_does() -> None:
    state = mlp().state_dict()
    state["0.weight"][:, 4:] = 0.0
    state["0.weight"][0, 0] = 0.0
    sparse = importers.load(state, mlp(), pattern="1x4")
    assert sparse.alive_by_weight()["0.weight"] == 24


def test_a_model_with_nothing_sparse_is_loaded_and_says_so() -> None:
    with pytest.warns(UserWarning, match="the dense source has no sparse weights"):
        sparse = importers.load(mlp().state_dict(), mlp())
    assert (sparse.target_sparsity, sparse.num_alive) == (0.0, 72)


def test_a_sparse_embedding_is_named_if_the_model_keeps_it_dense() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2))
    state = copy.deepcopy(model.state_dict())
    state["0.weight"][:5] = 0.0
    with pytest.warns(UserWarning, match="0.weight is sparse in the source, but dense in the model"):
        importers.load(state, model)
    sparse = importers.load(state, model, include=["0.weight"])
    assert sparse.alive_by_weight() == {"1.weight": 8, "0.weight": 20}


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"other": torch.ones(2)}, "lacks 0.weight, which the model has; it has names like 'other'"),
        ({**zeroed(), "0.weight": torch.ones(6, 9)}, r"has 0.weight with shape \(6, 9\), but the model has \(6, 8\)"),
        ({**zeroed(), "more": torch.ones(2)}, "has more, which the model lacks"),
        ({name: tensor * 0 for name, tensor in zeroed().items()}, "all prunable weights of the source are zero"),
    ],
)
def test_another_model_is_refused_and_left_as_it_was(state: dict[str, Tensor], said: str) -> None:
    model = mlp()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(gp.GrowpruneError, match=said):
        importers.load(state, model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


# The wrong format, and what is no format


def sources(folder: Path) -> dict[str, Any]:
    sparse = gp.SparseModel(mlp(), sparsity=0.5)
    sparse.prune()
    gp.save(sparse, folder / "ours.safetensors")
    return {"growprune": folder / "ours.safetensors", "torch-prune": pruned_by_torch(), "dense": zeroed()}


def test_every_format_is_known_by_its_content(tmp_path: Path) -> None:
    found = sources(tmp_path)
    assert len(found) == len(IMPORTERS)
    for name, source in found.items():
        assert importers.read(source).format == name


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "neither safetensors nor a torch.save file"),
        (b"GGUF" + bytes(100), "neither safetensors nor a torch.save file"),
        (b"PK\x03\x04" + bytes(100), "not a complete checkpoint|would run code, or is damaged"),
        (b"\x80\x02}q\x00.", "not a complete checkpoint|would run code, or is damaged"),
        ((40).to_bytes(8, "little") + b"{" + bytes(100), "not a safetensors file"),
    ],
)
def test_what_is_no_checkpoint_is_said_in_one_line(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(gp.GrowpruneError, match=said) as raised:
        importers.read(tmp_path / "file")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"epoch": 3, "lr": 0.1}, "holds no tensors, only epoch, lr"),
        ({"a": torch.ones(2, 2).to_sparse()}, "has a, which is a Tensor of torch.sparse_coo"),
        ({"a": torch.ones(2, device="meta")}, "on the meta device"),
        (3, "source must be a path, a module or a state dict, got a int"),
        ("nowhere.pt", "nowhere.pt does not exist"),
    ],
)
def test_sources_without_plain_tensors_are_refused(source: Any, said: str) -> None:
    with pytest.raises(gp.GrowpruneError, match=said):
        importers.read(source)


# Nothing is run, and nothing grows


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("pwned",)


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_pickle_that_would_run_code_is_refused_in_one_line(
    is_zip: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": zeroed(), "x": Evil()}, "evil.pt", _use_new_zipfile_serialization=is_zip)
    with pytest.raises(gp.GrowpruneError, match=r"would run code.*posix.mkdir.*No code is run") as raised:
        importers.read("evil.pt")
    assert "\n" not in str(raised.value)
    assert not Path("pwned").exists()


def test_a_whole_model_in_a_pickle_is_refused_with_its_class(tmp_path: Path) -> None:
    torch.save(mlp(), tmp_path / "model.pt")
    with pytest.raises(gp.GrowpruneError, match=r"it has torch.nn.modules.container.Sequential"):
        importers.read(tmp_path / "model.pt")


def test_an_archive_that_would_unpack_to_any_size_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}) + bytes(10**6))
    with pytest.raises(gp.GrowpruneError, match=r"has a compressed 'archive/data.pkl'"):
        importers.read(tmp_path / "bomb.pt")


def test_a_tensor_that_repeats_a_few_bytes_without_end_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1).expand(1 << 40)}, tmp_path / "wide.pt")
    with pytest.raises(gp.GrowpruneError, match=r"has overlapping tensors, 4398046511104 bytes in a file of"):
        importers.read(tmp_path / "wide.pt")


def test_an_index_cannot_lead_out_of_its_folder(tmp_path: Path) -> None:
    save_file(zeroed(), tmp_path / "secret.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    index = {"weight_map": {"0.weight": "../secret.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(gp.GrowpruneError, match="a name points outside the folder"):
        importers.read(folder)


def test_a_folder_of_several_files_is_read_as_one(tmp_path: Path) -> None:
    state = zeroed()
    names = {name: f"model-{i % 2 + 1}-of-2.safetensors" for i, name in enumerate(state)}
    for file in set(names.values()):
        save_file({name: state[name] for name in state if names[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    found = importers.read(tmp_path)
    assert (sorted(found.tensors), found.num_alive) == (sorted(state), 12)


def test_reading_does_not_change_the_file(tmp_path: Path) -> None:
    save_file(zeroed(), tmp_path / "model.safetensors")
    before = (tmp_path / "model.safetensors").read_bytes()
    sparse = importers.load(tmp_path / "model.safetensors", mlp())
    sparse.prune(to=0.6)
    for tensor in importers.read(tmp_path / "model.safetensors").tensors.values():
        tensor.fill_(3.0)
    assert (tmp_path / "model.safetensors").read_bytes() == before


def saved(content: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, **options)
    return buffer.getvalue()


MUTATIONS = runpy.run_path(str(ROOT / "benchmarks" / "mutations.py"))["BYTES"]


@pytest.mark.filterwarnings("ignore")
def test_mutated_files_are_read_or_refused_in_one_line(tmp_path: Path) -> None:
    contents = [
        safetensors.torch.save(pruned_by_torch().state_dict()),
        saved(pruned_by_torch().state_dict()),
        saved(pruned_by_torch().state_dict(), _use_new_zipfile_serialization=False),
        saved({"state_dict": zeroed()}),
    ]
    numbers = random.Random(0)
    refused = 0
    for i in range(600):
        mutate = numbers.choice(MUTATIONS)
        (tmp_path / "file").write_bytes(mutate(numbers, contents[i % len(contents)]))
        try:
            importers.read(tmp_path / "file")
        except gp.GrowpruneError as error:
            refused += 1
            assert "\n" not in str(error)
    assert 200 < refused < 600


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of memory from /proc")
def test_memory_stays_below_twice_the_file(tmp_path: Path) -> None:
    weight = torch.randn(4096, 4096)
    weight[weight.abs() < 1.3] = 0  # 64 MiB, about 80 % zeros
    model = nn.Linear(4096, 4096, bias=False)
    model.weight.data = weight
    prune.custom_from_mask(model, "weight", weight != 0)
    torch.save(model.state_dict(), tmp_path / "pruned.pt")
    size = (tmp_path / "pruned.pt").stat().st_size
    code = """
import sys, torch, growprune.files.importers
def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024
torch.ones(8, 8) != 0
before = peak()
found = growprune.files.importers.read(sys.argv[1])
print(peak() - before, found.num_alive)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "pruned.pt")], capture_output=True, text=True)
    taken, alive = map(int, done.stdout.split())
    assert alive == int(weight.count_nonzero())
    assert taken < 2 * size


def test_a_safetensors_file_whose_length_begins_like_a_pickle_is_read_as_what_it_is(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    sparse = gp.SparseModel(model, sparsity=0.75)
    sparse.prune()
    path = tmp_path / "model.safetensors"
    gp.save(sparse, path)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    spaces = (0x80 - length) % 256  # a header may end in spaces
    path.write_bytes(
        (length + spaces).to_bytes(8, "little") + data[8 : 8 + length] + b" " * spaces + data[8 + length :]
    )
    assert path.read_bytes()[:1] == b"\x80"
    assert importers.read(path).format == "growprune"


@pytest.mark.parametrize("about", [{}, {"format": "pt"}, {"format": "growprunf", "manifest": "{}"}])
def test_a_sparse_file_of_ours_that_lost_its_metadata_is_not_taken_for_a_dense_one(
    about: dict[str, str], tmp_path: Path
) -> None:
    sparse = gp.SparseModel(nn.Linear(16, 8), sparsity=0.5)
    sparse.prune()
    gp.save(sparse, tmp_path / "model.safetensors")
    save_file(load_file(tmp_path / "model.safetensors"), tmp_path / "lost.safetensors", about)
    with pytest.raises(gp.GrowpruneError, match=r"has weight\.values and its mask.* lacks its metadata"):
        importers.read(tmp_path / "lost.safetensors")
