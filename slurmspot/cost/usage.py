"""Where the time and the bytes of a run went, each second in one place only.

The useful work, and five terms that reduce what spot saves:

=============  ====================================================================================
``useful``     training steps that no earlier attempt had run
``running``    GPUs held without training: starting, importing, restoring, leaving, ending
``checkpoint`` training that waited for a snapshot, saves on notice; bytes kept and moved
``repeated``   training steps done again, because they were lost
``waiting``    no GPU counted: until Slurm has cleaned up after an attempt, backoff and queue
``failures``   attempts that made no new step, and the manual work for what did not come back
=============  ====================================================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from slurmspot.events import Event
from slurmspot.timeline.attempts import Attempt, Job
from slurmspot.timeline.lives import Life, chains, moment
from slurmspot.timeline.phases import divided
from slurmspot.timeline.recovery import interruptions

TERMS = ("useful", "running", "checkpoint", "repeated", "waiting", "failures")
"""The useful work, and the five terms."""

_TERM_OF = {
    "backoff": "waiting", "queue": "waiting", "release": "waiting",
    "train": "useful", "run": "useful", "repeat": "repeated",
    "notice": "checkpoint", "snapshot": "checkpoint", "save": "checkpoint",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one attempt used.

    Attributes:
        user: who submitted it; with ``partition`` and ``job_id``, what bills are told apart by.
        gpus: None where accounting does not say.
        seconds: of wall time, by term; ``waiting`` holds no GPU.
        written_gib: of checkpoints that became durable on the remote tier.
        read_gib: of those that were restored, as far as their size was logged.
        failures: interruptions that the run did not come back from, each a person's work.
        logged: an event log divided it; without one all running time counts as useful.
    """

    job_id: str
    user: str
    partition: str
    gpu_type: str
    gpus: int | None
    seconds: dict[str, float] = field(default_factory=dict)
    written_gib: float = 0.0
    read_gib: float = 0.0
    failures: int = 0
    logged: bool = False


def usages(
    jobs: Sequence[Job], events: Iterable[Event] = (), *, now: datetime | None = None
) -> list[Usage]:
    """What every attempt of ``jobs`` used.

    Args:
        events: of the run that all jobs belong to; without any, each job is work of its own.
        now: counts attempts that still run up to here; without it they count nothing.
    """
    events = tuple(events)
    groups = [jobs] if events else [[job] for job in jobs]
    return [one for group in groups for one in _of_one_work(group, events, now)]


def _of_one_work(jobs: Sequence[Job], events: Sequence[Event], now: datetime | None) -> list[Usage]:
    found = chains(jobs, events)
    idle = _idle(found)
    sizes = _sizes(events)
    lives = {
        (life.job_id, row.index): life for chain in found for life in chain for row in life.rows
    }
    over = not any(a.kind in {"running", "pending"} for job in jobs for a in job.attempts)
    lost = {
        (one.job_id, one.attempt)
        for one in interruptions(jobs, events)
        if over and not one.recovered and one.kind != "cancelled"  # which someone wanted
    }
    return [
        _usage(
            job,
            attempt,
            lives.get((job.job_id, attempt.index)),
            idle=(job.job_id, attempt.index) in idle,
            lost=(job.job_id, attempt.index) in lost,
            sizes=sizes,
            now=now,
        )
        for job in (divided(jobs, events) if events else jobs)
        for attempt in job.attempts
    ]


def _idle(found: Iterable[Sequence[Life]]) -> set[tuple[str, int]]:
    """Attempts that ended without a step that no earlier one had run."""
    idle: set[tuple[str, int]] = set()
    for chain in found:
        furthest = 0
        for life in chain:
            reached = life.last_step or 0
            done = life.first("finished") is not None or life.gone is None
            if life.lead is not None and reached <= furthest and not done:
                idle.update((life.job_id, row.index) for row in life.rows)
            furthest = max(furthest, reached)
    return idle


def _sizes(events: Iterable[Event]) -> dict[int, float]:
    """GiB of the checkpoint of each step."""
    pieces: dict[int, dict[str, float]] = {}
    for event in events:
        if event.event == "persist_end" and event.step is not None:
            pieces.setdefault(event.step, {})[event.rank] = _gib(event)
    return {step: sum(by_rank.values()) for step, by_rank in pieces.items()}


def _gib(event: Event) -> float:
    return _seconds(event, "size_bytes") / 2**30


def _seconds(event: Event, name: str) -> float:
    value = event.data.get(name)
    return max(0.0, float(value)) if isinstance(value, int | float) else 0.0


def _usage(
    job: Job,
    attempt: Attempt,
    life: Life | None,
    *,
    idle: bool,
    lost: bool,
    sizes: Mapping[int, float],
    now: datetime | None,
) -> Usage:
    logged = life is not None and life.lead is not None
    seconds = dict.fromkeys(TERMS, 0.0)
    for phase in attempt.phases:
        end = phase.end or now
        length_s = 0.0 if end is None else max(0.0, (end - phase.start).total_seconds())
        term = _TERM_OF.get(phase.name, "running")
        seconds["failures" if idle and term != "waiting" else term] += length_s
    mine = _own_events(life, attempt) if life is not None else []
    stalls = (_seconds(event, "stall_s") for event in mine if _stalls(event, life))
    for term, length_s in (("running", attempt.suspended_s), ("checkpoint", sum(stalls))):
        moved_s = min(length_s, seconds["useful"])
        seconds["useful"] -= moved_s
        seconds[term] += moved_s
    return Usage(
        job_id=job.job_id,
        user=job.user,
        partition=attempt.partition,
        gpu_type=attempt.gpu_type,
        gpus=attempt.gpus,
        seconds=seconds,
        written_gib=sum(_gib(event) for event in mine if event.event == "persist_end"),
        read_gib=next(
            (sizes.get(e.step, 0.0) for e in mine if e.event == "restore_end" and e.step), 0.0
        ),
        failures=int(lost),
        logged=logged,
    )


def _stalls(event: Event, life: Life | None) -> bool:
    """Whether training waited for a snapshot; the one on notice is a phase of its own."""
    if event.event != "snapshot_end" or life is None or event.rank != life.lead:
        return False
    return life.agreed is None or event.step != life.agreed.step


def _own_events(life: Life, attempt: Attempt) -> list[Event]:
    """Of a life that was resized, the events from the time of one of its rows."""
    if len(life.rows) == 1:
        return list(life.events)
    first, last = attempt.index == life.rows[0].index, attempt.index == life.rows[-1].index
    start, end = attempt.start or attempt.submit, attempt.process_exit
    return [
        event
        for event in life.events
        if (first or moment(event) >= start) and (last or end is None or moment(event) < end)
    ]
