"""The way of a checkpoint from the nodes' disks into the remote tier, behind training or before it.

Each file is copied by a rank whose node has it, made durable, read back from the remote tier and
compared with the manifest. The manifest comes last, then the name: a copy that is half done is
nothing, and a copy of something damaged is never made.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from slurmspot.checkpoint import manifest, reading, steps
from slurmspot.checkpoint.disk import BLOCK_BYTES, REAL, Disk, InFile, OutFile, aligned
from slurmspot.checkpoint.local import Candidate
from slurmspot.checkpoint.manifest import DataFile
from slurmspot.checkpoint.pipeline import PIECE_BYTES
from slurmspot.checkpoint.ranks import Ranks
from slurmspot.checkpoint.verify import problems_of
from slurmspot.errors import CheckpointError, CorruptCheckpointError


class AbandonedError(CheckpointError):
    """It is no longer wanted."""


def promote(
    candidate: Candidate,
    source: Path,
    target: Path,
    *,
    ranks: Ranks,
    fence: Callable[[], None],
    unwanted: Callable[[], bool] = lambda: False,
    disk: Disk = REAL,
) -> int:
    """Copy a checkpoint to ``target`` and commit it there, or leave nothing behind. Collective.

    Args:
        source: where this rank's node has its part of it.
        fence: called last before the commit; raises if it must not be.
        unwanted: asked on the way; True gives up.

    Returns:
        bytes that this rank has copied.

    Raises:
        AbandonedError: it was unwanted, on some rank.
        CheckpointError: a file cannot be read or written, or is not what was saved.
    """
    mine: list[Path] = []

    def look() -> bytes:
        is_reader = ranks.rank == candidate.reader
        return (source / manifest.NAME).read_bytes() if is_reader else b""

    def begin(every: list[bytes]) -> tuple[Path, bytes]:
        mine.append(steps.begin(target))
        return mine[0], every[candidate.reader]

    def carry() -> int:
        known = manifest.parse(sealed)
        files = [f for f in known.files if candidate.carriers[f.name] == ranks.rank]
        for file in files:
            _carry(file, source, partial, unwanted, disk)
        steps.sync(partial)
        return sum(file.size_bytes for file in files)

    def commit(sizes: list[int]) -> list[int]:
        steps.write_durably(partial / manifest.NAME, sealed)
        steps.commit(partial, target, is_good=lambda path: not problems_of(path), fence=fence)
        return sizes

    try:
        partial, sealed = ranks.reduce(look, begin)
        return ranks.reduce(carry, commit)[ranks.rank]
    except BaseException:
        for path in mine:
            steps.remove(path)
        raise


def _carry(
    file: DataFile, source: Path, partial: Path, unwanted: Callable[[], bool], disk: Disk
) -> None:
    """Copy one file durably, and make sure of what has arrived."""
    opened = InFile(manifest.open_regular(source / file.name), disk=disk)
    try:
        if opened.size_bytes != file.size_bytes:
            raise CorruptCheckpointError(f"{file.name} is not of the size that was saved")
        written = OutFile(partial / file.name, file.size_bytes, disk)
        try:
            buffer = aligned(PIECE_BYTES)
            for start in range(0, file.size_bytes, PIECE_BYTES):
                if unwanted():
                    raise AbandonedError("given up for something newer, or for want of time")
                blocks = -(-(file.size_bytes - start) // BLOCK_BYTES)
                memory = [buffer[: blocks * BLOCK_BYTES]]
                opened.read_direct(memory, start)
                written.write(memory, start)
            written.finish()
        finally:
            written.close()
    finally:
        opened.close()
    _forget(partial / file.name)
    for problem in reading.read(partial, file, {}, whole=True, disk=disk):
        raise CorruptCheckpointError(str(problem), why="read back after it was copied")


def _forget(path: Path) -> None:
    """Let the page cache drop the file, which is durable: what is read next comes from the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
