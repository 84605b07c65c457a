"""Reads ``sacct --json``, which every release writes in its own way.

A state is a string on 22.05 and a list from 23.02 on; a number may be wrapped as
``{"set": …, "infinite": …, "number": …}``. Times are seconds since 1970: no zone is needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from slurmspot import hostlist
from slurmspot.errors import NotFoundError, UsageError
from slurmspot.timeline.rows import IDENTITY, Gpus, RejectedRow, Row, Rows, Step, counted, key

_MOST_TEXT = 200  # of a row that was not understood
_FLAGS = frozenset({"REQUEUED", "RESIZING", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"})
"""What a list of states holds besides PENDING, where the text says this alone."""


def read_json(data: bytes) -> Rows:
    """The rows of ``sacct --duplicates --json``; a row's line is its number, from 1.

    Raises:
        NotFoundError: it holds no job.
        UsageError: it is not JSON, or not of sacct.
    """
    try:
        found = json.loads(data.decode("utf-8-sig", errors="replace"))
    except (ValueError, RecursionError) as error:
        raise _not_sacct(f"it is not JSON: {error}") from None
    jobs = found.get("jobs") if isinstance(found, dict) else None
    if not isinstance(jobs, list):
        raise _not_sacct("it has no list of jobs")
    if not jobs:
        raise NotFoundError(
            "the JSON of sacct holds no job",
            why="sacct found nothing",
            fix="ask it for an earlier time (-S) and for all attempts (-D)",
        )
    rows = Rows()
    for number, job in enumerate(jobs, start=1):
        try:
            row = _row(number, job)
            for step in _steps(number, job):
                rows.steps[key(row.cluster, row.job_id)].append(step)
            rows.heads[key(row.cluster, row.job_id)].append(row)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, OSError) as error:
            reason = f"{type(error).__name__}: {error}"
            text = json.dumps(job)[:_MOST_TEXT]
            rows.rejected.append(RejectedRow(line=number, reason=reason, text=text))
    return rows


def _not_sacct(why: str) -> UsageError:
    return UsageError(
        "this is not the JSON of sacct",
        why=why,
        fix="save it again: sacct --duplicates --json --jobs=ID > FILE",
    )


def _row(number: int, job: Mapping[str, Any]) -> Row:
    time = job["time"]
    submit = _moment(time["submission"])
    if submit is None:
        raise ValueError("a record without a submit time")
    start, end = _moment(time["start"]), _moment(time["end"])
    identity = {
        "jobname": job.get("name"),
        "user": job.get("user"),
        "submitline": job.get("submit_line"),
        "workdir": job.get("working_directory"),
    }
    restarts = job.get("restart_cnt")
    return Row(
        line=number,
        job_id=_job_id(job),
        name=str(job.get("name") or ""),
        state=_state(job["state"]["current"]),
        submit=submit,
        eligible=_moment(time.get("eligible")),
        start=start,
        end=end,
        nodes=hostlist.expand(str(job.get("nodes") or "")),
        gpus=_gpus(job),
        cluster=str(job.get("cluster") or ""),
        user=str(job.get("user") or ""),
        partition=str(job.get("partition") or ""),
        restarts=None if restarts is None else _number(restarts),
        suspended_s=float(_number(time.get("suspended")) or 0),
        identity=tuple(str(identity.get(name) or "") for name in IDENTITY),
    )


def _job_id(job: Mapping[str, Any]) -> str:
    """The id as the text of sacct has it: ``7_0`` for a task, ``33+1`` for a part."""
    task = _number(job["array"]["task_id"])
    if job["array"].get("task"):  # tasks that wait are one record: its text names them
        return f"{job['array']['job_id']}_[{job['array']['task']}]"
    if task is not None and job["array"]["job_id"]:
        return f"{job['array']['job_id']}_{task}"
    offset = _number(job["het"]["job_offset"])
    if offset is not None and job["het"]["job_id"]:
        return f"{job['het']['job_id']}+{offset}"
    return str(int(job["job_id"]))


def _state(current: str | list[str]) -> str:
    names = [current] if isinstance(current, str) else current
    return next((name for name in names if name in _FLAGS), names[0])


def _gpus(job: Mapping[str, Any]) -> Gpus:
    return counted(
        (str(tres["name"]).partition(":")[2], int(tres["count"] or 0))
        for tres in job["tres"]["allocated"]
        if tres["type"] == "gres" and str(tres["name"]).partition(":")[0] == "gpu"
    )


def _steps(number: int, job: Mapping[str, Any]) -> Iterator[Step]:
    for step in job.get("steps") or ():
        start = _moment(step["time"]["start"]) or _moment(job["time"]["start"])
        if start is not None:
            yield start, _moment(step["time"]["end"]), number, number


def _number(value: Any) -> int | None:
    """A number, plain or wrapped; None where it is not set."""
    if isinstance(value, dict):
        return int(value["number"]) if value.get("set") else None
    return None if value is None else int(value)


def _moment(value: Any) -> datetime | None:
    seconds = _number(value)
    return datetime.fromtimestamp(seconds, tz=UTC) if seconds else None
