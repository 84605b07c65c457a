"""Joins what sacct saw from outside with what the run said of itself.

A *life* is one stay of the job's processes: from a start by Slurm to the end of those processes.
Its events stand in a folder named ``<job id>-<restart>``; restart k is the job's k-th start. A
change of size is a new row of sacct but no new start, so a life may have several rows.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from slurmspot.events import Event
from slurmspot.timeline.attempts import Attempt, Job

INJECTOR = "injector"
"""Attempt name under which the injector logs."""

_FAR_FUTURE_NS = 2**62  # the year 2116
_NAME = re.compile(r"(?P<job>.+)-(?P<restart>\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One stay of a job's processes.

    Attributes:
        rows: the attempts of sacct it spans, several if the job was resized, at least one.
        events: what its processes logged, in order of time; empty if they logged nothing.
        steps: those events that say that a step was run.
        last_step: the highest of them; None if it ran none.
        lead: the rank whose clock measures what happens within a process: the lowest there is.
    """

    job_id: str
    rows: tuple[Attempt, ...]
    events: tuple[Event, ...]
    steps: tuple[Event, ...]
    last_step: int | None
    lead: str | None

    @classmethod
    def of(cls, job_id: str, rows: Sequence[Attempt], events: Sequence[Event]) -> Life:
        """The life that spans ``rows`` and logged ``events``."""
        steps = tuple(event for event in events if is_step(event))
        ranks = {event.rank for event in events if event.rank.isdecimal()}
        return cls(
            job_id=job_id,
            rows=tuple(rows),
            events=tuple(events),
            steps=steps,
            last_step=max((event.step or 0 for event in steps), default=None),
            lead=min(ranks, key=int, default=None),
        )

    @property
    def start(self) -> datetime:
        """When Slurm started it."""
        return self.rows[0].start or self.rows[0].submit

    @property
    def kind(self) -> str:
        """How it ended, as sacct says."""
        return self.rows[-1].kind

    @property
    def gone(self) -> datetime | None:
        """When its processes were gone; None while they live."""
        return self.rows[-1].process_exit

    @property
    def restored(self) -> int | None:
        """The step it went on from; 0 if there was nothing to restore, None if it never tried."""
        end = self.first("restore_end")
        return None if end is None else end.step or 0

    @property
    def notice(self) -> Event | None:
        """The first warning that its capacity goes away.

        When a node is lost, Slurm ends the processes on the other nodes by SIGTERM: that comes
        after the loss and warns of nothing.
        """
        late = {"SIGTERM"} if self.kind == "node_fail" else set()
        return next((e for e in self.all("notice") if e.data.get("source") not in late), None)

    @property
    def agreed(self) -> Event | None:
        """The last rank's word that all save at one step, and leave."""
        return next(reversed(self.all("agreed")), None)

    @property
    def rescues(self) -> list[Event]:
        """Commits of the step that all ranks agreed to save at, in order of time."""
        agreed = self.agreed
        return [e for e in self.all("commit") if agreed is not None and e.step == agreed.step]

    @property
    def copied(self) -> Event | None:
        """The last rank's word that this step is copied."""
        agreed = self.agreed
        ends = [e for e in self.all("snapshot_end") if agreed is not None and e.step == agreed.step]
        return ends[-1] if ends else None

    def own(self, name: str) -> Event | None:
        """The first event of a name on the lead rank."""
        return next((e for e in self.events if e.event == name and e.rank == self.lead), None)

    def all(self, name: str) -> list[Event]:
        """Its events of one name, in order of time."""
        return [event for event in self.events if event.event == name]

    def first(self, name: str) -> Event | None:
        """The first event of a name on any rank."""
        return next((event for event in self.events if event.event == name), None)


def lives(job: Job, events: Mapping[str, Sequence[Event]]) -> list[Life]:
    """The lives of one job, in order; attempts that never started have none.

    Args:
        events: by attempt name, see :func:`by_attempt`.
    """
    starts = _starts(job)
    restarts = _restarts(starts, _logged(job.job_id, events))
    return [
        Life.of(job.job_id, rows, events.get(f"{job.job_id}-{restart}", ()))
        for restart, rows in zip(restarts, starts, strict=True)
    ]


def _starts(job: Job) -> list[list[Attempt]]:
    """The attempts of each start, several where the job was resized."""
    starts: list[list[Attempt]] = []
    resized = False
    for attempt in sorted(
        (attempt for attempt in job.attempts if attempt.start),
        key=lambda attempt: attempt.start or attempt.submit,
    ):
        if resized:
            starts[-1].append(attempt)
        else:
            starts.append([attempt])
        resized = attempt.kind == "resized"
    return starts


def _logged(job_id: str, events: Mapping[str, Sequence[Event]]) -> dict[int, datetime]:
    """When each restart of a job logged first."""
    names = ((_NAME.fullmatch(name), logged) for name, logged in events.items())
    return {
        int(match["restart"]): moment(logged[0])
        for match, logged in names
        if match and match["job"] == job_id
    }


