"""The injector's own log: what was asked, what was seen, and what has still to be put right.

It lies in the run's event log, under the attempt name ``injector``, one file for each injector.
Before anything is taken that someone has to give back, that is *promised* here, on disk; when it
has been given back the promise is *kept*. What is promised and not kept after a crash is *owed*.

===================  =============================================================================
``inject``           fault (as asked), kind, job_id, nodes, notice (whether one will come), phase
``inject_observed``  kind, observed, noticed, inside (the phase), seconds
``promise``          what (``node``, ``hold``, ``preemptor``), name
``promise_kept``     what, name
===================  =============================================================================
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from slurmspot.errors import SlurmspotError
from slurmspot.events import Event, EventWriter, read_events

ATTEMPT = "injector"


class Journal:
    """Writes the journal of one injector.

    Args:
        events: the run's event log.
    """

    def __init__(self, events: Path) -> None:
        self._path = events / ATTEMPT / f"{os.getpid()}.jsonl"
        self._log = EventWriter(events, ATTEMPT, os.getpid())

    def write(self, event: str, *, step: int | None = None, **data: Any) -> None:
        """Append one event, for good.

        Raises:
            SlurmspotError: it could not be written; then nothing may be taken.
        """
        dropped = self._log.dropped
        self._log.write(event, step=step, **data)
        if self._log.dropped > dropped:
            raise SlurmspotError(
                f"cannot write the journal {self._path}",
                why="without it nobody would know what to put right after a crash",
                fix="free space on the run's file system",
            )
        with self._path.open("rb") as file:
            os.fsync(file.fileno())

    def promise(self, what: str, name: str) -> None:
        """About to take something that must be given back."""
        self.write("promise", what=what, name=name)

    def keep(self, what: str, name: str) -> None:
        """It has been given back."""
        self.write("promise_kept", what=what, name=name)

    def close(self) -> None:
        """Close the file."""
        self._log.close()


class Silent(Journal):
    """Writes nothing: for a drill that only says what it would do."""

    def __init__(self) -> None:
        pass

    def write(self, event: str, *, step: int | None = None, **data: Any) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def owed(events: Iterable[Event]) -> list[tuple[str, str]]:
    """What was promised and not kept, as (what, name), oldest first."""
    open_: dict[tuple[str, str], None] = {}
    for event in events:
        key = (str(event.data.get("what")), str(event.data.get("name")))
        if event.event == "promise":
            open_[key] = None
        elif event.event == "promise_kept":
            open_.pop(key, None)
    return list(open_)


def read_journal(events: Path) -> list[Event]:
    """All that injectors have written about a run, in order of time."""
    return [event for event in read_events(events, steps=False) if event.attempt == ATTEMPT]
