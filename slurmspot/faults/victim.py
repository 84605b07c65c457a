"""The run that is to be hit, as seen from outside: its job, its event log, its settings."""

from __future__ import annotations

import json
import os
import pwd
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from slurmspot.cluster.scontrol import JobState
from slurmspot.cluster.submit import job_ids
from slurmspot.errors import (
    FinishedError,
    NotFoundError,
    SlurmspotError,
    SlurmUnreachableError,
    UsageError,
)
from slurmspot.events import Event, last_step, read_events
from slurmspot.faults.backend import Backend
from slurmspot.runfolder import RunFolder

_POLL_S = 0.2
_LOOK_S = 5.0


@dataclass(frozen=True, slots=True)
class Process:
    """Where one rank runs."""

    node: str
    pid: int


class Victim:
    """One run and its newest job.

    Args:
        folder: the run; with ``job_id``, any folder to keep the journal in.
        job_id: this job, whatever it is and whose it is, instead of the run's own.
        any_job: the run's job even if it is another user's.
        wait: called between two looks.
    """

    def __init__(
        self,
        folder: RunFolder,
        backend: Backend,
        *,
        job_id: str | None = None,
        any_job: bool = False,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self.folder = folder
        self._backend = backend
        self._job_id = job_id
        self._any_job = any_job or job_id is not None
        self._wait = wait

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What the run was launched with; empty if another way than by ``launch``."""
        if not self.folder.spec.exists():
            return {}
        return dict(json.loads(self.folder.spec.read_text()))

    def job(self) -> JobState:
        """The job, in whatever state.

        Raises:
            NotFoundError: there is none.
            UsageError: it is somebody else's.
        """
        job_id = self._job_id or next(reversed(job_ids(self.folder)), None)
        if job_id is None:
            raise NotFoundError(f"{self.folder.path} has no job", fix="launch it first")
        job = self._backend.job(job_id)
        me = pwd.getpwuid(os.geteuid()).pw_name
        if not self._any_job and job.user not in {"", me}:
            raise UsageError(
                f"job {job_id} belongs to {job.user}, not to {me}",
                why="a drill touches its caller's own runs alone",
                fix="if it is meant all the same: --any-job",
            )
        return job

    def running(self, *, though_finished: bool = False) -> JobState:
        """The job, which runs.

        Raises:
            FinishedError: the run is complete, even if its last processes are still there.
            UsageError: the job does not run: there is nothing to take away.
        """
        job = self.job()
        if self.finished and not though_finished:
            raise FinishedError(
                f"{self.folder.path} has finished",
                why="there is nothing to take away",
                fix="launch another run",
            )
        if job.state != "RUNNING":
            raise UsageError(
                f"job {job.job_id} is not running but {job.state.lower()}",
                why="there is nothing to take away",
                fix=f"see `slurmspot status {self.folder.path}`",
            )
        return job

    def ended(self, job: JobState) -> bool:
        """Whether the attempt that ran when ``job`` was seen has been ended since."""
        try:
            now = self._backend.job(job.job_id)
        except NotFoundError:
            return True
        except SlurmUnreachableError:  # the controller may be restarted in a drill, too
            return False
        return now.state != "RUNNING" or now.restarts > job.restarts

    @property
    def finished(self) -> bool:
        """Whether the run is complete."""
        return self.folder.finished.exists()

    def await_training(self, deadline_s: float) -> bool:
        """Wait until the present attempt has made a step: True; or the run has finished: False.

        Raises:
            SlurmspotError: neither within ``deadline_s``, or the job ended for good.
        """
        self.expect(
            lambda: self.finished or self._trains(),
            deadline_s,
            "the run to train again",
            though_finished=False,
        )
        return not self.finished

    def _trains(self) -> bool:
        job = self.job()
        beats = self.folder.events.glob(f"*-{job.restarts}/[0-9]*.beat")
        return job.state == "RUNNING" and any(beat.stat().st_size for beat in beats)

    @property
    def last_step(self) -> int | None:
        """The furthest step that any attempt has made."""
        return last_step(self.folder.events)

    def events(self, *, since_ns: int = 0) -> list[Event]:
        """What the run has logged since, oldest first; without its steps."""
        found = read_events(self.folder.events, steps=False)
        return [event for event in found if event.t_ns >= since_ns]

    def attempt(self, job: JobState) -> list[Event]:
        """What the ranks of the job's present attempt have logged."""
        mark = f"-{job.restarts}"
        return [event for event in self.events() if event.attempt.endswith(mark)]

    def total_steps(self) -> int | None:
        """How many steps the whole run has, once it has said so."""
        totals = [event.data.get("total") for event in self.events() if event.event == "goal"]
        return next((int(total) for total in reversed(totals) if total), None)

    def check_holds(self, job_id: str) -> None:
        """Refuse a run whose ranks have said that they would not stand still for a drill.

        Raises:
            UsageError: they would not, as they were launched.
        """
        started = (event for event in self.events() if event.event == "attempt_start")
        if any(e.data.get("job_id") == job_id and not e.data.get("holds") for e in started):
            raise UsageError(
                f"the ranks of job {job_id} cannot be held in a phase",
                why="it was launched without SLURMSPOT_HOLD=1",
                fix="launch it with that, or aim at a step or a time instead",
            )

    def rank(self, job: JobState, number: int) -> Process:
        """Where a rank of the present attempt runs.

        Raises:
            NotFoundError: it has not come to life, or has left.
        """
        mine = [event for event in self.attempt(job) if event.rank == str(number)]
        started = next((event for event in mine if event.event == "attempt_start"), None)
        if started is None or any(event.event == "exit" for event in mine):
            raise NotFoundError(
                f"job {job.job_id} has no rank {number} now",
                why="ranks are found in the run's event log",
                fix="wait for its first step (--at-step), or choose another --target rank:NUMBER",
            )
        return Process(str(started.data["host"]), int(started.data["pid"]))

    def poll(self, true: Callable[[], bool], deadline_s: float) -> bool:
        """Whether it became true within ``deadline_s``."""
        end = time.monotonic() + deadline_s
        while not true():
            if time.monotonic() >= end:
                return False
            self._wait(min(_POLL_S, max(0.0, end - time.monotonic())))
        return True

    def expect(
        self, true: Callable[[], bool], deadline_s: float, what: str, *, though_finished: bool
    ) -> None:
        """Wait for something that only a living run can bring.

        Raises:
            FinishedError: the run finished before.
            SlurmspotError: it did not come in time, or the run died before.
        """
        next_look = time.monotonic() + _LOOK_S

        def over() -> bool:
            nonlocal next_look
            if though_finished or self.finished or time.monotonic() < next_look:
                return self.finished and not though_finished
            next_look = time.monotonic() + _LOOK_S
            return self.job().over

        if not self.poll(lambda: true() or over(), deadline_s):
            raise SlurmspotError(
                f"waited {deadline_s:.0f} s in vain for {what}",
                fix=f"see `slurmspot status {self.folder.path}`",
            )
        if not true():
            kind, verb = (FinishedError, "finished") if self.finished else (SlurmspotError, "ended")
            raise kind(f"the run {verb} while waiting for {what}")
