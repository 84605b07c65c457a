"""Load one checkpoint into the registered objects: all of it, on every rank, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from slurmspot.checkpoint import host, memory, tagged
from slurmspot.checkpoint.disk import aligned
from slurmspot.checkpoint.manifest import Manifest
from slurmspot.checkpoint.objects import Part, Saved
from slurmspot.checkpoint.ranks import Ranks
from slurmspot.checkpoint.state import State, differences, take
from slurmspot.checkpoint.steps import committed
from slurmspot.checkpoint.storage import Hdf5StorageReader, corrupt
from slurmspot.checkpoint.verify import listing_problems, problems_of
from slurmspot.errors import MismatchedCheckpointError, SlurmspotError

_LARGE_BYTES = 1 << 20
_SHOWN = 5  # differences that an error names


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What came with the states.

    Attributes:
        metadata: what the save was given.
        fresh: per-rank objects that began anew, since the saved run had no such rank.
    """

    metadata: dict[str, Any]
    fresh: tuple[str, ...]


def key_of(name: str, rank: int, *, per_rank: bool) -> str:
    """Name of an object within a checkpoint."""
    return f"{name}/rank-{rank:05d}" if per_rank else name


def load(
    path: Path,
    parts: Mapping[str, Part],
    *,
    ranks: Ranks,
    per_rank: frozenset[str],
    available_bytes: Callable[[], int] = memory.available_bytes,
) -> Loaded:
    """Load the checkpoint at ``path`` into ``parts``. Collective.

    The ranks together read and check every byte of it, in one pass, before any object is touched.
    Where the host has too little memory for a second copy of the state, they check it all first;
    then they load one object after the other, in place where that is possible, and check again.

    Args:
        available_bytes: the memory that may still be taken.

    Raises:
        CorruptCheckpointError: its content is not what was saved. Nothing has been loaded.
        MismatchedCheckpointError: it is of other objects, and nothing has been loaded; or an
            object did not take its state, and then some have.
    """
    loading = _Loading(path, parts, ranks, per_rank)
    ranks.reduce(loading.match, lambda _: None)
    groups = [list(parts)]
    if ranks.reduce(lambda: loading.room_bytes > 0.8 * available_bytes(), any):
        ranks.reduce(loading.check, lambda _: None)
        groups = [[name] for name in parts]
    for names in groups:
        for stage in (loading.read, loading.apply, loading.compare):
            ranks.reduce(partial(stage, names), lambda _: None)
    metadata = tagged.decode(loading.manifest.metadata)
    return Loaded(metadata=metadata, fresh=tuple(loading.fresh))


