"""Follow a job from the login node to its end, and keep it from waiting where it need not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from slurmspot.cluster import scontrol
from slurmspot.cluster.command import Runner, run
from slurmspot.cluster.scontrol import JobState
from slurmspot.errors import NoSlurmError, NotFoundError, SlurmError, SlurmUnreachableError

# What Slurm writes when a job has exited within its grace once too often (MaxBatchRequeue).
_LAUNCH_LIMIT = "launch failure limit exceeded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """One look at a job.

    Attributes:
        job: what the controller said; None when it has forgotten the job.
        action: what was done about it (``backoff lifted``, ``released``), or empty.
    """

    job: JobState | None
    action: str = ""

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return self.job is None or self.job.over


def follow(
    job_id: str,
    *,
    interval_s: float = 5.0,
    runner: Runner = run,
    wait: Callable[[float], object] = time.sleep,
) -> Iterator[Sighting]:
    """Yield a sighting every ``interval_s`` until the job is over.

    A controller that does not answer for a while is waited for: it is restarted more often than a
    run ends. Slurm's own requeue backoff is lifted, and a job that Slurm holds for having been
    requeued too often is released; both are the owner's right.

    Raises:
        NoSlurmError: there is no cluster to ask, as was seen at the first look.
    """
    known = False
    lifted: set[int] = set()  # restarts whose backoff has been lifted: again would put it off
    while True:
        try:
            sighting = _look(job_id, runner, lifted)
        except SlurmUnreachableError as error:
            if isinstance(error, NoSlurmError) and not known:
                raise
            sighting = Sighting(
                job=JobState(job_id=job_id, state="UNKNOWN"), action=error.why or error.what
            )
        known = True
        yield sighting
        if sighting.over:
            return
        wait(interval_s)


def _look(job_id: str, runner: Runner, lifted: set[int]) -> Sighting:
    try:
        job = scontrol.show_job(job_id, runner=runner)
    except NotFoundError:
        return Sighting(job=None)
    return Sighting(job=job, action=_help_along(job, runner, lifted))


def _help_along(job: JobState, runner: Runner, lifted: set[int]) -> str:
    waits = job.state == "PENDING" and job.reason == "BeginTime"
    try:
        if waits and job.restarts and job.restarts not in lifted:
            scontrol.lift_backoff(job.job_id, runner=runner)
            lifted.add(job.restarts)
            return "backoff lifted"
        if _LAUNCH_LIMIT in job.reason.replace("_", " "):  # never a hold that a person asked for
            scontrol.release(job.job_id, runner=runner)
            return "released"
    except SlurmUnreachableError:
        raise
    except SlurmError as error:  # it has started by itself in between
        return error.why or error.what
    return ""
