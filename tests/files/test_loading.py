"""What is refused on loading."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from file_cases import tampered, target
from torch import Tensor, nn

from growprune.errors import GrowpruneError
from growprune.files import sparse_file as file
from growprune.files.reader import SparseFile
from growprune.sparse.model import SparseModel


def refuse(path: Path, message: str, model: nn.Module | None = None) -> None:
    """Loading is refused with a message of one line, and does not touch the model."""
    model = target() if model is None else model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=message) as caught:
        file.load(path, model)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(path))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_model_with_another_shape_is_refused(old: Path) -> None:
    message = r"has weight with shape \(3, 4\), but the model has \(4, 3\): build the model that was saved"
    refuse(old, message, nn.Linear(3, 4, bias=False))


def test_a_model_with_more_or_other_tensors_is_refused(old: Path) -> None:
    refuse(old, "lacks bias, which the model has.*: build", nn.Linear(4, 3))
    refuse(old, "lacks 0.weight, which the model has", nn.Sequential(target()))


def test_a_model_with_fewer_tensors_is_refused(tmp_path: Path) -> None:
    sparse = SparseModel(nn.Linear(4, 3), sparsity=0.0)
    file.save(sparse, tmp_path / "model")
    refuse(tmp_path / "model", "has bias, which the model lacks: build")


def test_a_model_of_another_dtype_is_refused(old: Path) -> None:
    message = r"has weight as torch.float32, but the model has torch.float16: call model.to\(torch.float32\) first"
    refuse(old, message, target().half())


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


def test_a_model_whose_layers_are_of_another_kind_is_refused(tmp_path: Path) -> None:
    sparse = SparseModel(nn.Conv2d(4, 4, 3), sparsity=0.5)
    sparse.prune()
    file.save(sparse, tmp_path / "model")
    message = "does not fit the model: the file has other matrices in weight: build the model that was saved"
    refuse(tmp_path / "model", message, nn.ConvTranspose2d(4, 4, 3))


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


def test_plain_safetensors_are_refused_with_the_way_to_load_them(tmp_path: Path) -> None:
    safetensors.torch.save_file({"weight": torch.zeros(3, 4)}, tmp_path / "plain")
    refuse(tmp_path / "plain", r"is not a growprune file: load plain safetensors with safetensors.torch.load_file")


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 100, b"{}" * 50])
def test_garbage_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "garbage").write_bytes(content)
    refuse(tmp_path / "garbage", r"is not a safetensors file, or is incomplete \(.*\): download or save it again")


def test_a_checkpoint_of_torch_is_sent_to_convert(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(3, 4)}, tmp_path / "model.pt")
    refuse(tmp_path / "model.pt", r"\(.*\): it looks like a checkpoint of torch, which `growprune convert` reads")


def test_a_file_cut_short_anywhere_is_refused(old: Path) -> None:
    content = old.read_bytes()
    cut = old.with_name("cut")
    for length in range(len(content)):
        cut.write_bytes(content[:length])
        with pytest.raises(ValueError, match="is not a safetensors file, or is incomplete"):
            file.load(cut, target())


TAMPERED = {
    "another version": (
        lambda tensors, about, manifest: about.update(version="4"),
        "has version '4' of the format, this growprune reads '5'",
    ),
    "no checksum of the manifest": (
        lambda tensors, about, manifest: about.pop("manifest_crc32"),
        r"has an invalid manifest \(KeyError: 'manifest_crc32'\)",
    ),
    "no checksum of a tensor": (
        lambda tensors, about, manifest: manifest["tensors"]["weight"].pop("crc32"),
        r"has an invalid manifest \(KeyError: 'crc32'\)",
    ),
    "no checksum of a mask": (
        lambda tensors, about, manifest: manifest["tensors"]["weight"].pop("mask_crc32"),
        r"has an invalid manifest \(KeyError: 'mask_crc32'\)",
    ),
    "another value": (
        lambda tensors, about, manifest: tensors["weight.values"].copy_(torch.tensor([9, -8, 7.5])),
        "has values of weight whose CRC-32 does not match the manifest: it is damaged, download or save it again",
    ),
    "no version": (lambda tensors, about, manifest: about.pop("version"), "has version None of the format"),
    "no manifest": (
        lambda tensors, about, manifest: about.update(manifest="[1]"),
        r"has an invalid manifest \(it is not a JSON object\)",
    ),
    "a deep manifest": (
        lambda tensors, about, manifest: about.update(manifest="[" * 100_000),
        "has an invalid manifest .RecursionError: maximum recursion depth",
    ),
    "a sparsity of two": (
        lambda tensors, about, manifest: manifest.update(sparsity=2),
        r"does not fit the model: sparsity must be in .0, 1., got 2",
    ),
    "a glob that takes hours to match": (
        lambda tensors, about, manifest: manifest.update(include=["[" * 300_000]),
        "invalid manifest .a name must be a string of at most 1000 characters, got ",
    ),
    "an unknown pattern": (
        lambda tensors, about, manifest: manifest.update(pattern="hexagons"),
        "invalid manifest .pattern must be .*, got 'hexagons'",
    ),
    "a block as large as the world": (
        lambda tensors, about, manifest: manifest.update(pattern="1x9999999999"),
        "blocks in a file may be at most 1024 wide or high",
    ),
    "another shape": (
        lambda tensors, about, manifest: manifest["tensors"]["weight"].update(shape=[3, 5], matrices=[[0, 3]]),
        r"has weight with shape \(3, 5\), but the model has \(3, 4\)",
    ),
    "a huge shape": (
        lambda tensors, about, manifest: manifest["tensors"]["weight"].update(shape=[3, 10**15]),
        r"has tensor weight.mask as U8 \[2\], but its manifest says U8 \[375000000000000\]",
    ),
    "a negative shape": (
        lambda tensors, about, manifest: manifest["tensors"]["weight"].update(shape=[3, -4]),
        "invalid manifest .-4 is not a size",
    ),
    "a shape of very many dimensions": (
        lambda tensors, about, manifest: manifest["tensors"]["weight"].update(shape=[2**62] * 100_000),
        "invalid manifest .weight has more than 64 dimensions",
    ),
    "matrices beyond the end": (
        lambda tensors, about, manifest: manifest["tensors"]["weight"].update(matrices=[[0, 4]]),
        "the matrices of weight do not fit its shape",
    ),
    "other matrices": (
        lambda tensors, about, manifest: manifest["tensors"]["weight"].update(matrices=[[0, 1], [1, 3]]),
        "does not fit the model: the file has other matrices in weight",
    ),
    "more alive than there are weights": (
        lambda tensors, about, manifest: manifest["tensors"]["weight"].update(nnz=13),
        "invalid manifest .weight has 13 live weights of 12",
    ),
    "an alias of nothing": (
        lambda tensors, about, manifest: manifest.update(aliases={"a": "b"}),
        "has a as another name of b, which is invalid",
    ),
    "a value too few": (
        lambda tensors, about, manifest: tensors.update({"weight.values": torch.ones(2)}),
        r"has tensor weight.values as F32 \[2\], but its manifest says F32 \[3\]: it is damaged",
    ),
    "a value too few and a count to match": (
        lambda tensors, about, manifest: (
            tensors.update({"weight.values": torch.ones(2)}),
            manifest["tensors"]["weight"].update(nnz=2),
        ),
        "has a mask of weight with 3 live weights, but 2 values: it is damaged, download or save it again",
    ),
    "a bit moved": (
        lambda tensors, about, manifest: tensors["weight.mask"].copy_(torch.tensor([34, 8])),
        "has a mask of weight whose CRC-32 does not match the manifest",
    ),
    "a bit behind the end": (
        lambda tensors, about, manifest: (
            tensors["weight.mask"].copy_(torch.tensor([33, 24])),
            manifest["tensors"]["weight"].update(mask_crc32=zlib.crc32(bytes([33, 24]))),
        ),
        "has a mask of weight with bits set after its end",
    ),
    "a tensor lost": (lambda tensors, about, manifest: tensors.pop("weight.mask"), "lacks tensor weight.mask"),
    "a tensor added": (
        lambda tensors, about, manifest: tensors.update(extra=torch.ones(1)),
        "has tensor extra, which its manifest lacks",
    ),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_a_tampered_file_is_refused(what: str, old: Path) -> None:
    change, message = TAMPERED[what]
    refuse(tampered(old, change), message)


def test_a_mask_and_hash_changed_together_are_caught_by_the_count(old: Path) -> None:
    def change(tensors: dict[str, Tensor], about: dict[str, str], manifest: dict[str, Any]) -> None:
        tensors["weight.mask"] = torch.tensor([35, 8], dtype=torch.uint8)
        manifest["tensors"]["weight"]["mask_crc32"] = zlib.crc32(bytes([35, 8]))

    refuse(tampered(old, change), "has a mask of weight with 4 live weights, but 3 values")


HOSTILE = "a\n\x1b[31m" * 50_000


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors, about, manifest: manifest["tensors"].update({HOSTILE: {"shape": [1]}}),
        lambda tensors, about, manifest: tensors.update({HOSTILE: torch.ones(1)}),
        lambda tensors, about, manifest: about.update(version=HOSTILE),
        lambda tensors, about, manifest: manifest.update(pattern=HOSTILE),
        lambda tensors, about, manifest: manifest.update(keep_dense=[HOSTILE]),
    ],
)
def test_an_error_shows_little_of_a_hostile_file_and_in_one_line(change: Any, old: Path) -> None:
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
    def change(tensors: dict[str, Tensor], about: dict[str, str], manifest: dict[str, Any]) -> None:
        tensors["weight.values"], tensors["weight.mask"] = torch.zeros(0), torch.zeros(1 << 10, dtype=torch.uint8)
        manifest["pattern"] = "1024x1024"
        about_weight = {"shape": [1 << 23, 1 << 10], "matrices": [[0, 1 << 23]], "nnz": 0}
        manifest["tensors"]["weight"].update(about_weight)

    huge = tampered(old, change)
    refuse(huge, "has weight with shape")
    with pytest.raises(
        ValueError, match="would need 34359738368 bytes, over 1000 times its size: load it into its model"
    ):
        file.read(huge)
    assert file.manifest(huge)["totals"]["dense_bytes"] == 34359738368  # the header can always be looked at


def test_a_manifest_is_read_from_the_header_alone(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SparseFile, "bits", None)
    monkeypatch.setattr(SparseFile, "values", None)
    assert file.manifest(old)["tensors"]["weight"]["nnz"] == 3
