"""Attempts of jobs, put together from sacct's rows.

An attempt is one run of a job between two starts. sacct keeps one row for each, all under one job
id, told apart by when they were submitted (again); the steps of an attempt have rows of their own
and are folded into it.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from io import BytesIO
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from slurmspot.timeline.exports import read_rows
from slurmspot.timeline.lines import Source
from slurmspot.timeline.rows import RejectedRow, Row, Rows, Step, id_of

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

_NEVER = datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A stretch of an attempt.

    Attributes:
        name: ``backoff``, ``queue``, ``run``, ``teardown``, ``release``; with events, the parts of
            ``run``.
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


class Attempt(NamedTuple):
    """One run of a job. A tuple, for there may be millions.

    Attributes:
        kind: a value of :data:`KINDS`.
        end: when Slurm decided that it is over.
        process_exit: when its processes were gone: the end of its last step, if later than ``end``.
            A resized attempt ends where the next begins, since its processes run on.
        released: when Slurm had cleaned up after it and given its nodes back, so that the job was
            submitted again; None for the last one.
        gpus: GPUs allocated; None where sacct was not asked for them.
        suspended_s: how long it stood still between start and end.
        restarts: how often the job had been requeued before, where sacct says so.
        gpu_type: as AllocTRES names it; empty where it does not.
        parts: its phases where the event log divides them; without one, sacct's are derived.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody asks for
    kind: str
    submit: datetime
    eligible: datetime | None
    start: datetime | None
    end: datetime | None
    process_exit: datetime | None
    nodes: tuple[str, ...]
    gpus: int | None
    partition: str = ""
    suspended_s: float = 0.0
    restarts: int | None = None
    gpu_type: str = ""
    released: datetime | None = None
    parts: tuple[Phase, ...] = ()

    @property
    def phases(self) -> tuple[Phase, ...]:
        """What it went through, in order, without gaps."""
        return (*(self.parts or self._seen_by_sacct()), *self._release())

    def _seen_by_sacct(self) -> Iterator[Phase]:
        eligible = max(self.eligible or self.submit, self.submit)
        yield Phase.between("backoff", self.submit, eligible, "sacct")
        yield Phase.between("queue", eligible, self.start or self.end, "sacct")
        if self.start:
            yield Phase.between("run", self.start, self.end, "sacct")
            if self.end:
                yield Phase.between("teardown", self.end, self.process_exit, "sacct")

    def _release(self) -> Iterator[Phase]:
        if self.process_exit and self.released:
            yield Phase.between("release", self.process_exit, self.released, "sacct")


