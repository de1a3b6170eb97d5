"""Sparse layers for decoding: formats in plain torch, kernels through Triton's interpreter or on a GPU."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from triton_interpreter import interpret, on_the_gpu

from growprune.deployment.cpu.matrix import SparseMatrix, from_dense
from growprune.deployment.cuda.products import LaneMatrix, SparseLinear, Tile, lane_matrix, product
from growprune.deployment.cuda.tuning import choose, fastest, times_of_tiles
from growprune.deployment.layer_table import Row
from growprune.errors import GrowpruneError

LANES = (4, 16, 32)
TILES = (Tile(1, 8, 1), Tile(4, 32, 2, is_pinned=True), Tile(2, 64, 1))
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-22}
"""How far a sum may be from the exact one, relative to the largest."""


@pytest.fixture(params=[pytest.param("cuda", marks=on_the_gpu), pytest.param("cpu", id="interpreted")])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where kernels run: on a GPU, or on the CPU through the interpreter, which must be chosen before they are made."""
    if request.param == "cpu":
        interpret(monkeypatch)
    yield request.param


def random_weight(
    rows: int, columns: int, sparsity: float, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return weight.masked_fill(torch.rand(rows, columns, generator=generator) < sparsity, 0).to(dtype)


def uneven_weight() -> Tensor:
    """An empty row, a full one, one weight at the very end, and one far from the next."""
    weight = random_weight(6, 530, 0.9)
    weight[1:4] = 0
    weight[2, [0, 255, 511, 512]] = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=weight.dtype)
    weight[3, 529] = 2.0
    weight[4] = random_weight(1, 530, 0.0)[0]
    return weight


def entries_of(weight: Tensor) -> SparseMatrix:
    return from_dense(weight).to(weight.device, weight.dtype)


# formats


def test_a_run_is_consecutive_weights_across_the_lanes() -> None:
    weight = torch.arange(1.0, 33.0).view(1, 32)
    matrix = lane_matrix(from_dense(weight), lanes=4)
    assert matrix.values[:, 0].tolist() == [1, 2, 3, 4]
    assert matrix.values[1].tolist() == [2, 6, 10, 14, 18, 22, 26, 30]
    assert torch.equal(matrix.places() + 1, matrix.values.long())


def test_the_last_slab_of_a_row_is_narrow() -> None:
    matrix = lane_matrix(from_dense(torch.ones(1, 40)), lanes=4)
    assert matrix.unit_starts.tolist() == [0, 5]
    assert matrix.slab_starts.tolist() == [0, 2]
    assert matrix.places()[4].tolist() == list(range(32, 40))


@pytest.mark.parametrize(("gap", "num_units"), [(255, 4 * 2 + 1), (256, 4 * 4 + 1)])
def test_a_run_ends_where_an_offset_would_not_fit(gap: int, num_units: int) -> None:
    """With a gap of 255, two of 40 weights fit a run, 16 a slab of eight runs; with 256 one does, and eight a slab."""
    weight = torch.zeros(1, gap * 40)
    weight[0, ::gap] = torch.arange(1.0, 41.0)
    matrix = lane_matrix(from_dense(weight), lanes=4)
    assert torch.equal(matrix.dense(), weight)
    assert len(matrix.values) == num_units


def test_rows_are_sorted_by_length() -> None:
    weight = torch.tensor([[1.0, 0, 0], [1.0, 1.0, 1.0], [0, 0, 0], [1.0, 1.0, 0]])
    assert lane_matrix(from_dense(weight)).order.tolist() == [1, 3, 0, 2]


def test_bytes_a_weight_are_what_they_are_said_to_be() -> None:
    entries = entries_of(random_weight(256, 4096, 0.9))
    assert lane_matrix(entries).nbytes / entries.values.numel() == pytest.approx(3.2, abs=0.06)


@pytest.mark.parametrize("lanes", LANES)
@settings(max_examples=40)
@given(
    rows=st.integers(0, 20),
    columns=st.sampled_from([1, 2, 7, 8, 9, 255, 256, 257, 900]),
    sparsity=st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0]),
    seed=st.integers(0, 99),
    dtype=st.sampled_from(list(ROUNDING)),
)
def test_the_format_gives_the_matrix_back(
    lanes: int, rows: int, columns: int, sparsity: float, seed: int, dtype: torch.dtype
) -> None:
    weight = random_weight(rows, columns, sparsity, dtype, seed)
    matrix = lane_matrix(entries_of(weight), lanes=lanes)
    assert torch.equal(matrix.dense(), weight)
    assert (matrix.rows, matrix.columns) == (rows, columns)


