"""One HDF5 file: contiguous datasets, allocated early and never filled.

HDF5 only lays the file out. Every dataset and the file are closed before data is written at the
offsets HDF5 chose, by plain writes that can be hashed on the way. Opened without HDF5's file
locks, which network file systems often lack.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import xxhash
from h5py import h5a, h5d, h5p, h5s, h5t

from slurmspot.checkpoint.dtypes import STORED_AS
from slurmspot.checkpoint.manifest import DataFile, Dataset

_ALIGNMENT_BYTES = 4096  # larger pieces begin on a page, as direct I/O will want
_ALIGN_FROM_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One piece of one tensor, before it has a place: see :class:`~.manifest.Dataset`."""

    tensor: str
    dtype: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def attributes(self) -> dict[bytes, np.ndarray[Any, Any]]:
        """What is written beside the data, for readers of the HDF5 file alone."""
        return {
            b"dtype": np.array(self.dtype.encode()),
            b"global_shape": np.array(self.global_shape, np.int64),
            b"offset": np.array(self.offset, np.int64),
        }


def write(path: Path, pieces: Sequence[Piece], data: Callable[[int], memoryview]) -> DataFile:
    """Write the file, durably; ``data(i)`` gives the bytes of piece i when it is its turn.

    Raises:
        OSError: the disk refused.
    """
    names = _names(pieces)
    starts = _lay_out(path, names, pieces)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        datasets = []
        for i, piece in enumerate(pieces):
            content = data(i)
            _write_at(fd, content, starts[i])
            datasets.append(
                Dataset(
                    name=names[i],
                    tensor=piece.tensor,
                    dtype=piece.dtype,
                    global_shape=piece.global_shape,
                    offset=piece.offset,
                    shape=piece.shape,
                    start=starts[i],
                    size_bytes=content.nbytes,
                    xxh3_128=xxhash.xxh3_128_hexdigest(content),
                )
            )
        file = DataFile(
            name=path.name,
            size_bytes=os.fstat(fd).st_size,
            rest_xxh3_128="",
            datasets=tuple(datasets),
        )
        rest = xxhash.xxh3_128()
        for start, size in file.gaps():
            rest.update(os.pread(fd, size, start))
        os.fsync(fd)
    finally:
        os.close(fd)
    return replace(file, rest_xxh3_128=rest.hexdigest())


def structure_problems(path: Path, file: DataFile) -> Sequence[tuple[str | None, str]]:
    """(dataset or None, problem) wherever HDF5's view of the file differs from the manifest's.

    Call it on a file whose bytes have been verified.
    """
    expected = {dataset.name: dataset for dataset in file.datasets}
    found: list[str] = []
    try:
        with h5py.File(path, "r", locking=False) as root:
            root.visit(found.append)
            misplaced = [
                name
                for name in expected.keys() & set(found)
                if not _is_as_listed(h5d.open(root.id, name.encode()), expected[name])
            ]
    except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
        return [(None, f"is not readable as HDF5: {error}")]
    extra = set(found) - expected.keys() - _groups(expected)
    missing = expected.keys() - set(found)
    return sorted(
        [(name, "is in the file but not in the manifest") for name in extra]
        + [(name, "is in the manifest but not in the file") for name in missing]
        + [(name, "is not stored as the manifest says") for name in misplaced]
    )


def _is_as_listed(dataset: h5d.DatasetID, listed: Dataset) -> bool:
    creation = dataset.get_create_plist()
    return bool(
        creation.get_layout() == h5d.CONTIGUOUS
        and creation.get_nfilters() == 0
        and creation.get_external_count() == 0
        and (dataset.get_offset() or 0) == listed.start
        and dataset.get_storage_size() == listed.size_bytes
        and dataset.dtype == np.dtype(STORED_AS[listed.dtype])
        and dataset.shape == listed.shape
    )


def _lay_out(path: Path, names: Sequence[str], pieces: Sequence[Piece]) -> list[int]:
    """Create the file and return where each piece's bytes go."""
    creation = h5p.create(h5p.DATASET_CREATE)
    creation.set_layout(h5d.CONTIGUOUS)
    creation.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    creation.set_fill_time(h5d.FILL_TIME_NEVER)
    creation.set_obj_track_times(False)
    link = h5p.create(h5p.LINK_CREATE)
    link.set_create_intermediate_group(True)
    link.set_char_encoding(h5t.CSET_UTF8)
    starts = []
    with h5py.File(
        path,
        "x",
        locking=False,
        alignment_threshold=_ALIGN_FROM_BYTES,
        alignment_interval=_ALIGNMENT_BYTES,
    ) as file:
        for name, piece in zip(names, pieces, strict=True):
            kind = h5t.py_create(np.dtype(STORED_AS[piece.dtype]), logical=True)
            space = h5s.create_simple(piece.shape) if piece.shape else h5s.create(h5s.SCALAR)
            dataset = h5d.create(file.id, name.encode(), kind, space, creation, link)
            for key, value in piece.attributes.items():
                held = h5s.create_simple(value.shape) if value.shape else h5s.create(h5s.SCALAR)
                h5a.create(dataset, key, h5t.py_create(value.dtype), held).write(value)
            starts.append(dataset.get_offset() or 0)
    return starts


def _names(pieces: Sequence[Piece]) -> list[str]:
    """A unique, readable HDF5 path for each piece.

    A ``/`` in a tensor's name makes groups. What HDF5 would read otherwise is percent-encoded, a
    piece of a larger tensor gets its offset, and a name that is also a group gets a ``%``.
    """
    names = []
    for piece in pieces:
        name = "/".join(map(_quoted, piece.tensor.split("/")))
        whole = piece.shape == piece.global_shape
        names.append(name if whole else f"{name}@{','.join(map(str, piece.offset))}")
    groups = _groups(names)
    return [f"{name}%" if name in groups else name for name in names]


def _groups(names: Iterable[str]) -> set[str]:
    """Every group that datasets of these names lie in."""
    return {name[:i] for name in names for i, letter in enumerate(name) if letter == "/"}


def _quoted(part: str) -> str:
    if part in {"", ".", ".."}:
        return "%2E" * len(part) or "%2F"
    return "".join(
        f"%{ord(letter):02X}" if letter in "%@" or ord(letter) < 32 else letter for letter in part
    )


def _write_at(fd: int, content: memoryview, offset: int) -> None:
    while content.nbytes:
        written = os.pwrite(fd, content[: 1 << 30], offset)
        content, offset = content[written:], offset + written
