"""Who may write to a run: the attempt that opened it last, and nobody else.

A node that Slurm has given up may still run its ranks, and a process or a request to a file server
that hung there may go on after the next attempt has begun. To look first whether one still owns the
run, and to write then, is of no use: a process can freeze in between for as long as it likes.

Instead each attempt has a folder of its own among the checkpoints, its desk::

    checkpoints/owner-<turn>-<token>-<run>-<restart>-<job id>/

What it writes lies there until a rename gives it a checkpoint's name, and what it removes is
renamed into there first. Every change that an attempt makes to the checkpoints is thus one rename
out of its desk or into it. The next attempt

1. makes its own desk, whose turn is higher than any desk's or checkpoint's, and then looks for
   others;
2. moves whatever lies in theirs into its own, and removes the empty folder;
3. only then looks for the checkpoint to go on from.

Why this is safe: a rename and the removal of an empty folder are atomic, on a shared file system
too. A change of the earlier attempt either came before its desk was gone, and then the next one
sees it; or it fails, since a folder that is gone takes nothing in and gives nothing out, whatever
path or handle the frozen process holds. No clock, no lock and no check is involved. Names are never
used again, and only opening a run makes a desk: one that is gone stays gone. Of two attempts that
open a run at once, each makes its desk before it looks, so at least one sees the other; the one
with the higher turn, or token, wins. The highest desk is never removed, and should somebody do that
the checkpoints tell the turns of their owners, so the turns only grow.

What an unfinished save has left is moved along with the rest, since it may be just what a restore
lacks (see :mod:`slurmspot.checkpoint.promotion`), and removed when something newer is safe.
"""

from __future__ import annotations

import contextlib
import errno
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

import xxhash

from slurmspot.checkpoint import local, steps
from slurmspot.errors import CheckpointError, CheckpointWriteError, FencedError

_DESK = re.compile(r"owner-(\d{8,})-([0-9a-f]{8})-([0-9a-f]{16})-(\d+)-(.+)\Z", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """An attempt that wants to own a run.

    Attributes:
        restart: how often its job had been started before.
    """

    job_id: str
    restart: int

    def take(self, folder: Path) -> Owner:
        """Own the run whose checkpoints lie in ``folder`` from here on, durably.

        Of two starts of one job the later one wins, even if the earlier one was slower to come.

        Raises:
            FencedError: a later start of the same job owns it, or another job has come later.
        """
        steps.make(folder)
        while True:
            owner = self._sit_down(folder)
            others = [one for one in _owners(folder) if one != owner]
            above = [one for one in others if one.came_after(owner)]
            winners = [one for one in others if owner.came_before(one)]
            winners += [one for one in above if not one.came_before(owner)]
            if winners:
                with contextlib.suppress(OSError):
                    owner.desk.rmdir()
                raise winners[-1].won()
            if not above:
                break
        try:
            for other in others:
                owner.dismiss(other)
            steps.sync(owner.desk)
            steps.sync(folder)
        except FileNotFoundError:
            owner.check()
            raise
        return owner

    def _sit_down(self, folder: Path) -> Owner:
        known = _owners(folder)
        saved = map(local.turn_at, steps.committed(folder).values())
        owner = Owner(
            folder=folder,
            turn=1 + max([0, *(one.turn for one in known), *saved]),
            token=secrets.token_hex(4),
            run=known[-1].run if known else secrets.token_hex(8),
            job_id=self.job_id,
            restart=self.restart,
        )
        owner.desk.mkdir(mode=0o700)
        return owner


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """An attempt that has taken a run.

    Attributes:
        turn: higher than that of all attempts before it.
        token: of this attempt alone.
        run: of this run alone, for good.
    """

    folder: Path
    turn: int
    token: str
    run: str
    job_id: str
    restart: int

    @property
    def desk(self) -> Path:
        """The folder that this attempt writes in, as long as it owns the run."""
        job = quote(self.job_id, safe="")
        name = f"owner-{self.turn:08d}-{self.token}-{self.run}-{self.restart}-{job}"
        return self.folder / name

    def key(self) -> str:
        """What stands for this run on other disks: a copy of its folder has another one."""
        return xxhash.xxh3_64_hexdigest(f"{self.run} {self.folder.resolve()}".encode())

    def check(self) -> None:
        """See whether this attempt still owns the run: to end early, and to say why.

        Raises:
            FencedError: another attempt has taken it, as far as one can see.
        """
        with contextlib.suppress(OSError):
            for other in reversed(_owners(self.folder)):
                if other.came_after(self) and not other.came_before(self):
                    raise other.won()

    @contextlib.contextmanager
    def losing(self) -> Iterator[None]:
        """Have what fails because the run has been lost fail for that reason.

        Raises:
            FencedError: something failed, and another attempt has taken the run.
        """
        try:
            yield
        except CheckpointError:
            self.check()
            raise

    def dismiss(self, other: Owner) -> None:
        """Take over what lies on the desk of ``other``, and take the desk away.

        Raises:
            FencedError: another attempt has done that to this one.
            CheckpointWriteError: this one's desk is gone, though nobody has taken it.
        """
        while True:
            for path in steps.entries(other.desk):
                with contextlib.suppress(FileNotFoundError):
                    path.rename(self.desk / path.name)
            try:
                other.desk.rmdir()
            except FileNotFoundError:
                return
            except OSError as error:
                if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                    raise
            else:
                return
            self.check()
            if not self.desk.is_dir():
                raise CheckpointWriteError(f"{self.desk} is gone")

    def came_after(self, other: Owner) -> bool:
        """Whether this one has opened the run after ``other``."""
        return (self.turn, self.token) > (other.turn, other.token)

    def came_before(self, other: Owner) -> bool:
        """Whether ``other`` is a later start of the same job."""
        return self.job_id == other.job_id and self.restart < other.restart

    def won(self) -> FencedError:
        """What an attempt is told that has lost the run to this one."""
        return FencedError(
            "this attempt no longer owns the run",
            why=f"attempt {self.job_id}-{self.restart} has taken it over",
            fix="nothing, if Slurm gave this attempt's node up; end one of the two jobs, if both "
            f"run; if the cluster numbers its jobs anew since then, remove {self.desk}",
        )


def _owners(folder: Path) -> list[Owner]:
    """All that have a desk, in the order in which they came."""
    desks = (path for path in steps.owners(folder) if not (path.is_file() or path.is_symlink()))
    found = (_DESK.match(path.name) for path in desks)
    owners = [
        Owner(
            folder=folder,
            turn=int(match[1]),
            token=match[2],
            run=match[3],
            restart=int(match[4]),
            job_id=unquote(match[5]),
        )
        for match in found
        if match
    ]
    return sorted(owners, key=lambda one: (one.turn, one.token))
