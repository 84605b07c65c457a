"""Run a Slurm command: the one seam between this package and the cluster.

Everything that talks to Slurm takes a :class:`Runner`; tests pass one that answers from a table.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slurmspot.errors import NoSlurmError, SlurmError, SlurmUnreachableError
from slurmspot.settings import slurm_conf

_UNREACHABLE = (
    "Unable to contact slurm controller",
    "Connection refused",
    "Connection timed out",
    "Communication connection failure",
    "Socket timed out",
    "Unable to establish controller machine",
    "Zero Bytes were transmitted or received",
    "Protocol authentication error",
    "Unable to connect to",
)
_NO_CLUSTER = ("Could not establish a configuration source", "Unable to process configuration file")


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What a finished command left."""

    stdout: str
    stderr: str
    returncode: int


Runner = Callable[..., Output]
"""``runner(argv, stdin=None) -> Output``. Raises only :class:`SlurmUnreachableError`."""


def run(argv: Sequence[str], *, stdin: str | None = None, timeout_s: float = 60.0) -> Output:
    """Run ``argv`` (never through a shell) and return what it left, whatever its exit code.

    Raises:
        NoSlurmError: the command does not exist, or the slurm.conf that it should read.
        SlurmUnreachableError: it did not answer in time.
    """
    conf = slurm_conf()
    own = argv[0] == "env"  # brings a SLURM_CONF of its own: a sandbox's
    if not (own or conf is None or os.access(conf, os.R_OK)):  # Slurm would wait a minute for it
        raise NoSlurmError(
            f"{conf}, which SLURM_CONF names, cannot be read",
            fix="set SLURM_CONF to the slurm.conf of a cluster; "
            "`slurmspot sandbox up` prints that of a private one",
        )
    try:
        done = subprocess.run(
            list(argv),
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError:
        raise NoSlurmError(
            f"{argv[0]} is not on PATH",
            why="Slurm's client commands are not installed here, or their module is not loaded",
            fix="run this on a login node; or try it out with `slurmspot sandbox up`",
        ) from None
    except subprocess.TimeoutExpired:
        raise SlurmUnreachableError(
            f"{argv[0]} did not answer within {timeout_s:.0f} s",
            why="the controller is overloaded or out of reach",
            fix="check it with `scontrol ping`, then try again",
        ) from None
    return Output(stdout=done.stdout, stderr=done.stderr, returncode=done.returncode)


def checked(runner: Runner, argv: Sequence[str], *, stdin: str | None = None) -> str:
    """Run ``argv`` and return its stdout.

    Raises:
        NoSlurmError: the command finds no cluster.
        SlurmUnreachableError: Slurm did not answer.
        SlurmError: Slurm answered and refused; ``why`` holds its own words.
    """
    output = runner(argv, stdin=stdin)
    if output.returncode == 0:
        return output.stdout
    words = (output.stderr.strip() or output.stdout.strip()).removeprefix(f"{argv[0]}: error: ")
    last = words.rpartition("\n")[2].removeprefix(f"{argv[0]}: ").removeprefix("fatal: ")
    if any(sign in words for sign in _NO_CLUSTER):
        raise NoSlurmError(
            "this machine does not know its Slurm cluster",
            why=last,
            fix="run this on a login node, or set SLURM_CONF to the cluster's slurm.conf; "
            "or try it out with `slurmspot sandbox up`",
        )
    if any(sign in words for sign in _UNREACHABLE):
        raise SlurmUnreachableError(
            "Slurm's controller does not answer",
            why=last,
            fix="check it with `scontrol ping`; `echo $SLURM_CONF` tells which cluster is meant",
        )
    raise SlurmError(f"`{' '.join(argv[:3])}` was refused", why=words or "no reason given")
