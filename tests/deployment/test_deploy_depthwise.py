"""Depthwise convolutions on our kernels, and the threads that share their work."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cpu_kernels import GAP, finish, kernels, spaced  # noqa: F401
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import growprune as gp
from growprune.deployment.cpu.geometry import Geometry
from growprune.deployment.cpu.matrix import from_dense
from growprune.deployment.cpu.prepared import Activation, DepthwiseLayer, LayerSpec
from growprune.deployment.graph.program import CallStep, Lowered, Program, TorchStep, is_ours


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def spec_of(weight: Tensor, geometry: Geometry, **options: Any) -> LayerSpec:
    return LayerSpec("layer", from_dense(weight), geometry, is_sparse=False, is_depthwise=True, **options)


def expected(spec: LayerSpec, weight: Tensor, x: Tensor, residual: Tensor | None) -> Tensor:
    """What torch gives, in float64."""
    g = spec.geometry
    images = x.double().reshape(g.channels, g.batch, g.height, g.width).transpose(0, 1)
    bias = None if spec.bias is None else spec.bias.double()
    found = F.conv2d(images, weight.double(), bias, g.stride, g.padding, g.dilation, g.channels)
    sums = found.transpose(0, 1).flatten(1) + (0 if residual is None else residual.double())
    return finish(sums, spec.activation)


def expect_same_as_torch(geometry: Geometry, num_threads: int, activation: Activation, has_residual: bool) -> None:
    torch.manual_seed(0)
    g = geometry
    weight, x = 2 * torch.randn(g.channels, 1, *g.kernel), torch.randn(g.channels, g.in_columns)
    spec = spec_of(weight, g, bias=torch.randn(g.channels), activation=activation)
    residual = torch.randn(g.channels, g.columns) if has_residual else None
    out = spaced(residual if residual is not None else torch.zeros(g.channels, g.columns))
    whole = out.as_strided((g.channels - 1, g.columns + GAP), out.stride())  # the last row has no gap behind it here
    layer = DepthwiseLayer(spec, num_threads)
    layer.bind(spaced(x), out, None if residual is None else out)()  # the residual may be where the result goes
    torch.testing.assert_close(out.double(), expected(spec, weight, x, residual), atol=2e-5, rtol=2e-5)
    assert whole[:, g.columns :].isnan().all()


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    kernel = draw(st.sampled_from([(3, 3), (5, 5), (7, 7), (1, 1), (2, 3), (1, 5), (4, 4)]))
    stride, dilation = (draw(st.tuples(st.integers(1, 3), st.integers(1, 3))) for _ in range(2))
    padding = draw(st.tuples(st.integers(0, 5), st.integers(0, 5)))
    spans = [d * (k - 1) + 1 - 2 * p for d, k, p in zip(dilation, kernel, padding, strict=True)]
    height, width = (draw(st.integers(max(1, span), max(1, span) + 40)) for span in spans)
    channels, batch = draw(st.integers(2, 9)), draw(st.integers(1, 3))
    return Geometry(channels, batch, height, width, kernel, stride, padding, dilation)


@settings(max_examples=300)
@given(geometry=geometries(), num_threads=st.integers(1, 3), end=st.sampled_from(Activation), residual=st.booleans())
def test_a_depthwise_convolution_is_that_of_torch(
    geometry: Geometry, num_threads: int, end: Activation, residual: bool
) -> None:
    expect_same_as_torch(geometry, num_threads, end, residual)


# Whole models


def deployed(model: nn.Module, x: Tensor, **options: Any) -> gp.Deployed:
    """Deployed without timing, after a check that it gives what the model gives."""
    torch.manual_seed(0)
    sparse = gp.SparseModel(model.eval(), sparsity=0.5, **options)
    sparse.prune(by=gp.By.RANDOM)
    found = gp.deploy(sparse, x, seconds=0)
    with torch.no_grad():
        torch.testing.assert_close(found(x), model(x), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found(x), model(x), atol=1e-5, rtol=1e-5)
    return found


@pytest.mark.filterwarnings("ignore::UserWarning")  # of layers that are small
@pytest.mark.parametrize("pattern", ["unstructured", "8x1"])
@pytest.mark.parametrize("groups, out", [(2, 16), (16, 16), (16, 32)])
def test_depthwise_convolutions_are_deployed_and_other_grouped_ones_stay_in_torch(
    pattern: str, groups: int, out: int
) -> None:
    grouped = nn.Conv2d(16, out, 3, 2, 1, groups=groups)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU6(), grouped, nn.BatchNorm2d(out), nn.GELU())
    for kept in ([], ["2"]):
        table = deployed(model, torch.randn(2, 3, 13, 11), pattern=pattern, keep_dense=kept).table
        if groups == out:
            assert table.in_torch == () and [row.choice for row in table] == ["sparse", "dense"]
            assert table[1].shape.startswith("16x9 (3x3)")
        else:
            assert table.in_torch[0] == "conv2d"
            assert [row.choice for row in table] == (["sparse"] if kept else ["sparse", "torch"])


class MobileBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(8, 24, 1)
        self.each = nn.Conv2d(24, 24, 3, padding=1, groups=24)
        self.narrow = nn.Conv2d(24, 8, 1)
        self.down = nn.Conv2d(16, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.narrow(F.relu6(self.each(F.relu6(self.wide(x)))))
        return self.down(torch.cat([y, F.max_pool2d(y, 3, 1, 1)], 1))  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_network_of_images_runs_without_torch_the_same_bits_for_any_number_of_threads(threads: int) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 8, 1), MobileBlock()), torch.randn(2, 3, 12, 10)
    found = deployed(model, x)
    assert found.table.in_torch == ()
    assert torch.get_num_threads() == threads
    (program,) = found.module.plans.values()
    assert program._alone is not None
    alone = found(x)
    program._alone = None  # on OpenMP's threads
    assert torch.equal(found(x), alone)


def test_limits_that_are_not_those_of_relu6_are_not_taken_for_it() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Hardtanh(-0.1, 0.2), nn.Conv2d(16, 16, 3, padding_mode="circular"))
    assert deployed(model, torch.randn(1, 3, 9, 9)).table[0].choice == "sparse"


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 16, 1), nn.Conv2d(19, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        wide = torch.cat([y.flip(3)[:, :9], x, y[:, :7]], 1)  # what torch made, an input, and some of a layer
        return torch.cat([torch.empty(0), self.last(wide)], 1)  # type: ignore[no-any-return]


def test_channels_of_whatever_lies_elsewhere_are_joined() -> None:
    assert deployed(Joined(), torch.randn(2, 3, 5, 6)).table.in_torch == ("flip", "cat")


# Threads


def test_a_program_has_threads_of_its_own_only_where_torch_computes_little() -> None:
    little, much = (TorchStep(torch.neg, (), {}, 0, size=size) for size in (1000, 1 << 20))
    assert is_ours([little]) and not is_ours([little, much])
    assert is_ours([CallStep(min, [], [], is_ours=True)]) and not is_ours([CallStep(min, [], [])])


def test_torch_has_its_threads_again_after_an_error() -> None:
    def fails() -> None:
        raise KeyError

    before = torch.get_num_threads()
    program = Program(Lowered(steps=[TorchStep(fails, (), {}, None)]), torch.utils._pytree.tree_flatten([])[1])
    assert program._alone is not None
    with pytest.raises(KeyError):
        program([])
    assert torch.get_num_threads() == before


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_several_callers_at_once_get_what_each_gets_alone(threads: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 3, 12, 10)
    models = [deployed(nn.Sequential(nn.Conv2d(3, 8, 1), MobileBlock()), x) for _ in range(3)]
    wanted = [model(x) for model in models]
    wrong: list[int] = []

    def call(i: int) -> None:
        wrong.extend(i for _ in range(100) if not torch.equal(models[i](x), wanted[i]))

    callers = [threading.Thread(target=call, args=(i,)) for i in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


FORK = """
import os, torch
import growprune as gp
torch.set_num_threads(2)
model = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 3), torch.nn.ReLU(), torch.nn.Conv2d(32, 8, 3))
sparse = gp.SparseModel(model.eval(), sparsity=0.5)
sparse.prune()
x = torch.randn(1, 3, 32, 32)
fast = gp.deploy(sparse, x, seconds=0)
wanted = fast(x)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(fast(x), wanted) else 1)
assert os.waitpid(child, 0)[1] == 0
assert torch.equal(fast(x), wanted)
"""


def test_a_forked_process_has_threads_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kernel", [3, 5])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [(150, 141), (33, 400), (5, 5), (16, 16), (1, 9000)])
def test_large_images_are_done_in_bands_of_rows_and_small_ones_several_at_a_time(
    kernel: int, stride: int, size: tuple[int, int]
) -> None:
    geometry = Geometry(21, 1, *size, (kernel, kernel), (stride, stride), (kernel // 2, kernel // 2))
    expect_same_as_torch(geometry, 2, Activation.RELU6, False)
