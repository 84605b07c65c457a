"""``slurmspot inject``: take capacity away from a run, on purpose."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from slurmspot.cli import print_json
from slurmspot.faults.injector import Injection, Injector, machines_here
from slurmspot.runfolder import RunFolder

_ARGUMENTS: list[Callable[[Any], Any]] = [
    click.argument("run", type=click.Path(path_type=Path)),
    click.option("--at-step", type=int, help="Wait until the run has made this step."),
    click.option("--json", "as_json", is_flag=True, help="Print JSON."),
]


def _common(function: Any) -> Any:
    for decorate in reversed(_ARGUMENTS):
        function = decorate(function)
    return function


@click.group()
def command() -> None:
    """Take capacity away from a run and see that it really went.

    Every action is written into the run's event log. An action that is not seen to take effect
    is an error (exit code 1).
    """


@command.command()
@_common
@click.option("--partition", help="Partition of the job that preempts.  [default: a higher tier]")
@click.option(
    "--hold-s", type=int, default=5, show_default=True, help="How long it keeps the nodes."
)
def preempt(
    run: Path, at_step: int | None, as_json: bool, partition: str | None, hold_s: int
) -> None:
    """A higher-tier job takes all nodes of RUN: Slurm preempts it, with its grace."""
    injector = _injector(run, at_step)
    _show(injector.preempt(partition=partition, hold_s=hold_s), as_json)


@command.command("node-down")
@_common
@click.option("--node", help="Which node.  [default: the job's last]")
def node_down(run: Path, at_step: int | None, as_json: bool, node: str | None) -> None:
    """One node of RUN is gone, without notice. Needs an operator's rights."""
    _show(_injector(run, at_step).node_down(node), as_json)


@command.command()
@_common
def kill(run: Path, at_step: int | None, as_json: bool) -> None:
    """SIGKILL every rank of RUN: no notice, the nodes stay."""
    _show(_injector(run, at_step).kill(), as_json)


def _injector(run: Path, at_step: int | None) -> Injector:
    injector = Injector(RunFolder.open(run), machines=machines_here())
    if at_step is not None:
        injector.wait_for_step(at_step)
    return injector


def _show(injection: Injection, as_json: bool) -> None:
    if as_json:
        print_json(dataclasses.asdict(injection))
    else:
        click.echo(
            f"{injection.kind}: job {injection.job_id} lost {', '.join(injection.nodes)} "
            f"at step {injection.at_step}, seen after {injection.seconds:.1f} s"
        )
