"""``slurmspot status``: where a run stands, now."""

from __future__ import annotations

from pathlib import Path

import click

from slurmspot.cli import print_json
from slurmspot.cluster import scontrol
from slurmspot.cluster.submit import job_ids
from slurmspot.errors import NotFoundError, SlurmUnreachableError
from slurmspot.events import read_events
from slurmspot.runfolder import RunFolder


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(run: Path, as_json: bool) -> int:
    """Say where RUN stands: its job, attempts, last step and last durable checkpoint."""
    folder = RunFolder.open(run)
    events = read_events(folder.events)
    job_id = next(iter(job_ids(folder)[::-1]), None)
    facts = {
        "run": str(folder.path),
        "complete": folder.finished.exists(),
        "job_id": job_id,
        "state": _state(job_id),
        "attempts": len({e.attempt for e in events if e.event == "attempt_start"}),
        "notices": len({e.attempt for e in events if e.event == "notice"}),
        "last_step": max((e.step for e in events if e.event == "step" and e.step), default=None),
        "last_durable_step": max(
            (e.step for e in events if e.event == "commit" and e.step is not None), default=None
        ),
        "failed_saves": sum(e.event == "save_failed" and e.rank == "0" for e in events),
    }
    if as_json:
        print_json(facts)
    else:
        width = max(map(len, facts))
        for name, value in facts.items():
            shown = (
                "-" if value is None else str(value).lower() if value in (True, False) else value
            )
            click.echo(f"{name.replace('_', ' '):<{width}}  {shown}")
    return 0


def _state(job_id: str | None) -> str | None:
    if job_id is None:
        return None
    try:
        return scontrol.show_job(job_id).state
    except NotFoundError:
        return "no longer known to Slurm"
    except SlurmUnreachableError as error:
        click.echo(f"slurmspot: {error}", err=True)
        return None
