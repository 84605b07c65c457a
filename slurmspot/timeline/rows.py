"""The rows of sacct, typed. What cannot be understood comes back with the reason."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo

from slurmspot import hostlist
from slurmspot.errors import NotFoundError
from slurmspot.timeline.records import COMMAND, JOB_ID, records

_IDENTITY = ("jobname", "user", "uid", "submitline", "workdir")
_TIMES = ("submit", "eligible", "start", "end")
_GPUS = re.compile(r"gres/gpu(?P<type>:[^=,]+)?=(?P<count>\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One record of sacct: an attempt of a job, or one of its steps.

    Attributes:
        line: the line of the text that the record begins on, from 1.
        job_id: as sacct prints it, without the step (``17``, ``7_0``, ``7_[2-5]``, ``33+0``).
        step: ``batch``, ``extern``, ``0``, …; None for the job itself.
        state: the first word of State (``CANCELLED``, not ``CANCELLED by 0``).
        gpus: GPUs allocated; None where sacct was not asked for AllocTRES.
        restarts: how often the job had been requeued before; None where sacct does not say.
        identity: what cannot change between attempts of one job, by field.
    """

    line: int
    text: str
    job_id: str
    step: str | None
    name: str
    state: str
    submit: datetime
    eligible: datetime | None
    start: datetime | None
    end: datetime | None
    nodes: tuple[str, ...]
    gpus: int | None
    cluster: str
    restarts: int | None
    identity: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedRow:
    """A record that could not be understood: where it begins, why, and what it says."""

    line: int
    reason: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Everything a text of sacct holds."""

    rows: tuple[Row, ...]
    rejected: tuple[RejectedRow, ...]


def read_rows(text: str, *, tz: tzinfo | None = None) -> Rows:
    """Read what ``sacct --parsable2`` printed, with its header, fields in any order.

    Args:
        text: the whole output; the delimiter is taken from its header.
        tz: the cluster's time zone, for times without one; None means this machine's.

    Raises:
        NotFoundError: the text is empty.
        UsageError: the header is missing, or lacks a field of :data:`.records.NEEDED`.
    """
    text = text.removeprefix("\ufeff")
    if not text.strip():
        raise NotFoundError(
            "the sacct text is empty",
            why="sacct prints a header even when it finds no job",
            fix=f"save it again: {COMMAND}",
        )
    lines = text.removesuffix("\n").split("\n")
    if lines[0].endswith("\r"):
        lines = [line.removesuffix("\r") for line in lines]
    rows: list[Row] = []
    rejected: list[RejectedRow] = []
    for line, record, fields in records(lines):
        row = fields if isinstance(fields, str) else _row(line, record, fields, tz)
        if isinstance(row, Row):
            rows.append(row)
        else:
            rejected.append(RejectedRow(line=line, reason=row, text=record))
    return Rows(rows=tuple(rows), rejected=tuple(rejected))


def _row(line: int, text: str, fields: dict[str, str], tz: tzinfo | None) -> Row | str:
    """The row, or why it is none."""
    match = JOB_ID.fullmatch(fields["jobid"])
    try:
        times = {name: _time(fields.get(name, ""), tz) for name in _TIMES}
        nodes = hostlist.expand(fields.get("nodelist", ""))
    except (ValueError, OverflowError, OSError) as error:
        return str(error)
    submit = times["submit"]
    if match is None or submit is None:
        return "a record without " + ("a job id" if match is None else "a submit time")
    restarts = fields.get("restarts", "")
    return Row(
        line=line,
        text=text,
        job_id=match["job"],
        step=match["step"],
        name=fields.get("jobname", ""),
        state=fields["state"].partition(" ")[0].removesuffix("+"),
        submit=submit,
        eligible=times["eligible"],
        start=times["start"],
        end=times["end"],
        nodes=nodes,
        gpus=_gpus(fields["alloctres"]) if "alloctres" in fields else None,
        cluster=fields.get("cluster", ""),
        restarts=int(restarts) if restarts else None,
        identity={name: fields[name] for name in _IDENTITY if fields.get(name)},
    )


def _time(text: str, tz: tzinfo | None) -> datetime | None:
    if text in {"", "Unknown", "None", "N/A"}:
        return None
    if text.isdecimal():
        return datetime.fromtimestamp(int(text), tz=tz or UTC)
    time = datetime.fromisoformat(text)
    return time if time.tzinfo else time.replace(tzinfo=tz) if tz else time.astimezone()


def _gpus(tres: str) -> int:
    """GPUs of an AllocTRES. Where the untyped total stands, the typed counts are its parts."""
    found = [(match["type"], int(match["count"])) for match in _GPUS.finditer(tres)]
    totals = [count for kind, count in found if kind is None]
    return totals[0] if totals else sum(count for _, count in found)
