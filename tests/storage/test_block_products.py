"""Products over live blocks are those with the dense weight: in Triton, and through whole layers."""

import copy
import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as activation_checkpoint
from triton_interpreter import interpret, on_the_gpu

from growprune.errors import GrowpruneError
from growprune.masks.partition import Partition
from growprune.masks.patterns import parse_pattern
from growprune.plan import By
from growprune.sparse.model import SparseModel
from growprune.storage import block_products, kernels
from growprune.storage.compact import layouts_of

ALIVE = torch.tensor([[0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 0, 0]], dtype=torch.bool)
"""With an empty row and an empty column."""
CROWDED = torch.tensor([[1, 1, 0, 1, 1, 1, 1], [0, 1, 0, 0, 0, 0, 1]], dtype=torch.bool)
"""With more neighbours in a row than a program takes at once."""
SIZES = [(32, 32), (64, 32), (32, 96), (128, 64)]


@pytest.fixture(autouse=True)
def auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the way after each test."""
    monkeypatch.setattr(block_products, "WAY", "auto")


def mask_of(alive: Tensor, height: int, width: int) -> Tensor:
    return alive.repeat_interleave(height, 0).repeat_interleave(width, 1)


def random_alive(down: int, across: int, seed: int = 0) -> Tensor:
    return torch.rand(down, across, generator=torch.Generator().manual_seed(seed)) < 0.3


def operands(
    alive: Tensor, height: int, width: int, tokens: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Any, ...]:
    """Live blocks, x, dy, values, and the dense weight."""
    generator = torch.Generator().manual_seed(1)
    mask = mask_of(alive, height, width)
    shapes = mask.shape, (tokens, mask.shape[1]), (tokens, mask.shape[0])
    weight, x, dy = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    found = block_products.live_blocks(mask.to(device), height, width)
    assert found is not None
    return found, x.to(device), dy.to(device), weight[mask].to(device), (weight * mask).to(device)


def test_the_table_says_where_live_blocks_are() -> None:
    found = block_products.live_blocks(mask_of(ALIVE, 32, 64), 32, 64)
    assert found.sizes == (3, 4, 4, 32, 64)
    assert found.table.dtype == torch.int32
    assert found.table.tolist() == [
        *(0, 2, 2, 4),  # where block rows begin
        *(0, 1, 3, 3, 4),  # where block columns begin
        *(1, 3, 0, 1),  # row by row: columns
        *(0, 0, 2, 2),  # row by row: rows
        *(2, 0, 2, 0),  # column by column: rows
        *(64, 0, 65, 1),  # column by column: first pieces; two blocks of 32 rows before the third
        *(2, 2, 2, 2),  # column by column: strides
        0,
    ]


def test_a_mask_that_splits_a_block_has_no_table() -> None:
    mask = mask_of(ALIVE, 32, 32)
    mask[0, 32] = False
    assert block_products.live_blocks(mask, 32, 32) is None


@pytest.mark.parametrize(
    ("pattern", "shape", "found"),
    [
        ("32x64", (96, 128), (32, 64)),
        ("128x128", (256, 128), (128, 128)),
        ("32x32", (40, 64), None),  # a rest
        ("16x64", (64, 64), None),  # too small
        ("64x64", (64, 64, 3), None),  # a convolution
        ("unstructured", (64, 64), None),
        ("2:4", (64, 64), None),
    ],
)
def test_products_are_for_large_blocks_that_fit(pattern: str, shape: tuple[int, ...], found: Any) -> None:
    assert block_products.block_of(parse_pattern(pattern), "fc.weight", torch.Size(shape)) == found


def test_a_layer_that_blocks_do_not_fill_is_named_with_what_fits(caplog: pytest.LogCaptureFixture) -> None:
    SparseModel(nn.Sequential(nn.Linear(96, 64)), sparsity=0.5, storage="compact", pattern="64x64")
    assert (
        "0.weight is 64x96, which blocks of 64x64 do not divide evenly: its products stay dense; 32x32 would fit"
        in caplog.text
    )


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The kernels, run by Triton's interpreter, which must be chosen before they are made."""
    interpret(monkeypatch)
    names = ("growprune.storage.triton_kernels", "growprune.storage.triton_blocks")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(names[1])

    def launch(kernel: Any, grid: Any, tensors: Any, numbers: Any, *, num_warps: int, num_stages: int) -> None:
        kernel[grid](*tensors, *numbers, num_warps=num_warps, num_stages=num_stages)

    monkeypatch.setattr(module, "launch", launch)
    yield module
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize(
    ("alive", "tokens"), [(ALIVE, 130), (torch.zeros_like(ALIVE), 3), (random_alive(4, 3), 64), (CROWDED, 64)]
)
def test_interpreted_kernels_give_the_products(
    height: int, width: int, alive: Tensor, tokens: int, interpreted: Any
) -> None:
    found, x, dy, values, weight = operands(alive, height, width, tokens, torch.float32)
    bias, mask = dy[0].clone(), mask_of(alive, height, width)
    close = {"rtol": 1e-5, "atol": 1e-4}
    y = interpreted.output(x, values, None, found.table, found.sizes)
    torch.testing.assert_close(y, x @ weight.t(), **close)
    y = interpreted.output(x, values, bias, found.table, found.sizes)
    torch.testing.assert_close(y, x @ weight.t() + bias, **close)
    dx = interpreted.input_gradient(dy, values, found.table, found.sizes)
    torch.testing.assert_close(dx, dy @ weight, **close)
    gradient = interpreted.values_gradient(dy, x, found.table, found.sizes, torch.float32)
    torch.testing.assert_close(gradient, (dy.t() @ x)[mask], **close)


