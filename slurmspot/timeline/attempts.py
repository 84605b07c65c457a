"""Attempts of jobs, put together from sacct's rows.

An attempt is one run of a job between two starts. sacct keeps one row for each, all under one job
id, told apart by when they were submitted (again); the steps of an attempt have rows of their own
and are folded into it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, tzinfo
from itertools import pairwise
from typing import Any

from slurmspot.timeline.rows import RejectedRow, Row, read_rows

KINDS = {
    "PREEMPTED": "preempted",
    **dict.fromkeys(("REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"), "requeued"),
    "NODE_FAIL": "node_fail",
    "RESIZING": "resized",
    "COMPLETED": "completed",
    **dict.fromkeys(
        ("FAILED", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "LAUNCH_FAILED", "RECONFIG_FAIL"),
        "failed",
    ),
    "TIMEOUT": "timeout",
    **dict.fromkeys(("CANCELLED", "REVOKED"), "cancelled"),
    **dict.fromkeys(
        (
            *("RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT"),
            *("COMPLETING", "CONFIGURING", "POWER_UP_NODE"),
        ),
        "running",
    ),
    **dict.fromkeys(("PENDING", "RESV_DEL_HOLD", "UPDATE_DB"), "pending"),
}
"""Slurm's job state → kind of an attempt."""

