"""Tensors on the host: copies, their bytes, and hashes of them.

Works on plain tensors and DTensors of any device; a DTensor stays one, with its shard on the CPU.
"""

from __future__ import annotations

import ctypes
import functools
import json
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from slurmspot.checkpoint.dtypes import STORED_AS
from slurmspot.errors import CheckpointWriteError

_SAMPLE_BYTES = 64
_STORABLE = {getattr(torch, name) for name in STORED_AS if hasattr(torch, name)}


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` of ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def check_storable(path: str, dtype: torch.dtype, layout: torch.layout) -> None:
    """Refuse a tensor that is not a plain array of a known type.

    Raises:
        CheckpointWriteError: it is sparse, quantized, or of an unknown type; names its path.
    """
    if dtype not in _STORABLE or layout is not torch.strided:
        raise CheckpointWriteError(
            f"{path} cannot be stored: {layout} tensor of {dtype}",
            fix="store a dense tensor of a usual type from state_dict()",
        )


def copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host that shares nothing with ``tensor``."""
    return tensor.detach().to("cpu", copy=True)


def empty(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised host memory, whatever torch's default device is."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def empty_like(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Uninitialised host memory shaped, typed and sharded like ``tensor``."""
    return torch.empty_like(tensor.detach(), device="cpu", dtype=dtype or tensor.dtype)


def part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, as it lies in memory: not a copy."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor._local_tensor  # noqa: SLF001 - what to_local() gives without gradients, slowly


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, contiguous, with no pending conjugation."""
    return part(tensor).detach().resolve_conj().resolve_neg().contiguous()


def address(mine: torch.Tensor) -> tuple[int, int]:
    """Where a rank's part begins in memory, and its bytes: what tells tensors from each other.

    A state dict gives new tensor objects around the same memory every time.
    """
    return mine.data_ptr(), mine.nbytes


def sample(mine: torch.Tensor) -> bytes | torch.Tensor | None:
    """A copy of a few elements of a rank's part, on its device; None if torch cannot tell them."""
    if mine.is_cpu and mine.is_contiguous() and not mine.is_conj() and not mine.is_neg():
        size = mine.nbytes
        begin = max(0, (size - _SAMPLE_BYTES) // 2)
        # Past torch: to make the view to read them through takes longer than all of this.
        return ctypes.string_at(mine.data_ptr() + begin, min(size, _SAMPLE_BYTES))
    try:
        return mine.detach().take(_middle(mine.numel(), mine.device))
    except NotImplementedError:  # float8, and wide unsigned integers
        return None


def has(tensor: torch.Tensor, sampled: bytes | torch.Tensor) -> bool:
    """Whether this rank's part of a tensor on the host has, bit for bit, what :func:`sample` took.

    Of a tensor of that shape and type; this one is contiguous.
    """
    mine = part(tensor)
    if isinstance(sampled, bytes):
        return sample(mine) == sampled
    found = mine.take(_middle(mine.numel(), mine.device))
    return content(found) == content(sampled.cpu())


@functools.lru_cache(4096)
def _middle(count: int, device: torch.device) -> torch.Tensor:
    """Where :func:`sample` looks in ``count`` elements."""
    return torch.arange(count // 2, min(count, count // 2 + 16), device=device)


def onto(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Host bytes ``memory`` as a tensor that is shaped, typed and sharded like ``tensor``."""
    room = memory.view(tensor.dtype).reshape(part(tensor).shape)
    if isinstance(tensor, DTensor):  # from_local() would move the room to the device of the mesh
        spec = tensor._spec  # noqa: SLF001 - see above
        return DTensor(room, spec, requires_grad=False)  # type: ignore[no-untyped-call]  # torch's
    return room


def likeness(tensor: torch.Tensor) -> Any:
    """Equal for tensors that are shaped, typed and sharded alike, on whatever device."""
    cut = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
    return tensor.dtype, tensor.shape, cut


def content(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host, without copying."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def content_hash(tensor: torch.Tensor) -> str:
    """XXH3-128, in hexadecimal, of the bytes of this rank's part."""
    return xxhash.xxh3_128_hexdigest(content(local(tensor).cpu()))


def digest(
    path: str, tensor: torch.Tensor, *, whole: bool = False, known: str | None = None
) -> bytes:
    """XXH3-128 over name, type, shape and the XXH3-128 of the bytes.

    Args:
        known: the latter, in hexadecimal, where it has been computed already.
        whole: gather a sharded tensor first (collective), so that the sharding does not matter;
            else this rank's part and its place count.
    """
    place: Any = None
    if isinstance(tensor, DTensor):
        if whole:
            tensor = tensor.full_tensor()
        else:
            place = compute_local_shape_and_global_offset(
                tensor.shape, tensor.device_mesh, tensor.placements
            )
    header = [path, dtype_name(tensor.dtype), list(tensor.shape), place]
    summed = xxhash.xxh3_128(json.dumps(header).encode())
    if known is None:
        known = content_hash(tensor)
    summed.update(bytes.fromhex(known))
    return summed.digest()
