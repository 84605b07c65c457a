"""The way of a checkpoint from the nodes' disks into the remote tier, behind training or before it.

Each file is copied by a rank whose node has it, made durable, read back from the remote tier and
compared with the manifest. The manifest comes last, then the name: a copy that is half done is
nothing, and a copy of something damaged is never made.

A node that is lost while a step is drained takes along the files that nobody else has, but what it
has brought to the remote tier is still there. A file is therefore taken from wherever a copy
verifies: from a node, or from what an earlier drain has left. That is why one which ends because
a rank is gone, or for want of time, leaves its files where they are.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from slurmspot.checkpoint import manifest, reading, steps
from slurmspot.checkpoint.disk import BLOCK_BYTES, REAL, Disk, InFile, OutFile, aligned
from slurmspot.checkpoint.local import Candidate
from slurmspot.checkpoint.manifest import DataFile, Manifest
from slurmspot.checkpoint.pipeline import WRITING
from slurmspot.checkpoint.ranks import Ranks
from slurmspot.checkpoint.verify import stands_in
from slurmspot.errors import (
    CheckpointError,
    CheckpointWriteError,
    CorruptCheckpointError,
    SlurmspotError,
)


class AbandonedError(CheckpointError):
    """It is no longer wanted."""


def promote(
    candidate: Candidate,
    root: Path,
    remote: Path,
    *,
    desk: Path,
    ranks: Ranks,
    vital: Collection[str],
    unwanted: Callable[[], bool] = lambda: False,
    disk: Disk = REAL,
) -> None:
    """Bring a checkpoint to the remote tier and commit it there. Collective.

    A failure leaves nothing behind, unless a rank is gone or it was unwanted.

    Args:
        root: the folder of the run on the disk of this rank's node.
        remote: the folder of the remote tier.
        desk: the folder of the attempt in there.
        vital: objects that an intact checkpoint in its place must have the same state of.
        unwanted: asked on the way; True gives up.

    Raises:
        AbandonedError: it was unwanted, on some rank.
        CorruptCheckpointError: some file verifies nowhere.
        CheckpointError: the remote tier cannot be written.
    """
    final = remote / steps.step_name(candidate.step)
    listed = root / candidate.attempt / candidate.folder / manifest.NAME
    target, sealed = ranks.reduce(
        lambda: _sealed(listed) if ranks.rank == candidate.reader else b"",
        lambda every: (steps.begin(final, desk), every[candidate.reader]),
    )
    places = (root / candidate.attempt, remote, desk)
    known = manifest.parse(sealed)
    carrying = _Carrying(candidate, known, places, target, unwanted, disk)

    def commit(_: Sequence[None]) -> None:
        steps.write_durably(target / manifest.NAME, sealed)
        steps.commit(target, final, is_good=lambda path: stands_in(path, known, vital))

    try:
        wanted: Collection[str] = candidate.carriers.keys()
        for turn in itertools.count():
            wanted = ranks.reduce(
                partial(carrying.carry, ranks.rank, wanted, turn), partial(carrying.missing, turn)
            )
            if not wanted:
                break
        ranks.reduce(lambda: None, commit)
    except AbandonedError:
        raise
    except SlurmspotError:
        if ranks.rank == 0:
            steps.remove(target)
        raise


def _sealed(listed: Path) -> bytes:
    try:
        return listed.read_bytes()
    except OSError as error:
        raise _unreadable(manifest.NAME, error) from None


@dataclass(frozen=True, slots=True)
class _Carrying:
    """What the ranks bring into the folder ``target``, from whichever of ``places`` has it."""

    candidate: Candidate
    known: Manifest
    places: Sequence[Path]
    target: Path
    unwanted: Callable[[], bool]
    disk: Disk

    def carry(self, rank: int, wanted: Collection[str], turn: int) -> dict[str, str]:
        """Bring the ``wanted`` files whose ``turn``-th carrier is ``rank``; tell what is wrong."""
        failed = {}
        for file in self.known.files:
            if file.name in wanted and self.candidate.carriers[file.name][turn] == rank:
                problem = self._carry(file)
                if problem:
                    failed[file.name] = problem
        steps.sync(self.target)
        return failed

    def missing(self, turn: int, failures: Sequence[Mapping[str, str]]) -> dict[str, str]:
        """Which files the next carriers must bring, and why."""
        failed = {name: problem for one in failures for name, problem in one.items()}
        for name, problem in failed.items():
            if turn + 1 == len(self.candidate.carriers[name]):
                raise CorruptCheckpointError(problem)
        return failed

    def _sources(self, file: DataFile) -> list[Path]:
        traces = []
        for place in self.places:
            with contextlib.suppress(OSError):
                traces += steps.traces(place)
        found = [path for step, path in traces if step == self.candidate.step]
        return [p for p in found if p != self.target and os.path.lexists(p / file.name)]

    def _carry(self, file: DataFile) -> str:
        """Copy a file from the first place where it verifies; what is wrong if there is none."""
        problem = ""
        for source in self._sources(file):
            try:
                _copy(file, source, self.target, self.unwanted, self.disk)
            except CorruptCheckpointError as error:
                problem = problem or error.what
                (self.target / file.name).unlink(missing_ok=True)
            else:
                return ""
        return problem or f"{file.name} is missing"


def _copy(
    file: DataFile, source: Path, target: Path, unwanted: Callable[[], bool], disk: Disk
) -> None:
    """Copy one file durably, and make sure of what has arrived."""

    def look(_: int = 0) -> None:
        if unwanted():
            raise AbandonedError("given up for something newer, or for want of time")

    opened = _open(source / file.name, disk)
    try:
        if opened.size_bytes != file.size_bytes:
            raise CorruptCheckpointError(f"{file.name} is not of the size that was saved")
        written = OutFile(target / file.name, file.size_bytes, disk)
        try:
            buffer = aligned(WRITING.piece_bytes, inherited=False)
            for start in range(0, file.size_bytes, WRITING.piece_bytes):
                look()
                blocks = -(-(file.size_bytes - start) // BLOCK_BYTES)
                memory = [buffer[: blocks * BLOCK_BYTES]]
                try:
                    opened.read_direct(memory, start)
                except OSError as error:
                    raise _unreadable(file.name, error) from None
                written.write(memory, start)
            written.finish()
        finally:
            written.close()
    finally:
        opened.close()
    _forget(target / file.name)
    check = partial(reading.read, file=file, targets={}, whole=True, progress=look, disk=disk)
    for problem in check(target):
        kind = CorruptCheckpointError if check(source) else CheckpointWriteError
        raise kind(str(problem), why="read back after it was copied")


def _open(path: Path, disk: Disk) -> InFile:
    try:
        return InFile(manifest.open_regular(path), disk=disk)
    except OSError as error:
        raise _unreadable(path.name, error) from None


def _unreadable(name: str, error: OSError) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{name}: cannot be read: {error.strerror or error}")


def _forget(path: Path) -> None:
    """Let the page cache drop the file, which is durable: what is read next comes from the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
