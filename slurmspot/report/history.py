"""The history of a run: what Slurm's accounting and the run's own events tell together."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path

from slurmspot.cluster import command, sacct
from slurmspot.cluster.command import Runner
from slurmspot.errors import NotFoundError, SlurmError, UsageError
from slurmspot.events import Event, read_events
from slurmspot.report.document import RunReport
from slurmspot.runfolder import RunFolder
from slurmspot.timeline import outages
from slurmspot.timeline.attempts import Job, Timeline, read_timeline
from slurmspot.timeline.clocks import ClockDifference, differences, in_step
from slurmspot.timeline.lives import by_attempt, complete, moment, sensible, witnessed
from slurmspot.timeline.outages import Outage
from slurmspot.timeline.phases import divided
from slurmspot.timeline.records import FIELDS
from slurmspot.timeline.recovery import Interruption, interruptions, of_each

_MARGIN = timedelta(days=1)  # a job may have waited before the first thing known of it


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Jobs with their attempts and phases, and the events that these were divided by.

    Attributes:
        clocks: how far the clocks of nodes are apart; the events are moved accordingly.
        outages: when Slurm took nodes for gone, in order of time; none where only a text was read.
    """

    timeline: Timeline
    events: tuple[Event, ...] = ()
    clocks: tuple[ClockDifference, ...] = ()
    outages: tuple[Outage, ...] = ()

    @property
    def interruptions(self) -> list[Interruption]:
        """Every attempt that ended before the work was done: of the one run, or of each job."""
        if self.events:
            return interruptions(self.timeline.jobs, self.events, self.outages)
        return of_each(self.timeline.jobs, self.outages)

    def report(self, label: str, *, baseline: bool = False) -> RunReport:
        """The run as it enters a report."""
        return RunReport(
            label=label,
            jobs=self.timeline.jobs,
            events=self.events,
            outages=self.outages,
            baseline=baseline,
        )


def of_run(
    folder: RunFolder,
    *,
    sacct_file: Path | None = None,
    tz: tzinfo | None = None,
    runner: Runner = command.run,
) -> History:
    """The history of a run folder.

    Its jobs are those that were submitted for it and those that logged into it. What ran outside
    Slurm is told from its events alone.

    Args:
        sacct_file: a saved text of sacct; None asks the cluster.
        tz: time zone of that text.

    Raises:
        NotFoundError, UsageError: the text cannot be used, or knows none of the run's jobs.
        SlurmError: the cluster cannot be asked.
    """
    logged = sensible(read_events(folder.events))
    clocks = tuple(differences(logged))
    events = tuple(in_step(logged, clocks))
    submitted = {**dict(_in_events(events)), **dict(_submitted(folder))}
    timeline = Timeline(jobs=())
    down: tuple[Outage, ...] = ()
    if submitted:
        if sacct_file is not None:
            timeline = read_file(sacct_file, tz=tz)
        else:
            since = min(submitted.values()) - _MARGIN
            timeline = read_timeline(
                sacct.query(runner, list(submitted), fields=FIELDS, since=since)
            )
            timeline, down = _with_outages(timeline, since=since, runner=runner)
        jobs = tuple(_own(timeline.jobs, submitted))
        if not jobs:
            raise NotFoundError(
                f"the sacct text knows no job of {folder.path}",
                why=f"the run submitted {', '.join(submitted)}",
                fix="save the text on the cluster the run was submitted to",
            )
        completed, notes = complete(jobs, events)
        timeline = replace(timeline, jobs=tuple(completed), notes=(*timeline.notes, *notes))
    known = {attempt.job_id for attempt in timeline.jobs}
    jobs = (*timeline.jobs, *witnessed(events, known=known))
    apart = tuple(f"{one}; its events are shown moved by that" for one in clocks if one.certain)
    return History(
        timeline=replace(timeline, jobs=divided(jobs, events), notes=(*timeline.notes, *apart)),
        events=events,
        clocks=clocks,
        outages=down,
    )


def of_job(job_id: str, *, since: datetime, runner: Runner = command.run) -> History:
    """The history of one job, asked of the cluster; ``since`` bounds how far back.

    Raises:
        NotFoundError: accounting knows no such job since then.
        SlurmError: the cluster cannot be asked.
    """
    text = sacct.query(runner, [job_id], fields=FIELDS, since=since)
    timeline, down = _with_outages(read_timeline(text), since=since, runner=runner)
    return History(timeline=timeline, outages=down)


