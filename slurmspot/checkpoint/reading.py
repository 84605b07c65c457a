"""Read one data file in one pass, checking each byte that is read. Fails closed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash

from slurmspot.checkpoint import manifest, pipeline
from slurmspot.checkpoint.disk import REAL, Disk, InFile
from slurmspot.checkpoint.manifest import DataFile, Dataset
from slurmspot.checkpoint.pipeline import Run

Progress = Callable[[int], None]
"""Called with the number of bytes just read, by any thread."""


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
class Target:
    """Where a dataset goes.

    Attributes:
        memory: gives as many bytes of memory as the dataset has, when it is its turn.
        done: called by any thread once they are there and proved right.
    """

    memory: Callable[[], memoryview]
    done: Callable[[], None]


def read(
    folder: Path,
    file: DataFile,
    targets: Mapping[str, Target],
    *,
    whole: bool,
    direct: bool = True,
    progress: Progress | None = None,
    disk: Disk = REAL,
) -> list[Problem]:
    """Read datasets of ``folder/file.name`` to their ``targets``; return what is wrong.

    What lies in a target's memory is right only once its ``done`` is called.

    Args:
        targets: by the dataset's name.
        whole: check every byte of the file, else only those of the targets.
        direct: past the page cache, except for what it holds already.
    """

    def problem(text: str, dataset: str | None = None) -> Problem:
        return Problem(file=file.name, dataset=dataset, problem=text)

    try:
        opened = InFile(manifest.open_regular(folder / file.name), direct=direct, disk=disk)
    except FileNotFoundError:
        return [problem("is missing")]
    except OSError as error:
        return [problem(error.strerror or str(error))]
    try:
        if opened.size_bytes != file.size_bytes:
            return [problem(f"holds {opened.size_bytes} bytes instead of {file.size_bytes}")]
        checks = [
            _Check(d, targets.get(d.name)) for d in file.datasets if whole or d.name in targets
        ]
        rest = xxhash.xxh3_128()
        runs = [check.run() for check in checks if check.dataset.size_bytes]
        if whole:
            gaps = file.gaps()
            opened.expect(gaps)  # HDF5 will want them
            runs += [Run(start=start, size=size, digest=rest) for start, size in gaps]
        try:
            pipeline.read(opened, sorted(runs, key=lambda run: run.start), progress)
        except OSError as error:
            return [problem(f"cannot be read: {error.strerror}")]
    finally:
        opened.close()
    for check in checks:
        if not check.dataset.size_bytes:
            check.done()
    problems = [
        problem("content differs from what was saved", check.dataset.name)
        for check in checks
        if not check.right
    ]
    if whole and rest.hexdigest() != file.rest_xxh3_128:
        problems.append(problem("bytes outside the datasets differ from what was saved"))
    return problems


class _Check:
    """One dataset on its way."""

    def __init__(self, dataset: Dataset, target: Target | None) -> None:
        self.dataset = dataset
        self.right = False
        self._target = target
        self._digest = xxhash.xxh3_128()

    def run(self) -> Run:
        return Run(
            start=self.dataset.start,
            size=self.dataset.size_bytes,
            digest=self._digest,
            memory=None if self._target is None else self._target.memory,
            done=self.done,
        )

    def done(self) -> None:
        self.right = self._digest.hexdigest() == self.dataset.xxh3_128
        if self.right and self._target is not None:
            self._target.done()
