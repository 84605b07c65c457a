"""``slurmspot watch``: follow a run to its end."""

from __future__ import annotations

import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import click

from slurmspot.cli import print_json
from slurmspot.cluster.submit import job_ids
from slurmspot.cluster.watch import Sighting, follow
from slurmspot.errors import NotFoundError
from slurmspot.events import read_events
from slurmspot.report.standing import line, standing
from slurmspot.runfolder import RunFolder

_INTERVAL_S = 5.0
_USUAL_COLUMNS = 80  # of a terminal that does not say
_MOST_EFFORT = 0.05  # of the time may go into reading the event log, which grows with the run


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--interval-s",
    type=click.FloatRange(min=0.1),
    default=_INTERVAL_S,
    show_default=True,
    help="Seconds between two looks at the job.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON at the end.")
def command(run: Path, interval_s: float, as_json: bool) -> int:
    """Follow RUN to its end, and lift Slurm's requeue backoff whenever it comes back.

    On a terminal one line is kept up to date; elsewhere a line is written for each change. Exits
    with 0 when the run finished, else with 1.
    """
    folder = RunFolder.open(run)
    ids = job_ids(folder)
    if not ids:
        raise NotFoundError(f"{run} has no job", fix="launch it first")
    return show_until_over(folder, ids[-1], interval_s=interval_s, as_json=as_json)


def show_until_over(
    folder: RunFolder, job_id: str, *, interval_s: float | None, as_json: bool
) -> int:
    """Show how a job goes until it is over; 0 if the run is complete."""
    shown = _LiveLine(folder, job_id)
    for sighting in follow(job_id, interval_s=interval_s or _INTERVAL_S):
        shown.update(sighting)
    shown.end()
    complete = folder.finished.exists()
    if as_json:
        print_json({"job_id": job_id, "run": str(folder.path), "complete": complete})
    else:
        click.echo(f"{folder.path} {'is complete' if complete else 'did not finish'}")
    if not complete:
        click.echo(f"its output is in {folder.logs}", err=True)
    return 0 if complete else 1


class _LiveLine:
    """Lines on stderr: one for each change of the job; on a terminal the last is kept fresh."""

    def __init__(self, folder: RunFolder, job_id: str) -> None:
        self._folder = folder
        self._job_id = job_id
        self._live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._shown = ""
        self._rest_until_s = 0.0
        self._words = ""

    def update(self, sighting: Sighting) -> None:
        """Show a sighting of the job."""
        text = _describe(sighting)
        changed = text != self._shown
        if self._live:
            if changed and self._shown:
                click.echo(err=True)
            columns = os.get_terminal_size(sys.stderr.fileno()).columns or _USUAL_COLUMNS
            whole = f"job {self._job_id}: {text} · {self._progress(anew=changed)}"
            click.echo(f"\r\x1b[K{whole[: columns - 1]}", err=True, nl=False)
        elif changed:
            progress = self._progress(anew=True)
            click.echo(
                f"job {self._job_id}: {text}" + (f" · {progress}" * bool(progress)), err=True
            )
        self._shown = text

    def end(self) -> None:
        """Leave the last line."""
        if self._live and self._shown:
            click.echo(err=True)

    def _progress(self, *, anew: bool) -> str:
        began_s = time.monotonic()
        if anew or began_s >= self._rest_until_s:
            self._words = line(standing(read_events(self._folder.events), now=datetime.now(tz=UTC)))
            took_s = time.monotonic() - began_s
            self._rest_until_s = began_s + took_s / _MOST_EFFORT
        return self._words


def _describe(sighting: Sighting) -> str:
    job = sighting.job
    if job is None:
        return "no longer known to Slurm"
    words = [job.state.lower()]
    if job.state == "PENDING" and job.reason not in {"", "None"}:
        words.append(f"({job.reason})")
    if job.nodes:
        words.append(f"on {job.nodes}")
    if job.restarts:
        words.append(f"after {job.restarts} restart{'s' * (job.restarts > 1)}")
    if sighting.action:
        words.append(f"- {sighting.action}")
    return " ".join(words)
