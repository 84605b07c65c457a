"""Checkpoints on the nodes' own disks: each node has the files of its ranks, and the manifest.

They survive the loss of processes, not that of a node. Which of them are of any use is found out
by looking: what the nodes that are here hold of the same save, put together. A node that comes
back may hold anything: nothing, half a checkpoint, or one of an attempt that the run has long
left behind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from slurmspot.checkpoint import manifest, steps
from slurmspot.checkpoint.manifest import Manifest
from slurmspot.checkpoint.storage import Hdf5StorageWriter, Place
from slurmspot.errors import CorruptCheckpointError

TURN = "turn"
"""The name in a checkpoint's metadata that says which owner of the run has saved it."""


class LocalStorageWriter(Hdf5StorageWriter):
    """Writes this node's part of a checkpoint; ``path`` may be another on every node.

    The parent of its parent must exist: a disk that is not mounted is not written beside.

    Args:
        commits: whether this rank commits for its node; one on each does.
    """

    def __init__(self, path: Path, *, commits: bool, fence: Callable[[], None]) -> None:
        super().__init__(path, fence=fence)
        self._commits = commits

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give every rank its file, and all of them the name of the folder."""
        self._world_size = len(plans)
        folder = Path(steps.partial_of(self._path).name)
        return [
            dataclasses.replace(plan, storage_data=Place(folder, f"rank-{rank:05d}.h5"))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, durably, hashing on the way."""
        place: Place = plan.storage_data
        self.partial = self._path.parent / place.folder
        if not self._path.parent.is_dir():
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            steps.sync(self._path.parent.parent)
        self.partial.mkdir(mode=0o700, exist_ok=True)
        here = Place(self.partial, place.file)
        return super().write_data(dataclasses.replace(plan, storage_data=here), planner)

    def commit(self, sealed: bytes) -> None:
        """Commit this node's part. What an earlier attempt has left under the name goes."""
        if self._commits and self.partial is not None:
            steps.write_durably(self.partial / manifest.NAME, sealed)
            steps.commit(self.partial, self._path, is_good=lambda _: False, fence=self._fence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """What one rank sees of a checkpoint on its node.

    Attributes:
        seal: XXH3-128 of the manifest: equal on all nodes, and for one save alone.
        turn: of the attempt that saved it.
        files: all data files of the checkpoint, whether they are here or not.
        here: those that this node has, in full size; their content is not known to be right.
        problem: why it is of no use at all; empty if it may be.
    """

    step: int
    seal: str = ""
    turn: int = 0
    files: tuple[str, ...] = ()
    here: frozenset[str] = frozenset()
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A checkpoint on the disks of the nodes that are here, put together.

    Attributes:
        reader: a rank that has its manifest.
        carriers: the rank that copies each data file, spread over those that have it.
        problem: why it cannot be had; empty if it is complete, as far as one can see.
    """

    step: int
    turn: int
    reader: int
    carriers: Mapping[str, int]
    problem: str = ""

    def overtaken(self) -> Candidate:
        """It, of no use, since the run has gone on from elsewhere."""
        problem = "an earlier attempt has left it, and the run has gone on without it"
        return dataclasses.replace(self, problem=self.problem or problem)


def survey(root: Path, only: int | None = None) -> list[Copy]:
    """What lies on this node, or of it the step ``only``."""
    found = steps.committed(root)
    return [_copy(step, path) for step, path in found.items() if only in {None, step}]


def _copy(step: int, path: Path) -> Copy:
    try:
        known = manifest.read(path)
        seal = xxhash.xxh3_128_hexdigest((path / manifest.NAME).read_bytes())
        sizes = {entry.name: entry.lstat().st_size for entry in path.iterdir()}
    except CorruptCheckpointError as error:
        return Copy(step=step, problem=f"{manifest.NAME}: {error.what}")
    except OSError as error:
        return Copy(step=step, problem=error.strerror or str(error))
    return Copy(
        step=step,
        seal=seal,
        turn=turn_of(known),
        files=tuple(file.name for file in known.files),
        here=frozenset(f.name for f in known.files if sizes.get(f.name) == f.size_bytes),
    )


def turn_of(known: Manifest) -> int:
    """Which owner of the run has saved it; 0 if it does not say."""
    turn = known.metadata.get(TURN) if isinstance(known.metadata, dict) else None
    return turn if type(turn) is int else 0


def gathered(surveys: Sequence[Sequence[Copy]]) -> list[Candidate]:
    """All checkpoints of which some node here has a part, the newest first.

    Args:
        surveys: of each rank.
    """
    saves: dict[tuple[int, str], dict[int, Copy]] = {}
    for rank, copies in enumerate(surveys):
        for copy in copies:
            saves.setdefault((copy.step, copy.seal), {})[rank] = copy
    candidates = [_candidate(holders) for holders in saves.values()]
    return sorted(candidates, key=lambda one: (one.step, one.turn), reverse=True)


def _candidate(holders: Mapping[int, Copy]) -> Candidate:
    reader, first = min(holders.items())
    carriers = {}
    missing = []
    for i, file in enumerate(first.files):
        able = [rank for rank, copy in holders.items() if file in copy.here]
        if able:
            carriers[file] = able[i % len(able)]
        else:
            missing.append(file)
    problem = first.problem
    if missing:
        problem = f"{missing[0]} is on none of these nodes"
    return Candidate(
        step=first.step, turn=first.turn, reader=reader, carriers=carriers, problem=problem
    )
