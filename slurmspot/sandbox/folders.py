"""The folder of a sandbox: private, locked while it is made or removed, with a record inside."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from slurmspot.errors import UsageError
from slurmspot.sandbox.spec import Layout

RECORD_FORMAT = 1


def private_base() -> Path:
    """Where this user's sandboxes lie: short, for the sake of socket paths, and private.

    Raises:
        UsageError: someone else has made it.
    """
    base = Path(f"/tmp/slurmspot-{os.geteuid()}")  # noqa: S108 - made private and checked below
    base.mkdir(mode=0o700, exist_ok=True)
    found = base.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise UsageError(
            f"{base} is not a private folder of this user",
            why="someone else made it, or its mode is not 0700",
            fix="remove it, or choose another place with --folder",
        )
    return base


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make ``folder`` and keep every other ``up`` and ``down`` away from it.

    The kernel drops the lock when its holder dies; and removing the folder leaves nothing behind.
    """
    while True:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        fcntl.flock(held, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(held), folder.stat()):
                break
        os.close(held)  # removed while we waited: that lock guards nothing
    try:
        yield
    finally:
        os.close(held)


def read_record(layout: Layout) -> dict[str, Any] | None:
    """What ``up`` wrote into the sandbox's folder; None if nothing.

    Raises:
        UsageError: another version wrote it.
    """
    try:
        record = json.loads(layout.record.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        record = {}
    if record.get("format") != RECORD_FORMAT:
        raise UsageError(
            f"{layout.record} is not a record of this version of slurmspot",
            fix=f"end what it left by hand, then remove {layout.path}",
        )
    return dict(record)


def write_private(path: Path, content: bytes) -> None:
    """Replace ``path`` at once, readable by its owner alone (slurmdbd and munged insist on it)."""
    partial = path.with_name(f"{path.name}.partial")
    partial.touch(mode=0o600)
    partial.write_bytes(content)
    partial.replace(path)


def empty(folder: Path) -> None:
    """Remove all that ``folder`` holds, but not the folder."""
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
