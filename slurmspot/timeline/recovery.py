"""What each interruption cost, and whether the run came back from it.

Words: *steps lost* is the last step run minus the step restored; *RPO* the training time those
steps took; *RTO* the time from the last step before the interruption to the first *new* step after
it, one that no attempt had run before. Clocks of different hosts differ, so no duration here is
ever negative, and what happened within one process is measured on its monotonic clock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

from slurmspot.events import Event
from slurmspot.timeline.attempts import Attempt, Job
from slurmspot.timeline.lives import INJECTOR, Life, chains, elapsed_s, is_step, moment
from slurmspot.timeline.moments import moments
from slurmspot.timeline.outages import Outage

WANTED = frozenset({"cancelled", "timeout"})
"""Kinds of interruptions that say nothing about capacity: a person or the time limit ended it."""

_INJECTION_SLACK = timedelta(seconds=5)
_SAVED = 75  # exit codes from here on ask for another attempt
_KILLED = 128  # a shell's exit code for death by signal N is 128 + N


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """The end of an attempt before the work was done. None means: cannot be known.

    Attributes:
        job_id: with ``attempt``, the index of the attempt of sacct that it ended.
        kind: ``preemption``, ``node_fail``, ``killed``, ``timeout``, ``requeued``, ``cancelled``,
            ``failed``, or ``exited`` (ended well in Slurm's eyes, but was not done).
        at_step: the last step run before it.
        notice: the run was warned.
        recovered: a later attempt ran a step that no earlier one had run, or finished.
        notice_to_durable_s: first notice on any rank → the checkpoint it led to is durable.
        notice_to_exit_s: first notice → the last process gone.
        requeue_wait_s: next attempt submitted → started (backoff and queue).
        inject: the injector's event, if one caused it.
        moments: those of :data:`slurmspot.timeline.moments.MOMENTS` that are known.
    """

    job_id: str
    attempt: int
    kind: str
    at_step: int | None
    notice: bool
    recovered: bool
    steps_lost: int | None
    rpo_s: float | None
    rto_s: float | None
    notice_to_durable_s: float | None
    notice_to_exit_s: float | None
    requeue_wait_s: float | None
    inject: Event | None
    moments: Mapping[str, datetime] = field(default_factory=dict)

    @property
    def down_at(self) -> datetime | None:
        """When the last step before it was done."""
        return self.moments.get("last_step")

    @property
    def back_at(self) -> datetime | None:
        """When the first new step after it was done."""
        return self.moments.get("new_step")

    def as_json(self) -> dict[str, Any]:
        """Plain values, times in ISO 8601; ``injected`` names what was done on purpose."""
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "inject"}
        return {
            **values,
            "moments": {name: time.isoformat() for name, time in self.moments.items()},
            "injected": self.inject.data.get("kind") if self.inject else None,
        }


def interruptions(
    jobs: Sequence[Job], events: Iterable[Event] = (), outages: Sequence[Outage] = ()
) -> list[Interruption]:
    """Every attempt after which the run was not finished, in order of time for each job.

    One that ended by a fault of its own before it had run a step interrupted nothing and is left
    out; see :func:`false_starts`. All jobs are taken to carry on the same training, as those of one
    run do. For jobs that have nothing to do with one another see :func:`of_each`.

    Args:
        outages: what Slurm's database knows of nodes, in order of time.
    """
    events = tuple(events)
    causes = _Causes(events)
    return [
        one
        for chain in chains(jobs, events)
        for one in _of_chain(chain[: _unfinished(chain)], chain, causes, outages)
    ]


def of_each(jobs: Iterable[Job], outages: Sequence[Outage] = ()) -> list[Interruption]:
    """The interruptions of jobs that have nothing to do with one another, as in an export."""
    return [one for job in jobs for one in interruptions([job], outages=outages)]


def false_starts(jobs: Sequence[Job], events: Iterable[Event] = ()) -> int:
    """How many attempts ended by a fault of their own before they had run a step."""
    found = chains(jobs, tuple(events))
    return sum(_never_began(life) for chain in found for life in chain[: _unfinished(chain)])


def ended_as(attempt: Attempt, one: Interruption | None) -> str:
    """How an attempt ended, in words: what sacct says, and what the event log knows better.

    Args:
        one: the interruption that it ended in, if it is one.
    """
    if one is None:
        return attempt.kind.replace("_", " ")
    better = {"preemption": "preempted", "killed": "killed"}.get(one.kind, attempt.kind)
    return better.replace("_", " ") + (", saved" if "durable" in one.moments else "")


def breakdown(one: Interruption, jobs: Sequence[Job]) -> dict[str, float]:
    """The seconds of each phase between an interruption's last step and its first new one.

    Args:
        jobs: divided by the event log, see :func:`slurmspot.timeline.phases.divided`; of those,
            all that carry on the same training.

    Returns:
        Seconds by phase, in order of time; ``between`` is what lies between two attempts. Their
        sum is the RTO, but for clocks that disagree. Empty if the run did not come back.
    """
    if one.down_at is None or one.back_at is None:
        return {}
    parts: dict[str, float] = {}
    seen = one.down_at
    phases = (p for job in jobs for a in job.attempts for p in a.phases)
    for phase in sorted(phases, key=lambda phase: phase.start):
        since, until = max(phase.start, seen), min(phase.end or one.back_at, one.back_at)
        if until > since:
            if since > seen:
                parts["between"] = parts.get("between", 0.0) + (since - seen).total_seconds()
            parts[phase.name] = parts.get(phase.name, 0.0) + (until - since).total_seconds()
            seen = until
    return parts


def finished(jobs: Sequence[Job], events: Iterable[Event] = ()) -> bool:
    """Whether the work of every line of training is done."""
    found = chains(jobs, events)
    return bool(found) and all(any(map(_is_final, chain)) for chain in found)


def given_up(jobs: Sequence[Job], events: Iterable[Event] = ()) -> bool:
    """Whether a line of training ended before its work was done, and Slurm will not go on."""
    return any(
        chain[-1].kind in {"failed", "cancelled", "timeout"} and not any(map(_is_final, chain))
        for chain in chains(jobs, events)
    )


def _unfinished(chain: Sequence[Life]) -> int:
    """How many lives of a chain ended before the work was done."""
    for index, life in enumerate(chain):
        if _is_final(life) or life.kind in {"running", "pending"}:
            return index
    return len(chain)


def _is_final(life: Life) -> bool:
    if life.lead is None:
        return life.kind == "completed"
    return life.first("finished") is not None


def _of_chain(
    ended: Sequence[Life],
    chain: Sequence[Life],
    causes: _Causes,
    outages: Sequence[Outage],
) -> Iterator[Interruption]:
    furthest, ran = 0, None
    for index, life in enumerate(ended):
        if _never_began(life):
            continue
        if life.steps:
            ran = life
            furthest = max(furthest, life.last_step or 0)
        notice, future = life.notice, chain[index + 1 :]
        last_step = _last_step(ran) if ran else None
        news = _first_news(future, furthest)
        restored = next((run.restored for run in future if run.restored is not None), None)
        lost, rpo_s = (None, None) if restored is None else _lost(chain[: index + 1], restored)
        yield Interruption(
            job_id=life.job_id,
            attempt=life.rows[-1].index,
            kind=_kind(life),
            at_step=ran.last_step if ran else None,
            notice=notice is not None,
            recovered=news is not None or any(_is_final(run) for run in future),
            steps_lost=lost,
            rpo_s=rpo_s,
            rto_s=elapsed_s(last_step, news) if last_step and news else None,
            notice_to_durable_s=_durable_s(life, notice) if notice else None,
            notice_to_exit_s=_exit_s(life, notice) if notice else None,
            requeue_wait_s=_wait_s(future),
            inject=causes.of(life, future),
            moments=moments(life, future, last_step=last_step, new_step=news, outages=outages),
        )


def _kind(life: Life) -> str:
    kind = {"preempted": "preemption", "completed": "exited"}.get(life.kind, life.kind)
    if kind not in {"requeued", "failed"} or life.lead is None:
        return kind
    if life.notice:
        return "preemption"
    codes = [event.data.get("exit_code") for event in life.all("requeue_asked")]
    died = any(isinstance(code, int) and code >= _KILLED for code in codes)
    return "killed" if died or not _all_left(life) else kind


def _never_began(life: Life) -> bool:
    """Whether its log tells of a fault of its own, such as a failed import, before any step."""
    kind = _kind(life)
    if kind == "requeued":  # by itself, since the ranks did not get started
        codes = [event.data.get("exit_code") for event in life.all("requeue_asked")]
        own = any(isinstance(code, int) and 0 < code < _SAVED for code in codes)
    else:
        own = kind in {"failed", "exited"}
    return own and life.lead is not None and not life.steps


def _all_left(life: Life) -> bool:
    """Whether every rank that began also said goodbye."""
    left = {event.rank for event in life.all("exit")}
    return all(event.rank in left for event in life.all("attempt_start"))


def _last_step(life: Life) -> Event:
    return max(life.steps, key=lambda event: (event.step or 0, event.t_ns))


def _first_news(future: Sequence[Life], furthest: int) -> Event | None:
    """The first step beyond ``furthest``, or the finish."""
    for life in future:
        for event in life.events:
            if event.event == "finished" or (is_step(event) and (event.step or 0) > furthest):
                return event
    return None


def _lost(past: Sequence[Life], restored: int) -> tuple[int, float]:
    """Steps run up to the end of ``past`` that a restore to ``restored`` undoes, and their time."""
    life = past[-1]
    reached = life.last_step if life.steps else life.restored
    if reached is None or reached <= restored:
        return 0, 0.0
    seconds, high = 0.0, reached
    for run in reversed(past):  # steps from before this life's own restore were run by earlier ones
        if high <= restored:
            break
        low = max(restored, run.restored or 0)
        if run.last_step is not None and low < min(high, run.last_step):
            seconds += _training_s(run, low, min(high, run.last_step))
            high = low
    return reached - restored, seconds


def _training_s(life: Life, low: int, high: int) -> float:
    """Seconds the lead rank took from step ``low`` to ``high``; between logged steps, linear."""
    lead = [event for event in life.events if event.rank == life.lead]
    points = [
        (event.step or 0, event.mono_ns)
        for event in lead
        if event.event == "restore_end" or is_step(event)
    ]
    points = sorted(dict(reversed(points)).items())

    def at_ns(step: int) -> float:
        for (step0, ns0), (step1, ns1) in pairwise(points):
            if step0 <= step <= step1:
                return ns0 + (ns1 - ns0) * (step - step0) / (step1 - step0)
        return points[0][1] if step < points[0][0] else points[-1][1]

    return max(0.0, (at_ns(high) - at_ns(low)) / 1e9) if points else 0.0


def _durable_s(life: Life, notice: Event) -> float | None:
    return max((elapsed_s(notice, commit) for commit in life.rescues), default=None)


def _exit_s(life: Life, notice: Event) -> float | None:
    if _all_left(life):
        return max((elapsed_s(notice, event) for event in life.all("exit")), default=None)
    if life.gone is None:
        return None
    return max(0.0, (life.gone - moment(notice)).total_seconds())


def _wait_s(future: Sequence[Life]) -> float | None:
    if not future:
        return None
    row = future[0].rows[0]
    return max(0.0, (future[0].start - row.submit).total_seconds())


class _Causes:
    """The injections of a run, to find the one behind an interruption."""

    def __init__(self, events: Iterable[Event]) -> None:
        injected = (e for e in events if e.attempt == INJECTOR and e.event == "inject")
        self._events = sorted(injected, key=lambda event: event.t_ns)
        self._times = [moment(event) for event in self._events]

    def of(self, life: Life, future: Sequence[Life]) -> Event | None:
        """The last one within the life; a little after it, if no other has begun by then."""
        ends = [life.gone + _INJECTION_SLACK] if life.gone else []
        until = min([*ends, *(run.start for run in future[:1])], default=None)
        last = len(self._times) if until is None else bisect_right(self._times, until)
        found = last > 0 and self._times[last - 1] >= life.start
        return self._events[last - 1] if found else None
