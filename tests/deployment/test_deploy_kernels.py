"""Sparse kernels against torch in double precision, in every shape, pattern and way to cut the work up."""

import ctypes
import mmap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_kernels import GAP, finish, kernels, spaced  # noqa: F401
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import growprune as gp
from growprune.deployment.cpu import library, prepared, tuning
from growprune.deployment.cpu.geometry import Geometry
from growprune.deployment.cpu.library import BuildError, Library, Tile, find_compiler
from growprune.deployment.cpu.matrix import SparseMatrix, from_dense
from growprune.deployment.cpu.prepared import (
    Activation,
    DenseLayer,
    Layer,
    LayerSpec,
    NativeLayer,
    PoolLayer,
)
from growprune.deployment.skeleton import skeleton_of
from growprune.errors import GrowpruneError

PATTERNS = {"unstructured": (1, 1), "1x8": (1, 8), "8x1": (8, 1)}


def weight_and_mask(shape: tuple[int, ...], pattern: str, density: float) -> tuple[Tensor, Tensor]:
    """A random weight (out, in, ...) whose mask keeps to the pattern."""
    height, width = PATTERNS[pattern]
    rows, columns = shape[0], torch.Size(shape[1:]).numel()
    blocks = torch.rand(-(-rows // height), -(-columns // width)) < density
    mask = blocks.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
    mask = mask.view(rows, *shape[2:], shape[1]).movedim(-1, 1)
    return torch.randn(shape) * mask, mask


def run(layer: Layer, x: Tensor) -> Tensor:
    out = torch.empty(layer.rows, layer.geometry.columns)
    layer.bind(x, out)()
    return out


def expect_close(found: Tensor, expected: Tensor, scale: Tensor) -> None:
    """At most 1e-5 off, relative to the largest sum of magnitudes."""
    assert found.isfinite().all()
    assert (found - expected).abs().max() <= 1e-5 * scale.abs().max().clamp_min(1e-30)


@st.composite
def tiles(draw: st.DrawFn, matrix_height: int) -> Tile:
    """Any tile the library takes, with blocks so small that there are many of them."""
    found = library.library()
    lanes = draw(st.sampled_from([n for n in (1, 4, 8, 16) if n <= found.lanes]))
    vectors = draw(st.integers(1, 1 if lanes < found.lanes else 3 if matrix_height == 8 else 8))
    threads = draw(st.integers(1, 3))
    k_block = draw(st.sampled_from([8, 16, 40, 512]))
    return Tile(lanes, vectors, k_block, draw(st.integers(1, threads)), threads)


sizes = st.integers(1, 40) | st.sampled_from([49, 64, 130])


@settings(max_examples=150)
@given(data=st.data(), rows=sizes, columns=sizes, n=sizes, density=st.sampled_from([0.0, 0.1, 0.5, 1.0]))
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_product_with_bias_residual_and_activation_is_that_of_torch(
    pattern: str, data: st.DataObject, rows: int, columns: int, n: int, density: float
) -> None:
    weight, mask = weight_and_mask((rows, columns), pattern, density)
    x, bias, residual = torch.randn(columns, n), torch.randn(rows), torch.randn(rows, n)
    has_bias, has_residual = data.draw(st.booleans()), data.draw(st.booleans())
    activation, tile = data.draw(st.sampled_from(Activation)), data.draw(tiles(PATTERNS[pattern][0]))
    matrix = from_dense(weight, mask, pattern=pattern)
    assert torch.equal(matrix.dense(), weight)
    spec = LayerSpec("", matrix, Geometry.linear(columns, n), bias if has_bias else None, activation=activation)
    out = spaced(torch.zeros(rows, n), gap=7.0)
    NativeLayer(spec, tile).bind(spaced(x), out, spaced(residual) if has_residual else None)()
    sums = weight.double() @ x.double() + has_bias * bias.double().view(-1, 1) + has_residual * residual.double()
    expect_close(out, finish(sums, activation), weight.abs() @ x.abs() + bias.abs().view(-1, 1) + residual.abs())
    assert (out.as_strided((rows, n + GAP), (n + GAP, 1))[:, n:] == 7.0).all()


@st.composite
def convolutions(draw: st.DrawFn) -> Geometry:
    kernel = draw(st.sampled_from([(1, 1), (3, 3), (7, 7), (1, 5)]))
    stride, padding, dilation = (draw(st.tuples(st.integers(low, high), st.integers(low, high)))
                                 for low, high in ((1, 3), (0, 3), (1, 2)))  # fmt: skip
    least = [d * (k - 1) + 1 - 2 * p for d, k, p in zip(dilation, kernel, padding, strict=True)]
    height, width = (max(1, size) + draw(st.integers(0, 15)) for size in least)
    return Geometry(draw(st.integers(1, 12)), draw(st.integers(1, 3)), height, width, kernel, stride, padding, dilation)


def convolved(x: Tensor, weight: Tensor, g: Geometry) -> Tensor:
    images = x.double().view(g.channels, g.batch, g.height, g.width).transpose(0, 1)
    return F.conv2d(images, weight.double(), None, g.stride, g.padding, g.dilation).transpose(0, 1).flatten(1)


@settings(max_examples=80)
@given(data=st.data(), geometry=convolutions(), rows=st.integers(1, 20))
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_convolution_is_that_of_torch(pattern: str, data: st.DataObject, geometry: Geometry, rows: int) -> None:
    weight, mask = weight_and_mask((rows, geometry.channels, *geometry.kernel), pattern, 0.4)
    x = torch.randn(geometry.channels, geometry.in_columns)
    matrix, tile = from_dense(weight, mask, pattern=pattern), data.draw(tiles(PATTERNS[pattern][0]))
    found = run(NativeLayer(LayerSpec("", matrix, geometry), tile), spaced(x))
    expect_close(found, convolved(x, weight, geometry), convolved(x.abs(), weight.abs(), geometry))


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(
    "geometry",
    [
        Geometry.linear(300, 1),
        Geometry.linear(300, 7),
        Geometry.linear(300, 200),
        Geometry(40, 2, 14, 14, kernel=(3, 3), padding=(1, 1)),
        Geometry(3, 1, 40, 40, kernel=(7, 7), stride=(2, 2), padding=(3, 3)),
    ],
)
def test_every_candidate_is_right_and_gives_the_same_bits_on_one_thread_and_on_two(
    pattern: str, geometry: Geometry
) -> None:
    weight, mask = weight_and_mask((50, geometry.channels, *geometry.kernel), pattern, 0.2)
    x, matrix = torch.randn(geometry.channels, geometry.in_columns), from_dense(weight, mask, pattern=pattern)
    expected, scale = convolved(x, weight, geometry), convolved(x.abs(), weight.abs(), geometry)
    for tile in tuning.candidates(matrix, geometry, threads=2):
        two = run(NativeLayer(LayerSpec("", matrix, geometry), tile), x)
        alone = replace(tile, threads=1, row_chunks=1)
        one = run(NativeLayer(LayerSpec("", matrix, geometry), alone), x)
        expect_close(one, expected, scale)
        assert torch.equal(one, two), tile


def test_gelu_is_within_a_millionth_everywhere() -> None:
    x = torch.cat([torch.linspace(-8, 8, 100_001), torch.tensor([-1e4, -40.0, 40.0, 1e4, 0.0])]).view(1, -1)
    one = from_dense(torch.ones(1, 1))
    layer = made(NativeLayer, one, Geometry.linear(1, x.shape[1]), activation=Activation.GELU)
    found, expected = run(layer, x), F.gelu(x.double())
    assert ((found - expected).abs() <= 1e-6 * expected.abs().clamp_min(1)).all()


def test_what_an_earlier_layer_has_left_behind_does_not_matter() -> None:
    before = made(NativeLayer, from_dense(torch.ones(3, 40)), Geometry.linear(40, 20))
    assert run(before, torch.full((40, 20), float("nan"))).isnan().all()
    overhanging = from_dense(torch.ones(2, 9), pattern="1x8")
    after = made(NativeLayer, overhanging, Geometry.linear(9, 19))
    assert (run(after, torch.ones(9, 19)) == 9).all()


def test_nan_and_infinity_come_through_as_in_torch() -> None:
    x = torch.tensor([[float("nan"), float("inf"), -float("inf"), 1.0]])
    for activation, last in ((Activation.NONE, -float("inf")), (Activation.RELU, 0.0)):
        ours = made(NativeLayer, from_dense(torch.ones(1, 1)), Geometry.linear(1, 4), activation=activation)
        found = run(ours, x)
        assert found[0, 0].isnan() and found[0, 1:].tolist() == [float("inf"), last, 1.0]


@pytest.mark.parametrize(
    "geometry",
    [Geometry.linear(1024, 17), Geometry.linear(4096, 1), Geometry(4, 1, 32, 32, kernel=(3, 3), padding=(1, 1))],
)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_nothing_is_read_before_or_behind_the_input(pattern: str, geometry: Geometry) -> None:
    """The input ends, and begins, where memory does: whoever goes too far is killed."""
    size, page = geometry.channels * geometry.in_columns * 4, mmap.PAGESIZE
    assert size % page == 0
    memory = mmap.mmap(-1, size + 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    assert protect(start, page, 0) == 0 and protect(start + page + size, page, 0) == 0
    x = torch.frombuffer(memory, dtype=torch.float32, count=size // 4, offset=page).view(geometry.channels, -1)
    weight, mask = weight_and_mask((20, geometry.channels, *geometry.kernel), pattern, 0.2)
    matrix = from_dense(weight, mask, pattern=pattern)
    for tile in tuning.candidates(matrix, geometry, threads=1):
        assert run(NativeLayer(LayerSpec("", matrix, geometry), tile), x).count_nonzero() == 0


@pytest.mark.parametrize("march, lanes", [("x86-64", 4), ("x86-64-v3", 8)])
def test_kernels_for_shorter_vectors_give_the_same(
    march: str, lanes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lanes == 8 and "avx2" not in library.cpu_model():
        pytest.skip("this CPU has no AVX2")
    flags = [f"-march={march}" if flag == "-march=native" else flag.replace("-O3", "-O1") for flag in library.FLAGS]
    monkeypatch.setattr(library, "FLAGS", flags)
    try:
        short = Library(ctypes.CDLL(str(library.compile_to(tmp_path / "short.so", find_compiler()))))
    except BuildError:
        pytest.skip("the compiler is not one for x86")
    for module in (prepared, tuning):
        monkeypatch.setattr(module, "library", lambda: short)
    assert short.lanes == lanes
    for pattern in PATTERNS:
        for geometry in (
            Geometry.linear(100, 1),
            Geometry.linear(100, 77),
            Geometry(9, 2, 9, 9, (3, 3), (1, 1), (1, 1)),
        ):
            test_every_candidate_is_right_and_gives_the_same_bits_on_one_thread_and_on_two(pattern, geometry)
        test_nothing_is_read_before_or_behind_the_input(pattern, Geometry(4, 1, 32, 32, (3, 3), padding=(1, 1)))


@settings(max_examples=60)
@given(geometry=convolutions(), ceil_mode=st.booleans())
def test_pools_are_those_of_torch(geometry: Geometry, ceil_mode: bool) -> None:
    half = tuple(min(p, k // 2) for p, k in zip(geometry.padding, geometry.kernel, strict=True))
    try:
        g = replace(geometry, padding=half, ceil_mode=ceil_mode)
        flat = replace(geometry, padding=(0, 0), dilation=(1, 1))
    except GrowpruneError:
        return  # with less padding there is nothing left
    x = torch.randn(g.channels, g.in_columns)
    images = x.view(g.channels, g.batch, g.height, g.width).transpose(0, 1)
    largest = F.max_pool2d(images, g.kernel, g.stride, g.padding, g.dilation, ceil_mode)
    assert torch.equal(run(PoolLayer(g), spaced(x)), largest.transpose(0, 1).flatten(1))
    means = F.avg_pool2d(images.double(), flat.kernel, flat.stride)
    found = run(PoolLayer(flat, is_mean=True), spaced(x))
    torch.testing.assert_close(found.double(), means.transpose(0, 1).flatten(1), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("storage", ["masked", "compact"])
@pytest.mark.parametrize("pattern", [*PATTERNS, "2:4"])
def test_modules_give_the_very_weights_they_hold(pattern: str, storage: str) -> None:
    model = nn.Sequential(nn.Conv2d(16, 12, 3), nn.Flatten(), nn.Linear(16, 24))
    sparse = gp.SparseModel(model, sparsity=0.75, pattern=pattern, storage=storage)
    sparse.prune()
    matrices = skeleton_of(sparse).matrices
    assert matrices.keys() == {"0.weight", "2.weight"}
    for name, found in matrices.items():
        dense = sparse.model.state_dict()[name]
        assert torch.equal(found.dense(), dense.movedim(1, -1).reshape(dense.shape[0], -1))
        assert (found.height, found.width) == PATTERNS.get(pattern, (1, 1))


def made(kind: type[Any], matrix: SparseMatrix, geometry: Geometry, **ends: Any) -> Layer:
    tiles = tuning.candidates(matrix, geometry, threads=1)[:1] if kind is NativeLayer else []
    layer: Layer = kind(LayerSpec("", matrix, geometry, **ends), *tiles)
    return layer


@pytest.mark.parametrize("geometry", [Geometry.linear(30, 20), Geometry(4, 2, 6, 5, (3, 3), (2, 1), (1, 0))])
@pytest.mark.parametrize("kind", [NativeLayer, DenseLayer])
def test_all_ways_to_run_a_layer_agree(kind: type[Any], geometry: Geometry) -> None:
    weight, mask = weight_and_mask((16, geometry.channels, *geometry.kernel), "8x1", 0.3)
    x, bias, residual = (
        torch.randn(geometry.channels, geometry.in_columns),
        torch.randn(16),
        torch.randn(16, geometry.columns),
    )
    layer = made(kind, from_dense(weight, mask, pattern="8x1"), geometry, bias=bias, activation=Activation.RELU)
    expected = (convolved(x, weight, geometry) + bias.double().view(-1, 1) + residual.double()).relu()
    out = torch.empty_like(residual)
    layer.bind(x, out, residual)()
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    out = residual.clone()
    layer.bind(x, out, out)()  # the residual may be where the result goes
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def spec_of(weight: Tensor, geometry: Geometry) -> LayerSpec:
    return LayerSpec("layer", from_dense(weight), geometry)


def test_tuning_takes_the_likeliest_tile_without_time_and_one_of_the_candidates_with_it() -> None:
    spec = spec_of(torch.ones(8, 8), Geometry.linear(8, 100))
    assert tuning.fastest_tile(spec, 1, 0) == tuning.candidates(spec.weight, spec.geometry, threads=1)[0]
    assert tuning.fastest_tile(spec, 2, 0.05) in tuning.candidates(spec.weight, spec.geometry, threads=2)


@pytest.mark.parametrize(
    "x, out, words",
    [
        (torch.zeros(4, 5), torch.zeros(3, 6), "x is torch.float32 .4, 5."),
        (torch.zeros(4, 6), torch.zeros(3, 6).double(), "out is torch.float64"),
        (torch.zeros(6, 4).t(), torch.zeros(3, 6), "columns next to one another"),
        (torch.zeros(1, 6).expand(4, 6), torch.zeros(3, 6), "columns next to one another"),
    ],
)
def test_tensors_that_the_kernels_would_misread_are_refused(x: Tensor, out: Tensor, words: str) -> None:
    layer = made(NativeLayer, from_dense(torch.ones(3, 4)), Geometry.linear(4, 6))
    with pytest.raises(GrowpruneError, match=words):
        layer.bind(x, out)


def test_tiles_masks_and_biases_that_do_not_fit_are_refused() -> None:
    matrix, geometry = from_dense(torch.ones(3, 4)), Geometry.linear(4, 6)
    for tile in (Tile(16, 9, 8, 1, 1), Tile(4, 1, 70000, 1, 1), Tile(4, 1, 8, 2, 1), Tile(3, 1, 8, 1, 1)):
        with pytest.raises(GrowpruneError, match="does not suit"):
            NativeLayer(LayerSpec("", matrix, geometry), tile)
    with pytest.raises(GrowpruneError, match="bias has shape"):
        made(NativeLayer, matrix, geometry, bias=torch.ones(4))
    with pytest.raises(GrowpruneError, match=r"a mask of shape \(3, 2\) does not fit a weight of shape \(2, 2\)"):
        from_dense(torch.ones(2, 2), torch.ones(3, 2, dtype=torch.bool))
    with pytest.raises(GrowpruneError, match="no output"):
        Geometry(3, 1, 2, 2, kernel=(5, 5))
