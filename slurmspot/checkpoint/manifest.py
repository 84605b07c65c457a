"""The manifest: what a checkpoint consists of, down to the hash of every byte.

It is one line of JSON, written last. Its final member is the XXH3-128 of all bytes before it, so
a change of any byte of the manifest itself shows. Sizes, places and names are checked here,
before anything is allocated or opened on their word. Loads neither torch nor HDF5.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

import xxhash

from slurmspot.checkpoint.dtypes import STORED_AS, item_size
from slurmspot.checkpoint.steps import step_of
from slurmspot.errors import CheckpointWriteError, CorruptCheckpointError

FORMAT = 1
NAME = "manifest.json"
_LARGEST_BYTES = 1 << 30
_SEAL = b',"xxh3_128":"%s"}\n'
_SEAL_BYTES = len(_SEAL % (b"0" * 32))
END_OF_COUNTS = 1 << 62
"""No size, offset or step in a manifest reaches it."""

_HASH = re.compile(r"[0-9a-f]{32}\Z")
_FILE = re.compile(r"rank-\d{5,}\.h5\Z", re.ASCII)

_Piece = tuple[str, tuple[int, ...], tuple[int, ...]]

Scope = Literal["replicated", "sharded", "per_rank"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """One piece of one tensor, stored as one contiguous run of bytes.

    Attributes:
        name: path inside the HDF5 file.
        tensor: the tensor's name in the state dict.
        dtype: torch's name of the element type, as in ``bfloat16``.
        global_shape: shape of the whole tensor.
        offset: where the piece begins in the whole tensor, one number a dimension.
        shape: shape of the piece.
        start: offset of its first byte in the file; 0 if it is empty.
    """

    name: str
    tensor: str
    dtype: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    size_bytes: int
    xxh3_128: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """One HDF5 file; ``rest_xxh3_128`` covers every byte outside its datasets, in file order."""

    name: str
    size_bytes: int
    rest_xxh3_128: str
    datasets: tuple[Dataset, ...]

    def gaps(self) -> list[tuple[int, int]]:
        """(start, size) in bytes of each run of the file that no dataset covers."""
        gaps = []
        end = 0
        for start, size in sorted((d.start, d.size_bytes) for d in self.datasets if d.size_bytes):
            gaps.append((end, start - end))
            end = start + size
        gaps.append((end, self.size_bytes - end))
        return [gap for gap in gaps if gap[1]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectRecord:
    """How one registered object was stored.

    Attributes:
        scope: ``replicated`` (one copy serves all ranks), ``sharded``, or ``per_rank``.
        fingerprints: XXH3-128 of what a rank has after a restore; one if replicated, else one a
            rank. Of a sharded object's buffers the first rank's copy is kept, uncounted here.
    """

    scope: Scope
    fingerprints: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything known of a committed checkpoint.

    Attributes:
        step: the training step, or None for a folder saved without one.
        metadata: what the caller wished to keep with it (tagged JSON).
        values: all that is not a tensor, by name (tagged JSON).
        planner: the DCP planner's own data (tagged JSON).
        nodes: the node on whose own disk each file was saved; empty if it was shared storage.
    """

    step: int | None
    world_size: int
    files: tuple[DataFile, ...]
    metadata: Any = None
    values: Mapping[str, Any] = field(default_factory=dict)
    planner: Any = None
    objects: Mapping[str, ObjectRecord] = field(default_factory=dict)
    nodes: Mapping[str, str] = field(default_factory=dict)

    def hashes(self, objects: Collection[str]) -> dict[_Piece, str]:
        """Of every piece of a tensor of these objects, by name of the tensor, offset and shape."""
        return {
            (dataset.tensor, dataset.offset, dataset.shape): dataset.xxh3_128
            for file in self.files
            for dataset in file.datasets
            if dataset.tensor.partition("/")[0] in objects
        }

    def files_of(self, node: str) -> list[DataFile]:
        """The data files that were saved on the disk of ``node``."""
        return [file for file in self.files if self.nodes.get(file.name) == node]


def dump(manifest: Manifest) -> bytes:
    """The bytes of ``manifest.json``.

    Raises:
        CheckpointWriteError: it is larger than :func:`read` would take.
    """
    body = json.dumps(
        {"format": FORMAT, **_fields(manifest)},
        default=_fields,
        allow_nan=False,
        separators=(",", ":"),
    ).encode()[:-1]
    if len(body) + _SEAL_BYTES > _LARGEST_BYTES:
        raise CheckpointWriteError(
            f"the manifest would be larger than {_LARGEST_BYTES} bytes",
            why="all that is not a tensor lies in it, NumPy arrays and bytes too",
            fix="return large arrays as tensors from state_dict()",
        )
    return body + _SEAL % xxhash.xxh3_128_hexdigest(body).encode()


def _fields(record: Any) -> dict[str, Any]:
    """One level of ``dataclasses.asdict``, which copies all levels and takes its time."""
    return {field.name: getattr(record, field.name) for field in fields(record)}


def parse(raw: bytes) -> Manifest:
    """The manifest in ``raw``.

    Raises:
        CorruptCheckpointError: it is not what was written, is of another format, or contradicts
            itself.
    """
    body = raw[:-_SEAL_BYTES]
    if raw[len(body) :] != _SEAL % xxhash.xxh3_128_hexdigest(body).encode():
        raise CorruptCheckpointError("its own hash is missing or does not match")
    try:
        document = json.loads(body + b"}")
    except (ValueError, RecursionError):
        _refuse("is not JSON")
    if not isinstance(document, dict) or document.pop("format", None) != FORMAT:
        _refuse(f"is not of format version {FORMAT}")
    try:
        manifest = _build(document)
        _check(manifest)
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(f"lacks or misuses {error}") from None
    return manifest


