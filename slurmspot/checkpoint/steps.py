"""The folder of checkpoints: names, the commit by rename, and removal.

A checkpoint is a folder named exactly ``step-NNNNNNNN``. While it is written, and while it is
removed, it is named ``step-NNNNNNNN.partial-<unique>``, which nothing ever takes for one. In a run
such a partial one lies in the folder of the attempt that owns the run (see
:mod:`slurmspot.checkpoint.ownership`), else beside the checkpoints.
"""

from __future__ import annotations

import errno
import operator
import os
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from slurmspot.errors import UsageError

_STEP = re.compile(r"step-(\d{8})\Z", re.ASCII)
_NODE = re.compile(r"slurmspot-[0-9a-f]{16}-(.+)\Z", re.ASCII)
_PARTIAL = ".partial-"
_IS_PARTIAL = re.compile(r"\.partial-[0-9a-f]+\Z", re.ASCII)

REMOTE = "remote"
"""The tier of shared, persistent storage: survives the loss of nodes."""

LOCAL = "local"
"""The tier of the nodes' own disks: survives the loss of processes."""


def step_name(step: int) -> str:
    """Name of the folder of ``step``.

    Raises:
        UsageError: the step is no whole number in 0..99,999,999.
    """
    number = whole(step, below=100_000_000, why="it must be a whole number of 1 to 8 digits")
    return f"step-{number:08d}"


def whole(step: int, *, below: int, why: str) -> int:
    """The step as a plain number.

    Raises:
        UsageError: it is no whole number in 0..below - 1; told with ``why``.
    """
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number < below:
        raise UsageError(f"step {step!r} cannot be checkpointed", why=why)
    return number


def step_of(path: Path) -> int | None:
    """The step that the name of ``path`` tells; None if it is not a checkpoint's name."""
    match = _STEP.match(path.name)
    return int(match[1]) if match else None


def committed(folder: Path) -> dict[int, Path]:
    """Step to path of everything in ``folder`` that bears a checkpoint's name, newest first."""
    steps = {step: path for path in entries(folder) if (step := step_of(path)) is not None}
    return dict(sorted(steps.items(), reverse=True))


def partials(folder: Path) -> set[Path]:
    """Saves of steps that were begun and not committed, or removals not completed."""
    return {path for path in entries(folder) if is_partial(path) and path.name.startswith("step-")}


def is_partial(path: Path) -> bool:
    """Whether the name says that this never was, or no longer is, a checkpoint."""
    return _IS_PARTIAL.search(path.name) is not None


def traces(folder: Path) -> list[tuple[int, Path]]:
    """Step and path of all that is, or was to be, a checkpoint; what is comes first."""
    found = []
    for path in entries(folder):
        step = step_of(path.with_name(path.name.partition(_PARTIAL)[0]))
        if step is not None:
            found.append((step, path))
    return sorted(found, key=lambda one: is_partial(one[1]))


def owners(folder: Path) -> list[Path]:
    """The folders of attempts in ``folder``."""
    found = (path for path in entries(folder) if path.name.startswith("owner-"))
    return [path for path in found if not is_partial(path)]


def node_name(run: str, node: str) -> str:
    """Name of the folder on the disk of ``node`` with its part of the checkpoints of ``run``."""
    return f"slurmspot-{run}-{node}"


def node_of(path: Path) -> str | None:
    """The node whose part of a checkpoint ``path`` is; None if it stands for all of them."""
    match = _NODE.match(path.parent.parent.name)
    return match[1] if match and path.parent in owners(path.parent.parent) else None


def on_node(folder: Path) -> list[Path]:
    """The checkpoints of all attempts in a node's folder, or in that of several; newest first."""
    nodes = [folder, *(path for path in entries(folder) if _NODE.match(path.name))]
    found = [(step, path) for one in nodes for owner in owners(one) for step, path in traces(owner)]
    return [path for _, path in sorted(found, reverse=True) if not is_partial(path)]


def entries(folder: Path) -> list[Path]:
    """What is in ``folder``; nothing if it is not there."""
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


def make(folder: Path) -> None:
    """Make a folder of checkpoints (0700), durably, if it is not there."""
    if not folder.is_dir():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        sync(folder.parent)


def begin(target: Path, desk: Path | None = None) -> Path:
    """Make the folder (0700) in which the checkpoint ``target`` is written until its commit.

    Args:
        desk: where to make it, which must exist; by default beside ``target``.
    """
    if desk is None:
        make(target.parent)
    partial = partial_of(target, desk)
    partial.mkdir(mode=0o700)
    return partial


def partial_of(path: Path, desk: Path | None = None) -> Path:
    """A unique name in ``desk``, or beside ``path``, that nothing takes for it."""
    return (desk or path.parent) / f"{path.name}{_PARTIAL}{secrets.token_hex(8)}"


def commit(partial: Path, target: Path, *, is_good: Callable[[Path], bool]) -> None:
    """Turn ``partial``, whose content is durable, into the checkpoint ``target``, durably.

    If ``target`` exists and ``is_good``, another writer was there first: it stays and ours is
    dropped. If it exists and is damaged, ours takes its place.

    Raises:
        FileNotFoundError: ``partial`` has been taken away.
    """
    sync(partial)
    while not _renamed(partial, target):
        if is_good(target):
            remove(partial)
            break
        remove(target, partial.parent)
    for folder in {target.parent, partial.parent}:
        sync(folder)


def _renamed(partial: Path, target: Path) -> bool:
    """Whether ``partial`` could take the name ``target``, which is free then."""
    try:
        partial.rename(target)
    except OSError as error:
        if error.errno in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
            return False
        raise
    return True


def remove(path: Path, desk: Path | None = None) -> None:
    """Remove a checkpoint or a partial one: it first loses its name, then its files.

    That another process removes it as well does no harm.

    Args:
        desk: where it loses its files; by default where it is. If there is no such folder any
            more, nothing is removed.
    """
    if not is_partial(path):
        doomed = partial_of(path, desk)
        try:
            path.rename(doomed)
        except FileNotFoundError:
            return
        sync(path.parent)
        path = doomed
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write_durably(path: Path, content: bytes) -> None:
    """Write a small file so that after a crash it is wholly there, or as it was before."""
    partial = partial_of(path)
    with partial.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    sync(path.parent)


def sync(folder: Path) -> None:
    """Make the names in ``folder`` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
