"""What is refused on loading."""

import io
import json
import zlib
from pathlib import Path

import pytest
import safetensors.torch
import torch
from file_cases import Change, both, entry, header, settings_of, tampered, target, tensor
from torch import Tensor, nn

from growprune.errors import GrowpruneError
from growprune.files import sparse_file as file
from growprune.files.reader import SparseFile
from growprune.sparse.model import SparseModel


def bits(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def refuse(path: Path, message: str, model: nn.Module | None = None) -> None:
    """Loading is refused with a message of one line, and does not touch the model."""
    model = target() if model is None else model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(GrowpruneError, match=message) as caught:
        file.load(path, model)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(path))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (nn.Linear(3, 4, bias=False), r"weight .*\(3, 4\).*\(4, 3\)"),
        (nn.Linear(4, 3), "bias"),
        (nn.Sequential(target()), r"0\.weight"),
        (nn.Identity(), "weight"),
        (target().half(), r"weight .*torch\.float32.*torch\.float16"),
    ],
)
def test_a_model_with_other_tensors_is_refused(model: nn.Module, named: str, old: Path) -> None:
    refuse(old, named, model)


def test_a_model_on_the_meta_device_may_have_a_buffer_that_repeats_its_numbers(tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 8))
        model.register_buffer("mask", torch.arange(3.0).expand(4, 3))
        return model

    path = tmp_path / "model.safetensors"
    sparse = SparseModel(make(), sparsity=0.5)
    sparse.prune()
    file.save(sparse, path)
    with torch.device("meta"):
        empty = make()
    assert torch.equal(file.load(path, empty).model.get_buffer("mask"), torch.arange(3.0).expand(4, 3))


@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_a_model_without_memory_is_given_some(old: Path, storage: str) -> None:
    loaded, expected = (file.load(old, model, storage=storage) for model in (target().to("meta"), target()))
    state = expected.model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.model.state_dict().items())
    assert loaded.num_alive == expected.num_alive


def test_a_buffer_that_is_in_no_file_must_have_memory(old: Path) -> None:
    model = target()
    model.register_buffer("scale", torch.ones(2, device="meta"), persistent=False)
    with pytest.raises(ValueError, match=r"cannot fill scale, a non-persistent buffer on the meta device: build"):
        file.load(old, model)


def test_a_model_with_other_ties_is_refused(tmp_path: Path) -> None:
    tied, untied = (nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)}) for _ in "12")
    tied["b"].weight = tied["a"].weight
    for name, model in {"tied": tied, "untied": untied}.items():
        file.save(SparseModel(model, sparsity=0.0), tmp_path / name)
    refuse(tmp_path / "tied", "b.weight and a.weight are tied only in the file: build", untied)
    refuse(tmp_path / "untied", "b.weight and a.weight are tied only in the model: build", tied)


@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_a_refused_model_is_not_even_half_sparse(storage: str, tmp_path: Path) -> None:
    sparse = SparseModel(nn.Conv2d(4, 4, 3), sparsity=0.5)
    sparse.prune()
    file.save(sparse, tmp_path / "model")
    model = nn.ConvTranspose2d(4, 4, 3)
    with pytest.raises(GrowpruneError, match="the file has other matrices in weight"):
        file.load(tmp_path / "model", model, storage=storage)
    assert type(model) is nn.ConvTranspose2d


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(FileNotFoundError, match=f"{path.name} is not a file: pass the path of a file"):
            file.load(path, target())


