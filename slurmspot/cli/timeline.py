"""``slurmspot timeline``: what happened to a run or a job, attempt by attempt."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import click

from slurmspot.cli import print_json
from slurmspot.errors import NotFoundError, UsageError
from slurmspot.report import history, table
from slurmspot.report.history import History
from slurmspot.runfolder import RunFolder
from slurmspot.timeline.attempts import Attempt

_SHORTEST_S = 0.05  # a phase that would read 0.0 s is not shown
_JOB_ID = re.compile(r"\d+(?:_(?:\d+|\[.*\])|\+\d+)?")


@click.command("timeline")
@click.argument("target", metavar="[RUN|JOBID]", required=False)
@click.option(
    "--sacct",
    "sacct_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Read a saved `sacct --duplicates --parsable2` text instead of asking the cluster.",
)
@click.option("--tz", metavar="ZONE", help="Time zone of that text; default: this machine's.")
@click.option(
    "--since", "since_days", type=click.FloatRange(min=0), default=30, show_default=True,
    metavar="DAYS", help="How far to look back for a JOBID; ids are used again.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
def command(
    target: str | None, sacct_file: Path | None, tz: str | None, since_days: float, as_json: bool
) -> None:
    """What happened to a run or job, attempt by attempt.

    RUN is a run folder: then phases come from its event log as well. With --sacct alone every job
    in the file is shown.
    """
    found = read(target, sacct_file=sacct_file, tz=tz, since_days=since_days)
    if as_json:
        print_json(found.timeline.as_json())
        return
    click.echo(text(found, bold=sys.stdout.isatty()))
    for note in found.timeline.notes:
        click.echo(f"note: {note}", err=True)
    for row in found.timeline.rejected:
        click.echo(f"line {row.line} was not understood: {row.reason}", err=True)


def read(
    target: str | None, *, sacct_file: Path | None, tz: str | None, since_days: float
) -> History:
    """The history that the command's arguments name.

    Raises:
        SlurmspotError: nothing there, or it cannot be read.
    """
    zone = time_zone(tz)
    if target is not None and Path(target).is_dir():
        return history.of_run(RunFolder.open(target), sacct_file=sacct_file, tz=zone)
    if target is not None and not _JOB_ID.fullmatch(target):
        raise NotFoundError(
            f"{target} is neither a run folder nor a job id",
            fix="give the folder that `slurmspot launch` printed, or an id such as 17 or 7_0",
        )
    if sacct_file is not None:
        return history.of_file(sacct_file, job_id=target, tz=zone)
    if target is None:
        raise UsageError(
            "nothing to show", fix="give a run folder, a job id, or a saved text (--sacct FILE)"
        )
    since = datetime.now().astimezone() - timedelta(days=since_days)
    return history.of_job(target, since=since)


def time_zone(name: str | None) -> ZoneInfo | None:
    """The time zone by that name, None for this machine's.

    Raises:
        UsageError: there is no such zone.
    """
    if name is None:
        return None
    try:
        return ZoneInfo(name)
    except (OSError, ValueError, KeyError):  # ZoneInfoNotFoundError is a KeyError
        raise UsageError(
            f"there is no time zone {name!r}", fix="name one such as Europe/Berlin"
        ) from None


def text(found: History, *, bold: bool) -> str:
    """The history as a table, one line an attempt, and where its time went."""
    header = ["JOB", "NAME", "#", "KIND", "SUBMIT", "WAIT", "RAN", "GONE AFTER", "GPUS", "NODES"]
    rows = [
        [
            job.job_id,
            job.name,
            str(attempt.index),
            attempt.kind,
            f"{attempt.submit:%m-%d %H:%M:%S}",
            *_lengths(attempt),
            "-" if attempt.gpus is None else str(attempt.gpus),
            _some(attempt.nodes),
        ]
        for job in found.timeline.jobs
        for attempt in job.attempts
    ]
    shown = table.render(header, rows, right="# WAIT RAN GPUS", bold=bold)
    divided = [
        [job.job_id, str(attempt.index), phase.name, table.duration(phase.seconds)]
        for job in found.timeline.jobs
        for attempt in job.attempts
        if any(phase.source == "events" for phase in attempt.phases)
        for phase in attempt.phases
        if phase.seconds is None or phase.seconds >= _SHORTEST_S
    ]
    if divided:
        phases = table.render(["JOB", "#", "PHASE", "TOOK"], divided, right="# TOOK", bold=bold)
        shown = f"{shown}\n\n{phases}"
    return shown


def _some(nodes: Sequence[str]) -> str:
    if len(nodes) > 4:
        return f"{nodes[0]},...,{nodes[-1]} ({len(nodes)})"
    return ",".join(nodes) or "-"


def _lengths(attempt: Attempt) -> list[str]:
    def between(since: datetime | None, until: datetime | None) -> str:
        seconds = None if since is None or until is None else (until - since).total_seconds()
        return table.duration(seconds)

    return [
        between(attempt.submit, attempt.start),
        between(attempt.start, attempt.end),
        between(attempt.end, attempt.process_exit),
    ]
