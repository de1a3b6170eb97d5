"""Values in 8 bits: what their bytes are, how exact they are, and what is refused."""

import json
import math
import runpy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from file_cases import (
    EXAMPLE,
    FLOATS,
    PATTERNS,
    Change,
    Zoo,
    assert_same,
    entry,
    linear,
    metadata,
    stored,
    tampered,
    target,
    tensor,
    zoo,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from stacked import Conv1D, Experts
from torch import Tensor, nn
from typer.testing import CliRunner

from growprune.cli import app
from growprune.errors import GrowpruneError
from growprune.files import sparse_file as file
from growprune.files.convert import convert
from growprune.files.quantized import SMALLEST_SCALE, dequantize, quantize, rows_of_live
from growprune.plan import By
from growprune.sparse.model import SparseModel

ROWS = [[254, 0.9, 0, -101], [0, 0, 0, 0], [0, -0.5, 127, 0]]
"""Scales 2, none and 1. What lives: all of the first row, nothing of the second, two of the third."""


def three_rows() -> SparseModel:
    sparse = linear(ROWS, sparsity=0.5, allocation="global")
    sparse.prune()
    return sparse


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.safetensors"
    file.save(three_rows(), path, values="int8")
    return path


# What the bytes are


def test_a_file_with_int8_values_is_as_specified(small: Path) -> None:
    tensors = stored(small)
    assert tensors["weight.mask"].tolist() == [0b00001111, 0b0110]
    assert tensors["weight.values"].tolist() == [127, 0, 0, -50, 0, 127]  # -50.5 goes to the even one
    assert tensors["weight.values"].dtype == torch.int8
    assert tensors["weight.scales"].tolist() == [[2], [SMALLEST_SCALE], [1]]
    assert tensors.keys() == {"weight.values", "weight.scales", "weight.mask"}
    about = json.loads(metadata(small)["manifest"])["tensors"]["weight"]
    assert (about["dtype"], about["nnz"]) == ("F32", 6)
    assert about["error"] == pytest.approx(math.hypot(0.9, 1, 0.5) / math.hypot(254, 0.9, 101, 0.5, 127))


def test_live_weights_that_round_to_zero_stay_live(small: Path) -> None:
    expected = [[254, 0, 0, -100], [0, 0, 0, 0], [0, 0, 127, 0]]
    loaded = file.load(small, target())
    assert file.read(small)["weight"].tolist() == expected == loaded.model.weight.tolist()
    assert torch.equal(loaded.masks["weight"], three_rows().masks["weight"])


def test_a_layer_whose_weights_all_live_is_int8_too(tmp_path: Path) -> None:
    file.save(linear([[2, -1], [0, 0.25]], sparsity=0.0), tmp_path / "model", values="int8")
    assert stored(tmp_path / "model")["weight"].tolist() == [[127, -64], [0, 127]]
    assert file.read(tmp_path / "model")["weight"].flatten().tolist() == pytest.approx([2, -128 / 127, 0, 0.25])


# Round trips


def rows_of(weight: Tensor, kind: str) -> tuple[int, ...]:
    """The dimensions that a row's scale is shared over."""
    return {"stacked": (2,), "stacked transposed": (1,), "transposed": (0, *range(2, weight.ndim))}.get(
        kind, tuple(range(1, weight.ndim))
    )


def allowed(weight: Tensor, over: tuple[int, ...]) -> Tensor:
    """Half a scale, and what rounding to the dtype adds; in float64."""
    scales = weight.double().abs().amax(over, keepdim=True) / 127 if over else weight.double().abs() / 127
    ulp = torch.finfo(weight.dtype).eps if weight.dtype != torch.float64 else torch.finfo(torch.float32).eps
    return scales / 2 * (1 + 1e-5) + weight.double().abs() * ulp + 1e-37


def assert_close(exact: Tensor, found: Tensor, over: tuple[int, ...]) -> None:
    assert found.dtype == exact.dtype
    assert bool(((found.double() - exact.double()).abs() <= allowed(exact, over)).all())


KINDS = {"up.weight": "transposed", "up_grouped.weight": "transposed"}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_model_of_every_pattern_and_dtype_comes_back(pattern: str, dtype: torch.dtype, tmp_path: Path) -> None:
    sparse, path = zoo(pattern, dtype), tmp_path / "model.safetensors"
    file.save(sparse, path, values="int8")
    loaded = file.load(path, Zoo().to(dtype))
    names = {weight.parameter for weight in sparse.weights}
    for name, exact in sparse.model.state_dict().items():
        found = loaded.model.state_dict()[name]
        if name in names or name == "same.weight":
            assert_close(exact, found, rows_of(exact, KINDS.get(name, "")))
        else:
            assert torch.equal(exact, found), name
    assert all(torch.equal(loaded.masks[name], mask) for name, mask in sparse.masks.items())
    arrays = runpy.run_path(str(EXAMPLE))["read"](path)
    for name, found in file.read(path).items():
        expected = found.float() if found.dtype == torch.bfloat16 else found
        np.testing.assert_array_equal(arrays[name], expected.numpy(), strict=True)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_int8_values_are_loaded_into_compact_storage_and_mapped(pattern: str, tmp_path: Path) -> None:
    sparse, path = zoo(pattern, keep_dense=["linear", "grouped"]), tmp_path / "model.safetensors"
    file.save(sparse, path, values="int8")
    loaded = file.load(path, Zoo())
    for mapped in (False, True):
        compact = file.load(path, Zoo(), storage="compact", mapped=mapped)
        assert_same(loaded, compact)
        compact.grow()
        compact.prune()
    file.save(loaded, tmp_path / "masked", values="int8")
    file.save(file.load(path, Zoo(), storage="compact"), tmp_path / "compact", values="int8")
    assert (tmp_path / "masked").read_bytes() == (tmp_path / "compact").read_bytes()


@pytest.mark.parametrize(
    ("build", "kind"),
    [
        (lambda: Conv1D(6, 8), "transposed"),
        (lambda: Experts(is_transposed=False), "stacked"),
        (lambda: Experts(is_transposed=True), "stacked transposed"),
    ],
    ids=["Conv1D", "experts", "experts, inputs first"],
)
def test_every_output_row_has_its_own_scale(build: Callable[[], nn.Module], kind: str, tmp_path: Path) -> None:
    model = build()
    for i, parameter in enumerate(model.parameters()):
        over = rows_of(parameter, kind)
        shape = [1 if dim in over else length for dim, length in enumerate(parameter.shape)]
        parameter.data *= 10.0 ** torch.arange(math.prod(shape)).remainder(5 + i).view(shape)
    sparse = SparseModel(model, sparsity=0.5)
    sparse.prune(by=By.RANDOM)
    file.save(sparse, tmp_path / "model", values="int8")
    for name, found in file.read(tmp_path / "model").items():
        exact = model.get_parameter(name).detach()
        assert_close(exact, found, rows_of(exact, kind))
        assert stored(tmp_path / "model")[f"{name}.scales"].unique().numel() > 4


@given(
    numbers=st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=1, max_size=24),
    columns=st.integers(1, 6),
    dead=st.sets(st.integers(0, 23)),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
)
@settings(deadline=None, max_examples=300)
def test_the_error_of_any_weight_is_at_most_half_a_scale(
    numbers: list[float], columns: int, dead: set[int], dtype: torch.dtype
) -> None:
    numbers = numbers + [0.0] * (-len(numbers) % columns)
    if dtype == torch.float16:
        numbers = [math.fmod(number, 60_000) for number in numbers]
    weight = torch.tensor(numbers, dtype=torch.float64).view(-1, columns).to(dtype)
    mask = torch.tensor([i not in dead for i in range(weight.numel())]).view(weight.shape)
    weight = weight * mask
    values, scales, error = quantize(weight[mask], rows_of_live(mask, (len(weight), 1)), len(weight), "weight")
    found = torch.zeros_like(weight)
    found[mask] = dequantize(values, scales[:, None], mask, dtype)
    assert_close(weight, found, (1,))
    in_float32 = torch.zeros(weight.shape)
    in_float32[mask] = dequantize(values, scales[:, None], mask, torch.float32)
    difference = (in_float32.double() - weight.double()).abs()
    assert bool((difference <= scales.double()[:, None] / 2 * (1 + 1e-5)).all())
    assert error <= 1 if weight.any() else error == 0


