"""``slurmspot sandbox``: a private, real Slurm cluster on this machine."""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import click

from slurmspot.cli import leave_in_order, print_json
from slurmspot.errors import NotFoundError
from slurmspot.sandbox import Sandbox, Status

_name = click.option("--name", default="default", show_default=True, help="Which sandbox.")
_found = click.option("--name", help="Which sandbox.  [default: SLURM_CONF's, else `default`]")
_folder = click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where it lives, instead of a private folder under /tmp.",
)
_json = click.option("--json", "as_json", is_flag=True, help="Answer in JSON on stdout.")


@click.group(name="sandbox", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """A private, real Slurm cluster on this machine.

    It has its own munge, database, controller and nodes, partitions `ondemand` and `spot`, GPUs
    and accounting; it runs as the user who calls it and touches no other Slurm.
    """


@command.command()
@_name
@click.option("--nodes", default=4, show_default=True, help="Number of nodes.")
@click.option("--gpus", default=4, show_default=True, help="GPUs that each node claims.")
@click.option(
    "--grace-s", default=15, show_default=True, help="Seconds from notice to SIGTERM (GraceTime)."
)
@click.option(
    "--kill-wait-s", default=5, show_default=True, help="Seconds from SIGTERM to SIGKILL."
)
@_folder
@_json
def up(  # noqa: PLR0917 - click passes them by name
    name: str,
    nodes: int,
    gpus: int,
    grace_s: int,
    kill_wait_s: int,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Bring a sandbox up; print what a shell needs to use it.

    eval "$(slurmspot sandbox up)"
    """
    leave_in_order()
    begin = time.monotonic()
    sandbox = Sandbox.up(
        name,
        nodes=nodes,
        gpus_per_node=gpus,
        grace_s=grace_s,
        kill_wait_s=kill_wait_s,
        folder=folder,
        progress=lambda line: click.echo(f"sandbox {name}: {line}", err=True),
    ).detach()
    if as_json:
        print_json(
            {**_document(sandbox.status()), "env": sandbox.env, "seconds": time.monotonic() - begin}
        )
        return
    for variable, value in sandbox.env.items():
        click.echo(f"export {variable}={shlex.quote(value)}")


@command.command()
@_name
@_folder
def down(name: str, folder: Path | None) -> None:
    """End every process of a sandbox and remove its folder; nothing to do is fine."""
    try:
        sandbox = Sandbox.open(folder or name)
    except NotFoundError:
        click.echo(f"sandbox {folder or name}: nothing there", err=True)
        return
    sandbox.down()
    click.echo(f"sandbox {sandbox.spec.name}: down", err=True)


@command.command()
@_found
@_folder
@_json
def status(name: str | None, folder: Path | None, as_json: bool) -> None:
    """Which daemons run, and what state each node is in; exit code 1 unless all is well."""
    sandbox = _open(name, folder)
    found = sandbox.status()
    if as_json:
        print_json({**_document(found), "env": sandbox.env})
    else:
        for daemon, alive in found.daemons.items():
            state = found.nodes.get(daemon, "")
            click.echo(f"{daemon:<10} {'running' if alive else 'dead':<8} {state}".rstrip())
    sys.exit(0 if found.healthy else 1)


@command.command(name="exec", context_settings={"ignore_unknown_options": True})
@_found
@_folder
@click.argument("argv", nargs=-1, required=True, type=click.UNPROCESSED)
def exec_(name: str | None, folder: Path | None, argv: tuple[str, ...]) -> None:
    """Run a command as a client of a sandbox.

    slurmspot sandbox exec -- srun -N2 hostname
    """
    sys.exit(_open(name, folder).exec(argv))


def _open(name: str | None, folder: Path | None) -> Sandbox:
    """The sandbox that was named, or the one this shell is a client of, or `default`."""
    here = None if name or folder else Sandbox.current(os.environ)
    return here or Sandbox.open(folder or name or "default")


def _document(found: Status) -> dict[str, Any]:
    return {
        "name": found.name,
        "folder": str(found.folder),
        "healthy": found.healthy,
        "daemons": dict(found.daemons),
        "nodes": dict(found.nodes),
    }
