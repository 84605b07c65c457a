"""Timelines as pandas DataFrames, for notebooks and files.

Times are UTC, lengths are timedeltas, and what is not known is missing (NA, NaT). The columns and
their types are those of :data:`ATTEMPTS`, :data:`PHASES` and :data:`INTERRUPTIONS`, also of a
frame without rows.

    from slurmspot.timeline.attempts import read_timeline
    from slurmspot.timeline.frames import attempts

    frame = attempts(read_timeline(open("sacct.txt", "rb").read(), tz=UTC).jobs)
    frame.groupby("kind")["ran"].sum()
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slurmspot.errors import UsageError

try:
    import pandas as pd
except ModuleNotFoundError:
    raise UsageError("pandas is not installed", fix="pip install 'slurmspot[analysis]'") from None

from slurmspot.timeline.attempts import Attempt, Job
from slurmspot.timeline.moments import MOMENTS
from slurmspot.timeline.recovery import Interruption

_TIME, _LENGTH, _TEXT = "datetime64[us, UTC]", "timedelta64[us]", "string"

ATTEMPTS: dict[str, str] = {
    "cluster": _TEXT,
    "job_id": _TEXT,
    "name": _TEXT,
    "user": _TEXT,
    "partition": _TEXT,
    "attempt": "int64",
    "kind": _TEXT,
    "submit": _TIME,
    "eligible": _TIME,
    "start": _TIME,
    "end": _TIME,
    "process_exit": _TIME,
    "released": _TIME,
    "backoff": _LENGTH,
    "queue": _LENGTH,
    "ran": _LENGTH,
    "suspended": _LENGTH,
    "nodes": "int64",
    "node_list": _TEXT,
    "gpus": "Int64",
    "gpu_type": _TEXT,
    "gpu_hours": "Float64",
}
"""Columns of :func:`attempts`. ``ran`` is the time from start until the processes were gone;
``gpu_hours`` the GPUs times that; ``node_list`` the names, separated by commas."""

PHASES: dict[str, str] = {
    "cluster": _TEXT,
    "job_id": _TEXT,
    "attempt": "int64",
    "phase": _TEXT,
    "start": _TIME,
    "end": _TIME,
    "length": _LENGTH,
    "source": _TEXT,
}
"""Columns of :func:`phases`. ``source`` is ``sacct`` or ``events``."""

INTERRUPTIONS: dict[str, str] = {
    "job_id": _TEXT,
    "attempt": "int64",
    "kind": _TEXT,
    "injected": _TEXT,
    "at_step": "Int64",
    "notice": "bool",
    "recovered": "bool",
    "steps_lost": "Int64",
    "rpo": _LENGTH,
    "rto": _LENGTH,
    "notice_to_durable": _LENGTH,
    "notice_to_exit": _LENGTH,
    "requeue_wait": _LENGTH,
    **{f"{name}_at": _TIME for name in MOMENTS},
}
"""Columns of :func:`interruptions`, as the fields of
:class:`slurmspot.timeline.recovery.Interruption`; ``…_at`` are its moments."""


def attempts(jobs: Iterable[Job]) -> pd.DataFrame:
    """One row an attempt, with the columns of :data:`ATTEMPTS`."""
    return _frame(ATTEMPTS, [_attempt(job, attempt) for job in jobs for attempt in job.attempts])


def phases(jobs: Iterable[Job]) -> pd.DataFrame:
    """One row a phase, with the columns of :data:`PHASES`; a phase that lasts has no end."""
    return _frame(
        PHASES,
        [
            (
                job.cluster,
                job.job_id,
                attempt.index,
                phase.name,
                phase.start,
                phase.end,
                _length(phase.seconds),
                phase.source,
            )
            for job in jobs
            for attempt in job.attempts
            for phase in attempt.phases
        ],
    )


def interruptions(found: Iterable[Interruption]) -> pd.DataFrame:
    """One row an interruption, with the columns of :data:`INTERRUPTIONS`."""
    return _frame(
        INTERRUPTIONS,
        [
            (
                one.job_id,
                one.attempt,
                one.kind,
                str(one.inject.data.get("kind", "")) if one.inject else None,
                one.at_step,
                one.notice,
                one.recovered,
                one.steps_lost,
                *map(_length, (one.rpo_s, one.rto_s, one.notice_to_durable_s)),
                *map(_length, (one.notice_to_exit_s, one.requeue_wait_s)),
                *map(one.moments.get, MOMENTS),
            )
            for one in found
        ],
    )


def _attempt(job: Job, attempt: Attempt) -> tuple[Any, ...]:
    eligible = max(attempt.eligible or attempt.submit, attempt.submit)
    ran = None
    if attempt.start is not None and attempt.process_exit is not None:
        ran = max(0.0, (attempt.process_exit - attempt.start).total_seconds())
    queue = (attempt.start - eligible).total_seconds() if attempt.start else None
    return (
        job.cluster,
        job.job_id,
        job.name,
        job.user,
        attempt.partition,
        attempt.index,
        attempt.kind,
        attempt.submit,
        attempt.eligible,
        attempt.start,
        attempt.end,
        attempt.process_exit,
        attempt.released,
        eligible - attempt.submit,
        _length(queue if queue is None else max(0.0, queue)),
        _length(ran),
        _length(attempt.suspended_s),
        len(attempt.nodes),
        ",".join(attempt.nodes),
        attempt.gpus,
        attempt.gpu_type,
        None if ran is None or attempt.gpus is None else attempt.gpus * ran / 3600,
    )


def _length(seconds: float | None) -> pd.Timedelta | None:
    return None if seconds is None else pd.Timedelta(seconds=seconds)


def _frame(columns: Mapping[str, str], rows: Sequence[Sequence[Any]]) -> pd.DataFrame:
    data = dict(zip(columns, zip(*rows, strict=True), strict=True)) if rows else {}
    return pd.DataFrame(
        {name: _series(data.get(name, ()), dtype) for name, dtype in columns.items()}
    )


def _series(values: Sequence[Any], dtype: Any) -> pd.Series[Any]:
    read: Any = list(values)
    if dtype == _TIME:
        read = pd.to_datetime(read, utc=True)
    elif dtype == _LENGTH:
        read = pd.to_timedelta(read)
    found: pd.Series[Any] = (
        pd.Series(read).astype(dtype) if len(read) else pd.Series([], dtype=dtype)
    )
    return found
