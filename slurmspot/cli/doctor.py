"""``slurmspot doctor``: whether cluster, environment and storage are fit for spot jobs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from slurmspot.cli import print_json
from slurmspot.doctor import Diagnosis, diagnose
from slurmspot.findings import Finding
from slurmspot.report import table
from slurmspot.settings import JobEnvironment, checked_local


@click.command()
@click.option(
    "-p", "--partition", default="spot", show_default=True, help="Where spot jobs would run."
)
@click.option(
    "--run",
    "run_path",
    type=click.Path(path_type=Path),
    help="Run folder, which need not exist yet.  [default: $SLURMSPOT_RUN, else runs]",
)
@click.option(
    "--local",
    help="Folder on the nodes' own disks; {node} is the node's name.  [default: $SLURMSPOT_LOCAL]",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(partition: str, run_path: Path | None, local: str | None, as_json: bool) -> int:
    """Say whether cluster, environment and storage are fit for spot jobs.

    Submits nothing. 64 MiB are written to each folder, and removed again, to see how fast it is.
    Exits with 1 if there is a problem, and with 4 if Slurm cannot be reached; all else is then
    looked at even so. Run it on a login node, and under srun for what a node sees.
    """
    job = JobEnvironment.read()
    job = dataclasses.replace(
        job,
        run=run_path or job.run,
        local=job.local if local is None else checked_local(local),
    )
    found = diagnose(partition, job)
    if as_json:
        print_json(_document(found))
    else:
        rows = [[one.level, one.subject, _text(one)] for one in found.findings]
        click.echo(table.render(["STATE", "LOOKED AT", "FOUND"], rows))
    return found.exit_code


def _document(found: Diagnosis) -> dict[str, Any]:
    return {
        "fit": found.fit,
        "slurm_reached": found.reached,
        **{
            area: [dataclasses.asdict(one) for one in getattr(found, area)]
            for area in ("slurm", "python", "storage")
        },
    }


def _text(one: Finding) -> str:
    return f"{one.found}; {one.why}" + (f"; do: {one.fix}" if one.fix else "")
