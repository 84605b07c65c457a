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
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
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

from slurmspot.checkpoint import hdf5, host, manifest, reading, steps, tagged
from slurmspot.checkpoint.disk import REAL, Disk
from slurmspot.checkpoint.manifest import DataFile, Dataset, Manifest, ObjectRecord
from slurmspot.checkpoint.reading import Problem, Target
from slurmspot.checkpoint.verify import stands_in
from slurmspot.errors import (
    CheckpointWriteError,
    CorruptCheckpointError,
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where one rank writes: decided by the coordinator, sent with the plan."""

    folder: Path
    file: str


class Hdf5StorageWriter(StorageWriter):
    """Writes one verified checkpoint at ``path``.

    Args:
        path: the checkpoint's folder; it appears there, complete and durable, or not at all.
        step: kept in the manifest, a whole number; by default what a name like ``step-00001200``
            tells.
        metadata: whatever shall be kept with it; plain data, or tagged JSON already.
        keep_existing: if an intact checkpoint turns out to be at ``path``, drop ours instead of
            failing; unless one of the objects ``vital`` has another state in it.
        desk: a folder to write in until the commit, which must exist; by default beside ``path``.
        disk: the calls that write data files.

    Attributes:
        size_bytes: of the file that this rank has written.
        ready: called before the tensor of a given name is read; returns when it may be.
        hashes: XXH3-128 of each tensor of which this rank has written just one piece, by name.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        step: int | None = None,
        metadata: Mapping[str, Any] | tagged.Encoded | None = None,
        keep_existing: bool = False,
        vital: Collection[str] = (),
        desk: Path | None = None,
        disk: Disk = REAL,
    ) -> None:
        super().__init__()
        self._disk = disk
        self._desk = desk
        if step is not None:
            why = "it must be a whole number from 0 on"
            step = steps.whole(step, below=manifest.END_OF_COUNTS, why=why)
        self._step = step
        self.metadata = metadata
        self._keep_existing = keep_existing
        self._vital = vital
        self.ready: Callable[[str], object] = lambda _: None
        self.objects: Mapping[str, ObjectRecord] = {}
        self.nodes: Mapping[str, str] = {}
        self.size_bytes = 0
        self.hashes: Mapping[str, str] = {}
        self.partial: Path | None = None
        self.reset(path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another checkpoint, at ``checkpoint_id`` if given."""
        if checkpoint_id is not None:
            self._path = Path(checkpoint_id).absolute()
        self.size_bytes = 0
        self.hashes = {}
        self.partial = None
        self._world_size = 0

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: roles follow from the methods that are called."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leave the plan as it is."""
        _check_fresh([plan])
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the partial folder and give every rank its file in it."""
        _check_fresh(plans)
        if self._path.exists() and not self._keep_existing:
            raise CheckpointWriteError(
                f"there is something at {self._path}", fix="save to a new folder"
            )
        self.partial = steps.begin(self._path, self._desk)
        self._world_size = len(plans)
        return [
            dataclasses.replace(plan, storage_data=Place(self.partial, f"rank-{rank:05d}.h5"))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, durably, hashing on the way."""
        place: Place = plan.storage_data
        tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        values = [item for item in plan.items if item.type == WriteItemType.BYTE_IO]
        results = [
            WriteResult(item.index, 0, tagged.encode(_value(planner, item), item.index.fqn))
            for item in values
        ]
        if tensors:

            def data(i: int) -> memoryview:
                self.ready(tensors[i].index.fqn)
                tensor = planner.resolve_data(tensors[i])
                if not isinstance(tensor, torch.Tensor):
                    raise CheckpointWriteError(f"{tensors[i].index.fqn} is not a tensor")
                return host.content(host.local(tensor.cpu()))

            path = place.folder / place.file
            try:
                file = hdf5.write(path, list(map(_piece, tensors)), data, self._disk)
            except BaseException:
                path.unlink(missing_ok=True)  # a full disk needs its space back
                if self._world_size == 1:  # else others may be at work in there
                    steps.remove(place.folder)
                raise
            results += [
                WriteResult(item.index, dataset.size_bytes, file)
                for item, dataset in zip(tensors, file.datasets, strict=True)
            ]
            self.size_bytes = file.size_bytes
            written = Counter(d.tensor for d in file.datasets)
            self.hashes = {d.tensor: d.xxh3_128 for d in file.datasets if written[d.tensor] == 1}
        steps.sync(place.folder)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest and commit, or leave nothing behind."""
        try:
            self.commit(self.seal(metadata, results))
        except BaseException:
            if self.partial is not None:
                steps.remove(self.partial)
            raise

    def seal(self, metadata: Metadata, results: list[list[WriteResult]]) -> bytes:
        """The manifest."""
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
            nodes=self.nodes,
            files=tuple(files[name] for name in sorted(files)),
            values=values,
            planner=tagged.encode(metadata.planner_data, "planner_data"),
        )
        return manifest.dump(document)

    def commit(self, sealed: bytes) -> None:
        """Write the manifest and make it a checkpoint."""
        if self.partial is None:
            raise CheckpointWriteError("the save was never begun on this rank")
        steps.write_durably(self.partial / manifest.NAME, sealed)
        ours = manifest.parse(sealed)
        steps.commit(
            self.partial, self._path, is_good=lambda path: stands_in(path, ours, self._vital)
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path of this file system."""
        return "://" not in str(checkpoint_id)


class Hdf5StorageReader(StorageReader):
    """Reads a checkpoint that :class:`Hdf5StorageWriter` wrote, checking each byte it reads.

    A load that raises may have changed tensors already, some to content that did not verify: do not
    go on with them.

    Args:
        path: the checkpoint's folder.
        part: with ``parts``, read and check every parts-th file in whole, starting at this one,
            whatever of it is needed: then the ranks together check all bytes of all files.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, part: int = 0, parts: int | None = None
    ) -> None:
        super().__init__()
        self._part = part
        self._parts = parts
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
            if not self._path.exists():
                raise CorruptCheckpointError(f"there is no checkpoint at {self._path}")
            try:
                self._manifest = manifest.read(self._path)
            except CorruptCheckpointError as error:
                problem = Problem(file=manifest.NAME, dataset=None, problem=error.what)
                raise corrupt(self._path, problem) from None
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
        needed = [
            [d for d in file.datasets if MetadataIndex(d.tensor, d.offset) in wanted]
            for file in self.manifest.files
        ]
        # What several ranks of one machine read alike should come from the disk only once.
        once = sum(file.size_bytes for file in self.manifest.files)
        mine = sum(d.size_bytes for datasets in needed for d in datasets)
        direct = mine * (self._parts or 1) <= 1.5 * once
        lock = threading.Lock()
        for i, (file, datasets) in enumerate(zip(self.manifest.files, needed, strict=True)):
            whole = self._parts is not None and i % self._parts == self._part
            targets = {
                d.name: _target(d, wanted[MetadataIndex(d.tensor, d.offset)], planner, lock)
                for d in datasets
            }
            if targets or whole:
                problems = reading.read(self._path, file, targets, whole=whole, direct=direct)
                if problems:
                    raise corrupt(self._path, problems[0])
        future: Future[None] = Future()
        future.set_result(None)
        return future

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


def _check_fresh(plans: Sequence[SavePlan]) -> None:
    """Refuse plans that stand for one that a rank has kept from an earlier save.

    That one names the earlier save's file, and may have the earlier type of a tensor.
    """
    if not all(getattr(plan, "usable", True) for plan in plans):  # torch 2.5 knows no others
        raise CheckpointWriteError(
            "the planner has kept its plan from an earlier save",
            why="a plan tells where a save goes and what its tensors are, so each needs its own",
            fix="give a planner without enable_plan_caching",
        )


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


def _target(
    dataset: Dataset, items: Sequence[ReadItem], planner: LoadPlanner, lock: threading.Lock
) -> Target:
    """Straight into the tensor that is to be loaded, or by way of memory of its own."""
    piece: list[torch.Tensor] = []
    room: list[torch.Tensor] = []

    def memory() -> memoryview:
        with lock:
            goal = planner.resolve_tensor(items[0]).detach()
        if len(items) == 1 and _is_like(goal, dataset):
            room.append(goal)
        else:
            shape = torch.Size(dataset.shape)
            piece.append(host.empty(shape, getattr(torch, dataset.dtype)))
        return host.content((room or piece)[0])

    def done() -> None:
        with lock:
            for item in items:
                goal = planner.resolve_tensor(item).detach()
                if not room:
                    goal.copy_(_narrow(piece[0], item))
                planner.commit_tensor(item, goal)
        room.clear()
        piece.clear()

    if not dataset.size_bytes:
        memory()
    return Target(memory=memory, done=done)


def _is_like(tensor: torch.Tensor, dataset: Dataset) -> bool:
    """Whether the dataset's bytes are just what the memory of ``tensor`` must hold."""
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and host.dtype_name(tensor.dtype) == dataset.dtype
        and tuple(tensor.shape) == dataset.shape
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _narrow(piece: torch.Tensor, item: ReadItem) -> torch.Tensor:
    return piece[
        tuple(
            slice(offset, offset + length)
            for offset, length in zip(item.storage_offsets, item.lengths, strict=True)
        )
    ]


def corrupt(folder: Path, problem: Problem) -> CorruptCheckpointError:
    """The error for a checkpoint with a problem."""
    return CorruptCheckpointError(
        f"{folder} is damaged",
        why=str(problem),
        fix=f"see all of it with `slurmspot verify {folder}`",
    )
