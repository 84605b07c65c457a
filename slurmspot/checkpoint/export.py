"""Export a checkpoint's tensors to one safetensors file, checking every byte on the way.

The format: 8 bytes with the length of a JSON header, little-endian; the header, from tensor name
to type, shape and place; then the tensors' bytes without gaps. Needs neither torch nor the
safetensors library, and holds one tensor piece in memory at most.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import secrets
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from slurmspot.checkpoint import manifest, reading, steps
from slurmspot.checkpoint.disk import Bytes
from slurmspot.checkpoint.dtypes import STORED_AS, item_size
from slurmspot.checkpoint.manifest import Dataset, Manifest
from slurmspot.checkpoint.reading import Progress, Target
from slurmspot.checkpoint.verify import listing_problems
from slurmspot.errors import (
    CheckpointWriteError,
    CorruptCheckpointError,
    NotFoundError,
    UsageError,
)

_METADATA = "__metadata__"
_TYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
}


def export(
    checkpoint: Path, target: Path, *, only: str | None = None, progress: Progress | None = None
) -> int:
    """Write the tensors of ``checkpoint`` to the safetensors file ``target``; return how many.

    ``target`` appears whole and durable, or not at all.

    Args:
        only: export this object alone, its tensors named as in its own state.

    Raises:
        UsageError: ``target`` exists or lies in the checkpoint, or safetensors cannot hold a type
            or a name.
        NotFoundError: there is no such object, or nothing in it is a tensor.
        CorruptCheckpointError: the checkpoint is not what was saved.
        CheckpointWriteError: the disk refused.
    """
    known = _read_manifest(checkpoint)
    names = _names(known, only)
    if not names:
        raise NotFoundError(
            f"{checkpoint} has no tensor" + (f" of {only!r}" if only else ""),
            why=f"its objects are {', '.join(known.objects) or 'not named'}",
        )
    try:
        _check_target(checkpoint, target)
        _write(checkpoint, known, names, target, progress)
    except OSError as error:
        raise CheckpointWriteError(f"{target} cannot be written", why=error.strerror) from None
    return len(names)


def _check_target(checkpoint: Path, target: Path) -> None:
    if target.exists():
        raise UsageError(f"there is something at {target}", fix="export to a new file")
    if target.parent.resolve().is_relative_to(checkpoint.resolve()):
        raise UsageError(
            f"{target} lies in the checkpoint",
            why="a checkpoint with a file that it does not list is damaged",
            fix="export to another folder",
        )


def _read_manifest(checkpoint: Path) -> Manifest:
    try:
        known = manifest.read(checkpoint)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(
            f"{checkpoint} is damaged", why=f"{manifest.NAME}: {error.what}"
        ) from None
    for problem in listing_problems(checkpoint, known):
        raise CorruptCheckpointError(f"{checkpoint} is damaged", why=str(problem))
    return known


def _names(known: Manifest, only: str | None) -> dict[str, str]:
    """Each tensor's name in the checkpoint, and the one to export it by."""
    prefix = f"{only}/" if only else ""
    tensors = {d.tensor for file in known.files for d in file.datasets}
    stored = {name: name[len(prefix) :] for name in sorted(tensors) if name.startswith(prefix)}
    names = stored
    if known.objects:  # else it is no state of ours, and its names are as they were given
        plain = {name: one.replace("%2F", "/").replace("%25", "%") for name, one in stored.items()}
        count = Counter(plain.values())
        names = {name: one if count[one] == 1 else stored[name] for name, one in plain.items()}
    _check_names(names)
    return names


def _check_names(names: Mapping[str, str]) -> None:
    taken: dict[str, str] = {}
    for name, exported in names.items():
        if exported == _METADATA:
            raise UsageError(f"{name} cannot be exported", why="safetensors keeps that name")
        if exported in taken:
            raise UsageError(
                f"{taken[exported]} and {name} cannot be exported together",
                why=f"both would be named {exported}",
            )
        taken[exported] = name


def _write(
    checkpoint: Path,
    known: Manifest,
    names: Mapping[str, str],
    target: Path,
    progress: Progress | None,
) -> None:
    header, places, size_bytes = _lay_out(known, names)
    unfinished = target.with_name(f"{target.name}.partial-{secrets.token_hex(8)}")
    try:
        with unfinished.open("xb+") as file:
            unfinished.chmod(0o600)
            os.posix_fallocate(file.fileno(), 0, size_bytes)
            mapped = mmap.mmap(file.fileno(), size_bytes)
            mapped[: len(header)] = header
            _fill(checkpoint, known, places, mapped, progress)
            mapped.flush()
            os.fsync(file.fileno())
        unfinished.rename(target)
        steps.sync(target.absolute().parent)
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


def _lay_out(known: Manifest, names: Mapping[str, str]) -> tuple[bytes, dict[str, int], int]:
    """(header, where each tensor's bytes go, size of the file)."""
    wholes = {d.tensor: d for file in known.files for d in file.datasets if d.tensor in names}
    entries = {}
    places = {}
    end = 0
    # Wider types first, so that every tensor is aligned for its type.
    for name, d in sorted(wholes.items(), key=lambda one: (-item_size(one[1].dtype), one[0])):
        if d.dtype not in _TYPES:
            raise UsageError(f"{name} cannot be exported", why=f"safetensors has no {d.dtype}")
        places[name] = end
        end += math.prod(d.global_shape) * item_size(d.dtype)
        entries[names[name]] = {
            "dtype": _TYPES[d.dtype],
            "shape": d.global_shape,
            "data_offsets": (places[name], end),
        }
    step = {} if known.step is None else {_METADATA: {"step": str(known.step)}}
    text = json.dumps({**step, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + at for name, at in places.items()}, len(header) + end


def _fill(
    checkpoint: Path,
    known: Manifest,
    places: Mapping[str, int],
    mapped: mmap.mmap,
    progress: Progress | None,
) -> None:
    raw = np.frombuffer(mapped, np.uint8)
    for file in known.files:
        targets = {
            d.name: _target(d, raw[places[d.tensor] :])
            for d in file.datasets
            if d.tensor in places and d.size_bytes
        }
        for problem in reading.read(checkpoint, file, targets, whole=True, progress=progress):
            raise CorruptCheckpointError(f"{checkpoint} is damaged", why=str(problem))


def _target(d: Dataset, room: Bytes) -> Target:
    """Where a piece goes within the whole tensor, whose memory ``room`` begins with."""
    kind = np.dtype(STORED_AS[d.dtype])
    whole = room[: math.prod(d.global_shape) * kind.itemsize].view(kind).reshape(d.global_shape)
    # The ellipsis keeps it a view even where there is no dimension to cut.
    cuts: list[Any] = [slice(at, at + n) for at, n in zip(d.offset, d.shape, strict=True)]
    part = whole[(..., *cuts)]
    if part.flags.c_contiguous:
        return Target(memory=lambda: part.reshape(-1).view(np.uint8).data, done=lambda: None)
    held: list[Bytes] = []

    def memory() -> memoryview:
        held.append(np.empty(d.size_bytes, np.uint8))
        return held[0].data

    def done() -> None:
        part[...] = held.pop().view(kind).reshape(part.shape)

    return Target(memory=memory, done=done)
