"""When Slurm took a node for gone: what ``sacctmgr show event`` prints.

Slurm's database keeps a record of every stretch in which a node was down. It says when the
controller took the node for gone, which for a silent node is up to ``SlurmdTimeout`` late, and it
says nothing of a node that went away and came back unnoticed.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, tzinfo

from slurmspot.timeline.times import Times

FIELDS = ("NodeName", "TimeStart", "TimeEnd", "State", "Reason")
"""What to ask for; the reason is last, since it may hold the delimiter."""

_GONE = "DOWN"  # also in POWERED_DOWN; a node that drains is still there


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """One stretch in which Slurm took a node for gone; ``end`` is None while it lasts."""

    node: str
    start: datetime
    end: datetime | None
    reason: str


def read_outages(text: str, *, tz: tzinfo | None = None) -> tuple[Outage, ...]:
    """The outages in ``sacctmgr --parsable2 --noheader show event`` with :data:`FIELDS`.

    Records of the cluster itself, of nodes that only drain, and broken lines are left out.

    Args:
        tz: the cluster's time zone; None means this machine's.
    """
    times, found = Times(tz), []
    for line in text.splitlines():
        cells = line.split("|", len(FIELDS) - 1)
        if len(cells) < len(FIELDS) or not cells[0] or _GONE not in cells[3]:
            continue
        try:
            starts, ends = times.read(cells[1]), times.read(cells[2])
        except ValueError:
            continue
        if starts:
            end = ends[-1] if ends else None
            found.append(Outage(node=cells[0], start=starts[0], end=end, reason=cells[4]))
    return tuple(sorted(found, key=lambda outage: outage.start))
