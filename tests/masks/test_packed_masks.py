"""Masks held as bits, as masked storage holds them on a GPU; here on a CPU, with the kernel written in torch."""

import copy

import pytest
import torch
from torch import Tensor, nn

from growprune.sparse.model import SparseModel
from growprune.storage import Masked, kernels


@pytest.fixture(autouse=True)
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    def zero_off(tensor: Tensor, bits: Tensor) -> None:
        assert tensor.is_contiguous()
        flat = tensor.detach().view(-1)
        flat.numpy()[~kernels.unpack(bits, flat.numel()).numpy()] = 0  # behind torch's back, as a kernel does it

    monkeypatch.setattr(kernels, "can_zero_off", lambda device: True)
    monkeypatch.setattr(kernels, "zero_off", zero_off)


def make() -> SparseModel:
    torch.manual_seed(0)
    sparse = SparseModel(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 4)), sparsity=0.5)
    sparse.prune()
    return sparse


def held(sparse: SparseModel, name: str) -> Masked:
    found = sparse.stored[name]
    assert isinstance(found, Masked)
    return found


def test_a_mask_takes_a_bit_a_weight_and_is_unpacked_when_asked_for() -> None:
    sparse = make()
    conv = held(sparse, "0.weight")
    assert conv._mask.numel() == 0
    assert [bits.numel() for bits in conv._bits.values()] == [128]
    assert int(sparse.masks["0.weight"].sum()) == 108
    assert conv.mask() is not conv.mask()


def test_tensors_in_another_memory_order_are_masked_by_bits_in_that_order() -> None:
    sparse = make()
    mask, conv = sparse.masks["0.weight"], held(sparse, "0.weight")
    tensor = torch.ones(8, 3, 3, 3).to(memory_format=torch.channels_last)
    conv.zero_off(tensor)
    assert torch.equal(tensor, mask.float())
    assert sorted(conv._bits) == [(0, 1, 2, 3), (0, 2, 3, 1)]
    sparse.prune(to=0.75)
    tensor = torch.ones(8, 3, 3, 3).to(memory_format=torch.channels_last)
    conv.zero_off(tensor)
    assert torch.equal(tensor, sparse.masks["0.weight"].float())
    assert int(tensor.sum()) == 54


def test_tensors_with_gaps_in_memory_are_masked_too() -> None:
    sparse = make()
    tensor = torch.ones(8, 3, 3, 6)[..., ::2]
    held(sparse, "0.weight").zero_off(tensor)
    assert torch.equal(tensor, sparse.masks["0.weight"].float())


def test_bits_stay_where_they_are_when_the_mask_changes() -> None:
    """A captured graph reads them from there."""
    sparse = make()
    places = {order: bits.data_ptr() for order, bits in held(sparse, "0.weight")._bits.items()}
    sparse.grow()
    assert {order: bits.data_ptr() for order, bits in held(sparse, "0.weight")._bits.items()} == places


def test_what_is_masked_has_a_new_version() -> None:
    sparse = make()
    tensor = torch.ones(4, 8)
    held(sparse, "2.weight").zero_off(tensor)
    assert tensor._version == 1


def test_training_keeps_zeros_and_copies_are_independent() -> None:
    sparse = make()
    copied = copy.deepcopy(sparse)
    optimizer = sparse.attach(torch.optim.SGD(sparse.model.parameters(), 0.1, momentum=0.9))
    for _ in range(3):
        optimizer.zero_grad()
        sparse.model(torch.randn(2, 3, 3, 3)).square().sum().backward()
        optimizer.step()
    for name, mask in sparse.masks.items():
        assert not sparse.model.get_parameter(name)[~mask].any()
    before = copied.masks["0.weight"]
    sparse.prune(to=0.75)
    assert torch.equal(copied.masks["0.weight"], before)
