"""Who may write to a run: the attempt that opened it last.

A node that Slurm has given up may still run its ranks, and a write that hung there may go through
after the next attempt has begun. Every attempt therefore takes ownership of the run folder when it
opens it, and looks whether it still has it right before a checkpoint gets its name and before
anything is removed.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
from dataclasses import dataclass
from pathlib import Path

from slurmspot.checkpoint import steps
from slurmspot.errors import FencedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """An attempt that wants to own a run.

    Attributes:
        path: the file that tells who does.
        restart: how often its job had been started before.
    """

    path: Path
    job_id: str
    restart: int

    def take(self) -> Owner:
        """Own the run from here on, durably.

        Raises:
            FencedError: a later start of the same job owns it.
        """
        former = _read(self.path)
        owner = Owner(
            path=self.path,
            job_id=self.job_id,
            restart=self.restart,
            token=secrets.token_hex(8),
            run=former.run if former else secrets.token_hex(8),
            turn=former.turn + 1 if former else 1,
        )
        if former is not None and owner.came_before(former):
            raise former.lost_to()
        owner.write()
        return owner


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """An attempt that has taken a run.

    Attributes:
        token: of this attempt alone.
        run: of this run alone, for good.
        turn: how many attempts have owned the run, this one included.
    """

    path: Path
    job_id: str
    restart: int
    token: str
    run: str
    turn: int

    def check(self) -> None:
        """Make sure that this attempt owns the run.

        Of two starts of one job the later one wins, even if the earlier one was slower to write.

        Raises:
            FencedError: another attempt has taken it.
        """
        now = _read(self.path)
        if now is None:
            raise FencedError(
                "this attempt no longer owns the run", why=f"{self.path} is gone or damaged"
            )
        if now.token == self.token:
            return
        if not now.came_before(self):
            raise now.lost_to()
        self.write()

    def came_before(self, other: Owner) -> bool:
        """Whether ``other`` is a later start of the same job."""
        return self.job_id == other.job_id and self.restart < other.restart

    def lost_to(self) -> FencedError:
        """What an attempt is told that has lost the run to this one."""
        return FencedError(
            "this attempt no longer owns the run",
            why=f"attempt {self.job_id}-{self.restart} has taken it over",
            fix="nothing, if Slurm gave this attempt's node up; else end one of the two jobs",
        )

    def write(self) -> None:
        """Say so in the file, durably."""
        known = {**dataclasses.asdict(self), "path": None}
        steps.write_durably(self.path, json.dumps(known).encode() + b"\n")


def _read(path: Path) -> Owner | None:
    """The owner; None if nobody is, or it cannot be made out."""
    try:
        known = json.loads(path.read_bytes())
        owner = Owner(**{**known, "path": path})
    except (FileNotFoundError, ValueError, TypeError):
        return None
    sound = type(owner.turn) is int and type(owner.restart) is int and str(owner.run).isalnum()
    return owner if sound else None