def test_interpreted_kernels_round_sums_of_bfloat16_once(interpreted: Any) -> None:
    found, x, dy, values, weight = operands(ALIVE, 32, 64, 70, torch.bfloat16)
    y = interpreted.output(x, values, None, found.table, found.sizes)
    torch.testing.assert_close(y.double(), x.double() @ weight.double().t(), rtol=2**-7, atol=1e-3)
    gradient = interpreted.values_gradient(dy, x, found.table, found.sizes, torch.float32)
    exact = (dy.double().t() @ x.double())[mask_of(ALIVE, 32, 64)]
    torch.testing.assert_close(gradient.double(), exact, rtol=1e-5, atol=1e-4)


COMPILES = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from growprune.storage import triton_blocks

POINTERS = dict.fromkeys(("x", "values", "bias", "y", "dy", "dx"), "*bf16") | {"gradient": "*fp32", "table": "*i32"}
NUMBERS = ("num_tokens", "x_stride", "dy_stride", "block_rows", "block_columns", "num_blocks")
AXES = {"output": "TOKENS OUTPUTS INPUTS", "input": "TOKENS INPUTS OUTPUTS", "values": "OUTPUTS INPUTS TOKENS"}
for product, axes in AXES.items():
    kernel = getattr(triton_blocks, f"_{product}_kernel")
    tile = (triton_blocks.tile_of_values if product == "values" else triton_blocks.tile_of_tokens)(128, 128)
    sizes = dict(HEIGHT=128, WIDTH=128, HAS_BIAS=0, EVEN=1) | dict(zip(axes.split(), tile))
    names, types = kernel.arg_names, POINTERS | dict.fromkeys(NUMBERS, "i32")
    source = ASTSource(
        kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): size for name, size in sizes.items() if name in names},
        attrs={(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in types and n != "num_blocks"},
    )
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    stages = made.metadata.shared / (2 * tile.depth * (tile.rows + tile.columns))
    print(made.asm["ptx"].count("wgmma.mma_async") > 0, stages == tile.num_stages)