def _restarts(starts: Sequence[Sequence[Attempt]], logged: Mapping[int, datetime]) -> list[int]:
    """Which restart each start is: what sacct says; else, counted so that times fit best.

    Counting from 0 is wrong where accounting has purged the first rows, and then the event log
    knows more starts than sacct does.
    """
    spare = max(logged, default=0) + 1 - len(starts)

    def misfit_s(first: int) -> float:
        return sum(
            abs((logged[index] - (rows[0].start or rows[0].submit)).total_seconds())
            for index, rows in enumerate(starts, start=first)
            if index in logged
        )

    first = min(range(spare + 1), key=misfit_s) if spare > 0 else 0
    return [
        index if rows[0].restarts is None else rows[0].restarts
        for index, rows in enumerate(starts, start=first)
    ]


def complete(jobs: Iterable[Job], events: Iterable[Event]) -> tuple[list[Job], list[str]]:
    """The same jobs with the starts that only their event log knows; and a note for each job."""
    named = by_attempt(events)
    found, notes = [], []
    for job in jobs:
        starts = _starts(job)
        logged = _logged(job.job_id, named)
        absent = sorted(logged.keys() - set(_restarts(starts, logged)))
        if absent:
            attempts = list(job.attempts)
            for restart in absent:
                name = f"{job.job_id}-{restart}"
                newest = restart == max(logged)
                attempts.append(_witnessed(0, restart, named[name], last=newest))
            attempts.sort(key=lambda attempt: attempt.start or attempt.submit)
            numbered = (a._replace(index=index) for index, a in enumerate(attempts))
            found.append(job._replace(attempts=tuple(numbered)))
            notes.append(
                f"job {job.job_id}: restart {', '.join(map(str, absent))} left no row in the "
                "accounts (purged, or not asked for) and is told from the event log alone"
            )
        else:
            found.append(job)
    return found, notes


def chains(jobs: Iterable[Job], events: Iterable[Event]) -> list[list[Life]]:
    """Lives that continue one another, in order of time: one list for each line of training.

    All jobs of a run carry on the same training, except the tasks of an array, which are lines of
    their own. Of a heterogeneous job the first component speaks for all.
    """
    named = by_attempt(events)
    found: dict[str, list[Life]] = defaultdict(list)
    for job in jobs:
        if not re.search(r"\+[1-9]", job.job_id):
            found[job.job_id.partition("_")[2]].extend(lives(job, named))
    return [sorted(chain, key=lambda life: life.start) for chain in found.values()]


def by_attempt(events: Iterable[Event]) -> dict[str, list[Event]]:
    """Events by attempt name, each in order of time."""
    found: dict[str, list[Event]] = defaultdict(list)
    for event in sensible(events):
        found[event.attempt].append(event)
    return dict(found)


def sensible(events: Iterable[Event]) -> list[Event]:
    """Events in order of time, without those whose time or step cannot be one."""
    return sorted(
        (e for e in events if 0 <= e.t_ns < _FAR_FUTURE_NS and isinstance(e.step, int | None)),
        key=lambda event: event.t_ns,
    )


def witnessed(events: Iterable[Event], *, known: Iterable[str] = ()) -> list[Job]:
    """Jobs that only the event log knows of: a run outside Slurm, or without accounting.

    Args:
        known: job ids to leave out, since sacct has them.
    """
    skip = set(known)
    found: dict[str, dict[int, list[Event]]] = defaultdict(dict)
    for name, logged in by_attempt(events).items():
        match = _NAME.fullmatch(name)
        if match and match["job"] not in skip:
            found[match["job"]][int(match["restart"])] = logged
    newest = max((logs[0].t_ns for by in found.values() for logs in by.values()), default=0)
    return [
        Job(
            job_id=job_id,
            name=job_id,
            attempts=tuple(
                _witnessed(index, restart, logged, last=logged[0].t_ns == newest)
                for index, (restart, logged) in enumerate(sorted(by_restart.items()))
            ),
        )
        for job_id, by_restart in found.items()
    ]


def _witnessed(index: int, restart: int, logged: Sequence[Event], *, last: bool) -> Attempt:
    start, end = moment(logged[0]), moment(logged[-1])
    codes = [event.data.get("code") for event in logged if event.event == "exit"]
    if any(event.event == "finished" for event in logged) or (codes and not any(codes)):
        kind = "completed"
    elif codes:
        kind = "requeued" if 75 in codes else "failed"
    else:
        kind = "running" if last else "failed"
    hosts = (event.data.get("host") for event in logged if event.event == "attempt_start")
    gone = None if kind == "running" else end
    return Attempt(
        index=index,
        kind=kind,
        submit=start,
        eligible=start,
        start=start,
        end=gone,
        process_exit=gone,
        nodes=tuple(dict.fromkeys(str(host) for host in hosts if host)),
        gpus=None,
        restarts=restart,
    )


def is_step(event: Event) -> bool:
    """Whether an event says that a step was run."""
    return event.event in {"step", "first_step"} and event.step is not None


def moment(event: Event) -> datetime:
    """When an event was logged, on the clock of its host."""
    return datetime.fromtimestamp(event.t_ns / 1e9, tz=UTC)


def elapsed_s(before: Event, after: Event) -> float:
    """Seconds between two events, never negative.

    Within one process the monotonic clock counts; between hosts only their wall clocks can.
    """
    if (before.attempt, before.rank) == (after.attempt, after.rank):
        return max(0.0, (after.mono_ns - before.mono_ns) / 1e9)
    return max(0.0, (after.t_ns - before.t_ns) / 1e9)
