"""Tensors on the host: copies, their bytes, and hashes of them.

Works on plain tensors and DTensors of any device; a DTensor stays one, with its shard on the CPU.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from slurmspot.checkpoint.dtypes import STORED_AS
from slurmspot.errors import CheckpointWriteError


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` of ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def check_storable(path: str, dtype: torch.dtype, layout: torch.layout) -> None:
    """Refuse a tensor that is not a plain array of a known type.

    Raises:
        CheckpointWriteError: it is sparse, quantized, or of an unknown type; names its path.
    """
    if layout != torch.strided or dtype_name(dtype) not in STORED_AS:
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


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, contiguous, with no pending conjugation."""
    part = tensor.detach()
    if isinstance(part, DTensor):
        part = part.to_local()
    return part.resolve_conj().resolve_neg().contiguous()


def content(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host, without copying."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def digest(path: str, tensor: torch.Tensor, *, whole: bool = False) -> bytes:
    """XXH3-128 over name, type, shape and bytes.

    Args:
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
    summed.update(content(local(tensor).cpu()))
    return summed.digest()
