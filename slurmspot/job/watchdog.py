"""Ends a step that hangs: ``python -m slurmspot.job.watchdog``, one process beside srun.

A rank that died ends the step by itself (``--kill-on-bad-exit``). One that is stopped, or waits in
a collective for ever, does not; from inside it cannot even be noticed. This process reads the
ranks' beats, and when the slowest has made no step for ``SLURMSPOT_HANG_S`` seconds it kills the
step, as the batch script's owner may. The batch script then requeues the job like after any kill.

Nothing is expected before the attempt's first step: start-up takes as long as it takes.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from slurmspot.cluster import scontrol
from slurmspot.cluster.command import Runner, run
from slurmspot.errors import SlurmspotError
from slurmspot.events import EventWriter
from slurmspot.runfolder import RunFolder
from slurmspot.settings import JobEnvironment, slurm_job_id

_LOOKS = 10  # looks in one allowed time without a step


def oldest_beat_ns(attempt: Path) -> int | None:
    """When the slowest rank made its last step, in unix nanoseconds; None before the first."""
    try:
        beats = [beat.stat() for beat in attempt.glob("[0-9]*.beat")]
    except OSError:
        return None
    made = [beat.st_mtime_ns for beat in beats if beat.st_size]
    return min(made) if made and len(made) == len(beats) else None


def watch(
    job: JobEnvironment,
    folder: RunFolder,
    *,
    runner: Runner = run,
    wait: Callable[[float], object] = time.sleep,
    orphaned: Callable[[], bool] = lambda: False,
) -> bool:
    """Wait until the job hangs, then kill its step; False if the batch script ended before.

    Ages are measured from the moment a beat is *seen* to change, so that the clocks of this host
    and of the file server need not agree.
    """
    attempt = folder.events / job.attempt
    seen, still = oldest_beat_ns(attempt), 0
    while still < _LOOKS:
        wait(job.hang_s / _LOOKS)
        if orphaned():
            return False
        now = oldest_beat_ns(attempt)
        still = 0 if now is None or now != seen else still + 1
        seen = now
    log = EventWriter(folder.events, job.attempt, "watchdog")
    log.write("hang", seconds=job.hang_s)
    log.close()
    scontrol.signal_step(job.job_id, "KILL", runner=runner)
    return True


def main() -> None:
    """Watch the job that this process belongs to, for as long as its parent lives."""
    job = JobEnvironment.read(os.environ)
    if job.run is None or job.hang_s <= 0 or slurm_job_id(os.environ) is None:
        sys.stderr.write("slurmspot: the watchdog needs a job, SLURMSPOT_RUN, SLURMSPOT_HANG_S\n")
        sys.exit(2)
    parent = os.getppid()
    try:
        if watch(job, RunFolder(job.run), orphaned=lambda: os.getppid() != parent):
            sys.stderr.write(f"slurmspot: no step for {job.hang_s:g} s: the ranks were killed\n")
    except SlurmspotError as error:
        sys.stderr.write(f"slurmspot: {error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
