"""Tensors on the host: the few elements by which a copy is known again."""

import pytest
import torch

from slurmspot.checkpoint import host
from slurmspot.checkpoint.dtypes import STORED_AS

DTYPES = [getattr(torch, name) for name in STORED_AS if hasattr(torch, name)]
SHAPES = [(), (1,), (7,), (0, 3), (64, 5), (3, 4, 5, 6)]


def made(shape, dtype):
    count = torch.Size(shape).numel()
    raw = torch.arange(1, 1 + count * dtype.itemsize, dtype=torch.int64).to(torch.uint8)
    return (raw % 2 if dtype is torch.bool else raw).view(dtype).reshape(shape)


def copied(tensor):
    room = torch.empty(tensor.shape, dtype=tensor.dtype)
    return room.copy_(tensor)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_copy_has_the_sample_and_another_has_not(shape, dtype):
    tensor = made(shape, dtype)
    sampled = host.sample(tensor)
    room = copied(tensor)
    assert host.has(room, sampled)
    if tensor.numel():
        host.content(room)[tensor.numel() // 2 * dtype.itemsize] ^= 1
        assert not host.has(room, sampled)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(64.0).reshape(8, 8).T,
        torch.arange(240.0).reshape(2, 3, 8, 5).to(memory_format=torch.channels_last),
        torch.arange(1.0).expand(1000),
        torch.randn(40, dtype=torch.complex64).conj(),
        torch.randn(40, dtype=torch.complex64).conj().imag,
        torch.arange(100.0)[::3],
    ],
    ids=["transposed", "channels_last", "expanded", "conjugated", "negated", "strided"],
)
def test_a_sample_is_of_the_elements_and_not_of_the_memory(tensor):
    sampled = host.sample(tensor)
    room = copied(tensor)
    assert host.has(room, sampled)
    room.reshape(-1)[tensor.numel() // 2] += 1
    assert not host.has(room, sampled)


def test_of_some_types_there_is_no_sample_unless_they_are_contiguous():
    scattered = made((8, 8), torch.float8_e4m3fn).T
    assert host.sample(scattered) is None
    assert host.sample(scattered.contiguous()) is not None
