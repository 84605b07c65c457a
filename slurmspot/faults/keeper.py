"""Follows a job in the background, as ``slurmspot watch`` does, while it is being hit."""

from __future__ import annotations

from slurmspot.cluster.command import Runner, run
from slurmspot.cluster.watch import follow
from slurmspot.errors import SlurmspotError
from slurmspot.faults.companion import Companion


class Keeper(Companion):
    """Lifts the job's backoff until the job is over or the block is left.

    Attributes:
        states: the states it has been seen in, without repetition.
    """

    def __init__(self, job_id: str, *, interval_s: float = 0.5, runner: Runner = run) -> None:
        super().__init__(f"keep-{job_id}")
        self.states: list[str] = []
        self._job_id = job_id
        self._interval_s = interval_s
        self._runner = runner
        self._error: SlurmspotError | None = None

    def wait(self, deadline_s: float) -> bool:
        """Wait until the job is over; False if it is not by then.

        Raises:
            SlurmspotError: it could not be followed.
        """
        self._thread.join(deadline_s)
        if self._error is not None:
            raise self._error
        return not self._thread.is_alive()

    def _work(self) -> None:
        try:
            sightings = follow(
                self._job_id,
                interval_s=self._interval_s,
                runner=self._runner,
                wait=self.leaving.wait,
            )
            for sighting in sightings:
                state = "gone" if sighting.job is None else sighting.job.state
                if self.states[-1:] != [state]:
                    self.states.append(state)
                if self.leaving.is_set():
                    return
        except SlurmspotError as error:
            self._error = error
