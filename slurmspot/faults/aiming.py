"""Wait for the moment to hit a run, and hold its ranks there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import time_ns

from slurmspot.cluster.scontrol import JobState
from slurmspot.errors import SlurmspotError
from slurmspot.events import Event
from slurmspot.faults.backend import Backend
from slurmspot.faults.fault import Aim
from slurmspot.faults.victim import Victim
from slurmspot.job import hold


@dataclass(slots=True)
class Moment:
    """The moment of a hit.

    Attributes:
        job: the job then.
        phase: the phase that was aimed at, if any.
        held: by rank, the events with which ranks said that they stand still in it.
    """

    victim: Victim
    job: JobState
    phase: str | None
    since_ns: int
    held: list[Event] = field(default_factory=list)

    def release(self) -> None:
        """Let the ranks go on, those that are left."""
        self.victim.folder.hold.unlink(missing_ok=True)

    def inside(self, hit_ns: int) -> bool | None:
        """Whether a hit at ``hit_ns`` (unix) fell into the phase, by what the ranks have logged.

        For ``startup``: before any rank of the attempt had opened the run. For the others: after a
        rank was held in it, and before that rank said that it went on.
        """
        if self.phase is None:
            return None
        if self.phase == "startup":
            opened = [e for e in self.victim.attempt(self.job) if e.event == "imports_done"]
            return all(event.t_ns > hit_ns for event in opened)
        released = {
            (event.attempt, event.rank)
            for event in self.victim.events(since_ns=self.since_ns)
            if event.event == "released" and event.t_ns < hit_ns
        }
        return any(e.t_ns <= hit_ns and (e.attempt, e.rank) not in released for e in self.held)


@contextmanager
def aimed(victim: Victim, backend: Backend, aim: Aim, *, deadline_s: float) -> Iterator[Moment]:
    """Return at the moment that ``aim`` describes; ranks held for it go on at the latest at exit.

    Raises:
        FinishedError: the run finished before.
        UsageError: the job does not run then, or its ranks would not stand still.
        SlurmspotError: the moment did not come.
    """
    since_ns = time_ns()
    held_in = None if aim.in_phase == "startup" else aim.in_phase
    ending = aim.in_phase == "after-finish"
    moment = Moment(victim, victim.job(), aim.in_phase, since_ns)
    if held_in is not None:
        victim.check_holds(moment.job.job_id)
    try:
        if aim.after_s:
            victim.poll(lambda: victim.finished, aim.after_s)
        if held_in in {None, "drain"}:
            _wait_for_progress(victim, aim, deadline_s)
        if held_in is not None:
            hold.ask(victim.folder.hold, held_in, aim.at_step)
            if held_in == "drain":  # something must make them leave
                backend.signal_ranks(victim.running().job_id, "USR1")
            moment.held = _wait_for_hold(victim, moment, held_in, deadline_s)
        if aim.in_phase == "startup":
            moment.job = _starting(victim, deadline_s)
        elif aim == Aim() or held_in is not None:
            moment.job = victim.running(though_finished=ending)
        else:
            moment.job = _running_again(victim, deadline_s)
        yield moment
    finally:
        moment.release()


def _wait_for_progress(victim: Victim, aim: Aim, deadline_s: float) -> None:
    goal = aim.at_step or 0
    if aim.at_fraction is not None:

        def known() -> bool:
            return victim.total_steps() is not None

        victim.expect(known, deadline_s, "the run to say how long it is", though_finished=False)
        goal = max(goal, int(aim.at_fraction * (victim.total_steps() or 0)))
    if goal:
        victim.expect(
            lambda: (victim.last_step or 0) >= goal,
            deadline_s,
            f"step {goal} to be reached",
            though_finished=False,
        )


def _wait_for_hold(victim: Victim, moment: Moment, phase: str, deadline_s: float) -> list[Event]:
    held: list[Event] = []

    def stands() -> bool:
        victim.folder.hold.touch()
        victim.check_holds(moment.job.job_id)
        held[:] = [
            event
            for event in victim.events(since_ns=moment.since_ns)
            if event.event == "held" and event.data.get("phase") == phase
        ]
        return bool(held)

    victim.expect(
        stands,
        deadline_s,
        f"a rank to stand in {phase}",
        though_finished=phase == "after-finish",
    )
    return held


def _running_again(victim: Victim, deadline_s: float) -> JobState:
    """The job, once it runs: it may be on its way back when the moment has come."""
    victim.expect(
        lambda: victim.job().state == "RUNNING", deadline_s, "the job to run", though_finished=False
    )
    return victim.running()


def _starting(victim: Victim, deadline_s: float) -> JobState:
    """The job while its ranks start: it runs, and none of them has opened the run yet."""
    found: list[JobState] = []

    def starts() -> bool:
        job = victim.job()
        if job.over:
            raise SlurmspotError(f"job {job.job_id} ended before it started again")
        opened = any(event.event == "imports_done" for event in victim.attempt(job))
        if job.state == "RUNNING" and not opened:
            found.append(job)
        return bool(found)

    victim.expect(starts, deadline_s, "the ranks to start", though_finished=False)
    return found[-1]
