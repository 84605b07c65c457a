"""``slurmspot timeline``: what happened to a run or a job, attempt by attempt."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import click

from slurmspot.cli import print_json
from slurmspot.cli.options import accounts
from slurmspot.cost.bill import Bill, bill, bills
from slurmspot.cost.prices import load_prices
from slurmspot.cost.usage import usages
from slurmspot.errors import NotFoundError, UsageError
from slurmspot.report import history, table
from slurmspot.report.costs import bill_table, missing_prices, unpriced
from slurmspot.report.history import History
from slurmspot.runfolder import RunFolder
from slurmspot.timeline.attempts import Attempt
from slurmspot.timeline.lives import chains
from slurmspot.timeline.moments import since_first
from slurmspot.timeline.ranks import Part, by_node, by_rank
from slurmspot.timeline.records import COMMAND
from slurmspot.timeline.recovery import breakdown, ended_as

_MOST_TOLD = 20  # rows that were not understood
_SHORTEST_S = 0.05  # a phase that would read 0.0 s is not shown
_JOB_ID = re.compile(r"\d+(?:_(?:\d+|\[.*\])|\+\d+)?")


@click.command("timeline")
@click.argument("target", metavar="[RUN|JOBID]", required=False)
@accounts
@click.option(
    "--since", "since_days", type=click.FloatRange(min=0), default=30, show_default=True,
    metavar="DAYS", help="How far to look back on the cluster; job ids are used again.",
)  # fmt: skip
@click.option("--user", metavar="NAME", help="All jobs of this user on the cluster.")
@click.option("--partition", metavar="NAME", help="All jobs in this partition of the cluster.")
@click.option("--cost", is_flag=True, help="Show what it cost, term by term, and what was assumed.")
@click.option(
    "--ranks", is_flag=True, help="Show what each rank and each node did, from the event log."
)
@click.option(
    "--by", type=click.Choice(["job", "user", "partition"]), default="job", show_default=True,
    help="What to tell costs apart by.",
)  # fmt: skip
@click.option(
    "--format", "kind", type=click.Choice(["text", "json", "csv", "parquet"]), default="text",
    show_default=True, help="csv and parquet need pandas; parquet also pyarrow and --output.",
)  # fmt: skip
@click.option(
    "--table", "what", type=click.Choice(["attempts", "phases", "interruptions"]),
    default="attempts", show_default=True, help="Which table csv and parquet hold.",
)  # fmt: skip
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE",
    help="Write csv or parquet there.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
def command(
    *,
    target: str | None,
    sacct_file: Path | None,
    tz: str | None,
    since_days: float,
    user: str | None,
    partition: str | None,
    cost: bool,
    ranks: bool,
    by: str,
    prices: Path | None,
    kind: str,
    what: str,
    output: Path | None,
    as_json: bool,
) -> int:
    """What happened to a run or job, attempt by attempt.

    RUN is a run folder: then phases come from its event log as well. With --sacct alone every job
    in the file is shown.
    """
    price_list = load_prices(prices) if cost else None
    if (user or partition) and (target or sacct_file):
        raise UsageError(
            "--user and --partition ask the cluster for all their jobs",
            fix="leave out the run, the job id and --sacct",
        )
    if user or partition:
        now = datetime.now().astimezone()
        since = now - timedelta(days=since_days)
        found = history.of_account(user=user, partition=partition, since=since, until=now)
    else:
        found = read(target, sacct_file=sacct_file, tz=tz, since_days=since_days)
    if kind in {"csv", "parquet"}:
        export(found, kind, what, output)
        return 0
    billed, whole = [], None
    if price_list is not None:
        used = usages(found.timeline.jobs, found.events, now=datetime.now(tz=UTC))
        billed = bills(used, price_list, by="job_id" if by == "job" else by)
        whole = bill(used, price_list)
    if as_json or kind == "json":
        costs = {} if whole is None else {"costs": [bill_json(one) for one in billed]}
        print_json({**found.timeline.as_json(), **_log_json(found), **costs})
    else:
        bold = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        click.echo(text(found, bold=bold))
        if ranks:
            click.echo("\n" + ranks_text(found, bold=bold))
        if whole is not None:
            click.echo("\n" + cost_text(billed, whole, by, bold=bold))
        _tell_what_is_odd(found)
    return 1 if _tell_what_is_not_billed(billed) else 0


def _tell_what_is_odd(found: History) -> None:
    for note in found.timeline.notes:
        click.echo(f"note: {note}", err=True)
    rejected = found.timeline.rejected
    for row in rejected[:_MOST_TOLD]:
        click.echo(f"line {row.line} was not understood: {row.reason}", err=True)
    if len(rejected) > _MOST_TOLD:
        click.echo(f"{len(rejected)} rows in all were not understood: see --json", err=True)


def _tell_what_is_not_billed(billed: Sequence[Bill]) -> bool:
    """Whether any GPU time is in no bill, said on stderr."""
    absent = unpriced(billed)
    for words in missing_prices(absent):
        click.echo(words, err=True)
    uncounted = sum(one.uncounted for one in billed)
    if uncounted:
        click.echo(
            f"{uncounted} attempts are in no bill: accounting does not say how many GPUs they had\n"
            f"  do:  save it with AllocTRES: {COMMAND}",
            err=True,
        )
    return bool(absent or uncounted)


def export(found: History, kind: str, what: str, output: Path | None) -> None:
    """Write one table as CSV or Parquet.

    Raises:
        UsageError: pandas or pyarrow is missing, or the file cannot be written.
    """
    from slurmspot.timeline import frames  # noqa: PLC0415  pandas is an extra

    jobs = found.timeline.jobs
    frame = {
        "attempts": lambda: frames.attempts(jobs),
        "phases": lambda: frames.phases(jobs),
        "interruptions": lambda: frames.interruptions(found.interruptions),
    }[what]()
    try:
        if kind == "csv":
            frame.to_csv(output or sys.stdout, index=False)
        elif output is None:
            raise UsageError("parquet is not text", fix="name a file with --output")
        else:
            frame.to_parquet(output, index=False)
    except ImportError:
        raise UsageError(
            "pyarrow is not installed", fix="pip install 'slurmspot[parquet]'"
        ) from None
    except OSError as error:
        raise UsageError(f"{output} cannot be written", why=error.strerror) from None


def ranks_text(found: History, *, bold: bool) -> str:
    """What each rank did, then each node, then how far their clocks are apart."""
    numbers = ["RANK", "IMPORTS", "RESTORE", "STALLS", "WRITING", "WROTE", "LAST STEP", "EXIT"]
    header = ["ATTEMPT", "RANK", "NODE", "STARTED", *numbers[1:]]
    parts = by_rank(found.events)
    kinds = {
        life.events[0].attempt: life.kind
        for chain in chains(found.timeline.jobs, found.events)
        for life in chain
        if life.events
    }
    rows = [
        [
            part.attempt,
            part.rank or "all",
            part.host,
            f"{part.started:%H:%M:%S.%f}"[:-3],
            *map(table.duration, (part.imports_s, part.restore_s, part.stall_s, part.persist_s)),
            f"{part.written_bytes / 1e6:,.1f} MB",
            "-" if part.last_step is None else f"{part.last_step:,}",
            _farewell(part, kinds.get(part.attempt)),
        ]
        for part in (*parts, *by_node(parts))
    ]
    clocks = [f"{one}" for one in found.clocks]
    return "\n".join([table.render(header, rows, right=numbers, bold=bold), *clocks])


def _farewell(part: Part, kind: str | None) -> str:
    """How a rank left: its exit code, or what is known of one that did not say."""
    if part.exit_code is not None:
        return str(part.exit_code)
    return {"running": "still there", "failed": "failed", "completed": "-"}.get(
        kind or "", "killed"
    )


def _log_json(found: History) -> dict[str, Any]:
    """What only the event log tells: interruptions, ranks, and clocks."""
    if not found.events:
        return {}
    ranks = [
        {**asdict(part), "started": part.started.isoformat()} for part in by_rank(found.events)
    ]
    jobs = found.timeline.jobs
    ends = [{**one.as_json(), "rto_parts_s": breakdown(one, jobs)} for one in found.interruptions]
    return {"interruptions": ends, "ranks": ranks, "clocks": [asdict(one) for one in found.clocks]}


def cost_text(billed: Sequence[Bill], whole: Bill, by: str, *, bold: bool) -> str:
    """The bills and their sum as a table, and under it what they take for granted."""
    shown = bill_table([*billed, replace(whole, name="all")], by.capitalize())
    numbers = [name for name in shown.header if name in shown.right]
    lines = [
        table.render(shown.header, shown.rows, right=numbers, bold=bold),
        f"\nAmounts are in {whole.currency}. What these figures assume:",
        *(f"  - {line}" for line in whole.assumptions),
        "  - On demand, only the useful work would have been paid for.",
    ]
    return "\n".join(lines)


def bill_json(one: Bill) -> dict[str, Any]:
    """A bill as plain values; amounts are decimal texts, exact to the cent."""
    return {
        "name": one.name,
        "currency": one.currency,
        "amounts": {term: str(amount) for term, amount in one.amounts.items()},
        "total": str(one.total),
        "on_demand": str(one.on_demand),
        "nominal_discount": one.nominal,
        "effective_saving": one.saving,
        "gpu_hours": dict(one.gpu_hours),
        "waited_hours": one.waited_h,
        "unpriced_gpu_hours": dict(one.unpriced),
        "uncounted_attempts": one.uncounted,
        "assumptions": list(one.assumptions),
    }


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
    ends = {(one.job_id, one.attempt): one for one in found.interruptions}
    header = ["JOB", "NAME", "#", "KIND", "SUBMIT", "WAIT", "RAN", "GONE AFTER", "GPUS", "NODES"]
    rows = [
        [
            job.job_id,
            job.name,
            str(attempt.index),
            ended_as(attempt, ends.get((job.job_id, attempt.index))),
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
        passed = [
            [
                *(one.job_id, str(one.attempt), name.replace("_", " ")),
                *(f"{time:%m-%d %H:%M:%S.%f}"[:-5], table.duration(after_s)),
            ]
            for one in ends.values()
            for name, time, after_s in since_first(one.moments)
        ]
        if passed:
            header = ["JOB", "#", "MOMENT", "AT", "AFTER"]
            shown += "\n\n" + table.render(header, passed, right="# AFTER", bold=bold)
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
