"""``slurmspot launch``: submit a requeueable training job."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from slurmspot.cli import print_json
from slurmspot.cli.watch import show_until_over
from slurmspot.cluster import spec as specs
from slurmspot.cluster import submit as submission
from slurmspot.errors import SlurmUnreachableError
from slurmspot.job.rank import RankCommand
from slurmspot.runfolder import RunFolder


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option("--call", help="Call MODULE:FUNCTION in every rank instead of a command.")
@click.option(
    "--run", "run_path", type=click.Path(path_type=Path), help="Run folder, on shared storage."
)
@click.option(
    "--spec", "file", type=click.Path(path_type=Path), help="TOML file with any of these options."
)
@click.option("--name", help="Job name.")
@click.option("-p", "--partition", help="Partition to run in.  [default: spot]")
@click.option("-N", "--nodes", help="Number of nodes, or a range such as 2-4.")
@click.option("--gpus-per-node", type=int, help="GPUs on each node; 0 for none.")
@click.option("--tasks-per-node", type=int, help="Ranks on each node.  [default: one per GPU]")
@click.option("--cpus-per-task", type=int, help="CPUs for each rank.")
@click.option("--mem-gb", type=float, help="Memory of each node.")
@click.option("--time-min", type=int, help="Time limit of each attempt, minutes.")
@click.option("--account", help="Account to charge.")
@click.option("--qos", help="Quality of service.")
@click.option("--constraint", help="Features that the nodes must have.")
@click.option("--exclude", help="Nodes to keep off.")
@click.option("--nodelist", help="Nodes to insist on.")
@click.option("--period-s", type=float, help="Seconds between periodic checkpoints.")
@click.option("--period-steps", type=int, help="Steps between periodic checkpoints.")
@click.option("--keep", type=int, help="Checkpoints to keep.")
@click.option("--window-s", type=float, help="Seconds that a notice leaves.  [default: GraceTime]")
@click.option("--lead-s", type=int, help="Notice this long before the time limit, seconds.")
@click.option(
    "--local",
    help="Folder on the nodes' own disks for fast checkpoints; {node} is the node's name.",
)
@click.option(
    "--notice",
    multiple=True,
    help="Listen for this too: aws, gcp, azure or file:PATH; repeatable.",
)
@click.option(
    "--hang-s", type=float, help="Kill and requeue after this long without a step, seconds."
)
@click.option(
    "--setup", multiple=True, help="Shell line to run before the ranks start; repeatable."
)
@click.option("--dry-run", is_flag=True, help="Print the batch script and submit nothing.")
@click.option("--wait", is_flag=True, help="Follow the run to its end, as `slurmspot watch` does.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(  # noqa: PLR0917 - click passes them by name
    command: tuple[str, ...],
    run_path: Path | None,
    file: Path | None,
    dry_run: bool,
    wait: bool,
    as_json: bool,
    **flags: Any,
) -> int:
    r"""Submit COMMAND as a requeueable job to spot capacity.

    Every rank runs COMMAND: the first word that is no option of launch, and all that follows it;
    `--` before it makes that plain. Settings come from a TOML file (--spec), then
    SLURMSPOT_LAUNCH_* variables, then these options.

    \b
        slurmspot launch --nodes 2 --gpus-per-node 4 -- python train.py --lr 1e-3
    """
    spec = specs.build(file=file, flags={"command": command, **flags})
    folder = RunFolder((run_path or _default_run(spec.name)).absolute())
    try:
        windows = submission.check(spec)
    except SlurmUnreachableError as error:
        if not dry_run:
            raise
        click.echo(f"not checked against a cluster: {error.what}", err=True)
        windows = submission.offline_windows(spec)
    if dry_run:
        click.echo(submission.batch_script(spec, folder, windows))
        return 0
    job_id = submission.submit(spec, folder, windows, RankCommand.of(spec))
    if as_json and not wait:
        print_json({"job_id": job_id, "run": str(folder.path)})
        return 0
    click.echo(f"job {job_id}", err=wait)
    click.echo(f"run {folder.path}", err=wait)
    if not wait:
        click.echo(f"follow it with: slurmspot watch {folder.path}", err=True)
        click.echo(f"its output will be in {folder.logs}", err=True)
        return 0
    return show_until_over(folder, job_id, interval_s=None, as_json=as_json)


def _default_run(name: str) -> Path:
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