@pytest.mark.parametrize("lanes", LANES)
def test_the_format_gives_uneven_rows_back(lanes: int) -> None:
    assert torch.equal(lane_matrix(entries_of(uneven_weight()), lanes=lanes).dense(), uneven_weight())


def test_16_bits_hold_65536_columns_and_no_more() -> None:
    weight = torch.zeros(2, 65537)
    weight[:, [0, 65535]] = 1.0
    assert torch.equal(lane_matrix(from_dense(weight[:, :-1])).dense(), weight[:, :-1])
    with pytest.raises(GrowpruneError, match="65537 columns, but 16-bit columns allow 65536"):
        lane_matrix(from_dense(weight))


# kernels


def check_product(weight: Tensor, lanes: int, batch: int, device: str) -> None:
    """Every tile gives the product in float64, rounded; and the same bits again."""
    x = random_weight(batch, weight.shape[1], 0.0, weight.dtype, seed=5)
    expected = F.linear(x.double(), weight.double())
    matrix = lane_matrix(entries_of(weight.to(device)), lanes=lanes)
    for tile in TILES:
        found = product(matrix, x.to(device), tile)
        assert (found.dtype, found.shape) == (weight.dtype, expected.shape)
        rounding = ROUNDING[weight.dtype] * (2 if device == "cpu" else 1)  # the interpreter rounds towards zero
        bound = rounding * expected.abs() + 2**-20 * expected.abs().amax().clamp(min=1e-3)
        assert bool(((found.cpu().double() - expected).abs() <= bound).all()), tile
    assert torch.equal(product(matrix, x.to(device), tile), found)


@pytest.mark.parametrize(("lanes", "batch"), [(4, 1), (4, 16), (16, 1), (16, 3), (16, 16), (32, 1)])
def test_a_product_is_that_of_float64_rounded(lanes: int, batch: int, device: str) -> None:
    check_product(uneven_weight(), lanes, batch, device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_every_float_is_multiplied(dtype: torch.dtype, device: str) -> None:
    check_product(random_weight(9, 130, 0.7, dtype), 16, 2, device)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize(("rows", "columns", "sparsity"), [(3, 1, 0.0), (1, 65, 0.9), (5, 300, 1.0), (13, 8, 0.5)])
def test_odd_shapes_are_multiplied(lanes: int, rows: int, columns: int, sparsity: float, device: str) -> None:
    check_product(random_weight(rows, columns, sparsity), lanes, 1, device)


COMPILES = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from growprune.deployment.cuda.product_kernels import _lanes_kernel as kernel

for batch in (1, 8):
    sizes = dict(BATCH=batch, LANES=16, WIDTH=32, ROWS=4, STEPS=2, PINNED=False)
    types = dict(x="*bf16", offsets="*i64", bases="*i64", values="*bf16", out="*bf16")
    types |= dict(unit_starts="*i32", slab_starts="*i32", order="*i32")
    types |= dict.fromkeys(("num_rows", "num_columns", "batch", "split_units"), "i32")
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in sizes.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in types if types[name][0] == "*"},
    )
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
    print(ptx.count("bar.sync"), ptx.count(".v2.b64"), ptx.count(".v4.b32"))
"""


def test_for_hopper_loads_are_wide_and_threads_do_not_wait_for_one_another(tmp_path: Path) -> None:
    """Triton chooses which thread has what. If it differed from one tensor to the next, all would meet at barriers."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed, which would compile the kernels")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    run = subprocess.run([sys.executable, "-c", COMPILES], env=environment, capture_output=True, text=True, check=True)
    found = [[int(n) for n in line.split()] for line in run.stdout.splitlines()]
    assert [barriers for barriers, _, _ in found] == [1] * 2  # one, at the end, for the sums
    assert [pairs for _, pairs, _ in found] == [4] * 2  # two steps: values, and bases
    assert [fours for _, _, fours in found] == [0, 16]  # eight samples of a column


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("sparsity", [0.7, 0.95])
@pytest.mark.parametrize("batch", range(1, 17))
def test_large_products_on_a_gpu(lanes: int, batch: int, sparsity: float) -> None:
    check_product(random_weight(1027, 4100, sparsity), lanes, batch, "cuda")


# layers


