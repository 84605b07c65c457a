"""Every environment variable that slurmspot or a job under it reads, behind a typed value.

Nothing else in the package reads ``os.environ``: edges call :meth:`JobEnvironment.read` once and
pass the value on.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from slurmspot.errors import UsageError

RUN_VAR = "SLURMSPOT_RUN"
PERIOD_VAR = "SLURMSPOT_PERIOD_S"
PERIOD_STEPS_VAR = "SLURMSPOT_PERIOD_STEPS"
KEEP_VAR = "SLURMSPOT_KEEP"
WINDOW_VAR = "SLURMSPOT_WINDOW_S"
KILL_WAIT_VAR = "SLURMSPOT_KILL_WAIT_S"
MASTER_ADDR_VAR = "SLURMSPOT_MASTER_ADDR"
NOTICE_VAR = "SLURMSPOT_NOTICE"
METADATA_URL_VAR = "SLURMSPOT_METADATA_URL"
HANG_VAR = "SLURMSPOT_HANG_S"
HOLD_VAR = "SLURMSPOT_HOLD"
LOCAL_VAR = "SLURMSPOT_LOCAL"

PERIODS_S = (300.0, 900.0, 1800.0, 3600.0)
"""Periods between checkpoints that are compared where nobody says which, in seconds."""

DEFAULT_PERIOD_S = 900.0
DEFAULT_KEEP = 3
DEFAULT_WINDOW_S = 60.0
DEFAULT_KILL_WAIT_S = 30.0


_Number = TypeVar("_Number", int, float)


def _number(
    env: Mapping[str, str], name: str, kind: type[_Number], default: _Number, *, least: _Number
) -> _Number:
    text = env.get(name)
    if text is None or not text.strip():
        return default
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not value >= least:
        raise UsageError(
            f"{name}={text!r} is not a number of at least {least}",
            fix=f"unset {name}, or set it to a number",
        )
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnvironment:
    """What a process of a job knows of itself from its environment.

    Attributes:
        run: the run folder, or None outside a slurmspot run.
        job_id: as sacct prints it (``17``, ``7_0``, ``33+1``); ``local`` outside Slurm.
        restart: how often Slurm has started this job before (``SLURM_RESTART_COUNT``).
        rank: global rank, 0 <= rank < world_size.
        host: Slurm's node name, or the host's name outside Slurm.
        period_s: seconds between periodic checkpoints.
        period_steps: steps between periodic checkpoints; 0 means time alone decides.
        keep: how many committed checkpoints to keep, at least 1.
        window_s: seconds that a SIGUSR1 leaves.
        kill_wait_s: seconds between SIGTERM and SIGKILL (Slurm's KillWait).
        notice: sources of notices besides the signals: see :mod:`slurmspot.job.sources`.
        metadata_url: stands in for the clouds' metadata services; ``%n`` is the node's name.
        hang_s: seconds without a step after which the job is taken to hang; 0 is never.
        local: a folder on each node's own disk, for the local tier; ``{node}`` in it is the
            node's name; empty: there is none.
        hold: drills may hold the ranks in a phase: see :mod:`slurmspot.job.hold`.
    """

    run: Path | None = None
    job_id: str = "local"
    restart: int = 0
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    host: str = "localhost"
    period_s: float = DEFAULT_PERIOD_S
    period_steps: int = 0
    keep: int = DEFAULT_KEEP
    window_s: float = DEFAULT_WINDOW_S
    kill_wait_s: float = DEFAULT_KILL_WAIT_S
    notice: tuple[str, ...] = ()
    metadata_url: str = ""
    hang_s: float = 0.0
    local: str = ""
    hold: bool = False

    @property
    def attempt(self) -> str:
        """Name of this attempt: job id and restart count, unique within a run."""
        return f"{self.job_id}-{self.restart}"

    @property
    def local_folder(self) -> Path | None:
        """The folder of the local tier on this node, or None."""
        return Path(self.local.replace("{node}", self.host)) if self.local else None

    @classmethod
    def read(cls, env: Mapping[str, str] | None = None) -> JobEnvironment:
        """Read the environment of this process, or of ``env``.

        torchrun's and our own ``RANK``/``WORLD_SIZE`` win over Slurm's variables.

        Raises:
            UsageError: a variable holds something that is not a sensible number.
        """
        env = os.environ if env is None else env
        run = env.get(RUN_VAR)
        return cls(
            run=Path(run) if run else None,
            job_id=slurm_job_id(env) or "local",
            restart=_number(env, "SLURM_RESTART_COUNT", int, 0, least=0),
            rank=_number(env, "RANK" if "RANK" in env else "SLURM_PROCID", int, 0, least=0),
            world_size=_number(
                env,
                "WORLD_SIZE" if "WORLD_SIZE" in env else "SLURM_STEP_NUM_TASKS",
                int,
                1,
                least=1,
            ),
            local_rank=_number(
                env, "LOCAL_RANK" if "LOCAL_RANK" in env else "SLURM_LOCALID", int, 0, least=0
            ),
            host=env.get("SLURMD_NODENAME") or socket.gethostname(),
            period_s=_number(env, PERIOD_VAR, float, DEFAULT_PERIOD_S, least=0.0),
            period_steps=_number(env, PERIOD_STEPS_VAR, int, 0, least=0),
            keep=_number(env, KEEP_VAR, int, DEFAULT_KEEP, least=1),
            window_s=_number(env, WINDOW_VAR, float, DEFAULT_WINDOW_S, least=0.0),
            kill_wait_s=_number(env, KILL_WAIT_VAR, float, DEFAULT_KILL_WAIT_S, least=0.0),
            notice=checked_notice(filter(None, env.get(NOTICE_VAR, "").split(","))),
            metadata_url=env.get(METADATA_URL_VAR, ""),
            hang_s=_number(env, HANG_VAR, float, 0.0, least=0.0),
            local=checked_local(env.get(LOCAL_VAR, "")),
            hold=env.get(HOLD_VAR, "") == "1",
        )


def checked_notice(names: Iterable[str]) -> tuple[str, ...]:
    """The sources of notices besides the signals, by name.

    Raises:
        UsageError: a name is none of ``aws``, ``gcp``, ``azure`` and ``file:PATH``.
    """
    for name in (names := tuple(names)):
        kind, _, path = name.partition(":")
        if name not in {"aws", "gcp", "azure"} and not (kind == "file" and path):
            raise UsageError(
                f"notice={name!r} is no source of notices",
                fix="use aws, gcp, azure or file:PATH; signals are always heeded",
            )
    return names


def checked_local(folder: str) -> str:
    """The folder of the local tier, which must be absolute; empty is none.

    Raises:
        UsageError: it is relative.
    """
    if folder and not folder.startswith("/"):
        raise UsageError(
            f"local={folder!r} is not an absolute path",
            fix="name a folder on the nodes' own disks; {node} in it is the node's name",
        )
    return folder


def slurm_conf(env: Mapping[str, str] | None = None) -> Path | None:
    """The slurm.conf that ``env``, or this process, names; None leaves it to Slurm to find one."""
    named = (os.environ if env is None else env).get("SLURM_CONF")
    return Path(named) if named else None


def slurm_job_id(env: Mapping[str, str]) -> str | None:
    """The job id of ``env`` as sacct prints it: ``17``, ``7_0`` for an array task, ``33+1``."""
    if "SLURM_ARRAY_JOB_ID" in env and "SLURM_ARRAY_TASK_ID" in env:
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    if "SLURM_HET_JOB_ID" in env and "SLURM_HET_JOB_COMPONENT" in env:
        return f"{env['SLURM_HET_JOB_ID']}+{env['SLURM_HET_JOB_COMPONENT']}"
    return env.get("SLURM_JOB_ID")
