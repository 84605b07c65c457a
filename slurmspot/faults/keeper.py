"""Follows a job in the background, as ``slurmspot watch`` does, while it is being hit."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from slurmspot.cluster.command import Runner, run
from slurmspot.cluster.watch import follow
from slurmspot.errors import SlurmspotError


class Keeper:
    """Lifts the job's backoff until the job is over or the block is left.

    Attributes:
        states: the states it has been seen in, without repetition.
    """

    def __init__(self, job_id: str, *, interval_s: float = 0.5, runner: Runner = run) -> None:
        self.states: list[str] = []
        self._job_id = job_id
        self._interval_s = interval_s
        self._runner = runner
        self._stop = threading.Event()
        self._error: SlurmspotError | None = None
        self._thread = threading.Thread(target=self._follow, name=f"keep-{job_id}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def wait(self, deadline_s: float) -> bool:
        """Wait until the job is over; False if it is not by then.

        Raises:
            SlurmspotError: it could not be followed.
        """
        self._thread.join(deadline_s)
        if self._error is not None:
            raise self._error
        return not self._thread.is_alive()

    def _follow(self) -> None:
        try:
            sightings = follow(
                self._job_id,
                interval_s=self._interval_s,
                runner=self._runner,
                wait=self._stop.wait,
            )
            for sighting in sightings:
                state = "gone" if sighting.job is None else sighting.job.state
                if self.states[-1:] != [state]:
                    self.states.append(state)
                if self._stop.is_set():
                    return
        except SlurmspotError as error:
            self._error = error
