"""Host memory for one copy of a state: taken once, touched at once, used again and again.

Memory that a process has never touched is not there yet: the first write to each page stops for
the kernel to find and clear one, which makes a first copy several times slower than the next. So
all of it is touched when it is taken. Where a state has tensors on a GPU it is pinned as well,
which lets copies from there run on their own.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch

from slurmspot.checkpoint import host
from slurmspot.checkpoint.disk import aligned

_PAGE_BYTES = 4096
_LINE_BYTES = 64


class Staging:
    """Room on the host for the tensors of one state, kept from one copy to the next.

    Attributes:
        uses: how often room has been asked for; whoever remembers a number can tell whether what
            was copied then is still there.
    """

    def __init__(self) -> None:
        self.uses = 0
        self._likeness: dict[str, Any] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._memory: dict[str, _Memory] = {}

    @property
    def size_bytes(self) -> int:
        """The memory held: what the tensors take, and up to a page for each."""
        return sum(memory.size_bytes for memory in set(self._memory.values()))

    def rooms(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """A host tensor for each of ``tensors``, shaped, typed and sharded like it.

        The same memory as before wherever it fits; what is new, such as the state that an
        optimizer makes at its first step, is added. What was in it before is lost.

        Raises:
            OSError: there is no such memory.
        """
        self.uses += 1
        likeness = {path: host.likeness(tensor) for path, tensor in tensors.items()}
        if likeness != self._likeness:
            self._change(tensors, likeness)
        return self._tensors

    def _change(self, tensors: Mapping[str, torch.Tensor], likeness: dict[str, Any]) -> None:
        """Drop the memory of what is gone or of another shape, then take some for what is new."""
        kept = [path for path, one in likeness.items() if self._likeness.get(path) == one]
        self._likeness = {path: likeness[path] for path in kept}
        self._tensors = {path: self._tensors[path] for path in kept}
        self._memory = {path: self._memory[path] for path in kept}
        if new := {path: one for path, one in tensors.items() if path not in self._tensors}:
            memory = _Memory(new)
            self._likeness = likeness
            self._tensors |= memory.rooms
            self._memory |= dict.fromkeys(new, memory)


class _Memory:
    """One mapping that has room for several tensors, the larger ones on pages of their own."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        places: dict[str, slice] = {}
        end = 0
        for path, tensor in tensors.items():
            size_bytes = host.part(tensor).nbytes
            unit = _PAGE_BYTES if size_bytes >= _PAGE_BYTES else _LINE_BYTES
            begin = -(-end // unit) * unit
            end = begin + size_bytes
            places[path] = slice(begin, end)
        self.size_bytes = max(-(-end // _PAGE_BYTES), 1) * _PAGE_BYTES
        raw = torch.from_numpy(aligned(self.size_bytes, inherited=False))
        raw.zero_()
        if any(tensor.is_cuda for tensor in tensors.values()):
            _pin(self, raw)
        self.rooms = {path: host.onto(tensors[path], raw[place]) for path, place in places.items()}


def _pin(owner: _Memory, raw: torch.Tensor) -> None:
    """Pin memory for as long as ``owner`` lives.

    Torch's own allocator of pinned memory would round its size up to a power of two.
    """
    cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch's own omission
    address = raw.data_ptr()
    if code := int(cuda.cudaHostRegister(address, raw.nbytes, 0)):
        raise OSError(code, f"CUDA does not pin {raw.nbytes} bytes of host memory")
    weakref.finalize(owner, cuda.cudaHostUnregister, address).atexit = False
