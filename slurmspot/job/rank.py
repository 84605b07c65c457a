"""Start one rank: ``python -m slurmspot.job.rank -- COMMAND …``, one process under srun.

Sets what ``torch.distributed`` reads (``env://``), leaves SIGUSR1 ignored until the training
process has its own handler, and *becomes* the command: no parent stays behind to be signalled,
and the exit code is the command's own.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from slurmspot.cluster.spec import Spec
from slurmspot.errors import NotFoundError, SlurmspotError
from slurmspot.events import EventWriter
from slurmspot.hostlist import first
from slurmspot.job import rendezvous
from slurmspot.runfolder import RunFolder
from slurmspot.settings import MASTER_ADDR_VAR, JobEnvironment


def distributed_variables(env: Mapping[str, str]) -> dict[str, str]:
    """What ``torch.distributed.init_process_group`` reads, but for the port, from srun's own."""
    if "SLURM_PROCID" not in env:
        return {}
    return {
        "RANK": env["SLURM_PROCID"],
        "WORLD_SIZE": env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS", "1"),
        "LOCAL_RANK": env.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": env.get("SLURM_STEP_TASKS_PER_NODE", "1").partition("(")[0],
        "MASTER_ADDR": env.get(MASTER_ADDR_VAR)
        or first(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "localhost"),
    }


@dataclass(frozen=True, slots=True)
class RankCommand:
    """The callable that ``launch`` hands to submitit; called in every task of the step."""

    argv: tuple[str, ...]

    @classmethod
    def of(cls, spec: Spec) -> RankCommand:
        """The command of a spec, or the program that makes its call."""
        if spec.call:
            return cls((sys.executable, "-m", "slurmspot.job.call", spec.call))
        return cls(spec.command)

    def __call__(self) -> NoReturn:
        """Become the command, unless the run is already complete (then exit 0 at once)."""
        start(self.argv, os.environ)


def start(argv: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Become ``argv``; see the module's description.

    Raises:
        NotFoundError: there is no such command on this node.
        SlurmspotError: the ranks could not agree on a port.
    """
    env = {**env, **distributed_variables(env)}
    job = JobEnvironment.read(env)
    if job.run is not None and RunFolder(job.run).finished.exists():
        sys.stderr.write(f"slurmspot: {job.run} is already complete\n")
        sys.exit(0)
    for number in (signal.SIGTERM, signal.SIGCONT, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)  # submitit's handlers do not survive into the command
    # A notice during start-up must not kill: there is nothing to save yet. Slurm's SIGTERM follows.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if "SLURM_PROCID" in env:
        env["MASTER_PORT"] = str(rendezvous.agree(env, job))
    if job.run is not None:  # what fails before this line is not the command's fault
        log = EventWriter(RunFolder(job.run).events, job.attempt, job.rank)
        log.write("launched")
        log.close()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    try:
        os.execvpe(argv[0], list(argv), env)  # noqa: S606 - meant
    except OSError as error:
        raise NotFoundError(
            f"cannot start {argv[0]} on {job.host}",
            why=error.strerror,
            fix="give a command that exists on the compute nodes, or its full path",
        ) from None


def main() -> None:
    """Entry point for batch scripts written by hand."""
    argv = sys.argv[1:]
    if argv[:1] == ["--"]:
        argv = argv[1:]
    if not argv:
        sys.stderr.write("usage: python -m slurmspot.job.rank -- COMMAND [ARGUMENT]...\n")
        sys.exit(2)
    try:
        start(argv, os.environ)
    except SlurmspotError as error:
        sys.stderr.write(f"slurmspot: {error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
