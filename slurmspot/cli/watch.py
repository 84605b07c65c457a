"""``slurmspot watch``: follow a run to its end."""

from __future__ import annotations

from pathlib import Path

import click

from slurmspot.cli import print_json
from slurmspot.cluster.submit import job_ids
from slurmspot.cluster.watch import Sighting, follow
from slurmspot.errors import NotFoundError
from slurmspot.events import last_step
from slurmspot.runfolder import RunFolder

_INTERVAL_S = 5.0


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

    Exits with 0 when the run finished, else with 1.
    """
    folder = RunFolder.open(run)
    ids = job_ids(folder)
    if not ids:
        raise NotFoundError(f"{run} has no job", fix="launch it first")
    return show_until_over(folder, ids[-1], interval_s=interval_s, as_json=as_json)


def show_until_over(
    folder: RunFolder, job_id: str, *, interval_s: float | None, as_json: bool
) -> int:
    """Print one line for each change of a job until it is over; 0 if the run is complete."""
    shown = ""
    for sighting in follow(job_id, interval_s=interval_s or _INTERVAL_S):
        text = _describe(sighting)
        if text != shown:
            step = last_step(folder.events)
            click.echo(f"job {job_id}: {text}" + (f", step {step}" if step else ""), err=True)
            shown = text
    complete = folder.finished.exists()
    if as_json:
        print_json({"job_id": job_id, "run": str(folder.path), "complete": complete})
    else:
        click.echo(f"{folder.path} {'is complete' if complete else 'did not finish'}")
    return 0 if complete else 1


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
