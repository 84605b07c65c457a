"""How far the clocks of nodes are apart, and events as if they were not.

Ranks that agree on a step, or begin to save the same one, do so at the same moment: a collective
has just ended on all of them. How much later one node's clock reads at such moments is how far it
is ahead. The median over all of them is the estimate, and how they scatter its uncertainty.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from slurmspot.events import Event

_TOGETHER = frozenset({"agreed", "snapshot_begin"})
_LEAST_S = 0.05  # what is less is not told from the time that a collective takes to end


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockDifference:
    """How far the clock of a node is ahead of another's.

    Attributes:
        host: the node; ``against`` the one it is compared with, that of the lowest rank.
        seconds: how far it is ahead; negative if it is behind.
        spread_s: half of the moments say so within this.
        moments: how many there were.
    """

    host: str
    against: str
    seconds: float
    spread_s: float
    moments: int

    @property
    def certain(self) -> bool:
        """Whether it is more than the scatter and the time of a collective explain."""
        return abs(self.seconds) > max(_LEAST_S, 3 * self.spread_s)

    def __str__(self) -> str:
        way = "ahead of" if self.seconds > 0 else "behind"
        return (
            f"the clock of {self.host} is {abs(self.seconds):.2f} s {way} that of {self.against} "
            f"(± {self.spread_s:.2f} s, from {self.moments} moments)"
        )


def differences(events: Sequence[Event]) -> list[ClockDifference]:
    """The clock of every node against that of the lowest rank's, by name of the node."""
    hosts = hosts_of(events)
    together: dict[tuple[str, str, int], dict[str, Event]] = defaultdict(dict)
    for event in events:
        if event.event in _TOGETHER and event.step is not None:
            together[event.attempt, event.event, event.step].setdefault(event.rank, event)
    apart: dict[tuple[str, str], list[float]] = defaultdict(list)
    for (attempt, _, _), by_rank in together.items():
        ranks = sorted((rank for rank in by_rank if (attempt, rank) in hosts), key=int)
        for rank in ranks[1:]:
            pair = hosts[attempt, rank], hosts[attempt, ranks[0]]
            if pair[0] != pair[1]:
                apart[pair].append((by_rank[rank].t_ns - by_rank[ranks[0]].t_ns) / 1e9)
    return [
        ClockDifference(
            host=host,
            against=against,
            seconds=middle,
            spread_s=median(abs(second - middle) for second in seconds),
            moments=len(seconds),
        )
        for (host, against), seconds in sorted(apart.items())
        for middle in [median(seconds)]
    ]


def in_step(events: Sequence[Event], found: Iterable[ClockDifference]) -> list[Event]:
    """The events, with those of nodes whose clock is certainly off moved to the others' time."""
    ahead_ns = {one.host: round(one.seconds * 1e9) for one in found if one.certain}
    if not ahead_ns:
        return list(events)
    hosts = hosts_of(events)
    moved = (
        replace(
            event, t_ns=event.t_ns - ahead_ns.get(hosts.get((event.attempt, event.rank), ""), 0)
        )
        for event in events
    )
    return sorted(moved, key=lambda event: event.t_ns)


def hosts_of(events: Iterable[Event]) -> dict[tuple[str, str], str]:
    """The node of each rank, by attempt name and rank."""
    return {
        (event.attempt, event.rank): str(event.data["host"])
        for event in events
        if event.event == "attempt_start" and event.data.get("host") and event.rank.isdecimal()
    }
