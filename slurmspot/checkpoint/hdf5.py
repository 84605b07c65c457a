"""One HDF5 file: contiguous datasets, allocated early and never filled.

HDF5 only lays the file out, in memory, where the datasets' space is never touched. What it wrote
around them and the data itself then go to disk together, front to back, hashed on the way.
"""

from __future__ import annotations

import functools
import math
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import xxhash
from h5py import h5a, h5d, h5p, h5s, h5t

from slurmspot.checkpoint import pipeline
from slurmspot.checkpoint.disk import BLOCK_BYTES, REAL, Disk, OutFile
from slurmspot.checkpoint.dtypes import STORED_AS, item_size
from slurmspot.checkpoint.manifest import DataFile, Dataset
from slurmspot.checkpoint.pipeline import Run
from slurmspot.errors import CheckpointWriteError

_ALIGN_FROM_BYTES = 64 << 10  # larger pieces begin on a block, for whoever maps or reads them
_METADATA_BLOCK_BYTES = 64 << 10  # what HDF5 writes about its datasets stays together


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
        """What a reader of the HDF5 file alone could not know otherwise."""
        known = {}
        if np.dtype(STORED_AS[self.dtype]).name != self.dtype:
            known[b"dtype"] = np.array(self.dtype.encode())
        if self.shape != self.global_shape:
            known[b"global_shape"] = np.array(self.global_shape, np.int64)
            known[b"offset"] = np.array(self.offset, np.int64)
        return known


def write(
    path: Path,
    pieces: Sequence[Piece],
    data: Callable[[int], memoryview],
    disk: Disk = REAL,
) -> DataFile:
    """Write the file, durably; ``data(i)`` gives the bytes of piece i when it is its turn.

    Takes a few buffers of memory besides the data: see :mod:`~.pipeline`.

    Raises:
        OSError: the disk refused.
        CheckpointWriteError: HDF5 has no place for a piece of that name or shape.
    """
    layout = _lay_out(tuple(pieces))
    digests = [xxhash.xxh3_128() for _ in pieces]
    rest = xxhash.xxh3_128()
    unhashed = layout.file(path.name, [digest.hexdigest() for digest in digests], "")
    runs = [
        Run(start=d.start, size=d.size_bytes, digest=digest, memory=functools.partial(data, i))
        for i, (d, digest) in enumerate(zip(unhashed.datasets, digests, strict=True))
    ]
    runs += [
        Run(
            start=start,
            size=size,
            digest=rest,
            memory=functools.partial(layout.around, start, size),
        )
        for start, size in unhashed.gaps()
    ]
    out = OutFile(path, layout.size_bytes, disk)
    try:
        pipeline.write(out, sorted((run for run in runs if run.size), key=_start))
        out.finish()
    finally:
        out.close()
    return layout.file(path.name, [one.hexdigest() for one in digests], rest.hexdigest())


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


class _Layout:
    """The file as HDF5 lays it out, without the data: a sparse file in memory."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._names = _names(pieces)
        self._pieces = pieces
        self._fd = os.memfd_create("layout", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)
        self._starts = self._create()
        self.size_bytes = os.fstat(self._fd).st_size

    def around(self, start: int, size: int) -> bytes:
        """Bytes of the file that belong to no dataset."""
        return os.pread(self._fd, size, start)

    def file(self, name: str, hashes: Sequence[str], rest: str) -> DataFile:
        """The file as the manifest lists it."""
        datasets = tuple(
            Dataset(
                name=name,
                tensor=piece.tensor,
                dtype=piece.dtype,
                global_shape=piece.global_shape,
                offset=piece.offset,
                shape=piece.shape,
                start=start,
                size_bytes=math.prod(piece.shape) * item_size(piece.dtype),
                xxh3_128=digest,
            )
            for name, piece, start, digest in zip(
                self._names, self._pieces, self._starts, hashes, strict=True
            )
        )
        return DataFile(
            name=name, size_bytes=self.size_bytes, rest_xxh3_128=rest, datasets=datasets
        )

    def _create(self) -> list[int]:
        """Let HDF5 create all datasets; return where each one's bytes begin."""
        creation = h5p.create(h5p.DATASET_CREATE)
        creation.set_layout(h5d.CONTIGUOUS)
        creation.set_alloc_time(h5d.ALLOC_TIME_EARLY)
        creation.set_fill_time(h5d.FILL_TIME_NEVER)
        creation.set_obj_track_times(False)
        link = h5p.create(h5p.LINK_CREATE)
        link.set_create_intermediate_group(True)
        link.set_char_encoding(h5t.CSET_UTF8)
        kinds = {
            dtype: h5t.py_create(np.dtype(STORED_AS[dtype]), logical=True)
            for dtype in {piece.dtype for piece in self._pieces}
        }
        starts = []
        with (
            open(self._fd, "r+b", buffering=0, closefd=False) as memory,
            h5py.File(
                memory,
                "w",
                alignment_threshold=_ALIGN_FROM_BYTES,
                alignment_interval=BLOCK_BYTES,
                meta_block_size=_METADATA_BLOCK_BYTES,
            ) as file,
        ):
            for name, piece in zip(self._names, self._pieces, strict=True):
                kind = kinds[piece.dtype]
                try:
                    space = _space(piece.shape)
                    dataset = h5d.create(file.id, name.encode(), kind, space, creation, link)
                except ValueError as error:
                    raise CheckpointWriteError(
                        f"{piece.tensor!r} cannot be stored", why=f"HDF5 refuses it: {error}"
                    ) from None
                for key, value in piece.attributes.items():
                    attribute = h5a.create(
                        dataset, key, h5t.py_create(value.dtype), _space(value.shape)
                    )
                    attribute.write(value)
                starts.append(dataset.get_offset() or 0)
        return starts


@functools.lru_cache(maxsize=1)
def _lay_out(pieces: tuple[Piece, ...]) -> _Layout:
    """The layout of a file of ``pieces``; training saves the same ones again and again."""
    return _Layout(pieces)


def _space(shape: tuple[int, ...]) -> h5s.SpaceID:
    return h5s.create_simple(shape) if shape else h5s.create(h5s.SCALAR)


def _start(run: Run) -> int:
    return run.start


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