class _Loading:
    """The stages of one load; each must have succeeded on all ranks before the next begins."""

    def __init__(
        self, path: Path, parts: Mapping[str, Part], ranks: Ranks, per_rank: frozenset[str]
    ) -> None:
        self._path = path
        self._reader = Hdf5StorageReader(path, part=ranks.rank, parts=ranks.size)
        self._parts = parts
        self._ranks = ranks
        self._per_rank = per_rank
        self._states: dict[str, State] = {}
        self.fresh: list[str] = []

    @property
    def manifest(self) -> Manifest:
        return self._reader.manifest

    def match(self) -> None:
        """Compare names, types and shapes, and plan room on the host."""
        committed(self._path.parent)  # a network file system looks anew for what is listed
        for problem in listing_problems(self._path, self.manifest):
            raise corrupt(self._path, problem)
        if other := self.manifest.objects.keys() ^ self._parts.keys():
            raise MismatchedCheckpointError(
                f"the checkpoint is of other objects: {min(other)} is "
                + ("not in it" if min(other) in self._parts else "in it but not registered"),
                fix="register the same objects as the run that saved it",
            )
        metadata = self._reader.read_metadata()
        saved = {
            name: Saved(name, tensor.properties.dtype, tensor.size)
            for name, tensor in metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata)
        }
        for name, part in self._parts.items():
            if self._is_fresh(name, part):
                self.fresh.append(name)
                continue
            key = self._key(name)
            try:
                skeleton = self.manifest.values[key]
                templates = part.templates(key, tagged.decode(skeleton, saved.__getitem__))
            except (LookupError, TypeError, AttributeError) as error:
                raise MismatchedCheckpointError(
                    f"{name} was an object of another kind", why=f"{type(error).__name__}: {error}"
                ) from error
            rooms = {path: _on_pages(room) for path, room in templates.items()}
            self._states[name] = State(skeleton=skeleton, tensors=rooms)

    @property
    def room_bytes(self) -> int:
        """Memory that the states take until the objects have them."""
        return sum(
            host.local(room).nbytes
            for state in self._states.values()
            for room in state.tensors.values()
        )

    def check(self) -> None:
        """Check every byte, keeping none; then plan to load in place."""
        self._reader = Hdf5StorageReader(self._path)
        for problem in problems_of(self._path, part=self._ranks.rank, parts=self._ranks.size):
            raise corrupt(self._path, problem)
        for name, state in self._states.items():
            live = take(self._key(name), self._parts[name].state()).tensors
            self._states[name] = State(
                skeleton=state.skeleton,
                tensors={
                    path: _in_place(live.get(path), room) for path, room in state.tensors.items()
                },
            )

    def read(self, names: Sequence[str]) -> None:
        """Fill the room, checking hashes, and that the objects can tell apart what was apart."""
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        rooms: dict[str, Any] = {}
        for name in names:
            if name in self._states:
                rooms.update(self._states[name].tensors)
        planner.set_up_planner(rooms, self._reader.read_metadata(), self._ranks.rank == 0)
        plan = planner.finish_plan(planner.create_local_plan())
        self._reader.read_data(plan, planner).wait()
        for name in names:
            if name in self._states:
                self._parts[name].check_ties(self._key(name), self._states[name].tensors)

    def apply(self, names: Sequence[str]) -> None:
        """Hand the states to the objects."""
        for name in names:
            part = self._parts[name]
            try:
                if name in self.fresh:
                    part.thing.fresh_state(self._seed(name))
                else:
                    part.load(self._states[name].whole())
            except SlurmspotError:
                raise
            except Exception as error:
                raise MismatchedCheckpointError(
                    f"{name} did not take its state", why=f"{type(error).__name__}: {error}"
                ) from error

    def compare(self, names: Sequence[str]) -> None:
        """Take the fingerprints of the live objects, and compare them with those of the save."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's own omission
            torch.cuda.synchronize()  # several threads will read what this one has queued
        for name in names:
            state = self._states.pop(name, None)
            if state is None:
                continue
            record = self.manifest.objects[name]
            part, key = self._parts[name], self._key(name)
            live = take(key, part.state())
            loose = part.loose(key) if record.scope == "sharded" else set()
            fingerprint = live.fingerprint(without=loose, known=live.hashes())
            if record.scope == "per_rank":
                same = fingerprint == record.fingerprints[self._ranks.rank]
            else:
                same = fingerprint in record.fingerprints
            if same:
                continue
            found = differences(state, live)
            if not found and (record.scope == "sharded" or live.sharded):
                continue  # it was cut otherwise; what was loaded has been verified, and is there
            raise MismatchedCheckpointError(
                f"{name} is not what was saved, after loading it",
                why="; ".join([*found[:_SHOWN], *(["…"] if len(found) > _SHOWN else [])])
                or "its load_state_dict() changed a tensor that was loaded in place",
                fix="its load_state_dict() must restore exactly what state_dict() gave",
            )

    def _key(self, name: str) -> str:
        return key_of(name, self._ranks.rank, per_rank=name in self._per_rank)

    def _is_fresh(self, name: str, part: Part) -> bool:
        if (self.manifest.objects[name].scope == "per_rank") != (name in self._per_rank):
            raise MismatchedCheckpointError(
                f"{name} was saved once a rank, or is to be: the two do not fit",
                fix="use the same per_rank as the run that saved the checkpoint",
            )
        if name not in self._per_rank or self._ranks.size == self.manifest.world_size:
            return False
        if not hasattr(part.thing, "fresh_state"):
            raise MismatchedCheckpointError(
                f"{name} cannot move from {self.manifest.world_size} to {self._ranks.size} ranks",
                why="it has a state of its own on every rank",
                fix="restore with as many ranks as saved it, or give it fresh_state(seed)",
            )
        return self._ranks.rank >= self.manifest.world_size

    def _seed(self, name: str) -> int:
        saved = "".join(self.manifest.objects[name].fingerprints)
        return xxhash.xxh3_64_intdigest(f"{saved}:{self._ranks.rank}".encode())


def _on_pages(room: torch.Tensor) -> torch.Tensor:
    """The like of ``room``, which is empty, in memory that the disk can fill directly."""
    size_bytes = host.part(room).nbytes
    if size_bytes < _LARGE_BYTES:
        return room
    return host.onto(room, torch.from_numpy(aligned(size_bytes)))


def _in_place(live: torch.Tensor | None, room: torch.Tensor) -> torch.Tensor:
    """The live tensor, if what is to be loaded fits it as it is; else room for it."""

    def traits(tensor: torch.Tensor) -> tuple[Any, ...]:
        return tensor.device.type, host.likeness(tensor)

    return room if live is None or traits(live) != traits(room) else live.detach()
