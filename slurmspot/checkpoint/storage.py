"""The store as torch.distributed.checkpoint sees it: a StorageWriter and a StorageReader.

::

    dcp.save(state, storage_writer=Hdf5StorageWriter(path))
    dcp.load(state, storage_reader=Hdf5StorageReader(path))

Any state dict that DCP takes works, and loads back at another world size. Values that are not
tensors are stored as tagged JSON; nothing is ever unpickled from disk.
"""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from slurmspot.checkpoint import hdf5, host, manifest, steps, tagged
from slurmspot.checkpoint.manifest import DataFile, Dataset, Manifest, ObjectRecord
from slurmspot.checkpoint.verify import problems_of
from slurmspot.errors import CheckpointWriteError, CorruptCheckpointError


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one rank writes: decided by the coordinator, sent with the plan."""

    folder: Path
    file: str


class Hdf5StorageWriter(StorageWriter):
    """Writes one verified checkpoint at ``path``.

    Args:
        path: the checkpoint's folder; it appears there, complete and durable, or not at all.
        step: kept in the manifest; by default what a name like ``step-00001200`` tells.
        metadata: whatever shall be kept with it; plain data, or tagged JSON already.
        keep_existing: if an intact checkpoint turns out to be at ``path``, drop ours instead of
            failing.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        step: int | None = None,
        metadata: Mapping[str, Any] | tagged.Encoded | None = None,
        keep_existing: bool = False,
    ) -> None:
        super().__init__()
        self._step = step
        self.metadata = metadata
        self._keep_existing = keep_existing
        self.objects: Mapping[str, ObjectRecord] = {}
        self.size_bytes = 0
        self.partial: Path | None = None
        self.reset(path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another checkpoint, at ``checkpoint_id`` if given."""
        if checkpoint_id is not None:
            self._path = Path(checkpoint_id).absolute()
        self.size_bytes = 0
        self.partial = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: roles follow from the methods that are called."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leave the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the partial folder and give every rank its file in it."""
        if self._path.exists() and not self._keep_existing:
            raise CheckpointWriteError(
                f"there is something at {self._path}", fix="save to a new folder"
            )
        self.partial = steps.begin(self._path)
        self._world_size = len(plans)
        return [
            dataclasses.replace(plan, storage_data=_Place(self.partial, f"rank-{rank:05d}.h5"))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, durably, hashing on the way."""
        place: _Place = plan.storage_data
        tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        values = [item for item in plan.items if item.type == WriteItemType.BYTE_IO]
        results = [
            WriteResult(item.index, 0, tagged.encode(_value(planner, item), item.index.fqn))
            for item in values
        ]
        if tensors:

            def data(i: int) -> memoryview:
                tensor = planner.resolve_data(tensors[i])
                if not isinstance(tensor, torch.Tensor):
                    raise CheckpointWriteError(f"{tensors[i].index.fqn} is not a tensor")
                return host.content(host.local(tensor.cpu()))

            file = hdf5.write(place.folder / place.file, list(map(_piece, tensors)), data)
            results += [
                WriteResult(item.index, dataset.size_bytes, file)
                for item, dataset in zip(tensors, file.datasets, strict=True)
            ]
            self.size_bytes = file.size_bytes
        steps.sync(place.folder)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest and commit."""
        if self.partial is None:
            raise CheckpointWriteError("the save was never begun on this rank")
        files: dict[str, DataFile] = {}
        values: dict[str, Any] = {}
        for result in (one for rank in results for one in rank):
            if isinstance(result.storage_data, DataFile):
                files[result.storage_data.name] = result.storage_data
            else:
                values[result.index.fqn] = result.storage_data
        named = steps.step_of(self._path)
        document = Manifest(
            step=self._step if named is None else named,
            world_size=self._world_size,
            metadata=tagged.encode(self.metadata or {}, "metadata"),
            objects=self.objects,
            files=tuple(files[name] for name in sorted(files)),
            values=values,
            planner=tagged.encode(metadata.planner_data, "planner_data"),
        )
        with (self.partial / manifest.NAME).open("xb") as file:
            file.write(manifest.dump(document))
            file.flush()
            os.fsync(file.fileno())
        steps.commit(self.partial, self._path, is_good=lambda path: not problems_of(path))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path of this file system."""
        return "://" not in str(checkpoint_id)


class Hdf5StorageReader(StorageReader):
    """Reads a checkpoint that :class:`Hdf5StorageWriter` wrote, checking each byte it uses."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.reset(path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Read from ``checkpoint_id`` from now on, if given."""
        if checkpoint_id is not None:
            self._path = Path(checkpoint_id).absolute()
        self._manifest: Manifest | None = None

    @property
    def manifest(self) -> Manifest:
        """The manifest, read once.

        Raises:
            CorruptCheckpointError: there is none, or it is not intact.
        """
        if self._manifest is None:
            try:
                self._manifest = manifest.read(self._path)
            except CorruptCheckpointError as error:
                raise _corrupt(self._path / manifest.NAME, error.what) from None
        return self._manifest

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """What DCP needs to know, rebuilt from the manifest."""
        known: dict[str, Any] = {name: BytesStorageMetadata() for name in self.manifest.values}
        for file in self.manifest.files:
            for d in file.datasets:
                tensor = known.setdefault(
                    d.tensor,
                    TensorStorageMetadata(
                        properties=TensorProperties(dtype=getattr(torch, d.dtype)),
                        size=torch.Size(d.global_shape),
                        chunks=[],
                    ),
                )
                tensor.chunks.append(
                    ChunkStorageMetadata(offsets=torch.Size(d.offset), sizes=torch.Size(d.shape))
                )
        return Metadata(known, planner_data=tagged.decode(self.manifest.planner))

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to do: the manifest is read when needed."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Leave the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Leave the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read each dataset that is needed once, check its hash, and copy from it.

        Raises:
            CorruptCheckpointError: a file is missing or some content is not what was saved.
        """
        wanted: dict[MetadataIndex, list[ReadItem]] = {}
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._value(item.storage_index.fqn))
            else:
                wanted.setdefault(item.storage_index, []).append(item)
        for file in self.manifest.files:
            needed = [
                (d, items)
                for d in file.datasets
                if (items := wanted.get(MetadataIndex(d.tensor, d.offset)))
            ]
            if needed:
                self._read_file(file, needed, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_file(
        self,
        file: DataFile,
        needed: list[tuple[Dataset, list[ReadItem]]],
        planner: LoadPlanner,
    ) -> None:
        path = self._path / file.name
        try:
            fd = manifest.open_regular(path)
        except OSError as error:
            raise _corrupt(path, error.strerror) from None
        with os.fdopen(fd, "rb", buffering=0):
            if os.fstat(fd).st_size != file.size_bytes:
                raise _corrupt(path, "its size is not what was saved")
            for dataset, items in needed:
                piece = _read(fd, path, dataset)
                for item in items:
                    part = _narrow(piece, item)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(part)
                    planner.commit_tensor(item, target)

    def _value(self, name: str) -> io.BytesIO:
        # Planners expect torch.save's bytes; these are made here from JSON, not read from a disk.
        box = io.BytesIO()
        torch.save(tagged.decode(self.manifest.values[name]), box)
        box.seek(0)
        return box

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path of this file system."""
        return "://" not in str(checkpoint_id)


def _value(planner: SavePlanner, item: WriteItem) -> Any:
    look = getattr(planner, "lookup_object", None)
    if look is None:
        raise CheckpointWriteError(
            f"{type(planner).__name__} does not give its objects",
            why="it has no lookup_object(), and its pickled bytes are not stored",
        )
    return look(item.index)


def _piece(item: WriteItem) -> hdf5.Piece:
    tensor = item.tensor_data
    if tensor is None:
        raise CheckpointWriteError(f"the plan does not describe {item.index.fqn}")
    host.check_storable(item.index.fqn, tensor.properties.dtype, tensor.properties.layout)
    return hdf5.Piece(
        tensor=item.index.fqn,
        dtype=host.dtype_name(tensor.properties.dtype),
        global_shape=tuple(tensor.size),
        offset=tuple(tensor.chunk.offsets),
        shape=tuple(tensor.chunk.sizes),
    )


def _read(fd: int, path: Path, dataset: Dataset) -> torch.Tensor:
    raw = host.empty(torch.Size([dataset.size_bytes]), torch.uint8)
    view = host.content(raw)
    done = 0
    while done < dataset.size_bytes:
        count = os.preadv(fd, [view[done : done + (1 << 30)]], dataset.start + done)
        if not count:
            break
        done += count
    if xxhash.xxh3_128_hexdigest(view) != dataset.xxh3_128:
        raise _corrupt(path, f"dataset {dataset.name} is not what was saved")
    return raw.view(getattr(torch, dataset.dtype)).reshape(dataset.shape)


def _narrow(piece: torch.Tensor, item: ReadItem) -> torch.Tensor:
    return piece[
        tuple(
            slice(offset, offset + length)
            for offset, length in zip(item.storage_offsets, item.lengths, strict=True)
        )
    ]


def _corrupt(path: Path, problem: str | None) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{path} is damaged",
        why=problem,
        fix=f"see all of it with `slurmspot verify {path.parent}`",
    )