# Gaps: a file must not grow to more than 1000 times its bytes


def test_gaps_of_int8_values_stay_within_the_limit(tmp_path: Path) -> None:
    for alive in (1, 2, 4, 8, 16, 64, 256):
        model = nn.Linear(512, 128, bias=False)
        model.weight.data.zero_().view(-1)[:: 65536 // alive] = 1.0
        sparse = SparseModel.from_zeros(model, sparsity=0.9)
        file.save(sparse, tmp_path / "model", values="int8")
        assert torch.equal(file.read(tmp_path / "model")["weight"], model.weight)


# Converting and inspecting


def test_a_sparse_file_is_converted_to_int8_and_keeps_its_settings(tmp_path: Path) -> None:
    sparse = zoo("1x4")
    file.save(sparse, tmp_path / "exact.safetensors")
    file.save(sparse, tmp_path / "expected.safetensors", values="int8")
    convert(tmp_path / "exact.safetensors", tmp_path / "found.safetensors", to="sparse", values="int8")
    expected = (tmp_path / "expected.safetensors").read_bytes()
    assert (tmp_path / "found.safetensors").read_bytes() == expected
    convert(tmp_path / "found.safetensors", tmp_path / "again.safetensors", to="sparse", values="int8")
    assert (tmp_path / "again.safetensors").read_bytes() == expected


def growprune(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.stdout


def test_inspect_shows_the_error_and_the_bytes_of_a_live_weight(small: Path, tmp_path: Path) -> None:
    shown = growprune("inspect", str(small))
    assert "int8 error" in shown
    assert "0.48%" in shown  # 1.435 of 301.4
    assert "3.33" in shown  # 6 values, 3 scales of 4 bytes and 2 bytes of mask, for 6
    about = json.loads(growprune("inspect", str(small), "--json"))["tensors"]["weight"]
    assert about["bytes_per_live"] == 20 / 6
    file.save(three_rows(), tmp_path / "exact.safetensors")
    assert "int8" not in growprune("inspect", str(tmp_path / "exact.safetensors"))
    growprune("convert", str(tmp_path / "exact.safetensors"), str(tmp_path / "c.safetensors"), "--to", "sparse")
    out = str(tmp_path / "d.safetensors")
    growprune("convert", str(tmp_path / "exact.safetensors"), out, "--to", "sparse", "--values", "int8")
    assert Path(out).read_bytes() == small.read_bytes()


# What is refused


def refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(GrowpruneError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(number: float, tmp_path: Path) -> None:
    sparse = linear([[1, number], [3, 4]], sparsity=0.0)
    refused(lambda: file.save(sparse, tmp_path / "model", values="int8"), "weight has values that are not finite")
    assert not (tmp_path / "model").exists()


def test_int8_is_for_sparse_files_only(small: Path) -> None:
    call = lambda: convert(small, small.with_name("dense.safetensors"), to="dense", values="int8")  # noqa: E731
    refused(call, "'int8'.* dense")


def doubled(name: str) -> Change:
    return lambda tensors, *_: tensors[name].mul_(2)  # type: ignore[return-value]


REFUSED: dict[str, tuple[Change, str]] = {
    "other scales": (doubled("weight.scales"), "scales of weight"),
    "other values": (doubled("weight.values"), "values of weight"),
    "one scale": (tensor("weight.scales", torch.ones(1, 1)), r"weight\.scales .*\[1, 1\].*\[3, 1\]"),
    "an int8 of integers": (entry(dtype="I64"), "torch.int64"),
    "a negative error": (entry(error=-1.0), "-1.0"),
    "scales without a digest": (entry(scales_crc32=None), "None"),
    "no matrices": (entry(matrices=[]), "manifest"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_int8_values_that_are_not_as_saved_are_refused(what: str, small: Path) -> None:
    change, message = REFUSED[what]
    path = tampered(small, change)
    refused(lambda: file.read(path), message)
    refused(lambda: file.load(path, target()), message)
