"""Checkpoints on the nodes' own disks: each node has the files of its ranks, and the manifest.

They survive the loss of processes, not that of a node. Which of them are of any use is found out
by looking: every file of a save must be somewhere, on a node that is here or, from a drain that was
cut short, on the remote tier. A node that comes back may hold anything: nothing, half a
checkpoint, or one of an attempt that the run has long left behind.

An attempt writes in a folder of its own, named like its desk, so that what another one, which is
still running there, does to its own part touches nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import xxhash
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from slurmspot.checkpoint import manifest, steps
from slurmspot.checkpoint.manifest import Manifest
from slurmspot.checkpoint.storage import Hdf5StorageWriter, Place
from slurmspot.errors import CorruptCheckpointError

_T = TypeVar("_T")

TURN = "turn"
"""The name in a checkpoint's metadata that says which owner of the run has saved it."""


class LocalStorageWriter(Hdf5StorageWriter):
    """Writes this node's part of a checkpoint; ``path`` may be another on every node.

    The disk's folder, three levels up, must exist: one that is not mounted is not written beside.

    Args:
        nodes: the node of each rank.
        commits: whether this rank commits for its node; one on each does.
        fence: called before the commit; raises if this attempt has lost the run.
    """

    def __init__(
        self, path: Path, *, nodes: Sequence[str], commits: bool, fence: Callable[[], None]
    ) -> None:
        super().__init__(path)
        self._on = nodes
        self._commits = commits
        self._fence = fence

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give every rank its file, and all of them the name of the folder."""
        self._world_size = len(plans)
        folder = Path(steps.partial_of(self._path).name)
        places = [Place(folder, f"rank-{rank:05d}.h5") for rank in range(len(plans))]
        self.nodes = {place.file: node for place, node in zip(places, self._on, strict=True)}
        return [
            dataclasses.replace(plan, storage_data=place)
            for plan, place in zip(plans, places, strict=True)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, durably, hashing on the way."""
        place: Place = plan.storage_data
        mine = self._path.parent
        for folder in (mine.parent, mine):
            if not folder.is_dir():
                folder.mkdir(mode=0o700, exist_ok=True)
                steps.sync(folder.parent)
        partial = mine / place.folder
        partial.mkdir(mode=0o700, exist_ok=True)
        self.partial = partial
        here = Place(partial, place.file)
        return super().write_data(dataclasses.replace(plan, storage_data=here), planner)

    def commit(self, sealed: bytes) -> None:
        """Commit this node's part, in place of one that this attempt has made before."""
        if self._commits and self.partial is not None:
            self._fence()
            steps.write_durably(self.partial / manifest.NAME, sealed)
            steps.commit(self.partial, self._path, is_good=lambda _: False)