def saved_by_torch() -> bytes:
    buffer = io.BytesIO()
    torch.save({"weight": torch.zeros(3, 4)}, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (safetensors.torch.save({"weight": torch.zeros(3, 4)}), "not a growprune file: .* safetensors.torch.load_file"),
        (saved_by_torch(), "a checkpoint of torch, which `growprune convert` reads"),
        *((garbage, "not a safetensors file") for garbage in (b"", b"short", b"\xff" * 100, b"{}" * 50)),
    ],
)
def test_other_files_are_refused(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(content)
    refuse(tmp_path / "other", said)


def test_a_file_cut_short_anywhere_is_refused(old: Path) -> None:
    content = old.read_bytes()
    cut = old.with_name("cut")
    for length in range(len(content)):
        cut.write_bytes(content[:length])
        with pytest.raises(ValueError, match="is not a safetensors file, or is incomplete"):
            file.load(cut, target())


TAMPERED: dict[str, tuple[Change, str]] = {
    "another version": (header(version="4"), "'4'"),
    "no version": (header(version=None), "None"),
    "no manifest": (header(manifest="[1]"), "manifest"),
    "a deep manifest": (header(manifest="[" * 100_000), "manifest"),
    "no checksum of the manifest": (header(manifest_crc32=None), "manifest_crc32"),
    "no checksum of a tensor": (entry("crc32"), "crc32"),
    "no checksum of a mask": (entry("mask_crc32"), "mask_crc32"),
    "another value": (tensor("weight.values", torch.tensor([9, -8, 7.5])), "values of weight"),
    "a sparsity of two": (settings_of(sparsity=2), "2"),
    "a glob that takes hours to match": (settings_of(include=["[" * 300_000]), "at most 1000 characters"),
    "an unknown pattern": (settings_of(pattern="hexagons"), "'hexagons'"),
    "a block as large as the world": (settings_of(pattern="1x9999999999"), "1024"),
    "another shape": (entry(shape=[3, 5], matrices=[[0, 3]]), r"weight .*\(3, 5\)"),
    "a huge shape": (entry(shape=[3, 10**15]), "375000000000000"),
    "a negative shape": (entry(shape=[3, -4]), "-4"),
    "a shape of very many dimensions": (entry(shape=[2**62] * 100_000), "more than 64 dimensions"),
    "matrices beyond the end": (entry(matrices=[[0, 4]]), "matrices of weight"),
    "other matrices": (entry(matrices=[[0, 1], [1, 3]]), "matrices in weight"),
    "no target": (entry("target"), "target"),
    "a target of two": (entry(target=2.0), "target of 2.0"),
    "more alive than there are weights": (entry(nnz=13), "13 live weights of 12"),
    "an alias of nothing": (settings_of(aliases={"a": "b"}), "a as another name of b"),
    "a value too few": (tensor("weight.values", torch.ones(2)), r"weight\.values .*\[2\].*\[3\]"),
    "a value too few and a count to match": (
        both(tensor("weight.values", torch.ones(2)), entry(nnz=2)),
        "3 live weights, but 2 values",
    ),
    "a bit moved": (tensor("weight.mask", bits(34, 8)), "mask of weight"),
    "a bit behind the end": (
        both(tensor("weight.mask", bits(33, 24)), entry(mask_crc32=zlib.crc32(bytes([33, 24])))),
        "mask of weight with bits set after its end",
    ),
    "a bit more and a checksum to match": (
        both(tensor("weight.mask", bits(35, 8)), entry(mask_crc32=zlib.crc32(bytes([35, 8])))),
        "4 live weights, but 3 values",
    ),
    "a tensor lost": (tensor("weight.mask", None), r"weight\.mask"),
    "a tensor added": (tensor("extra", torch.ones(1)), "extra"),
    "int8 values of an older growprune": (
        both(tensor("weight.values", bits(1, 2, 3).char()), tensor("weight.scales", torch.ones(3, 1))),
        r"weight\.scales",
    ),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_a_tampered_file_is_refused(what: str, old: Path) -> None:
    change, message = TAMPERED[what]
    refuse(tampered(old, change), message)


HOSTILE = "a\n\x1b[31m" * 50_000


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors, about, manifest: manifest["tensors"].update({HOSTILE: {"shape": [1]}}),
        tensor(HOSTILE, torch.ones(1)),
        header(version=HOSTILE),
        settings_of(pattern=HOSTILE),
        settings_of(keep_dense=[HOSTILE]),
    ],
)
def test_an_error_shows_little_of_a_hostile_file_and_in_one_line(change: Change, old: Path) -> None:
    path = tampered(old, change)
    with pytest.raises(GrowpruneError) as caught:
        file.load(path, target())
    assert len(str(caught.value)) < len(str(path)) + 500
    assert str(caught.value).isprintable()


def test_a_header_that_lies_about_sizes_is_refused(tmp_path: Path) -> None:
    for shape in ([10**12, 10**12], [2], [2**63 - 1]):
        header = json.dumps({"weight": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}).encode()
        (tmp_path / "liar").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
        refuse(tmp_path / "liar", "is not a safetensors file, or is incomplete")


def test_dead_blocks_cannot_blow_a_small_file_up(old: Path) -> None:
    nothing = tensor("weight.values", torch.zeros(0)), tensor("weight.mask", torch.zeros(1 << 10, dtype=torch.uint8))
    large = entry(shape=[1 << 23, 1 << 10], matrices=[[0, 1 << 23]], nnz=0)
    huge = tampered(old, both(*nothing, settings_of(pattern="1024x1024"), large))
    refuse(huge, "has weight with shape")
    with pytest.raises(GrowpruneError, match="34359738368 bytes, over 1000 times"):
        file.read(huge)
    assert file.manifest(huge)["totals"]["dense_bytes"] == 34359738368  # the header can always be looked at


def test_a_manifest_is_read_from_the_header_alone(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SparseFile, "bits", None)
    monkeypatch.setattr(SparseFile, "values", None)
    assert file.manifest(old)["tensors"]["weight"]["nnz"] == 3
