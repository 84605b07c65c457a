"""Where a run stands now, from its event log and what the controller says of its job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from slurmspot.events import Event
from slurmspot.report.table import duration
from slurmspot.timeline.lives import sensible, witnessed
from slurmspot.timeline.phases import divided
from slurmspot.timeline.recovery import Interruption, interruptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a run stands.

    Attributes:
        attempts: how many have started; of a job, as many as its newest restart says.
        notices: attempts that were warned.
        phase: what the newest attempt is doing (see :mod:`slurmspot.timeline.phases`), None
            between attempts; ``phase_s`` for how long.
        last_step: the highest step run; ``last_durable_step`` the highest that is safe even if
            nodes are lost; ``last_local_step`` the highest on the nodes' own disks, if any is.
            What a restore has passed over counts no more.
        steps_lost: in all interruptions so far, each counted once the run has restored.
        failed_saves: of rank 0.
        interruptions: ends of attempts before the work was done.
    """

    attempts: int
    notices: int
    phase: str | None
    phase_s: float | None
    last_step: int | None
    last_durable_step: int | None
    last_local_step: int | None
    steps_lost: int
    failed_saves: int
    interruptions: tuple[Interruption, ...]

    @property
    def steps_at_risk(self) -> int | None:
        """How many steps the loss of a node would cost at this moment."""
        if self.last_step is None:
            return None
        return max(0, self.last_step - (self.last_durable_step or 0))


def standing(events: Sequence[Event], *, now: datetime) -> Standing:
    """Where the run with these events stands at ``now``."""
    logged = sensible(events)
    jobs = divided(witnessed(logged), logged)
    newest = max((a for job in jobs for a in job.attempts), key=lambda a: a.submit, default=None)
    phase = newest.phases[-1] if newest and newest.kind == "running" else None
    found = tuple(interruptions(jobs, logged))
    return Standing(
        attempts=sum(max((a.restarts or 0) for a in job.attempts) + 1 for job in jobs),
        notices=len({e.attempt for e in logged if e.event == "notice"}),
        phase=phase.name if phase else None,
        phase_s=max(0.0, (now - phase.start).total_seconds()) if phase else None,
        last_step=max((e.step for e in logged if e.event == "step" and e.step), default=None),
        last_durable_step=_last_commit(logged, local=False),
        last_local_step=_last_commit(logged, local=True),
        steps_lost=sum(one.steps_lost or 0 for one in found),
        failed_saves=sum(e.event == "save_failed" and e.rank == "0" for e in logged),
        interruptions=found,
    )


def _last_commit(logged: Sequence[Event], *, local: bool) -> int | None:
    found: list[int] = []
    for event in logged:
        if event.event == "restore_end" and event.rank == "0":
            restored = event.step if event.step is not None else -1
            found = [] if local else [step for step in found if step <= restored]
        here = (event.data.get("tier") == "local") == local
        if event.event == "commit" and event.step is not None and here:
            found.append(event.step)
    return max(found, default=None)


def line(now: Standing) -> str:
    """It in one line, for someone who watches."""
    words = []
    if now.phase is not None:
        words.append(f"{now.phase} for {duration(now.phase_s)}")
    if now.last_step is not None:
        words.append(f"step {now.last_step:,}")
        words.append(f"{now.steps_at_risk:,} not yet durable")
    count = len(now.interruptions)
    if count:
        words.append(f"{count} interruption{'s' * (count > 1)}, {now.steps_lost:,} steps lost")
    return " · ".join(words)
