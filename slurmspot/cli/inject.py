"""``slurmspot inject``: take capacity away from a run, on purpose."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import reduce
from pathlib import Path
from typing import Any

import click

from slurmspot.cli import leave_in_order, print_json
from slurmspot.cluster import command as commands
from slurmspot.cluster.command import Output
from slurmspot.cluster.submit import job_ids
from slurmspot.errors import UsageError
from slurmspot.faults import pyslurm
from slurmspot.faults.backend import Backend, Scontrol, dry
from slurmspot.faults.campaign import Campaign
from slurmspot.faults.conduct import Wait, conduct
from slurmspot.faults.fault import PHASES, PROFILES, Aim, Fault
from slurmspot.faults.injector import Injection, Injector
from slurmspot.faults.keeper import Keeper
from slurmspot.faults.machines import Command, Machines, Printed, machines_here
from slurmspot.faults.record import Record
from slurmspot.runfolder import RunFolder

_Decorator = Callable[[Any], Any]

MACHINERY: list[_Decorator] = [
    click.option(
        "--backend",
        type=click.Choice(["scontrol", "pyslurm"]),
        default="scontrol",
        show_default=True,
        help="How to talk to Slurm.",
    ),
    click.option(
        "--terminate-command",
        help="Command that ends a real machine; {node} stands for its name.",
    ),
]
_COMMON: list[_Decorator] = [
    click.argument("run", type=click.Path(path_type=Path)),
    click.option("--target", help="gang, node, node:NAME, nodes:COUNT, nodes:A,B or rank:NUMBER."),
    click.option("--after-s", type=float, help="Wait this many seconds first."),
    click.option("--at-step", type=int, help="Wait until the run has made this step."),
    click.option("--at-fraction", help="Wait for this share of its steps: 0.5, or a range to draw"),
    click.option(
        "--in-phase",
        type=click.Choice(PHASES),
        help="Hit inside this phase; launch with SLURMSPOT_HOLD=1.",
    ),
    click.option("--seed", type=int, default=0, show_default=True, help="For what is drawn."),
    click.option("--dry-run", is_flag=True, help="Print the exact commands and touch nothing."),
    click.option(
        "--any-job",
        is_flag=True,
        help="RUN may be somebody else's, or a bare job id. The journal of what has to be given "
        "back is then the folder slurmspot-drill-JOBID here, which `undo` takes for its RUN.",
    ),
    *MACHINERY,
    click.option("--json", "as_json", is_flag=True, help="Print JSON."),
]
_WINDOW = click.option("--window-s", type=float, help="Seconds that the notice leaves.")
_DETECT = click.option(
    "--detect-s", type=float, help="Seconds until Slurm is told that the machine is gone."
)
_HOLD = click.option("--hold-s", type=int, help="How long it is kept away.  [default: 5]")
_OWN: dict[str, list[_Decorator]] = {
    "slurm": [
        click.option("--partition", help="Partition of the job that preempts; or a higher tier."),
        _HOLD,
    ],
    "requeue-hold": [_HOLD],
    "cloud-aws": [_WINDOW, _DETECT],
    "cloud-gcp": [_WINDOW, _DETECT],
    "cloud-azure": [_WINDOW, _DETECT],
    "kubernetes": [_WINDOW, _DETECT],
    "forced": [_DETECT],
    "node-down": [
        click.option("--node", help="Which node.  [default: the job's last]"),
        click.option(
            "--state",
            "node_state",
            type=click.Choice(["DOWN", "DRAIN", "POWER_DOWN_FORCE"]),
            help="What the node is set to.  [default: DOWN]",
        ),
        click.option("--keep-machine", is_flag=True, help="Tell Slurm only; end no process."),
    ],
}
_NAMES = {"slurm": "preempt"}


def all_of(decorators: Sequence[_Decorator]) -> _Decorator:
    """All of them, the first one outermost, as if written above a function."""
    return lambda function: reduce(lambda f, decorate: decorate(f), reversed(decorators), function)


@click.group()
def command() -> None:
    """Take capacity away from a run and see that it really went.

    Every action is written into the run's event log. An action that is not seen to take effect
    is an error (exit code 1). Whatever is taken is given back, after a crash by `undo`.
    """
    leave_in_order()


def _verb(profile: str) -> None:
    def verb(
        run: Path,
        *,
        dry_run: bool,
        any_job: bool,
        backend: str,
        terminate_command: str | None,
        as_json: bool,
        seed: int,
        node: str | None = None,
        **given: Any,
    ) -> None:
        table = {
            name: value for name, value in given.items() if value is not None and value is not False
        }
        if node:
            table["target"] = f"node:{node}"
        fault = Fault.of({"profile": profile, **table}, seed=seed)
        folder, job_id = _victim(run, any_job=any_job)
        injector = Injector(
            folder,
            job_id=job_id,
            any_job=any_job,
            dry=dry_run,
            **machinery(backend, terminate_command, dry_run=dry_run),
        )
        injection = injector.inject(fault.aimed(Aim()) if dry_run else fault)
        if not dry_run:
            _show(injection, as_json)

    name, summary = _NAMES.get(profile, profile), PROFILES[profile].summary
    decorated = all_of([*_COMMON, *_OWN.get(profile, [])])(verb)
    command.command(name, help=f"{summary[0].upper()}{summary[1:]}.")(decorated)


for _profile in PROFILES:
    _verb(_profile)


@command.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--terminate-command", help="As it was given to the injection.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def undo(run: Path, terminate_command: str | None, as_json: bool) -> None:
    """Give back what an injector that died had taken: nodes, held jobs."""
    injector = Injector(RunFolder.open(run), **machinery("scontrol", terminate_command))
    done = injector.undo()
    if as_json:
        print_json({"undone": done})
    else:
        click.echo("\n".join(done) or "nothing to undo")


@command.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("runs", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("campaign.jsonl"),
    show_default=True,
    help="Journal; an interrupted campaign goes on behind its last line.",
)
@click.option("--any-job", is_flag=True, help="The runs may be somebody else's.")
@click.option(
    "--follow/--no-follow", default=True, show_default=True, help="Lift the requeue backoff."
)
@all_of(MACHINERY)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def campaign(
    file: Path,
    runs: tuple[Path, ...],
    *,
    out: Path,
    any_job: bool,
    follow: bool,
    backend: str,
    terminate_command: str | None,
    as_json: bool,
) -> int:
    """Carry out the campaign of FILE on RUNS, all at the same time.

    An injection that is not seen to take effect, or a run that does not come back, fails it.
    """
    plan = Campaign.read(file)
    folders = {str(run): RunFolder.open(run) for run in runs}
    record = Record(out, plan.digest)

    def hand(folder: RunFolder) -> Callable[[Wait], Injector]:
        return lambda wait: Injector(
            folder, any_job=any_job, wait=wait, **machinery(backend, terminate_command)
        )

    with ExitStack() as stack:
        for folder in folders.values() if follow else ():
            for job_id in job_ids(folder)[-1:]:
                stack.enter_context(Keeper(job_id))
        problems = conduct(
            plan,
            {run: hand(folder) for run, folder in folders.items()},
            record,
            say=lambda line: click.echo(line, err=True),
        )
    outcomes = [outcome for run in folders for outcome in record.outcomes(run)]
    record.close()
    if as_json:
        document = [dataclasses.asdict(outcome) for outcome in outcomes]
        print_json({"outcomes": document, "problems": problems})
    for problem in problems:
        click.echo(f"slurmspot: {problem}", err=True)
    return 1 if problems else 0


def _victim(run: Path, *, any_job: bool) -> tuple[RunFolder, str | None]:
    if any_job and not run.exists():
        return RunFolder(Path(f"slurmspot-drill-{run.name}").absolute()), run.name
    return RunFolder.open(run), None


def machinery(
    backend: str, terminate_command: str | None, *, dry_run: bool = False
) -> dict[str, Any]:
    """The injector's hands: how it talks to Slurm and how it ends machines."""
    runner = dry(commands.run, _print) if dry_run else commands.run
    hands: Backend = Scontrol(runner)
    if backend == "pyslurm":
        if dry_run:
            raise UsageError(
                "--dry-run prints commands, and pyslurm uses none",
                fix="leave --backend out: the commands do the same",
            )
        hands = pyslurm.load()
    machines: Machines | None
    if terminate_command is not None:
        machines = Command(terminate_command, hands, runner=runner)
    elif (machines := machines_here()) is not None and dry_run:
        machines = Printed(_print)
    return {"backend": hands, "machines": machines, "runner": runner}


def _print(argv: Sequence[str], *, stdin: str | None = None) -> Output:
    """Say what would be run; a submission is answered with a name for its job."""
    click.echo(shlex.join(argv) + ("" if stdin is None else f" <<'EOF'\n{stdin}EOF"))
    return Output(stdout="JOBID", stderr="", returncode=0)


def _show(injection: Injection, as_json: bool) -> None:
    if as_json:
        print_json(dataclasses.asdict(injection))
    else:
        click.echo(
            f"{injection.kind}: job {injection.job_id} was hit on {', '.join(injection.nodes)} "
            f"at step {injection.at_step}, seen after {injection.seconds:.1f} s"
        )
