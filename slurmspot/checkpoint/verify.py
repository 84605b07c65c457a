"""Check every byte of committed checkpoints. Needs HDF5 but not torch, and fails closed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmspot.checkpoint import hdf5, manifest, reading, steps
from slurmspot.checkpoint.manifest import DataFile, Manifest
from slurmspot.checkpoint.reading import Problem, Progress
from slurmspot.errors import (
    CheckpointError,
    CheckpointWriteError,
    CorruptCheckpointError,
    NotFoundError,
)

__all__ = [
    "CheckpointReport",
    "Problem",
    "Progress",
    "checkpoints",
    "listing_problems",
    "problems_of",
    "stands_in",
    "verify",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointReport:
    """What verification found of one checkpoint.

    Attributes:
        step: from its name or manifest; None if neither tells.
        node: the node whose part of it this is, and that alone was checked; None if it is all.
        elsewhere: the nodes that have the other parts.
    """

    path: Path
    step: int | None
    tier: str
    size_bytes: int
    problems: tuple[Problem, ...]
    node: str | None = None
    elsewhere: tuple[str, ...] = ()

    @property
    def intact(self) -> bool:
        """Whether every byte is as it was saved."""
        return not self.problems


def verify(path: Path, progress: Progress | None = None) -> list[CheckpointReport]:
    """Verify a run folder, a folder of checkpoints, or one checkpoint; newest first.

    Of the folder of a node's own disk, its part of each checkpoint is verified.

    Raises:
        NotFoundError: ``path`` does not exist, or is a save that was never committed.
        CheckpointError: it may not be read.
    """
    return [_report(one, progress) for one in checkpoints(path)]


def checkpoints(path: Path) -> list[Path]:
    """The checkpoints that ``path`` means, whatever their state, newest first.

    Raises:
        NotFoundError: ``path`` does not exist, or is a save that was never committed.
        CheckpointError: it may not be read.
    """
    try:
        if not path.is_dir():
            raise NotFoundError(
                f"{path} is not a folder",
                fix="give a run folder, a folder of checkpoints, or one checkpoint",
            )
        path = path.resolve()
        if steps.is_partial(path):
            raise NotFoundError(
                f"{path} is not a checkpoint",
                why="its save was never committed",
                fix="see with `slurmspot verify RUN` which ones there are",
            )
        return _find(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read", why=error.strerror) from None


def _find(path: Path) -> list[Path]:
    is_one = (path / manifest.NAME).exists() or any(path.glob("rank-*.h5"))
    if steps.step_of(path) is not None or is_one:
        return [path]
    if (path / "checkpoints").is_dir():
        path /= "checkpoints"
    return list(steps.committed(path).values()) or steps.on_node(path)


def _report(path: Path, progress: Progress | None) -> CheckpointReport:
    known, problems = _check(path, progress=progress)
    step = steps.step_of(path)
    node = steps.node_of(path)
    return CheckpointReport(
        path=path,
        step=known.step if known and step is None else step,
        tier=steps.LOCAL if node else steps.REMOTE,
        size_bytes=sum(file.size_bytes for file in _here(path, known)) if known else 0,
        problems=tuple(problems),
        node=node,
        elsewhere=tuple(sorted({*known.nodes.values()} - {node})) if known and node else (),
    )


def _here(path: Path, known: Manifest) -> Sequence[DataFile]:
    """The data files that must be in the checkpoint at ``path``."""
    node = steps.node_of(path)
    return known.files if node is None else known.files_of(node)


def problems_of(
    path: Path, *, part: int = 0, parts: int = 1, progress: Progress | None = None
) -> list[Problem]:
    """What is wrong with the checkpoint at ``path``; empty if it is intact.

    Args:
        part: with ``parts``, read only every parts-th file, starting at this one, so that ranks
            can share the work. The manifest and the list of files are always checked.
    """
    return _check(path, part=part, parts=parts, progress=progress)[1]


def _check(
    path: Path, *, part: int = 0, parts: int = 1, progress: Progress | None = None
) -> tuple[Manifest | None, list[Problem]]:
    """The manifest, unless that is what is wrong, and all problems."""
    try:
        known = manifest.read(path)
    except CorruptCheckpointError as error:
        return None, [Problem(file=manifest.NAME, dataset=None, problem=error.what)]
    problems = listing_problems(path, known)
    for file in _here(path, known)[part::parts]:
        found = reading.read(path, file, {}, whole=True, progress=progress)
        problems += found or [
            Problem(file=file.name, dataset=name, problem=text)
            for name, text in hdf5.structure_problems(path / file.name, file)
        ]
    return known, problems


def stands_in(path: Path, ours: Manifest, vital: Collection[str]) -> bool:
    """Whether the checkpoint at ``path`` is intact, so that it stays and ``ours`` is dropped.

    Args:
        vital: names of objects whose tensors must be the same in both, as far as that can be told:
            those of ranks that are cut otherwise cannot be compared.

    Raises:
        CheckpointWriteError: it is intact, and a tensor of one of them is another there.
    """
    known, problems = _check(path)
    if known is None or problems:
        return False
    theirs, mine = known.hashes(vital), ours.hashes(vital)
    if theirs.keys() == mine.keys() and theirs != mine:
        other = min(piece for piece, digest in mine.items() if theirs[piece] != digest)[0]
        raise CheckpointWriteError(
            f"{path} holds another state of {other}",
            why="that step was saved before, and what is intact is not replaced",
            fix="save under another step, or move that checkpoint away first",
        )
    return True


def listing_problems(path: Path, known: Manifest) -> list[Problem]:
    """What is wrong with the folder itself: a link, or files that the manifest does not list."""
    if path.is_symlink() or not path.is_dir():
        return [Problem(file=path.name, dataset=None, problem="is not a folder")]
    try:
        present = {entry.name for entry in path.iterdir()} - {manifest.NAME}
    except OSError as error:
        return [Problem(file=path.name, dataset=None, problem=error.strerror or str(error))]
    node = steps.node_of(path)
    if node is not None and node not in known.nodes.values():
        return [Problem(file=manifest.NAME, dataset=None, problem=f"knows nothing of node {node}")]
    return [
        Problem(
            file=name,
            dataset=None,
            problem=f"belongs to node {known.nodes[name]}"
            if name in known.nodes
            else "is not in the manifest",
        )
        for name in sorted(present - {file.name for file in _here(path, known)})
    ]
