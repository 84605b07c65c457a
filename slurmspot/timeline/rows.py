"""What sacct keeps: a row for each attempt of a job, and one for each of its steps."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

IDENTITY = ("jobname", "user", "uid", "submitline", "workdir")
"""Fields whose values cannot change between attempts of one job."""

_GPUS = re.compile(r"gres/gpu(?::(?P<type>[^=,]+))?=(?P<count>\d+)")


Gpus = tuple[int | None, str]

JobKey = str | tuple[str, str]
"""What tells jobs apart: the id; with the cluster before it, where that is known."""


class Row(NamedTuple):
    """One record of sacct about a job: one of its attempts. A tuple, for there may be millions.

    Attributes:
        line: the line of the text that the record begins on, from 1; in JSON, its number there.
        job_id: as sacct prints it (``17``, ``7_0``, ``7_[2-5]``, ``33+0``).
        state: the first word of State (``CANCELLED``, not ``CANCELLED by 0``).
        gpus: GPUs allocated, None where sacct was not asked for AllocTRES; and their type, empty
            where it has none, several joined by ``+``.
        restarts: how often the job had been requeued before; None where sacct does not say.
        suspended_s: how long it stood still.
        identity: what cannot change between attempts of one job, a value for each of
            :data:`IDENTITY`, empty where it is not known.
    """

    line: int
    job_id: str
    name: str
    state: str
    submit: datetime
    eligible: datetime | None
    start: datetime | None
    end: datetime | None
    nodes: tuple[str, ...]
    gpus: Gpus
    cluster: str
    user: str
    partition: str
    restarts: int | None
    suspended_s: float
    identity: tuple[str, ...]


Step = tuple[datetime, datetime | None, int, int]
"""Steps of a job that began together: their start, the last end that is known, the first line and
the last on which they stand. One alone stands on one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedRow:
    """A record that could not be understood: where it begins, why, and what it says."""

    line: int
    reason: str
    text: str


@dataclass(slots=True, kw_only=True)
class Rows:
    """Everything an export of sacct holds, by cluster and job id.

    Attributes:
        repeated: the lines of records with a time in the hour that clocks repeat.
        text_of: what the export says on a line.
    """

    heads: defaultdict[JobKey, list[Row]] = field(default_factory=lambda: defaultdict(list))
    steps: defaultdict[JobKey, list[Step]] = field(default_factory=lambda: defaultdict(list))
    rejected: list[RejectedRow] = field(default_factory=list)
    repeated: list[int] = field(default_factory=list)
    text_of: Callable[[int], str] = lambda line: f"row {line}"

    def drop(self, lines: set[int]) -> set[int]:
        """Leave out what begins on one of ``lines``.

        Returns:
            lines of steps that were left out with those, and have to be read again.
        """
        again: set[int] = set()
        for owner, rows in list(self.heads.items()):
            rows[:] = [row for row in rows if row.line not in lines]
            if not rows:
                del self.heads[owner]
        for steps in self.steps.values():
            kept = []
            for step in steps:
                mine = range(step[2], step[3] + 1)
                if lines.isdisjoint(mine):
                    kept.append(step)
                else:
                    again.update(mine)
            steps[:] = kept
        return again - lines


def key(cluster: str, job_id: str) -> JobKey:
    """The key of a job."""
    return (cluster, job_id) if cluster else job_id


def gpus(tres: str) -> Gpus:
    """GPUs of an AllocTRES. Where the untyped total stands, the typed counts are its parts."""
    return counted((match["type"] or "", int(match["count"])) for match in _GPUS.finditer(tres))


def counted(found: Iterable[tuple[str, int]]) -> Gpus:
    """The number and type of GPUs, from the count of each type; the total has an empty type."""
    counts = dict(found)
    kinds = "+".join(sorted(filter(None, counts)))
    return counts[""] if "" in counts else sum(counts.values()), kinds


def state(text: str) -> str:
    """The state alone, of ``CANCELLED by 0`` or a name that sacct cut short."""
    return text.partition(" ")[0].removesuffix("+")


def id_of(owner: JobKey) -> str:
    """The job id in a key."""
    return owner if isinstance(owner, str) else owner[1]
