"""Python values as JSON and back, exactly: what a pickle would do, without running code.

Plain JSON values stay plain. Everything else becomes an object with the key ``$`` naming its
kind, so tuples, bytes, dictionaries with other keys, NaN, and NumPy arrays survive. Tensors are
handed to the caller, who stores them elsewhere and is asked for them again at decoding.
"""

from __future__ import annotations

import base64
import math
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from slurmspot.errors import CheckpointWriteError, CorruptCheckpointError

_KIND = "$"
_MAPPINGS = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_SEQUENCES = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "torch.Size": torch.Size,
}
_KIND_OF = {kind: name for name, kind in {**_MAPPINGS, **_SEQUENCES}.items()}
_ARRAY_KINDS = "biufc"
_SAFE_INT = 2**63


@dataclass(frozen=True, slots=True)
class Encoded:
    """A value that is tagged JSON already."""

    json: Any


OnTensor = Callable[[str, torch.Tensor], str]


def _refuse_tensor(path: str, tensor: torch.Tensor) -> str:
    raise CheckpointWriteError(f"{path} holds a tensor of shape {list(tensor.shape)} as a value")


def encode(value: Any, path: str = "", on_tensor: OnTensor = _refuse_tensor) -> Any:
    """``value`` as tagged JSON.

    Args:
        path: where the value stands, for messages and for the names of tensors: components
            joined by ``/``, with ``%`` and ``/`` inside a component percent-encoded.
        on_tensor: called with each tensor and its path; gives the reference to put in its place.

    Raises:
        CheckpointWriteError: something in it cannot be written as JSON; names its path.
    """
    try:
        return value.json if isinstance(value, Encoded) else _encode(value, path, on_tensor)
    except RecursionError:
        raise CheckpointWriteError(f"{path} is nested too deeply, or holds itself") from None


def _encode(value: Any, path: str, on_tensor: OnTensor) -> Any:
    kind = type(value)
    if value is None or kind in {bool, str}:
        return value
    if kind is int:
        return value if -_SAFE_INT <= value < _SAFE_INT else {_KIND: "int", "v": hex(value)}
    if kind is float:
        # A NaN keeps its payload: its eight bytes, in hexadecimal.
        bits = struct.pack(">d", value).hex()
        return value if math.isfinite(value) else {_KIND: "float", "v": bits}
    if isinstance(value, torch.Tensor):
        return {_KIND: "tensor", "v": on_tensor(path, value)}
    if kind is list:
        return [_encode(item, join(path, i), on_tensor) for i, item in enumerate(value)]
    if kind is dict and _KIND not in value and all(type(key) is str for key in value):
        return {key: _encode(item, join(path, key), on_tensor) for key, item in value.items()}
    if kind in {dict, OrderedDict, Counter}:
        pairs = [
            [_encode(key, path, _refuse_tensor), _encode(item, join(path, key), on_tensor)]
            for key, item in value.items()
        ]
        return {_KIND: _KIND_OF[kind], "v": pairs}
    if kind in _KIND_OF:
        items = sorted(value, key=repr) if kind in {set, frozenset} else value
        encoded = [_encode(item, join(path, i), on_tensor) for i, item in enumerate(items)]
        return {_KIND: _KIND_OF[kind], "v": encoded}
    name, fields = _encode_leaf(value, path)
    return {_KIND: name, **fields}


def _encode_leaf(value: Any, path: str) -> tuple[str, dict[str, Any]]:
    if isinstance(value, bytes | bytearray):
        return type(value).__name__, {"v": base64.b64encode(value).decode()}
    if type(value) is complex:
        return "complex", {"v": [struct.pack(">d", x).hex() for x in (value.real, value.imag)]}
    if type(value) is deque:
        return "deque", {"v": encode(list(value), path), "maxlen": value.maxlen}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _ARRAY_KINDS:
        return "ndarray" if isinstance(value, np.ndarray) else "npscalar", {
            "dtype": value.dtype.str,
            "shape": list(value.shape),
            "v": base64.b64encode(value.tobytes()).decode(),
        }
    if isinstance(value, torch.dtype | torch.device):
        return f"torch.{type(value).__name__}", {"v": str(value).removeprefix("torch.")}
    if isinstance(value, PurePath):
        return "path", {"v": str(value)}
    raise CheckpointWriteError(
        f"{path or 'the value'} cannot be stored: a {type(value).__module__}."
        f"{type(value).__qualname__} is neither a tensor nor plain data",
        why="checkpoints hold no pickles, so that loading one can never run code",
        fix="return numbers, strings, lists, dicts, NumPy arrays or tensors from state_dict()",
    )


def join(path: str, key: Any) -> str:
    """``path`` extended by one component."""
    part = str(key).replace("%", "%25").replace("/", "%2F")
    return f"{path}/{part}" if path else part


def _no_tensor(path: str) -> Any:
    raise CorruptCheckpointError(f"a value refers to the tensor {path!r}, which is not there")


def decode(value: Any, tensor: Callable[[str], Any] = _no_tensor) -> Any:
    """The value that :func:`encode` was given.

    Args:
        tensor: gives the tensor (or what shall stand for it) of a path.

    Raises:
        CorruptCheckpointError: this is not tagged JSON of a known kind.
    """
    try:
        return _decode(value, tensor)
    except (ValueError, TypeError, KeyError, RecursionError, struct.error) as error:
        raise CorruptCheckpointError(
            "a stored value cannot be understood", why=f"{type(error).__name__}: {error}"
        ) from None


def _decode(value: Any, tensor: Callable[[str], Any]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {key: _decode(item, tensor) for key, item in value.items()}
    kind, content = value[_KIND], value["v"]
    if kind == "tensor":
        return tensor(content)
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]({_decode(k, tensor): _decode(v, tensor) for k, v in content})
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](_decode(item, tensor) for item in content)
    return _decode_leaf(kind, content, value)


def _decode_leaf(kind: str, content: Any, value: dict[str, Any]) -> Any:
    match kind:
        case "int":
            return int(content, 16)
        case "float":
            return _double(content)
        case "complex":
            return complex(_double(content[0]), _double(content[1]))
        case "bytes":
            return base64.b64decode(content, validate=True)
        case "bytearray":
            return bytearray(base64.b64decode(content, validate=True))
        case "deque":
            return deque(_decode(content, _no_tensor), value["maxlen"])
        case "ndarray" | "npscalar":
            dtype = np.dtype(value["dtype"])
            if dtype.kind not in _ARRAY_KINDS:
                raise ValueError(f"array of {dtype}")
            raw = base64.b64decode(content, validate=True)
            array = np.frombuffer(raw, dtype).reshape(value["shape"]).copy()
            return array if kind == "ndarray" else array[()]
        case "torch.dtype":
            dtype = getattr(torch, content)
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{content} is not a dtype")
            return dtype
        case "torch.device":
            return torch.device(content)
        case "path":
            return PurePath(content)
    raise ValueError(f"unknown kind {kind!r}")


def _double(bits: str) -> float:
    number: float = struct.unpack(">d", bytes.fromhex(bits))[0]
    return number