_GOES_ON = frozenset({"PREEMPTED", "NODE_FAIL", "RESIZING", "BOOT_FAIL", "LAUNCH_FAILED"}) | {
    state for state, kind in KINDS.items() if kind == "requeued"
}
"""States that another attempt of the same job may follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A stretch of an attempt.

    Attributes:
        name: ``backoff``, ``queue``, ``run``, ``teardown``; with events, the parts of ``run``.
        end: None while it lasts; then ``seconds`` is None too.
        seconds: its length, never negative.
        source: ``sacct`` or ``events``.
    """

    name: str
    start: datetime
    end: datetime | None
    seconds: float | None
    source: str

    @classmethod
    def between(cls, name: str, start: datetime, end: datetime | None, source: str) -> Phase:
        """The phase from ``start`` to ``end``; clocks that run backwards make it empty."""
        end = None if end is None else max(start, end)
        seconds = None if end is None else (end - start).total_seconds()
        return cls(name=name, start=start, end=end, seconds=seconds, source=source)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One run of a job.

    Attributes:
        kind: a value of :data:`KINDS`.
        end: when Slurm decided that it is over.
        process_exit: when its processes were gone: the end of its last step, if later than ``end``.
            A resized attempt ends where the next begins, since its processes run on.
        gpus: GPUs allocated; None where sacct was not asked for them.
    """

    index: int
    kind: str
    submit: datetime
    eligible: datetime | None
    start: datetime | None
    end: datetime | None
    process_exit: datetime | None
    nodes: tuple[str, ...]
    gpus: int | None
    phases: tuple[Phase, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job as the user knows it: all its attempts, in order."""

    job_id: str
    name: str
    attempts: tuple[Attempt, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """All jobs of a text of sacct.

    Attributes:
        jobs: in the order in which the text names them.
        rejected: records that could not be understood.
        notes: what a reader should know about how the rows were put together.
    """

    jobs: tuple[Job, ...]
    rejected: tuple[RejectedRow, ...] = ()
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Plain values for ``json.dumps``; times in ISO 8601."""
        return {
            "jobs": [
                {
                    "job_id": job.job_id,
                    "name": job.name,
                    "attempts": [_attempt_json(attempt) for attempt in job.attempts],
                }
                for job in self.jobs
            ],
            "rejected_rows": [
                {"line": row.line, "reason": row.reason, "text": row.text} for row in self.rejected
            ],
            "notes": list(self.notes),
        }


def read_timeline(text: str, *, tz: tzinfo | None = None) -> Timeline:
    """Jobs and attempts of what ``sacct --duplicates --parsable2`` printed.

    Raises:
        NotFoundError, UsageError: as :func:`slurmspot.timeline.rows.read_rows`.
    """
    read = read_rows(text, tz=tz)
    rejected = list(read.rejected)
    by_job: dict[tuple[str, str], list[Row]] = {}
    for row in _distinct(read.rows):
        if row.step is None and row.state not in KINDS:
            rejected.append(_reject(row, f"{row.state} is no job state known here"))
        else:
            by_job.setdefault((row.cluster, row.job_id), []).append(row)
    jobs: list[Job] = []
    notes: list[str] = []
    for (_, job_id), rows in by_job.items():
        heads = sorted((row for row in rows if row.step is None), key=lambda row: row.submit)
        steps, strays = _fold(heads, [row for row in rows if row.step is not None])
        rejected += [_reject(row, f"a step of no attempt of job {job_id}") for row in strays]
        namesakes = _namesakes(heads)
        if len(namesakes) > 1:
            notes.append(
                f"job id {job_id} was used by {len(namesakes)} different jobs, submitted "
                + ", ".join(job[0].submit.isoformat() for job in namesakes)
            )
        jobs.extend(_job(job, steps) for job in namesakes)
    return Timeline(
        jobs=tuple(jobs),
        rejected=tuple(sorted(rejected, key=lambda row: row.line)),
        notes=tuple(notes),
    )


def _distinct(rows: Iterable[Row]) -> Iterable[Row]:
    """Each record once: files that were appended to each other may hold it twice."""
    return {row.text: row for row in rows}.values()


def _reject(row: Row, reason: str) -> RejectedRow:
    return RejectedRow(line=row.line, reason=reason, text=row.text)


def _fold(heads: Sequence[Row], steps: Iterable[Row]) -> tuple[dict[int, list[Row]], list[Row]]:
    """Steps by the line of the attempt that each started in, and those of no attempt."""
    folded: dict[int, list[Row]] = {head.line: [] for head in heads}
    strays: list[Row] = []
    for step in steps:
        began = step.start or step.submit
        owners = [head for head in heads if head.start and head.start <= began]
        if owners:
            folded[owners[-1].line].append(step)
        else:
            strays.append(step)
    return folded, strays


def _namesakes(heads: Sequence[Row]) -> list[list[Row]]:
    """Rows of one id, cut where the id begins to mean another job.

    A controller that loses its state counts job ids from the start again.
    """
    jobs: list[list[Row]] = [[head] for head in heads[:1]]
    for before, after in pairwise(heads):
        if _same_job(before, after):
            jobs[-1].append(after)
        else:
            jobs.append([after])
    return jobs


def _same_job(before: Row, after: Row) -> bool:
    if before.state not in _GOES_ON:
        return False
    if before.restarts is not None and after.restarts is not None:
        more = after.restarts - before.restarts
        if more < 0 or (more == 0 and before.state != "RESIZING"):
            return False
    shared = before.identity.keys() & after.identity.keys()
    return all(before.identity[name] == after.identity[name] for name in shared)


def _job(rows: Sequence[Row], steps: dict[int, list[Row]]) -> Job:
    attempts: list[Attempt] = []
    carried: list[Row] = []  # steps that ran on through a change of size
    for index, row in enumerate(rows):
        mine = carried + steps[row.line]
        carried = mine if row.state == "RESIZING" and index + 1 < len(rows) else []
        attempts.append(_attempt(index, row, [] if carried else mine))
    return Job(job_id=rows[0].job_id, name=rows[0].name, attempts=tuple(attempts))


def _attempt(index: int, row: Row, steps: Sequence[Row]) -> Attempt:
    process_exit = row.end and max([row.end, *(step.end for step in steps if step.end)])
    return Attempt(
        index=index,
        kind=KINDS[row.state],
        submit=row.submit,
        eligible=row.eligible,
        start=row.start,
        end=row.end,
        process_exit=process_exit,
        nodes=row.nodes,
        gpus=row.gpus,
        phases=tuple(_phases(row, process_exit)),
    )


def _phases(row: Row, process_exit: datetime | None) -> Iterable[Phase]:
    eligible = max(row.eligible or row.submit, row.submit)
    yield Phase.between("backoff", row.submit, eligible, "sacct")
    yield Phase.between("queue", eligible, row.start or row.end, "sacct")
    if row.start:
        yield Phase.between("run", row.start, row.end, "sacct")
        if row.end:
            yield Phase.between("teardown", row.end, process_exit, "sacct")


def _attempt_json(attempt: Attempt) -> dict[str, Any]:
    return {
        "index": attempt.index,
        "kind": attempt.kind,
        "submit": _iso(attempt.submit),
        "eligible": _iso(attempt.eligible),
        "start": _iso(attempt.start),
        "end": _iso(attempt.end),
        "process_exit": _iso(attempt.process_exit),
        "nodes": list(attempt.nodes),
        "gpus": attempt.gpus,
        "phases": [
            {
                "name": phase.name,
                "start": _iso(phase.start),
                "end": _iso(phase.end),
                "seconds": phase.seconds,
                "source": phase.source,
            }
            for phase in attempt.phases
        ],
    }


def _iso(time: datetime | None) -> str | None:
    return None if time is None else time.isoformat()
