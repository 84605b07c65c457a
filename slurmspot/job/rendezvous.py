"""Where the ranks of one step meet: the port that they are told in ``MASTER_PORT``.

Rank 0 takes one that is free on its node, and its command inherits it: nobody else can take it
before the command listens there. The other ranks read in the run folder which one it is, from a
file that is named for their own srun, so that none of an earlier step or attempt is believed.

Without a run folder nobody can be told, and all take the same number: the one that is tried first.
"""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

from slurmspot import ports
from slurmspot.checkpoint.steps import write_durably
from slurmspot.errors import SlurmspotError
from slurmspot.runfolder import RunFolder
from slurmspot.settings import JobEnvironment

# Below the kernel's ephemeral ports (32768 and up), above the well-known services.
_FIRST, _COUNT = 20000, 12000
_WAIT_S = 300.0  # nodes may start their ranks minutes apart, after slow prologs
_LONGEST_POLL_S = 1.0


def first_choice(env: Mapping[str, str]) -> int:
    """A port that all ranks of an attempt derive alone, and that no two attempts share.

    Cluster, job and restart count go in: processes of an attempt whose node was lost may still
    hold its port when the next attempt starts.
    """
    names = ("SLURM_CONF", "SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID")
    key = "/".join(env.get(name, "") for name in names)
    restart = int(env.get("SLURM_RESTART_COUNT") or 0)
    return _FIRST + (zlib.crc32(key.encode()) + restart) % _COUNT


def agree(
    env: Mapping[str, str],
    job: JobEnvironment,
    *,
    wait: Callable[[float], object] = time.sleep,
    wait_s: float = _WAIT_S,
) -> int:
    """The port at which the ranks of this step meet; rank 0 holds it from here on, through exec.

    Raises:
        SlurmspotError: rank 0 has not told it within ``wait_s``, or has found no port free.
    """
    first = first_choice(env)
    if job.world_size == 1:
        return _hold(first)
    if job.run is None:
        return first
    # The launcher's port is one for all nodes; SLURM_SRUN_COMM_PORT differs beyond 48 of them.
    srun = "-".join(env.get(name, "") for name in ("SLURM_STEP_ID", "SLURM_STEP_LAUNCHER_PORT"))
    told = RunFolder(job.run).events / job.attempt / f"srun-{srun}.port"
    # By each rank, so that no network file system holds the folder for missing.
    told.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if job.rank != 0:
        return _read(told, wait, wait_s)
    port = _hold(first)
    write_durably(told, f"{port}\n".encode())
    return port


def _hold(first: int) -> int:
    for offset in range(_COUNT):
        port = _FIRST + (first - _FIRST + offset) % _COUNT
        with contextlib.suppress(OSError):
            held = ports.hold(port)
            held.set_inheritable(True)
            held.detach()
            return port
    raise SlurmspotError(f"no port from {_FIRST} to {_FIRST + _COUNT - 1} is free on this node")


def _read(told: Path, wait: Callable[[float], object], wait_s: float) -> int:
    end, poll_s = time.monotonic() + wait_s, 0.02
    while True:
        with contextlib.suppress(FileNotFoundError):
            return int(told.read_text())
        if time.monotonic() >= end:
            raise SlurmspotError(
                f"rank 0 has not told its port within {wait_s:.0f} s",
                why=f"{told} does not exist",
                fix="see in the log why rank 0 did not start; "
                "the run folder must be on shared storage",
            )
        with contextlib.suppress(OSError):
            os.utime(told.parent)  # a network file system forgets then what it holds for missing
        wait(poll_s)
        poll_s = min(2 * poll_s, _LONGEST_POLL_S)
