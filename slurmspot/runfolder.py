"""Where things lie in a run folder. Paths only; nothing here reads or writes.

::

    RUN/run.json                         the frozen spec
    RUN/jobs.jsonl                       one line for each submitted job
    RUN/logs/                            submitit's files and the ranks' output
    RUN/events/<attempt>/<rank>.jsonl    the event log
    RUN/events/<attempt>/<rank>.beat     the last step run (binary, fixed size)
    RUN/events/<attempt>/srun-*.port     where the ranks of a step meet
    RUN/checkpoints/step-00001200/       committed checkpoints
    RUN/checkpoints/owner-00000003-…/    the attempt that may write checkpoints
    RUN/finished.json                    written once, after the last commit
    RUN/hold.json                        a drill's request to stand still in a phase
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from slurmspot.errors import NotFoundError, UsageError


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The layout of one run folder."""

    path: Path

    @property
    def spec(self) -> Path:
        """The frozen spec, written by ``launch``."""
        return self.path / "run.json"

    @property
    def jobs(self) -> Path:
        """One JSON line for each job that was submitted for this run."""
        return self.path / "jobs.jsonl"

    @property
    def logs(self) -> Path:
        """Output of the batch script and of every rank."""
        return self.path / "logs"

    @property
    def events(self) -> Path:
        """Root of the event log."""
        return self.path / "events"

    @property
    def checkpoints(self) -> Path:
        """Remote (shared, persistent) tier."""
        return self.path / "checkpoints"

    @property
    def finished(self) -> Path:
        """Exists once the run is complete."""
        return self.path / "finished.json"

    @property
    def hold(self) -> Path:
        """Exists while a drill asks the ranks to stand still: see :mod:`slurmspot.job.hold`."""
        return self.path / "hold.json"

    def create(self) -> RunFolder:
        """Make the folder and its parts, private to the owner (0700).

        Raises:
            UsageError: the folder cannot be made or is not writable.
        """
        try:
            for path in (self.path, self.logs, self.events, self.checkpoints):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.chmod(0o700)
        except OSError as error:
            raise UsageError(
                f"cannot make the run folder {self.path}",
                why=error.strerror,
                fix="choose a folder on shared storage that you may write to (--run)",
            ) from None
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise UsageError(
                f"the run folder {self.path} is not writable",
                fix="choose a folder on shared storage that you may write to (--run)",
            )
        return self

    @classmethod
    def open(cls, path: Path | str) -> RunFolder:
        """The run folder at ``path``.

        Raises:
            NotFoundError: no run lives there.
        """
        folder = cls(Path(path).absolute())
        if not folder.spec.is_file() and not folder.events.is_dir():
            raise NotFoundError(
                f"{path} is not a run folder",
                why="it holds neither run.json nor events/",
                fix="give the folder that `slurmspot launch` printed",
            )
        return folder
