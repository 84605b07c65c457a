"""The folder of checkpoints: names, the commit by rename, and removal.

A checkpoint is a folder named exactly ``step-NNNNNNNN``. While it is written, and while it is
removed, it is named ``step-NNNNNNNN.partial-<unique>``, which nothing ever takes for one.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from slurmspot.errors import UsageError

_STEP = re.compile(r"step-(\d{8})\Z", re.ASCII)
_PARTIAL = ".partial-"

REMOTE = "remote"
"""The tier of shared, persistent storage: survives the loss of nodes."""

LOCAL = "local"
"""The tier of the nodes' own disks: survives the loss of processes."""


def step_name(step: int) -> str:
    """Name of the folder of ``step``.

    Raises:
        UsageError: the step is not in 0..99,999,999.
    """
    if not 0 <= step <= 99_999_999:
        raise UsageError(f"step {step} cannot be checkpointed", why="it must have 1 to 8 digits")
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step that the name of ``path`` tells; None if it is not a checkpoint's name."""
    match = _STEP.match(path.name)
    return int(match[1]) if match else None


def committed(folder: Path) -> dict[int, Path]:
    """Step to path of everything in ``folder`` that bears a checkpoint's name, newest first."""
    steps = {step: path for path in _entries(folder) if (step := step_of(path)) is not None}
    return dict(sorted(steps.items(), reverse=True))


def partials(folder: Path) -> set[Path]:
    """Saves of steps that were begun and not committed, or removals not completed."""
    return {path for path in _entries(folder) if is_partial(path) and path.name.startswith("step-")}


def is_partial(path: Path) -> bool:
    """Whether the name says that this never was, or no longer is, a checkpoint."""
    return _PARTIAL in path.name


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


def begin(target: Path) -> Path:
    """Make the folder (0700) in which the checkpoint ``target`` is written until its commit."""
    if not target.parent.is_dir():
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        sync(target.parent.parent)
    partial = partial_of(target)
    partial.mkdir(mode=0o700)
    return partial


def partial_of(path: Path) -> Path:
    """A unique name beside ``path`` that nothing takes for it."""
    return path.with_name(f"{path.name}{_PARTIAL}{secrets.token_hex(8)}")


def commit(
    partial: Path,
    target: Path,
    *,
    is_good: Callable[[Path], bool],
    fence: Callable[[], None] = lambda: None,
) -> None:
    """Turn ``partial``, whose content is durable, into the checkpoint ``target``, durably.

    If ``target`` exists and ``is_good``, another writer was there first: it stays and ours is
    dropped. If it exists and is damaged, ours takes its place.

    Args:
        fence: called last before the name is taken, or something under it removed; raises if this
            process may not.
    """
    sync(partial)
    fence()
    while not _renamed(partial, target):
        if is_good(target):
            remove(partial)
            break
        fence()
        remove(target)
        fence()
    sync(target.parent)


def _renamed(partial: Path, target: Path) -> bool:
    """Whether ``partial`` could take the name ``target``, which is free then."""
    try:
        partial.rename(target)
    except OSError as error:
        if error.errno in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
            return False
        raise
    return True


def remove(path: Path) -> None:
    """Remove a checkpoint or a partial one: it first loses its name, then its files.

    That another process removes it as well does no harm.
    """
    if not is_partial(path):
        doomed = partial_of(path)
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
