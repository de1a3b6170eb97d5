import logging
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton_interpreter import on_the_gpu

from growprune.storage import kernels
from growprune.storage.kernels import block_offsets, compress, expand, pack, unpack

every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_the_gpu)])
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
PAIRS = [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)]
"""What values are commonly held in, and computed with."""


def mask_of(text: str, device: str = "cpu") -> Tensor:
    return torch.tensor([letter == "1" for letter in text], device=device)


def random_mask(num_groups: int, density: float, group: int, seed: int = 0) -> Tensor:
    lives = torch.rand(num_groups, generator=torch.Generator().manual_seed(seed)) < density
    return lives.repeat_interleave(group)


def random_values(count: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def by_boolean_indexing(values: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    dense = torch.zeros(mask.shape, dtype=dtype, device=values.device)
    dense[mask] = values.to(dtype)
    return dense


@every_device
def test_bits_are_packed_least_significant_first(device: str) -> None:
    bits = pack(mask_of("1010000001", device))
    assert bits.dtype == torch.uint8
    assert bits.tolist() == [0b00000101, 0b00000010, *[0] * 126]


@every_device
def test_bits_are_padded_to_whole_blocks(device: str) -> None:
    sizes = {n: pack(torch.ones(n, dtype=torch.bool, device=device)).numel() for n in (0, 1, 1024, 1025)}
    assert sizes == {0: 0, 1: 128, 1024: 128, 1025: 256}


@every_device
def test_offsets_count_the_live_bits_before_each_block(device: str) -> None:
    mask = torch.zeros(3000, dtype=torch.bool, device=device)
    mask[[0, 7, 1023, 1024, 2999]] = True
    offsets, nnz = block_offsets(pack(mask))
    assert offsets.dtype == torch.int64
    assert (offsets.tolist(), nnz) == ([0, 3, 4], 5)


@every_device
def test_kernels_take_empty_tensors(device: str) -> None:
    bits = pack(torch.zeros(0, dtype=torch.bool, device=device))
    offsets, nnz = block_offsets(bits)
    assert (offsets.numel(), nnz) == (0, 0)
    empty = torch.zeros(0, device=device)
    assert expand(empty, bits, offsets, 0, dtype=torch.float32).numel() == 0
    assert compress(empty, bits, offsets, 0, dtype=torch.float32).numel() == 0


@every_device
def test_a_group_costs_one_bit(device: str) -> None:
    bits = pack(mask_of("111000111", device), group=3)
    offsets, num_live = block_offsets(bits)
    assert (bits[0].item(), num_live) == (0b101, 2)
    values = torch.tensor([1.0, 2, 3, 4, 5, 6], device=device)
    dense = expand(values, bits, offsets, 9, dtype=torch.float32, group=3)
    assert dense.tolist() == [1, 2, 3, 0, 0, 0, 4, 5, 6]
    assert compress(dense + 1, bits, offsets, 6, dtype=torch.float32, group=3).tolist() == [2, 3, 4, 5, 6, 7]
    assert unpack(bits, 9, group=3).tolist() == mask_of("111000111").tolist()


@every_device
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_all_agree_with_boolean_indexing(device: str, data: st.DataObject) -> None:
    group = data.draw(st.sampled_from([1, 4, 8]))
    num_groups = data.draw(st.one_of(st.integers(1, 40), st.integers(1000, 3100), st.just(2048)))
    density = data.draw(st.sampled_from([0.0, 0.03, 0.1, 0.5, 1.0]))
    held, computed = data.draw(st.sampled_from(PAIRS))
    mask = random_mask(num_groups, density, group, seed=data.draw(st.integers(0, 99))).to(device)
    n, nnz = mask.numel(), int(mask.sum())
    bits = pack(mask, group=group)
    offsets, num_live = block_offsets(bits)
    assert num_live * group == nnz
    assert torch.equal(unpack(bits, n, group=group), mask)

    values = random_values(nnz, held).to(device)
    dense = expand(values, bits, offsets, n, dtype=computed, group=group)
    assert torch.equal(dense, by_boolean_indexing(values, mask, computed))

    gradient = random_values(n, computed).to(device)
    taken = compress(gradient, bits, offsets, nnz, dtype=held, group=group)
    assert torch.equal(taken, gradient[mask].to(held))


@every_device
@pytest.mark.parametrize("computed", FLOATS, ids=str)
@pytest.mark.parametrize("held", FLOATS, ids=str)
def test_casts_round_as_torch_does(device: str, held: torch.dtype, computed: torch.dtype) -> None:
    mask = random_mask(5000, 0.3, 1).to(device)
    bits = pack(mask)
    offsets, nnz = block_offsets(bits)
    values, gradient = random_values(nnz, held).to(device), random_values(5000, computed).to(device)
    dense = expand(values, bits, offsets, 5000, dtype=computed)
    assert torch.equal(dense, by_boolean_indexing(values, mask, computed))
    assert torch.equal(compress(gradient, bits, offsets, nnz, dtype=held), gradient[mask].to(held))


@every_device
def test_dead_weights_are_positive_zeros_beside_infinities(device: str) -> None:
    mask = mask_of("01" * 600, device)
    bits = pack(mask)
    values = torch.full((600,), -torch.inf, device=device)
    values[::2] = torch.nan
    dead = expand(values, bits, block_offsets(bits)[0], 1200, dtype=torch.bfloat16)[~mask]
    assert not dead.any()
    assert not dead.signbit().any()


@every_device
@pytest.mark.parametrize(
    ("group", "is_chunked"), [(5, False), (16, False), (200, False), (1, True), (4, True)], ids=str
)
def test_any_group_works_and_chunks_meet_without_a_seam(
    device: str, group: int, is_chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_chunked:
        monkeypatch.setattr(kernels, "CPU_CHUNK", 1024)
        monkeypatch.setattr(kernels, "CUDA_CHUNK", 1024)
        monkeypatch.setattr(kernels, "_triton_kernels", lambda device: None)
    mask = random_mask(5000 if is_chunked else 1100, 0.2, group).to(device)
    bits = pack(mask, group=group)
    offsets, num_live = block_offsets(bits)
    values = random_values(num_live * group, torch.float32).to(device)
    dense = expand(values, bits, offsets, mask.numel(), dtype=torch.float32, group=group)
    assert torch.equal(unpack(bits, mask.numel(), group=group), mask)
    assert torch.equal(dense, by_boolean_indexing(values, mask, torch.float32))
    assert torch.equal(compress(dense, bits, offsets, values.numel(), dtype=torch.float32, group=group), values)


@every_device
def test_the_operators_keep_their_promises_to_torch(device: str) -> None:
    bits = pack(mask_of("0110000010", device))
    offsets, _ = block_offsets(bits)
    values, dense = torch.ones(3, device=device), torch.ones(10, device=device)
    operators = torch.ops.growprune
    expanding = torch.library.opcheck(operators.expand, (values, bits, offsets, 10, torch.bfloat16, 1))
    compressing = torch.library.opcheck(operators.compress, (dense, bits, offsets, 3, torch.bfloat16, 1))
    assert {*expanding.values(), *compressing.values()} == {"SUCCESS"}


@every_device
@pytest.mark.filterwarnings("ignore")  # inductor's own, on tf32 and the like
def test_compile_sees_one_graph(device: str) -> None:
    def train(values: Tensor, bits: Tensor, offsets: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        weight = expand(values, bits, offsets, 5000, dtype=torch.float32).view(50, 100)
        gradient = (x @ weight.t()).t() @ x
        taken = compress(gradient.view(-1), bits, offsets, values.numel(), dtype=torch.float32)
        return taken, weight

    mask = random_mask(5000, 0.1, 1).to(device)
    bits = pack(mask)
    offsets, nnz = block_offsets(bits)
    arguments = random_values(nnz, torch.float32).to(device), bits, offsets, torch.ones(3, 100, device=device)
    backend = "aot_eager" if device == "cpu" else "inductor"
    compiled = torch.compile(train, backend=backend, fullgraph=True)
    for result, expected in zip(compiled(*arguments), train(*arguments), strict=True):
        torch.testing.assert_close(result, expected)


def test_missing_triton_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delitem(sys.modules, "growprune.storage.triton_kernels", raising=False)
    monkeypatch.delattr("growprune.storage.triton_kernels", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    kernels._triton_kernels.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert kernels._triton_kernels("cuda") is None
        assert kernels._triton_kernels("cuda") is None
    assert [record.message for record in caplog.records if "Triton is not installed" in record.message]
    assert len(caplog.records) == 1
    kernels._triton_kernels.cache_clear()


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_the_gpu)])
def test_more_than_two_to_the_31_weights_work(device: str) -> None:
    n = 2**31 + 4104
    mask = torch.zeros(n, dtype=torch.bool, device=device)
    mask[::3] = True
    bits = pack(mask)
    offsets, nnz = block_offsets(bits)
    assert nnz == len(range(0, n, 3))
    values = torch.arange(nnz, device=device).remainder_(251).to(torch.bfloat16)
    dense = expand(values, bits, offsets, n, dtype=torch.bfloat16)
    assert torch.equal(dense[::3], values)
    assert int(dense.count_nonzero()) == int(values.count_nonzero())
    assert torch.equal(compress(dense, bits, offsets, nnz, dtype=torch.bfloat16), values)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_the_gpu)])
@pytest.mark.parametrize("n", [1, 1000, 1024, 100_003])
def test_what_is_off_the_bits_is_zeroed(n: int, device: str) -> None:
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        mask = random_mask(n, 0.1, 1).to(device)
        bits = pack(mask)
        for start in (0, 1):  # a tensor that begins in the middle of another is not aligned
            tensor = torch.randint(1, 100, (n + 1,), device=device).to(dtype)[start : n + start]
            expected = tensor * mask
            kernels.zero_off(tensor, bits)
            assert torch.equal(tensor, expected)