def read(folder: Path) -> Manifest:
    """The manifest of the checkpoint in ``folder``.

    Raises:
        CorruptCheckpointError: there is none, or it is not intact.
    """
    try:
        fd = open_regular(folder / NAME)
        with os.fdopen(fd, "rb") as file:
            size_bytes = os.fstat(fd).st_size
            if size_bytes > _LARGEST_BYTES:
                _refuse(f"is larger than {_LARGEST_BYTES} bytes")
            raw = file.read(size_bytes)
    except OSError as error:
        raise CorruptCheckpointError(error.strerror or str(error)) from None
    manifest = parse(raw)
    if step_of(folder) not in {None, manifest.step}:
        _refuse(f"belongs to step {manifest.step}, not to {folder.name}")
    return manifest


def open_regular(path: Path) -> int:
    """Open a regular file for reading; never follows a link and never blocks.

    Raises:
        OSError: it is missing, unreadable, or something else than a regular file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(0, "is not a regular file")
    return fd


def _refuse(problem: str) -> NoReturn:
    raise CorruptCheckpointError(problem)


def _build(document: dict[str, Any]) -> Manifest:
    files = tuple(
        DataFile(**{**file, "datasets": tuple(_dataset(**d) for d in file["datasets"])})
        for file in document.pop("files")
    )
    objects = {
        name: ObjectRecord(scope=item["scope"], fingerprints=tuple(item["fingerprints"]))
        for name, item in document.pop("objects").items()
    }
    return Manifest(**document, files=files, objects=objects)


def _dataset(**fields: Any) -> Dataset:
    for name in ("global_shape", "offset", "shape"):
        fields[name] = tuple(fields[name])
    return Dataset(**fields)


def _count(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value < END_OF_COUNTS:
        _refuse(f"{what} is not a count: {value!r}")
    return value


def _hash(value: Any, what: str) -> None:
    if not isinstance(value, str) or not _HASH.match(value):
        _refuse(f"{what} has no hash")


def _check(manifest: Manifest) -> None:
    if manifest.step is not None:
        _count(manifest.step, "step")
    if _count(manifest.world_size, "world_size") < 1:
        _refuse("world_size is 0")
    if not isinstance(manifest.values, dict):
        _refuse("values is not a table")
    names = [file.name for file in manifest.files]
    if len(set(names)) != len(names):
        _refuse("lists a file twice")
    for file in manifest.files:
        _check_file(file)
    _check_nodes(manifest.nodes, names)
    for name, item in manifest.objects.items():
        count = 1 if item.scope == "replicated" else manifest.world_size
        if item.scope not in get_args(Scope) or len(item.fingerprints) != count:
            _refuse(f"object {name!r} is not described")
        for fingerprint in item.fingerprints:
            _hash(fingerprint, f"object {name!r}")
    _check_tensors(manifest)


def _check_file(file: DataFile) -> None:
    if not isinstance(file.name, str) or not _FILE.match(file.name):
        _refuse(f"{file.name!r} is not the name of a data file")
    size_bytes = _count(file.size_bytes, f"size of {file.name}")
    _hash(file.rest_xxh3_128, file.name)
    if len({d.name for d in file.datasets}) != len(file.datasets):
        _refuse(f"lists a dataset of {file.name} twice")
    for dataset in file.datasets:
        _check_dataset(dataset, f"{dataset.name!r} in {file.name}", size_bytes)
    if any(gap < 0 for _, gap in file.gaps()):
        _refuse(f"datasets of {file.name} overlap")


def _check_dataset(d: Dataset, where: str, file_bytes: int) -> None:
    if not isinstance(d.name, str) or not isinstance(d.tensor, str):
        _refuse(f"{where} has no name")
    if d.dtype not in STORED_AS:
        _refuse(f"{where} is of unknown type {d.dtype!r}")
    if not len(d.global_shape) == len(d.offset) == len(d.shape):
        _refuse(f"{where} has contradicting shapes")
    for whole, offset, length in zip(d.global_shape, d.offset, d.shape, strict=True):
        if _count(offset, where) + _count(length, where) > _count(whole, where):
            _refuse(f"{where} lies outside its tensor")
    _hash(d.xxh3_128, where)
    if _count(d.size_bytes, where) != math.prod(d.shape) * item_size(d.dtype):
        _refuse(f"{where} has a size that does not fit its shape")
    if _count(d.start, where) + d.size_bytes > file_bytes:
        _refuse(f"{where} lies outside the file")


def _check_nodes(nodes: Any, files: Sequence[str]) -> None:
    if not isinstance(nodes, dict) or not all(isinstance(node, str) for node in nodes.values()):
        _refuse("nodes is not a table of names")
    if nodes and not nodes.keys() >= set(files):
        _refuse("does not tell the node of every file")


def _check_tensors(manifest: Manifest) -> None:
    """Pieces of a tensor must agree on it and fill it: nothing may stay uninitialised."""
    pieces: dict[str, list[Dataset]] = {}
    for file in manifest.files:
        for dataset in file.datasets:
            pieces.setdefault(dataset.tensor, []).append(dataset)
    for name, parts in pieces.items():
        if len({(p.dtype, p.global_shape) for p in parts}) != 1:
            _refuse(f"pieces of {name!r} disagree about its type or shape")
        if sum(math.prod(p.shape) for p in parts) != math.prod(parts[0].global_shape):
            _refuse(f"pieces of {name!r} do not fill it")
        if name in manifest.values:
            _refuse(f"{name!r} is both a tensor and a value")