def of_account(
    *,
    user: str | None,
    partition: str | None,
    since: datetime,
    until: datetime,
    runner: Runner = command.run,
) -> History:
    """The history of every job of a user, in a partition, or of both, asked page by page.

    Raises:
        NotFoundError: accounting knows no such job since then.
        SlurmError: the cluster cannot be asked.
    """
    found = sacct.pages(
        runner, user=user, partition=partition, fields=FIELDS, since=since, until=until
    )
    timeline = read_timeline("".join(found))
    if not timeline.jobs:
        raise NotFoundError(
            f"accounting knows no job of {user or 'anyone'} in {partition or 'any partition'} "
            f"since {since:%Y-%m-%d}",
            fix="give an earlier time (--since), or see `sacctmgr show user`",
        )
    timeline, down = _with_outages(timeline, since=since, runner=runner)
    return History(timeline=timeline, outages=down)


def _with_outages(
    timeline: Timeline, *, since: datetime, runner: Runner
) -> tuple[Timeline, tuple[Outage, ...]]:
    """When Slurm took nodes of the jobs for gone; a note where it does not tell."""
    nodes = sorted({n for job in timeline.jobs for attempt in job.attempts for n in attempt.nodes})
    if not nodes:
        return timeline, ()
    try:
        text = sacct.outages(runner, nodes, fields=outages.FIELDS, since=since)
    except SlurmError as error:
        note = f"Slurm does not tell when nodes went down ({error.why}): NODE_FAIL alone does"
        return replace(timeline, notes=(*timeline.notes, note)), ()
    return timeline, outages.read_outages(text)


def of_file(path: Path, *, job_id: str | None = None, tz: tzinfo | None = None) -> History:
    """The history of all jobs in a saved text of sacct, or of one of them.

    Raises:
        NotFoundError: there is no such file, or no such job in it.
        UsageError: the file is not what sacct prints.
    """
    timeline = read_file(path, tz=tz)
    if job_id is not None:
        jobs = tuple(job for job in timeline.jobs if job_id in {job.job_id, base_id(job.job_id)})
        if not jobs:
            raise NotFoundError(f"{path} knows no job {job_id}")
        timeline = replace(timeline, jobs=jobs)
    elif not timeline.jobs and not timeline.rejected:
        raise NotFoundError(
            f"{path} holds no job",
            why="it is a header only: sacct found nothing",
            fix="ask sacct for an earlier time (-S) and for all attempts (-D)",
        )
    return History(timeline=timeline)


def base_id(job_id: str) -> str:
    """The number that ``7_0``, ``7_[2-5]`` and ``33+1`` were submitted under."""
    match = re.match(r"\d+", job_id)
    return match.group() if match else job_id


def read_file(path: Path, *, tz: tzinfo | None = None) -> Timeline:
    """The timeline of a saved export of sacct.

    Raises:
        NotFoundError, UsageError: there is no such file, or it is not what sacct saves.
    """
    try:
        with path.open("rb") as file:
            return read_timeline(file, tz=tz)
    except FileNotFoundError:
        raise NotFoundError(f"there is no file {path}") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read", why=error.strerror) from None


def _submitted(folder: RunFolder) -> Iterator[tuple[str, datetime]]:
    """Job ids of the run with the time each was submitted. A torn last line is skipped."""
    if not folder.jobs.exists():
        return
    for line in folder.jobs.read_text(errors="replace").splitlines():
        try:
            job = json.loads(line)
            time = datetime.fromtimestamp(int(job["submitted_ns"]) / 1e9, tz=UTC)
            yield base_id(str(job["job_id"])), time
        except (ValueError, KeyError, TypeError):
            continue


def _in_events(events: Iterable[Event]) -> Iterator[tuple[str, datetime]]:
    """Job ids that the event log names, each with the time of its first event."""
    for name, logged in by_attempt(events).items():
        if name[:1].isdecimal():
            yield base_id(name), moment(logged[0])


def _own(jobs: Sequence[Job], submitted: dict[str, datetime]) -> Iterator[Job]:
    """The jobs of the run; of several under one id, the one submitted when the run says."""
    by_id: dict[str, list[Job]] = {}
    for job in jobs:
        if base_id(job.job_id) in submitted:
            by_id.setdefault(job.job_id, []).append(job)
    for job_id, namesakes in by_id.items():
        time = submitted[base_id(job_id)]
        yield min(namesakes, key=lambda job: abs(job.attempts[0].submit - time))
