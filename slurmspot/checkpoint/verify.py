"""Check every byte of committed checkpoints. Needs HDF5 but not torch, and fails closed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from slurmspot.checkpoint import hdf5, manifest, steps
from slurmspot.checkpoint.manifest import DataFile
from slurmspot.errors import CheckpointError, CorruptCheckpointError, NotFoundError

_CHUNK_BYTES = 16 << 20

Progress = Callable[[int], None]
"""Called with the number of bytes just read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something that is not as it was saved.

    Attributes:
        file: name within the checkpoint's folder.
        dataset: the dataset it lies in, or None if it lies in none.
    """

    file: str
    dataset: str | None
    problem: str

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.file, self.dataset, self.problem)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointReport:
    """What verification found of one checkpoint.

    Attributes:
        step: from its name or manifest; None if neither tells.
    """

    path: Path
    step: int | None
    tier: str
    size_bytes: int
    problems: tuple[Problem, ...]

    @property
    def intact(self) -> bool:
        """Whether every byte is as it was saved."""
        return not self.problems


def verify(path: Path, progress: Progress = lambda _: None) -> list[CheckpointReport]:
    """Verify a run folder, a folder of checkpoints, or one checkpoint; newest first.

    Raises:
        NotFoundError: ``path`` does not exist, or is a save that was never committed.
        CheckpointError: it may not be read.
    """
    try:
        if not path.is_dir():
            raise NotFoundError(f"{path} is not a folder")
        path = path.resolve()
        if steps.is_partial(path):
            raise NotFoundError(f"{path} is not a checkpoint", why="its save was never committed")
        found = _find(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read", why=error.strerror) from None
    return [_report(one, step, progress) for one, step in found]


def _find(path: Path) -> list[tuple[Path, int | None]]:
    """(folder, step its name tells) of each checkpoint that ``path`` means."""
    step = steps.step_of(path)
    if step is not None or (path / manifest.NAME).exists() or any(path.glob("rank-*.h5")):
        return [(path, step)]
    if (path / "checkpoints").is_dir():
        path /= "checkpoints"
    return [(found, step) for step, found in steps.committed(path).items()]


def _report(path: Path, step: int | None, progress: Progress) -> CheckpointReport:
    problems = problems_of(path, progress=progress)
    try:
        known = manifest.read(path)
    except CorruptCheckpointError:
        known = None
    return CheckpointReport(
        path=path,
        step=known.step if known and step is None else step,
        tier=steps.REMOTE,
        size_bytes=sum(file.size_bytes for file in known.files) if known else 0,
        problems=tuple(problems),
    )


def problems_of(
    path: Path, *, part: int = 0, parts: int = 1, progress: Progress = lambda _: None
) -> list[Problem]:
    """What is wrong with the checkpoint at ``path``; empty if it is intact.

    Args:
        part: with ``parts``, read only every parts-th file, starting at this one, so that ranks
            can share the work. The manifest and the list of files are always checked.
    """
    if path.is_symlink() or not path.is_dir():
        return [Problem(file=path.name, dataset=None, problem="is not a folder")]
    try:
        known = manifest.read(path)
    except CorruptCheckpointError as error:
        return [Problem(file=manifest.NAME, dataset=None, problem=error.what)]
    try:
        present = {entry.name for entry in path.iterdir()} - {manifest.NAME}
    except OSError as error:
        return [Problem(file=path.name, dataset=None, problem=error.strerror or str(error))]
    listed = {file.name for file in known.files}
    problems = [
        Problem(file=name, dataset=None, problem="is not in the manifest")
        for name in sorted(present - listed)
    ]
    for file in known.files[part::parts]:
        problems += _file_problems(path / file.name, file, progress)
    return problems


def _file_problems(path: Path, file: DataFile, progress: Progress) -> list[Problem]:
    def problem(text: str, dataset: str | None = None) -> Problem:
        return Problem(file=file.name, dataset=dataset, problem=text)

    try:
        fd = manifest.open_regular(path)
    except FileNotFoundError:
        return [problem("is missing")]
    except OSError as error:
        return [problem(error.strerror or str(error))]
    with os.fdopen(fd, "rb", buffering=0):
        size = os.fstat(fd).st_size
        if size != file.size_bytes:
            return [problem(f"holds {size} bytes instead of {file.size_bytes}")]
        try:
            problems = [
                problem("content differs from what was saved", d.name)
                for d in file.datasets
                if _hash(fd, [(d.start, d.size_bytes)], progress) != d.xxh3_128
            ]
            if _hash(fd, file.gaps(), progress) != file.rest_xxh3_128:
                problems.append(problem("bytes outside the datasets differ from what was saved"))
        except OSError as error:
            return [problem(f"cannot be read: {error.strerror}")]
    if problems:
        return problems
    return [problem(text, name) for name, text in hdf5.structure_problems(path, file)]


def _hash(fd: int, runs: list[tuple[int, int]], progress: Progress) -> str:
    digest = xxhash.xxh3_128()
    for start, size in runs:
        for offset in range(start, start + size, _CHUNK_BYTES):
            chunk = os.pread(fd, min(_CHUNK_BYTES, start + size - offset), offset)
            digest.update(chunk)
            progress(len(chunk))
    return digest.hexdigest()