"""


def test_for_hopper_every_stage_is_loaded_ahead_of_its_tensor_cores(tmp_path: Path) -> None:
    """Looking up a block in the step that loads it would cost half of the stages."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed, which would compile the kernels")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    run = subprocess.run([sys.executable, "-c", COMPILES], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["True True"] * 3


def test_tiles_divide_their_blocks(interpreted: Any) -> None:
    for height, width in [(32, 32), (64, 64), (128, 128), (96, 160), (256, 64), (128, 96)]:
        tile = interpreted.tile_of_tokens(height, width)
        assert height % tile.columns == 0
        assert width % tile.depth == 0
        tile = interpreted.tile_of_values(height, width)
        assert height % tile.rows == 0
        assert width % tile.columns == 0 or tile.columns % width == 0  # several neighbours


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(96, 128), nn.Linear(128, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def sparse_model(dtype: torch.dtype = torch.float64, device: str = "cpu", pattern: str = "32x32") -> SparseModel:
    torch.manual_seed(0)
    sparse = SparseModel(Small().to(device, dtype), sparsity=0.5, storage="compact", pattern=pattern)
    sparse.prune()
    return sparse


def trained(way: str) -> dict[str, Tensor]:
    """Weights after steps before and after an edit."""
    block_products.WAY = way
    sparse = sparse_model()
    optimizer = sparse.attach(torch.optim.SGD(sparse.model.parameters(), lr=0.1, momentum=0.9))
    parts = Partition.contiguous(sparse.model, 2)
    for step in range(6):
        if step == 2:
            sparse.grow(parts[0])
        if step == 4:
            sparse.prune(parts[0])
        optimizer.zero_grad()
        sparse.model(torch.randn(3, 4, 96, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    return sparse.model.state_dict()


def test_training_over_live_blocks_is_training_with_the_dense_weight() -> None:
    torch.testing.assert_close(trained("sparse"), trained("dense"), rtol=1e-9, atol=1e-12)


def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often each product was taken over live blocks."""
    counts = dict.fromkeys(("output", "input_gradient", "values_gradient"), 0)

    def counting(name: str) -> Any:
        plain = getattr(block_products, name)

        def run(*operands: Any) -> Any:
            counts[name] += 1
            return plain(*operands)

        return run

    for name in counts:
        monkeypatch.setattr(block_products, name, counting(name))
    return counts


def test_layers_multiply_live_blocks_only_and_dense_parts_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = counted(monkeypatch)
    sparse = sparse_model()
    x = torch.randn(2, 96, dtype=torch.float64)
    sparse.model(x).sum().backward()
    assert counts == {"output": 0, "input_gradient": 0, "values_gradient": 0}  # a CPU makes the weight dense
    block_products.WAY = "sparse"
    sparse.model(x).sum().backward()
    assert counts == {"output": 2, "input_gradient": 1, "values_gradient": 2}  # the first input needs no gradient
    sparse.grow(Partition.contiguous(sparse.model, 2)[0])
    sparse.model(x).sum().backward()
    assert counts == {"output": 3, "input_gradient": 2, "values_gradient": 3}


def test_dense_gradients_are_recorded_as_ever() -> None:
    block_products.WAY = "sparse"
    sparse = sparse_model()
    optimizer = sparse.attach(torch.optim.SGD(sparse.model.parameters(), lr=0.1))
    seen = []
    recording: Any = sparse.stored["first.weight"]
    recording.record = seen.append
    x = torch.randn(5, 96, dtype=torch.float64)
    sparse.model(x).square().sum().backward()
    assert [tuple(gradient.shape) for gradient in seen] == [(128, 96)]
    assert torch.count_nonzero(seen[0][~recording.mask()]) > 0
    torch.testing.assert_close(recording.parameter.grad, seen[0][recording.mask()])
    del optimizer


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile does that itself
@pytest.mark.parametrize("how", ["checkpointed", "compiled"])
def test_checkpointed_or_compiled_as_one_graph_it_computes_the_same(how: str) -> None:
    block_products.WAY = "sparse"
    sparse = sparse_model(torch.float64 if how == "checkpointed" else torch.float32)
    x = torch.randn(5, 96, dtype=sparse.model.second.weight.dtype, requires_grad=True)
    other: Any = lambda x: activation_checkpoint(sparse.model, x, use_reentrant=False)  # noqa: E731
    if how == "compiled":
        other = torch.compile(sparse.model, backend="aot_eager", fullgraph=True)
    gradients = []
    for run in (sparse.model, other):
        sparse.model.zero_grad()
        run(x).square().sum().backward()
        gradients.append([p.grad.clone() for p in sparse.model.parameters() if p.grad is not None])
    torch.testing.assert_close(*gradients, **({"rtol": 0, "atol": 0} if how == "checkpointed" else {}))


def test_copies_have_tables_of_their_own() -> None:
    sparse = sparse_model()
    mine, copied = (layouts_of(m.first)["weight"] for m in (sparse.model, copy.deepcopy(sparse.model)))
    assert mine is not None and copied is not None
    assert mine.blocks is not None and copied.blocks is not None
    assert torch.equal(mine.blocks.table, copied.blocks.table)
    assert mine.blocks.table.data_ptr() != copied.blocks.table.data_ptr()


@pytest.mark.parametrize("product", ["output", "input", "values"])
def test_operators_are_what_their_fakes_say(product: str) -> None:
    found, x, dy, values, _ = operands(random_alive(3, 4), 32, 64, 5, torch.float32)
    bits = kernels.pack(mask_of(random_alive(3, 4), 32, 64).flatten())
    layout = (found.table, found.sizes, bits, kernels.block_offsets(bits)[0], 1)
    arguments = {
        "output": (x, values, None, *layout),
        "input": (dy, values, *layout),
        "values": (dy, x, torch.float64, *layout),
    }[product]
    operator = getattr(torch.ops.growprune, f"block_{product}")
    torch.library.opcheck(operator.default, arguments, test_utils=("test_schema", "test_faketensor"))


def test_a_way_that_there_is_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_products, "WAY", "fast")
    with pytest.raises(GrowpruneError, match="GROWPRUNE_BLOCK_PRODUCTS must be one of auto, sparse, dense, got"):
        sparse_model()


@pytest.mark.parametrize(
    ("alive", "height", "width", "pays"),
    [(2, 64, 128, True), (3, 64, 128, False), (1, 32, 128, True), (2, 32, 128, False), (8, 64, 64, False)],
)
def test_block_products_pay_only_below_a_density(alive: int, height: int, width: int, pays: bool) -> None:
    # 8 blocks: 30 % are 2.4 of them, and 20 % are 1.6
    assert block_products.LiveBlocks(torch.zeros(1, dtype=torch.int32), (2, 4, alive, height, width)).pays is pays


# On a GPU


def gpu_pair(pattern: str) -> tuple[nn.Module, nn.Module, Tensor]:
    """A sparse layer, a dense one with its weight, and an input."""
    torch.manual_seed(0)
    layer = nn.Linear(512, 768).cuda()
    sparse = SparseModel(layer, sparsity=0.8, storage="compact", pattern=pattern)
    sparse.prune()
    plain = nn.Linear(512, 768).cuda()
    plain.load_state_dict(layer.state_dict())
    return sparse.model, plain, torch.randn(3, 111, 512, device="cuda").bfloat16()


def passed(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output and gradients of input, weight (dense, or live values) and bias."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
        y = layer(x)
    y.backward(torch.linspace(-1, 1, y.numel(), device="cuda").view_as(y).bfloat16())
    weight = layer._parameters["weight"]
    assert x.grad is not None and weight is not None and weight.grad is not None
    return y.detach(), x.grad, weight.grad, layer.bias.grad  # type: ignore[return-value,union-attr]


def close_to(found: Tensor, exact: Tensor) -> None:
    """Within the rounding of bfloat16, relative to the largest."""
    assert found.shape == exact.shape
    assert float((found.float() - exact.float()).abs().max()) <= 2**-6 * float(exact.abs().max())


@pytest.mark.parametrize("pattern", ["32x32", "64x64", "128x128", "96x64", "64x32"])
@pytest.mark.parametrize("way", ["sparse", "auto"])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_the_gpu)])
def test_a_layer_on_a_gpu_computes_what_the_dense_one_does(pattern: str, way: str, device: str) -> None:
    del device
    block_products.WAY = way
    layer, plain, x = gpu_pair(pattern)
    mask = layouts_of(layer)["weight"].mask()  # type: ignore[union-attr]
    found, exact = passed(layer, x), passed(plain, x)
    for one, other in zip(found, (*exact[:2], exact[2][mask], exact[3]), strict=True):
        close_to(one, other)


@pytest.mark.parametrize("pattern", ["32x32", "64x64", "128x128"])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_the_gpu)])
def test_kernels_give_the_products_and_the_same_bits_twice(pattern: str, device: str) -> None:
    from growprune.storage import triton_blocks

    height, width = (int(side) for side in pattern.split("x"))
    alive = random_alive(6, 9)
    alive[2], alive[:, 4] = False, False
    found, x, dy, values, weight = operands(alive, height, width, 333, torch.bfloat16, device)
    table, sizes, mask = found.table, found.sizes, mask_of(alive, height, width).cuda()
    for run, exact in [
        (lambda: triton_blocks.output(x, values, None, table, sizes), x @ weight.t()),
        (lambda: triton_blocks.input_gradient(dy, values, table, sizes), dy @ weight),
        (lambda: triton_blocks.values_gradient(dy, x, table, sizes, torch.float32), (dy.float().t() @ x.float())[mask]),
    ]:
        first = run()
        close_to(first, exact)
        assert torch.equal(first, run())


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_the_gpu)])
def test_after_edits_products_are_of_the_new_blocks(device: str) -> None:
    block_products.WAY = "sparse"
    torch.manual_seed(0)
    sparse = SparseModel(nn.Linear(512, 768).to(device), sparsity=0.8, storage="compact", pattern="64x64")
    x = torch.randn(200, 512, device=device).bfloat16()
    for seed in range(3):
        sparse.prune(by=By.RANDOM)
        plain = nn.Linear(512, 768).to(device)
        plain.load_state_dict(sparse.model.state_dict())
        mask = sparse.masks["weight"] if seed == 0 else layouts_of(sparse.model)["weight"].mask()  # type: ignore[union-attr]
        found, exact = passed(sparse.model, x), passed(plain, x)
        for one, other in zip(found, (*exact[:2], exact[2][mask], exact[3]), strict=True):
            close_to(one, other)
        sparse.grow(Partition.contiguous(sparse.model, 1)[0])
        sparse.model.weight.data.normal_()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # torch's own, of other versions too
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_the_gpu)])
def test_compiled_on_a_gpu_a_layer_computes_the_same(device: str) -> None:
    block_products.WAY = "sparse"
    layer, _, x = gpu_pair("64x64")
    compiled = torch.compile(lambda x: layer(x))
    found = passed(layer, x)
    x = x.clone().requires_grad_()
    layer.zero_grad()
    with torch.autocast(device, torch.bfloat16, cache_enabled=False):
        y = compiled(x)
    y.backward(torch.linspace(-1, 1, y.numel(), device=device).view_as(y).bfloat16())
    close_to(y.detach(), found[0])
    close_to(x.grad, found[1])
    close_to(layer._parameters["weight"].grad, found[2])  # type: ignore[union-attr]


def test_gradients_over_live_blocks_are_right() -> None:
    block_products.WAY = "sparse"
    sparse = sparse_model()
    layer = sparse.model.first
    x = torch.randn(2, 96, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, values, bias: layer(x),
        (x, layer._parameters["weight"], layer.bias),
        atol=1e-7,
        rtol=1e-7,
        fast_mode=True,
    )
