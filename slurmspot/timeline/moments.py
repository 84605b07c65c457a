"""The moments of an interruption, from the last step before it to the first new one after it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import islice
from operator import attrgetter

from slurmspot.events import Event
from slurmspot.timeline.lives import Life, moment
from slurmspot.timeline.outages import Outage

MOMENTS = (
    *("last_step", "notice", "agreed", "snapshot", "durable", "processes_gone", "node_gone"),
    *("requeued", "eligible", "started", "imports_done", "restored", "new_step"),
)
"""In the order in which they mostly come.

==================  ===============================================================================
``last_step``       the last step before the interruption was done
``notice``          the first rank was warned
``agreed``          all ranks agreed on a step to save at
``snapshot``        that step was copied, on the last rank
``durable``         its checkpoint was committed, on the remote tier if it got there
``processes_gone``  the last process had ended
``node_gone``       Slurm took the first of its nodes for gone; absent where none went away
``requeued``        the job was submitted again: killed, cleaned up after, its nodes given back
``eligible``        its backoff was over
``started``         the next attempt was started
``imports_done``    its script was ready to open the run
``restored``        its checkpoint was loaded and verified
``new_step``        the first step was done that no attempt had run before, or the run was finished
==================  ===============================================================================
"""

_begin = attrgetter("start")
_LONGEST_S = 3600.0  # no window is longer
_LATE = timedelta(seconds=60)  # a machine may outlive the window of its notice a little


def moments(
    life: Life,
    future: Sequence[Life],
    *,
    last_step: Event | None,
    new_step: Event | None,
    outages: Sequence[Outage] = (),
) -> dict[str, datetime]:
    """Those of :data:`MOMENTS` that are known.

    Args:
        life: the one that was interrupted; ``future`` those that came after it.
        last_step, new_step: between which the interruption lies.
        outages: what Slurm's database knows of nodes, in order of time.
    """
    after = future[0].rows[0] if future else None
    found = {
        "last_step": _time(last_step),
        "notice": _time(life.notice),
        "agreed": _time(life.agreed),
        "snapshot": _time(life.copied),
        "durable": _time(next(reversed(life.rescues), None)),
        "processes_gone": _processes_gone(life),
        "node_gone": _node_gone(life, future, outages),
        "requeued": after and after.submit,
        "eligible": after and after.start and max(after.eligible or after.submit, after.submit),
        "started": after and after.start,
        "imports_done": _first(future, lambda next_: next_.own("imports_done")),
        "restored": _first(future, lambda next_: next_.own("restore_end")),
        "new_step": _time(new_step),
    }
    return {name: time for name, time in found.items() if time is not None}


def since_first(found: Mapping[str, datetime]) -> list[tuple[str, datetime, float]]:
    """Each moment with the seconds since the earliest, in order of time."""
    ordered = sorted(found.items(), key=lambda item: item[1])
    return [(name, time, (time - ordered[0][1]).total_seconds()) for name, time in ordered]


def _time(event: Event | None) -> datetime | None:
    return None if event is None else moment(event)


def _first(future: Iterable[Life], find: Callable[[Life], Event | None]) -> datetime | None:
    return next((moment(event) for event in map(find, future) if event is not None), None)


def _processes_gone(life: Life) -> datetime | None:
    """As sacct says, which leaves out fractions of a second; no rank has logged after it went."""
    if life.gone is None:
        return None
    last = next((event for event in reversed(life.events) if event.rank.isdecimal()), None)
    return life.gone if last is None else max(life.gone, moment(last))


def _node_gone(life: Life, future: Sequence[Life], outages: Sequence[Outage]) -> datetime | None:
    """When the first node of a life went away: while it ran, or as long as that can be why.

    A machine that was announced to go away may do so after the job has left it.
    """
    nodes = {node for row in life.rows for node in row.nodes}
    until = life.gone or datetime.max.replace(tzinfo=life.start.tzinfo)
    if life.gone and life.notice is not None:
        window = life.notice.data.get("window_s")
        window_s = min(_LONGEST_S, window) if isinstance(window, int | float) else 0.0
        until = max(until, moment(life.notice) + timedelta(seconds=window_s) + _LATE)
    back = next((run.start for run in future if not nodes.isdisjoint(run.rows[0].nodes)), None)
    until = until if back is None else min(until, back)
    first = bisect_left(outages, life.start, key=_begin)
    last = bisect_right(outages, until, key=_begin)
    for outage in islice(outages, first, last):
        if outage.node in nodes:
            return outage.start
    return life.rows[-1].end if life.kind == "node_fail" else None
