"""Divides the run of each attempt by what the run logged.

::

    startup   Slurm started the job → first process there        (srun, the container)
    imports   → the training script is ready to make its run
    setup     → it begins to restore                             (process groups)
    restore   → the checkpoint is loaded and verified
    repeat    → the first step that no earlier attempt had run   (steps done again)
    train     → a notice, the finish, or the end
    notice    → all ranks agree on a step to save at
    snapshot  → that step is copied
    save      → that checkpoint is durable
    exit      → Slurm says that the attempt is over
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from itertools import pairwise

from slurmspot.events import Event
from slurmspot.timeline.attempts import Attempt, Job, Phase
from slurmspot.timeline.lives import Life, chains, moment

ORDER = (
    *("startup", "imports", "setup", "restore", "repeat", "train"),
    *("notice", "snapshot", "save", "exit"),
)


def divided(jobs: Sequence[Job], events: Iterable[Event]) -> tuple[Job, ...]:
    """The same jobs, with ``run`` replaced by its parts wherever the run logged any."""
    parts: dict[tuple[str, Attempt], tuple[Phase, ...]] = {}
    for chain in chains(jobs, events):
        furthest = 0
        for life in chain:
            if life.lead is not None:
                marks = _marks(life, furthest)
                for row in life.rows:
                    parts[life.job_id, row] = tuple(_phases(row, life, marks))
            furthest = max(furthest, life.last_step or 0)
    return tuple(
        job._replace(
            attempts=tuple(
                attempt._replace(parts=parts.get((job.job_id, attempt), ()))
                for attempt in job.attempts
            ),
        )
        for job in jobs
    )


def _phases(row: Attempt, life: Life, marks: Sequence[tuple[str, datetime]]) -> Iterator[Phase]:
    """The phases of one row of a life. A row that was resized gets its stretch of them."""
    yield from (phase for phase in row.phases if phase.name in {"backoff", "queue"})
    last = row is life.rows[-1]
    begin, stop = row.start or life.start, row.process_exit
    ended = row.end
    for name, since, until in _spans(marks, row.end if last else stop):
        start = max(since, begin)
        end = until if until is None or stop is None else min(until, stop)
        if end is None or end > start:
            yield Phase.between(name, start, end, "events")
            ended = end and ended and max(end, ended)
    if ended:
        yield Phase.between("teardown", ended, stop, "sacct")


def _spans(
    marks: Sequence[tuple[str, datetime]], end: datetime | None
) -> Iterator[tuple[str, datetime, datetime | None]]:
    """Names with the time from each mark to the next; the last goes on to ``end``."""
    for (name, since), (_, until) in pairwise(marks):
        yield name, since, until
    name, since = marks[-1]
    yield name, since, end if end is None else max(since, end)


def _marks(life: Life, furthest: int) -> list[tuple[str, datetime]]:
    """The moments at which phases begin, in order. A phase that never came has none.

    What happens in one process is timed there (by the lead rank). The whole gang has a notice when
    the first rank has it, and is done with a thing when the last rank is.
    """
    repeats = life.restored is not None and life.restored < furthest
    ends = life.rescues or life.all("finished") or life.all("exit")
    begins: list[tuple[str, Event | None]] = [
        ("imports", life.first("attempt_start")),
        ("setup", life.own("imports_done")),
        ("restore", life.own("restore_begin")),
        ("repeat" if repeats else "train", life.own("restore_end")),
        ("train", life.own("first_step")),
        ("notice", life.notice),
        ("snapshot", life.agreed),
        ("save", life.copied),
        ("exit", ends[-1] if ends else None),
    ]
    marks = [("startup", life.start)]
    found = [(moment(event), name) for name, event in begins if event is not None]
    for time, name in sorted(found, key=lambda item: item[0]):
        current, since = marks[-1]
        if ORDER.index(name) > ORDER.index(current):
            marks.append((name, max(since, time)))
    return marks