class Job(NamedTuple):
    """A job as the user knows it: all its attempts, in order."""

    job_id: str
    name: str
    attempts: tuple[Attempt, ...]
    user: str = ""
    cluster: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """All jobs of an export of sacct.

    Attributes:
        jobs: in the order in which the export names them.
        rejected: records that could not be understood.
        notes: what a reader should know about how the rows were put together, and what in them
            contradicts itself.
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
                    "user": job.user,
                    "cluster": job.cluster,
                    "attempts": [_attempt_json(attempt) for attempt in job.attempts],
                }
                for job in self.jobs
            ],
            "rejected_rows": [
                {"line": row.line, "reason": row.reason, "text": row.text} for row in self.rejected
            ],
            "notes": list(self.notes),
        }


def read_timeline(export: str | bytes | Source, *, tz: tzinfo | None = None) -> Timeline:
    """Jobs and attempts of what ``sacct --duplicates`` printed, as text or JSON, packed or not.

    Args:
        export: the whole of it; or open for reading, which needs less memory.
        tz: the cluster's time zone, for times without one; None means this machine's.

    Raises:
        NotFoundError, UsageError: as :func:`slurmspot.timeline.exports.read_rows`.
    """
    with _collector_paused():
        if isinstance(export, str):
            export = export.encode(errors="replace")
        source = BytesIO(export) if isinstance(export, bytes) else export
        return _timeline(read_rows(source, tz=tz))


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Millions of rows make no cycles: looking for them would only take time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not gc.get_freeze_count():  # what is new counts as old now, and is left alone
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def _timeline(rows: Rows) -> Timeline:
    jobs: list[Job] = []
    notes = [_told_apart(rows.repeated)] if rows.repeated else []
    rejected = rows.rejected

    def reject(line: int, reason: str) -> None:
        rejected.append(RejectedRow(line=line, reason=reason, text=rows.text_of(line)))

    for owner, found in sorted(rows.heads.items(), key=lambda item: item[1][0].line):
        heads = found if len(found) == 1 else _in_time(found)
        for row in heads:
            if row.state not in KINDS:
                reject(row.line, f"{row.state} is no job state known here")
                heads = [row for row in heads if row.state in KINDS]
        gone, strays = _last_ends(heads, rows.steps.pop(owner, ()))
        for line in strays:
            reject(line, f"a step of no attempt of job {id_of(owner)}")
        cuts = _cuts(heads)
        for first, last in pairwise(cuts):
            jobs.append(_job(heads[first:last], gone[first:last], notes))
        if len(cuts) > 2:
            notes.append(
                f"job id {id_of(owner)} was used by {len(cuts) - 1} different jobs, submitted "
                + ", ".join(heads[cut].submit.isoformat() for cut in cuts[:-1])
            )
    for owner, steps in rows.steps.items():
        for line in _distinct(steps):
            reject(line, f"a step of no attempt of job {id_of(owner)}")
    return Timeline(
        jobs=tuple(jobs),
        rejected=tuple(sorted(rejected, key=lambda row: row.line)),
        notes=tuple(notes),
    )


def _told_apart(lines: Sequence[int]) -> str:
    some = ", ".join(map(str, lines[:3])) + (", …" if len(lines) > 3 else "")
    return (
        f"{len(lines)} records have a time in the hour that clocks repeat (line {some}), read so "
        "that submission, start and end follow one another and ElapsedRaw fits, else as the earlier"
    )


def _in_time(heads: Sequence[Row]) -> list[Row]:
    """Rows in order, each once: files that were appended to each other may hold one twice."""
    if all(before.submit < after.submit for before, after in pairwise(heads)):
        return list(heads)
    ordered = sorted(heads, key=lambda row: row.submit)
    return list({row[1:]: row for row in ordered}.values())


def _distinct(steps: Iterable[Step]) -> list[int]:
    """The lines of steps, each step once."""
    once = {step[:2]: step for step in steps}.values()
    return [line for *_, first, last in once for line in range(first, last + 1)]


def _last_ends(
    heads: Sequence[Row], steps: Iterable[Step]
) -> tuple[list[datetime | None], list[int]]:
    """When the last step of each attempt ended, and the lines of steps of no attempt.

    A step belongs to the last attempt that had started by then.
    """
    last: list[datetime | None] = [None] * len(heads)
    strays: list[Step] = []
    starts = [head.start or _NEVER for head in heads]
    if len(starts) > 1:  # the first from each on: its own, unless rows contradict each other
        starts = list(accumulate(reversed(starts), min))[::-1]
    before, index = None, -1
    for step in steps:
        began, end = step[:2]
        if began is not before:  # the steps of an attempt mostly share one
            before, index = began, bisect_right(starts, began) - 1
        if index < 0:
            strays.append(step)
        elif end is not None:
            known = last[index]
            if known is None or end > known:
                last[index] = end
    return last, _distinct(strays) if strays else []


def _cuts(heads: Sequence[Row]) -> list[int]:
    """Where in the rows of one id the jobs begin, and the end.

    A controller that loses its state counts job ids from the start again.
    """
    if len(heads) < 2:
        return [0, 1] if heads else []
    inner = [
        index
        for index, (before, after) in enumerate(pairwise(heads), start=1)
        if not _same_job(before, after)
    ]
    return [0, *inner, len(heads)]


def _same_job(before: Row, after: Row) -> bool:
    if before.state not in _GOES_ON:
        return False
    if before.restarts is not None and after.restarts is not None:
        more = after.restarts - before.restarts
        if more < 0 or (more == 0 and before.state != "RESIZING"):
            return False
    return before.identity == after.identity or all(
        one == other
        for one, other in zip(before.identity, after.identity, strict=True)
        if one and other
    )


def _job(rows: Sequence[Row], last_ends: list[datetime | None], notes: list[str]) -> Job:
    attempts: list[Attempt] = []
    for index, row in enumerate(rows):
        gone, last, released = row.end, last_ends[index], None
        if row.state == "RESIZING" and index + 1 < len(rows):
            # Its steps run on through the change of size.
            later = last_ends[index + 1]
            last_ends[index + 1] = max(filter(None, (last, later)), default=None)
        elif gone is not None and last is not None and last > gone:
            gone = last
        if row.state != "RESIZING" and index + 1 < len(rows):
            released = _next_submit(row, rows[index + 1])
        attempts.append(
            Attempt(
                index,
                KINDS[row.state],
                row.submit,
                row.eligible,
                row.start,
                row.end,
                gone,
                row.nodes,
                row.gpus[0],
                row.partition,
                row.suspended_s,
                row.restarts,
                row.gpus[1],
                released,
            )
        )
    first = rows[0]
    _check(first.job_id, attempts, notes)
    return Job(first.job_id, first.name, tuple(attempts), first.user, first.cluster)


def _next_submit(row: Row, after: Row) -> datetime | None:
    """When a job was submitted again, unless rows are missing in between."""
    if row.restarts is None or after.restarts is None or after.restarts == row.restarts + 1:
        return after.submit
    return None


def _check(job_id: str, attempts: Sequence[Attempt], notes: list[str]) -> None:
    """Note what cannot be so, or is missing; it is shown as well as can be."""
    before: Attempt | None = None
    for attempt in attempts:
        words: list[str] = []
        start, end = attempt.start, attempt.end
        if start is not None:
            if start < attempt.submit:
                words.append(f"starts {_apart(attempt.submit, start)} before its submission")
            if end is not None and end < start:
                words.append(f"ends {_apart(start, end)} before it starts; it is shown as empty")
            if before is not None and before.end is not None and start < before.end:
                words.append(f"starts {_apart(before.end, start)} before the one before it ends")
        if attempt.restarts is not None:
            same = before is not None and before.kind == "resized"
            expected = 0 if before is None else (before.restarts or 0) + (not same)
            if attempt.restarts > expected:
                gone = attempt.restarts - expected
                words.append(f"is restart {attempt.restarts}: {gone} before it left no row")
        if words:
            notes.extend(f"job {job_id}, attempt {attempt.index} {word}" for word in words)
        before = attempt


def _apart(later: datetime, earlier: datetime) -> str:
    return f"{(later - earlier).total_seconds():.0f} s"


def _attempt_json(attempt: Attempt) -> dict[str, Any]:
    return {
        "index": attempt.index,
        "kind": attempt.kind,
        "submit": _iso(attempt.submit),
        "eligible": _iso(attempt.eligible),
        "start": _iso(attempt.start),
        "end": _iso(attempt.end),
        "process_exit": _iso(attempt.process_exit),
        "released": _iso(attempt.released),
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