@dataclass(frozen=True, slots=True)
class File:
    """A data file of a step, in full size; its content is not known to be right.

    Attributes:
        attempt: name of the folder of the attempt that has saved it.
    """

    attempt: str
    step: int
    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """What one rank knows of a checkpoint from the manifest on its node.

    Attributes:
        attempt: name of the folder of the attempt that has saved it.
        folder: its name in there.
        seal: XXH3-128 of the manifest: equal on all nodes, and for one save alone.
        turn: of the attempt that saved it.
        files: all its data files, wherever they are.
        problem: why it is of no use at all; empty if it may be.
    """

    attempt: str
    step: int
    folder: str = ""
    seal: str = ""
    turn: int = 0
    files: tuple[File, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What one rank finds on its node: manifests, and data files, of committed saves or not.

    Attributes:
        problem: why there may be more that could not be seen; empty if all was.
    """

    node: str
    copies: tuple[Copy, ...]
    files: frozenset[File]
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A checkpoint that can be put together from the disks of the nodes that are here.

    Attributes:
        attempt: name of the folder of the attempt that has saved it.
        reader: a rank that has its manifest, in ``folder`` there.
        carriers: for each data file the ranks that may bring it, one after the other.
        problem: why it cannot be had; empty if it is complete, as far as one can see.
        damaged: what is there is not what was saved, or cannot be read; it does not merely lack
            something.
    """

    attempt: str
    step: int
    turn: int
    folder: str
    reader: int
    carriers: Mapping[str, Sequence[int]]
    problem: str = ""
    damaged: bool = False


def survey(root: Path, node: str) -> Survey:
    """What lies on this node, and can be read.

    A save whose manifest is written is whole, though it may have been killed before its commit.

    Args:
        root: the folder of the run on the node's disk.
    """
    copies: list[Copy] = []
    files: set[File] = set()
    problems: list[str] = []
    for attempt in _seen(steps.owners, root, problems):
        for step, path in _seen(steps.traces, attempt, problems):
            copy = _copy(attempt.name, step, path)
            if not (copy.problem and steps.is_partial(path)):
                copies.append(copy)
            files |= _files_of(attempt.name, step, path)
    return Survey(
        node=node,
        copies=tuple(copies),
        files=frozenset(files),
        problem="; ".join(problems),
    )


def _seen(look: Callable[[Path], list[_T]], folder: Path, problems: list[str]) -> list[_T]:
    try:
        return look(folder)
    except OSError as error:
        problems.append(f"{folder.name}: {error.strerror}")
        return []


def files_in(folder: Path, attempt: str = "") -> set[File]:
    """The data files of all steps in ``folder``, committed or not."""
    traces = steps.traces(folder)
    return {file for step, path in traces for file in _files_of(attempt, step, path)}


def _files_of(attempt: str, step: int, path: Path) -> set[File]:
    found = set()
    with contextlib.suppress(OSError):  # it is being removed
        for file in path.iterdir():
            found.add(File(attempt, step, file.name, file.lstat().st_size))
    return found


def _copy(attempt: str, step: int, path: Path) -> Copy:
    try:
        known = manifest.read(path)
        seal = xxhash.xxh3_128_hexdigest((path / manifest.NAME).read_bytes())
    except CorruptCheckpointError as error:
        return Copy(attempt=attempt, step=step, problem=f"{manifest.NAME}: {error.what}")
    except OSError as error:
        return Copy(attempt=attempt, step=step, problem=error.strerror or str(error))
    return Copy(
        attempt=attempt,
        step=step,
        folder=path.name,
        seal=seal,
        turn=turn_of(known),
        files=tuple(File(attempt, step, file.name, file.size_bytes) for file in known.files),
    )


def turn_of(known: Manifest) -> int:
    """Which owner of the run has saved it; 0 if it does not say."""
    turn = known.metadata.get(TURN) if isinstance(known.metadata, dict) else None
    return turn if type(turn) is int else 0


def turn_at(path: Path) -> int:
    """Which owner of the run has saved the checkpoint ``path``; 0 if it does not say."""
    with contextlib.suppress(CorruptCheckpointError):
        return turn_of(manifest.read(path))
    return 0


def gathered(surveys: Sequence[Survey], remote: frozenset[File] = frozenset()) -> list[Candidate]:
    """All checkpoints of which some node here has the manifest, the newest first.

    Args:
        surveys: of each rank.
        remote: data files on the remote tier, which every rank can read; of no attempt.
    """
    saves: dict[tuple[str, int, str], tuple[int, Copy]] = {}
    for rank, one in enumerate(surveys):
        for copy in one.copies:
            saves.setdefault((copy.attempt, copy.step, copy.seal), (rank, copy))
    found = [_candidate(rank, copy, surveys, remote) for rank, copy in saves.values()]
    return sorted(found, key=lambda one: (one.step, one.turn), reverse=True)


def _candidate(
    reader: int, copy: Copy, surveys: Sequence[Survey], remote: frozenset[File]
) -> Candidate:
    carriers = {}
    problem, damaged = copy.problem, bool(copy.problem)
    there = {(file.attempt, file.step, file.name) for one in surveys for file in one.files}
    unseen = "; ".join(sorted({f"{one.node}: {one.problem}" for one in surveys if one.problem}))
    for i, file in enumerate(copy.files):
        able: dict[str, list[int]] = {}
        for rank, one in enumerate(surveys):
            if file in one.files:
                able.setdefault(one.node, []).append(rank)
        ranks = [on_node[i % len(on_node)] for on_node in able.values()]
        if dataclasses.replace(file, attempt="") in remote:
            ranks.append(i % len(surveys))
        carriers[file.name] = tuple(ranks)
        if not ranks:
            missing = f"{file.name} is neither on these nodes nor on the remote tier"
            problem = problem or (f"{missing} ({unseen})" if unseen else missing)
            damaged = damaged or (file.attempt, file.step, file.name) in there  # in another size
    return Candidate(
        attempt=copy.attempt,
        step=copy.step,
        turn=copy.turn,
        folder=copy.folder,
        reader=reader,
        carriers=carriers,
        problem=problem,
        damaged=damaged,
    )
