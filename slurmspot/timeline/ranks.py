"""What each rank and each node did in each attempt: who was slow, who wrote how much."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from slurmspot.events import Event
from slurmspot.timeline.lives import INJECTOR, by_attempt, elapsed_s, is_step, moment


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One rank, or all ranks of one node, in one attempt. None means: not logged.

    Attributes:
        attempt: its name, job id and restart (``17-0``).
        rank: empty for a node.
        started: when the (first) process was there.
        imports_s: from there until the script was ready; of a node's ranks, the slowest.
        restore_s: the longest of them, as are ``stall_s`` and ``persist_s``.
        stall_s: how long training waited for snapshots, in all.
        persist_s: how long writing took, in all.
        written_bytes: of checkpoints, in all.
        last_step: the highest step run.
        exit_code: the highest; None if one was killed.
    """

    attempt: str
    rank: str
    host: str
    started: datetime
    imports_s: float | None
    restore_s: float | None
    stall_s: float
    persist_s: float
    written_bytes: int
    last_step: int | None
    exit_code: int | None


def by_rank(events: Iterable[Event]) -> list[Part]:
    """Every rank of every attempt, in order of time and rank."""
    found: list[Part] = []
    for name, logged in by_attempt(events).items():
        if name == INJECTOR:
            continue
        ranks: dict[str, list[Event]] = {}
        for event in logged:
            if event.rank.isdecimal():
                ranks.setdefault(event.rank, []).append(event)
        found += [_part(name, rank, ranks[rank]) for rank in sorted(ranks, key=int)]
    return found


def by_node(parts: Iterable[Part]) -> list[Part]:
    """The same by node, in the same order."""
    nodes: dict[tuple[str, str], list[Part]] = {}
    for part in parts:
        nodes.setdefault((part.attempt, part.host), []).append(part)
    return [_together(members) for members in nodes.values()]


def _part(name: str, rank: str, logged: Sequence[Event]) -> Part:
    first = {event.event: event for event in reversed(logged)}
    start = first.get("attempt_start", logged[0])
    return Part(
        attempt=name,
        rank=rank,
        host=str(start.data.get("host") or "-"),
        started=moment(start),
        imports_s=_between(first, "attempt_start", "imports_done"),
        restore_s=_between(first, "restore_begin", "restore_end"),
        stall_s=_sum(logged, "snapshot_end", "stall_s"),
        persist_s=_sum(logged, "persist_end", "seconds"),
        written_bytes=round(_sum(logged, "persist_end", "size_bytes")),
        last_step=max((event.step or 0 for event in logged if is_step(event)), default=None),
        exit_code=_exit_code(first.get("exit")),
    )


def _exit_code(event: Event | None) -> int | None:
    code = None if event is None else event.data.get("code")
    return code if isinstance(code, int) else None


def _between(first: Mapping[str, Event], since: str, until: str) -> float | None:
    if since not in first or until not in first:
        return None
    return elapsed_s(first[since], first[until])


def _sum(logged: Iterable[Event], name: str, what: str) -> float:
    values = (event.data.get(what) for event in logged if event.event == name)
    return float(sum(value for value in values if isinstance(value, int | float)))


def _together(members: Sequence[Part]) -> Part:
    def most(get: Callable[[Part], float | None]) -> float | None:
        return max((value for value in map(get, members) if value is not None), default=None)

    steps = [part.last_step for part in members if part.last_step is not None]
    codes = [part.exit_code for part in members]
    known = [code for code in codes if code is not None]
    return Part(
        attempt=members[0].attempt,
        rank="",
        host=members[0].host,
        started=min(part.started for part in members),
        imports_s=most(lambda part: part.imports_s),
        restore_s=most(lambda part: part.restore_s),
        stall_s=max(part.stall_s for part in members),
        persist_s=max(part.persist_s for part in members),
        written_bytes=sum(part.written_bytes for part in members),
        last_step=max(steps, default=None),
        exit_code=max(known) if len(known) == len(codes) else None,
    )
