"""What the history of runs tells of the conditions that a plan is made for.

A mean over all runs asked is given where costs add up (stall, durable, restart), the median for a
step, the shortest for the window of a notice. What no run tells is absent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from statistics import fmean, median

from slurmspot.cost.usage import usages
from slurmspot.events import Event
from slurmspot.timeline.attempts import Job
from slurmspot.timeline.lives import Life, chains, elapsed_s
from slurmspot.timeline.recovery import WANTED, Interruption, breakdown

_NOT_RESTARTING = frozenset({"repeat", "notice", "snapshot", "save"})  # terms of their own
_WAITING = frozenset({"release", "between", "backoff", "queue"})  # no GPU is held


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A value and who says so."""

    value: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What one run tells; of each length of time in seconds, all that were seen.

    Attributes:
        stall_s: of periodic checkpoints, on the rank that waited longest.
        durable_s: from the end of the stall until they were durable, on the remote tier if there.
        notice_save_s: from the agreed step until a checkpoint on notice was durable.
        window_s: what notices left.
        restart_s: from the last step before an interruption to the first new one after it, without
            steps done again and without the save on notice.
        wait_s: of that, while no GPU was held.
        step_s: steps of training, as far apart as they were logged.
        held_s: capacity was held for so long.
        interruptions: but for those that someone wanted, and time limits.
        noticed: of these, with a notice; ``injected`` those made on purpose.
        gpus: as of its last attempt; None where accounting does not say.
        gpu_type: as AllocTRES names it; empty where it does not.
    """

    stall_s: tuple[float, ...] = ()
    durable_s: tuple[float, ...] = ()
    notice_save_s: tuple[float, ...] = ()
    window_s: tuple[float, ...] = ()
    restart_s: tuple[float, ...] = ()
    wait_s: tuple[float, ...] = ()
    step_s: tuple[float, ...] = ()
    held_s: float = 0.0
    interruptions: int = 0
    noticed: int = 0
    injected: int = 0
    gpus: int | None = None
    gpu_type: str = ""


def observe(
    jobs: Sequence[Job], events: Sequence[Event], interruptions: Iterable[Interruption]
) -> Observed:
    """What the history of one run tells.

    Args:
        jobs: divided by the event log, see :func:`slurmspot.timeline.phases.divided`.
        events: of the run; without any only its interruptions are seen.
        interruptions: of the run.
    """
    lives = [life for chain in chains(jobs, events) for life in chain]
    taken = [one for one in interruptions if one.kind not in WANTED]
    saves = [save for life in lives for save in _periodic_saves(life)]
    down = [parts for one in taken if (parts := breakdown(one, jobs))]
    warned = [life.notice for life in lives if life.notice is not None]
    used = usages(jobs, events)
    attempts = [attempt for job in jobs for attempt in job.attempts if attempt.gpus]
    return Observed(
        stall_s=tuple(stall_s for stall_s, _ in saves),
        durable_s=tuple(durable_s for _, durable_s in saves if durable_s is not None),
        notice_save_s=tuple(_between(taken, "agreed", "durable")),
        window_s=tuple(window_s for event in warned if (window_s := _number(event, "window_s"))),
        restart_s=tuple(_sum(parts, parts.keys() - _NOT_RESTARTING) for parts in down),
        wait_s=tuple(_sum(parts, _WAITING) for parts in down),
        step_s=tuple(step_s for life in lives for step_s in _steps(life)),
        held_s=sum(
            seconds for one in used for term, seconds in one.seconds.items() if term != "waiting"
        ),
        interruptions=len(taken),
        noticed=sum(one.notice for one in taken),
        injected=sum(one.inject is not None for one in taken),
        gpus=attempts[-1].gpus if attempts else None,
        gpu_type=attempts[-1].gpu_type if attempts else "",
    )


def pooled(runs: Mapping[str, Observed]) -> dict[str, Known]:
    """What several runs tell together: ``gpus``, and what else has a name in ``Conditions``.

    Args:
        runs: by the name to call each by.
    """
    found = {
        **_lengths(runs, "stall_s", fmean, "checkpoint"),
        **_lengths(runs, "durable_s", fmean, "checkpoint"),
        **_lengths(runs, "notice_save_s", fmean, "save"),
        **_lengths(runs, "window_s", min, "notice"),
        **_lengths(runs, "restart_s", fmean, "restart"),
        **_lengths(runs, "wait_s", fmean, "restart"),
        **_lengths(runs, "step_s", median, "interval"),
    }
    every = list(runs.values())
    sizes = {one.gpus for one in every}
    if len(sizes) == 1 and None not in sizes:
        found["gpus"] = Known(value=float(sizes.pop() or 0), source=_source(runs))
    hits = sum(one.interruptions for one in every)
    held_s = sum(one.held_s for one in every)
    if hits:
        injected = sum(one.injected for one in every)
        made = f", {injected} of them injected" if injected else ""
        source = _source(runs, f"{_count(hits, 'interruption')}{made}")
        share = sum(one.noticed for one in every) / hits
        found["notice_share"] = Known(value=share, source=source)
        if held_s:
            found["mtbi_s"] = Known(value=held_s / hits, source=source)
    return found


def _lengths(
    runs: Mapping[str, Observed], name: str, together: Callable[[Sequence[float]], float], what: str
) -> dict[str, Known]:
    """One entry, or none if no run has seen any."""
    seen: dict[str, Sequence[float]] = {run: getattr(one, name) for run, one in runs.items()}
    values = [value for some in seen.values() for value in some]
    if not values:
        return {}
    source = _source([run for run, some in seen.items() if some], _count(len(values), what))
    return {name: Known(value=together(values), source=source)}


def _source(runs: Iterable[str], words: str = "") -> str:
    return f"measured in {', '.join(runs)}" + (f": {words}" if words else "")


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _periodic_saves(life: Life) -> Iterator[tuple[float, float | None]]:
    """The stall of each, and how long after it it was durable; None if it never was."""
    begun: dict[int, Event] = {}
    for event in life.all("snapshot_begin"):
        if event.data.get("trigger") == "period" and event.step is not None:
            begun.setdefault(event.step, event)
    ended = life.all("snapshot_end")
    commits = life.all("commit")
    for step, begin in begun.items():
        waits = [_number(event, "stall_s") for event in ended if event.step == step]
        stalls = [stall_s for stall_s in waits if stall_s is not None]
        if not stalls:
            continue
        mine = [commit for commit in commits if commit.step == step]
        remote = [commit for commit in mine if commit.data.get("tier") == "remote"]
        stall_s = max(stalls)
        commit = next(iter(remote or mine), None)
        after_s = None if commit is None else max(0.0, elapsed_s(begin, commit) - stall_s)
        yield stall_s, after_s


def _steps(life: Life) -> Iterator[float]:
    """Seconds a step, between those that the lead rank logged."""
    logged = [event for event in life.steps if event.rank == life.lead]
    for before, after in pairwise(logged):
        steps = (after.step or 0) - (before.step or 0)
        if steps > 0 and after.mono_ns > before.mono_ns:
            yield (after.mono_ns - before.mono_ns) / 1e9 / steps


def _between(ended: Iterable[Interruption], since: str, until: str) -> Iterator[float]:
    for one in ended:
        begin: datetime | None = one.moments.get(since)
        end: datetime | None = one.moments.get(until)
        if begin is not None and end is not None:
            yield max(0.0, (end - begin).total_seconds())


def _sum(parts: Mapping[str, float], names: Iterable[str]) -> float:
    return sum(parts.get(name, 0.0) for name in names)


def _number(event: Event, name: str) -> float | None:
    value = event.data.get(name)
    return float(value) if isinstance(value, int | float) and value >= 0 else None
