"""Every error a user can meet, and the exit code each becomes.

::

    SlurmspotError              1  failed, or not accepted
    ├── UsageError              2  the request itself is wrong
    │   └── FinishedError          the run is complete: nothing of it is left to act on
    ├── NotFoundError           3  nothing there by that name
    ├── SlurmError              1  Slurm answered, and refused
    │   └── SlurmUnreachableError  4  Slurm did not answer
    │       └── NoSlurmError          there is none here to answer
    └── CheckpointError         1  a checkpoint could not be used
        ├── CorruptCheckpointError     its bytes are not the bytes that were saved
        ├── MismatchedCheckpointError  intact, but of another model or state
        └── CheckpointWriteError       it could not be made durable
            └── FencedError            another attempt has taken the run over

An error says what happened, why, and what to do next. The command line prints those three lines
and no traceback. Exit code 75 is not an error: see :class:`slurmspot.job.run.Preempted`.
"""

from __future__ import annotations

from typing import ClassVar


class SlurmspotError(Exception):
    """What happened; ``why`` it happened, if known; and what to do about it (``fix``)."""

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, why: str | None = None, fix: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.fix = fix

    def __str__(self) -> str:
        lines = [self.what]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.fix:
            lines.append(f"  do:  {self.fix}")
        return "\n".join(lines)


class UsageError(SlurmspotError):
    """The request cannot be carried out as written."""

    exit_code = 2


class FinishedError(UsageError):
    """The run is complete: nothing of it is left to act on."""


class NotFoundError(SlurmspotError):
    """No run, job, node or checkpoint by that name."""

    exit_code = 3


class SlurmError(SlurmspotError):
    """Slurm was reached and refused."""


class SlurmUnreachableError(SlurmError):
    """Slurm's commands are missing, or its controller does not answer."""

    exit_code = 4


class NoSlurmError(SlurmUnreachableError):
    """This machine has no Slurm commands, or does not know which cluster they should ask."""


class CheckpointError(SlurmspotError):
    """A checkpoint could not be written, read or trusted."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint's content does not match its manifest."""


class MismatchedCheckpointError(CheckpointError):
    """A checkpoint is intact but belongs to another model, optimizer or state."""


class CheckpointWriteError(CheckpointError):
    """A checkpoint could not be made durable; the previous one is untouched."""


class FencedError(CheckpointWriteError):
    """A newer attempt owns the run: this one may neither commit nor remove anything."""
