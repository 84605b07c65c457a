"""The state of one object, taken apart into tensors and tagged JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from slurmspot.checkpoint import host, tagged
from slurmspot.errors import CheckpointWriteError

_LARGE_BYTES = 1 << 20  # what is worth a thread
_HASHING_THREADS = 8
_PLAIN = frozenset({torch.Tensor, nn.Parameter})


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The state of one object, taken apart.

    Attributes:
        skeleton: all of it as tagged JSON, with references where tensors stood.
        tensors: the tensors, by path.
    """

    skeleton: Any
    tensors: Mapping[str, torch.Tensor]

    def copy(self) -> State:
        """On the host, sharing nothing with the original."""
        copied = {path: host.copy(tensor) for path, tensor in self.tensors.items()}
        return State(skeleton=self.skeleton, tensors=copied)

    def at(self, rooms: Mapping[str, torch.Tensor]) -> State:
        """The same state with its tensors elsewhere."""
        return State(skeleton=self.skeleton, tensors={path: rooms[path] for path in self.tensors})

    def whole(self) -> Any:
        """The state, put together again around these very tensors."""
        return tagged.decode(self.skeleton, self.tensors.__getitem__)

    @property
    def sharded(self) -> frozenset[str]:
        """Paths of the tensors of which every rank holds a part."""
        return frozenset(path for path, one in self.tensors.items() if isinstance(one, DTensor))

    def hashes(self) -> dict[str, str]:
        """By path, the XXH3-128 of the bytes of this rank's part of each large tensor."""
        tensors = self.tensors.items()
        large = {path: one for path, one in tensors if host.part(one).nbytes >= _LARGE_BYTES}
        with ThreadPoolExecutor(_HASHING_THREADS) as pool:
            return dict(zip(large, pool.map(host.content_hash, large.values()), strict=True))

    def fingerprint(
        self, *, without: Iterable[str] = (), known: Mapping[str, str] | None = None
    ) -> str:
        """XXH3-128, in hexadecimal, of all values and this rank's parts of all tensors.

        Args:
            known: by path, the XXH3-128 of tensors whose bytes have been hashed already.
        """
        known = known or {}
        summed = xxhash.xxh3_128(json.dumps(self.skeleton, sort_keys=True).encode())
        for path in sorted(self.tensors.keys() - set(without)):
            summed.update(host.digest(path, self.tensors[path], known=known.get(path)))
        return summed.hexdigest()


def differences(saved: State, live: State) -> list[str]:
    """Where ``live`` is not what ``saved`` is: the path of each tensor or value, and how."""
    found = []
    for path in sorted(saved.tensors.keys() | live.tensors.keys()):
        if path not in live.tensors:
            found.append(f"{path} is gone")
        elif path not in saved.tensors:
            found.append(f"{path} was not saved")
        elif host.digest(path, saved.tensors[path]) != host.digest(path, live.tensors[path]):
            found.append(f"{path} differs")
    return found + list(_unequal(saved.skeleton, live.skeleton, ""))


def _unequal(saved: Any, live: Any, path: str) -> Iterator[str]:
    """Where two values in tagged JSON differ."""
    match saved, live:
        case (dict(), dict()) if saved.keys() == live.keys():
            for key in saved:
                yield from _unequal(saved[key], live[key], tagged.join(path, key))
        case (list(), list()) if len(saved) == len(live):
            for i, (one, other) in enumerate(zip(saved, live, strict=True)):
                yield from _unequal(one, other, tagged.join(path, i))
        case _ if saved != live:
            yield f"value {path} is {_short(live)}, was {_short(saved)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def take(name: str, state: Any) -> State:
    """Take apart what ``state_dict()`` returned; tensors are named below ``name``, not copied.

    Raises:
        CheckpointWriteError: something in it can be stored neither as tensor nor as JSON.
    """
    tensors: dict[str, torch.Tensor] = {}

    def add(path: str, tensor: torch.Tensor) -> str:
        host.check_storable(path, tensor.dtype, tensor.layout)
        if type(mine := host.part(tensor)) not in _PLAIN:
            _check_unwrapped(path, mine)
        if path == name:  # the state is this one tensor, and the name stands for the whole state
            path = tagged.join(name, "")
        while path in tensors:  # the keys 1 and "1" of one dictionary
            path += "~"
        tensors[path] = tensor
        return path

    return State(skeleton=tagged.encode(state, name, add), tensors=tensors)


def _check_unwrapped(path: str, tensor: Any) -> None:
    """Refuse a tensor that keeps its values in other tensors: its own memory tells nothing."""
    if is_traceable_wrapper_subclass(tensor):
        kind = type(tensor)
        raise CheckpointWriteError(
            f"{path} cannot be stored: a {kind.__module__}.{kind.__qualname__} wraps other tensors",
            fix="give the plain tensors inside it from state_dict(), and wrap them when loading",
        )
