"""Python values as JSON and back, exactly: what a pickle would do, without running code.

Plain JSON values stay plain. Everything else becomes an object whose key ``$`` names its kind,
so tuples, bytes, dictionaries with other keys, NaN and NumPy arrays survive. Tensors are handed
to the caller, who stores them elsewhere and is asked for them again at decoding.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slurmspot.errors import CheckpointWriteError, CorruptCheckpointError

OnTensor = Callable[[str, torch.Tensor], str]

_KIND = "$"
_CONTENT = "v"
_ARRAYS = frozenset({np.ndarray, np.memmap})  # others mean more than type, shape and bytes
_ARRAY_KINDS = "biufc"


@dataclass(frozen=True, slots=True)
class Encoded:
    """A value that is tagged JSON already."""

    json: Any


def _refuse_tensor(path: str, tensor: torch.Tensor) -> str:
    raise CheckpointWriteError(f"{path} holds a tensor of shape {list(tensor.shape)} as a value")


def _no_tensor(path: str) -> Any:
    raise CorruptCheckpointError(f"a value refers to the tensor {path!r}, which is not there")


def encode(value: Any, path: str = "", on_tensor: OnTensor = _refuse_tensor) -> Any:
    """``value`` as tagged JSON.

    Args:
        path: where the value stands, for messages and for the names of tensors: components
            joined by ``/``, with ``%`` and ``/`` inside a component percent-encoded.
        on_tensor: called with the path of each tensor; gives the reference to put in its place.

    Raises:
        CheckpointWriteError: something in it cannot be written as JSON; names its path.
    """
    try:
        return value.json if isinstance(value, Encoded) else _encode(value, path, on_tensor)
    except RecursionError:
        raise CheckpointWriteError(f"{path} is nested too deeply, or holds itself") from None


def decode(value: Any, tensor: Callable[[str], Any] = _no_tensor) -> Any:
    """The value that :func:`encode` was given.

    Args:
        tensor: gives the tensor (or what shall stand for it) of a reference.

    Raises:
        CorruptCheckpointError: this is not tagged JSON of a known kind.
    """
    try:
        return _decode(value, tensor)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(
            "a stored value cannot be understood", why=f"{type(error).__name__}: {error}"
        ) from None


def join(path: str, key: Any) -> str:
    """``path`` extended by one component."""
    part = str(key)
    if "%" in part or "/" in part:
        part = part.replace("%", "%25").replace("/", "%2F")
    return f"{path}/{part}" if path else part


def _bits(number: float) -> str:
    """All 64 bits in hexadecimal: a NaN keeps its payload."""
    return struct.pack(">d", number).hex()


def _number(bits: str) -> float:
    return float(np.frombuffer(bytes.fromhex(bits), ">f8")[0])


def _base64(raw: bytes | bytearray) -> str:
    return base64.b64encode(raw).decode()


def _raw(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _dtype(name: str) -> torch.dtype:
    if not isinstance(dtype := getattr(torch, name), torch.dtype):
        raise TypeError(f"{name} is not a dtype")
    return dtype


def _array(content: dict[str, Any]) -> Any:
    if (dtype := np.dtype(content["dtype"])).kind not in _ARRAY_KINDS:
        raise ValueError(f"array of {dtype}")
    return np.frombuffer(_raw(content["bytes"]), dtype).reshape(content["shape"]).copy()


_LEAVES: dict[type, tuple[str, Callable[[Any], Any]]] = {
    int: ("int", hex),
    float: ("float", _bits),
    complex: ("complex", lambda z: [_bits(z.real), _bits(z.imag)]),
    bytes: ("bytes", _base64),
    bytearray: ("bytearray", _base64),
    torch.dtype: ("torch.dtype", lambda dtype: str(dtype).removeprefix("torch.")),
    torch.device: ("torch.device", str),
    type(Path()): ("path", str),
}
_DECODERS: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "float": _number,
    "complex": lambda parts: complex(*map(_number, parts)),
    "bytes": _raw,
    "bytearray": lambda text: bytearray(_raw(text)),
    "torch.dtype": _dtype,
    "torch.device": torch.device,
    "path": Path,
    "array": _array,
    "scalar": lambda content: _array(content)[()],
}
_MAPPINGS: dict[str, type] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_SEQUENCES: dict[str, type] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "torch.Size": torch.Size,
}
_PLAIN = frozenset({bool, str, type(None)})
_STRINGS = frozenset({str})
_KIND_OF = {kind: name for name, kind in (_MAPPINGS | _SEQUENCES).items()}


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind is int:
        return bool(-(2**63) <= value < 2**63)
    if kind is float:
        return math.isfinite(value)
    return kind in _PLAIN


def _encode(value: Any, path: str, on_tensor: OnTensor) -> Any:
    """What is neither a tensor nor plain is rare: a large state goes through the first lines."""

    def inner(key: Any, item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return {_KIND: "tensor", _CONTENT: on_tensor(join(path, key), item)}
        return item if _is_plain(item) else _encode(item, join(path, key), on_tensor)

    if isinstance(value, torch.Tensor):
        return {_KIND: "tensor", _CONTENT: on_tensor(path, value)}
    kind = type(value)
    if kind is dict and _KIND not in value and _STRINGS.issuperset(map(type, value)):
        return {key: inner(key, item) for key, item in value.items()}
    if kind is list:
        return [inner(i, item) for i, item in enumerate(value)]
    if _is_plain(value):
        return value
    content: Any
    if kind in _MAPPINGS.values():
        name = _KIND_OF[kind]
        content = [[_encode(k, path, _refuse_tensor), inner(k, v)] for k, v in value.items()]
    elif kind in _KIND_OF:
        name = _KIND_OF[kind]
        items = sorted(value, key=_rank) if kind in {set, frozenset} else value
        content = [inner(i, item) for i, item in enumerate(items)]
    elif kind is deque:
        name, content = "deque", [inner("maxlen", value.maxlen), inner("items", list(value))]
    else:
        name, content = _encode_leaf(value, path)
    return {_KIND: name, _CONTENT: content}


def _rank(item: Any) -> str:
    """What orders the items of a set the same in every process: ``repr`` may not."""
    try:
        return json.dumps(_encode(item, "", _refuse_tensor))
    except CheckpointWriteError:  # a tensor
        return repr(item)


def _encode_leaf(value: Any, path: str) -> tuple[str, Any]:
    is_array = type(value) in _ARRAYS
    if (is_array or isinstance(value, np.generic)) and value.dtype.kind in _ARRAY_KINDS:
        return "array" if is_array else "scalar", {
            "dtype": value.dtype.str,
            "shape": list(value.shape),
            "bytes": _base64(value.tobytes()),
        }
    if (leaf := _LEAVES.get(type(value))) is None:
        raise CheckpointWriteError(
            f"{path or 'the value'} cannot be stored: a {type(value).__module__}."
            f"{type(value).__qualname__} is neither a tensor nor plain data",
            why="checkpoints hold no pickles, so that loading one can never run code",
            fix="return numbers, strings, lists, dicts, NumPy arrays or tensors from state_dict()",
        )
    return leaf[0], leaf[1](value)


def _decode(value: Any, tensor: Callable[[str], Any]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {key: _decode(item, tensor) for key, item in value.items()}
    kind, content = value[_KIND], value[_CONTENT]
    return tensor(content) if kind == "tensor" else _decode_tagged(kind, content, tensor)


def _decode_tagged(kind: str, content: Any, tensor: Callable[[str], Any]) -> Any:
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]({_decode(k, tensor): _decode(v, tensor) for k, v in content})
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](_decode(item, tensor) for item in content)
    if kind == "deque":
        maxlen, items = content
        return deque(_decode(items, tensor), maxlen)
    return _DECODERS[kind](content)