def test_a_layer_takes_any_batch_and_a_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    weight, bias = random_weight(6, 9, 0.5, torch.float32), torch.arange(6.0)
    layer = SparseLinear(lane_matrix(entries_of(weight)), bias=bias)
    for shape in ((9,), (2, 9), (3, 20, 9), (100, 9)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(layer(x), F.linear(x, weight, bias))


def test_a_batch_over_16_is_multiplied_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("growprune.deployment.cuda.products.product", None)
    assert torch.equal(SparseLinear(lane_matrix(from_dense(torch.eye(4))))(torch.ones(17, 4)), torch.ones(17, 4))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.ones(1, 5), r"x is torch.float32 \(1, 5\) on cpu, but must be torch.float32 \(batch, 4\)"),
        (torch.ones(17, 4), r"\(17, 4\) on cpu, .* with a batch of 1 to 16"),
        (torch.ones(1, 4, dtype=torch.float64), "x is torch.float64 .*, but must be torch.float32"),
    ],
)
def test_what_does_not_fit_is_refused(x: Tensor, message: str) -> None:
    with pytest.raises(GrowpruneError, match=message):
        product(lane_matrix(from_dense(torch.eye(4))), x)


# choosing


ROW = Row("fc", "8x16 x 1", 0.75, None, None, "torch")


@pytest.mark.parametrize(("sparse_us", "choice"), [(3.0, "sparse"), (4.0, "dense"), (9.0, "dense")])
def test_faster_of_sparse_and_dense_is_chosen(sparse_us: float, choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("growprune.deployment.cuda.tuning.fastest", lambda m, tiles, batch, s: (tiles[0], sparse_us))
    monkeypatch.setattr("growprune.deployment.cuda.tuning.time_of", lambda layers, x: 4.0)
    row = choose(ROW, from_dense(random_weight(8, 16, 0.75, torch.float32)))
    assert (row.layer, row.choice, row.dense_ms, row.sparse_ms) == ("fc", choice, 0.004, sparse_us / 1e3)
    assert (row.tile is None) == (choice == "dense")


@pytest.mark.parametrize(
    ("error", "reason"),
    [("out of shared memory\nand more", "shared memory$"), ("", "difference from the dense product is 1.0e[+]00")],
)
def test_a_kernel_that_fails_or_errs_is_left_out_with_the_reason(
    error: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = product

    def broken(matrix: LaneMatrix, x: Tensor, tile: Tile | None = None) -> Tensor:
        if error:
            raise RuntimeError(error)
        return plain(matrix, x, tile) * 2

    monkeypatch.setattr("growprune.deployment.cuda.products.product", broken)
    monkeypatch.setattr("growprune.deployment.cuda.tuning.time_of", lambda layers, x: 1.0)
    with pytest.warns(UserWarning, match=f"^fc was not timed on the sparse kernel: .*{reason}"):
        row = choose(ROW, from_dense(random_weight(8, 16, 0.75, torch.float32)))
    assert (row.choice, row.dense_ms, row.sparse_ms) == ("dense", 0.001, None)


def test_a_tile_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, tiles = product, (Tile(1), Tile(2), Tile(4))

    def broken(matrix: LaneMatrix, x: Tensor, tile: Tile | None = None) -> Tensor:
        if tile == tiles[0]:
            raise RuntimeError("too many registers")
        return plain(matrix, x, tile)

    times = iter((5.0, 3.0))
    monkeypatch.setattr("growprune.deployment.cuda.products.product", broken)
    monkeypatch.setattr("growprune.deployment.cuda.tuning.time_of", lambda layers, x: next(times))
    assert fastest(lane_matrix(from_dense(torch.eye(4))), tiles, 1) == (tiles[2], 3.0)
    with pytest.raises(RuntimeError, match="no tile can run: RuntimeError: too many registers"):
        fastest(lane_matrix(from_dense(torch.eye(4))), tiles[:1], 1)


def test_when_time_is_up_no_more_tiles_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("growprune.deployment.cuda.tuning.time_of", lambda layers, x: 1.0)
    tiles = (Tile(1), Tile(2))
    assert [tile for tile, _ in times_of_tiles(lane_matrix(from_dense(torch.eye(4))), tiles, 1, 0)] == [tiles[0]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_choosing_on_a_gpu_measures_all() -> None:
    row = choose(ROW, entries_of(random_weight(2048, 2048, 0.9).cuda()), batch=16)
    assert row.dense_ms is not None and row.sparse_ms is not None
