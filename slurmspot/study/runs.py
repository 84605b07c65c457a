"""The jobs of a study: submitted, and followed to their end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from slurmspot.cluster import submit
from slurmspot.cluster.spec import Spec
from slurmspot.cluster.watch import Sighting, follow
from slurmspot.errors import SlurmspotError
from slurmspot.events import last_step
from slurmspot.job.rank import RankCommand
from slurmspot.runfolder import RunFolder

Say = Callable[[str], None]


def launch(spec: Spec, folder: RunFolder) -> str:
    """Submit a run; the id of its job."""
    return submit.submit(spec, folder, submit.check(spec), RankCommand.of(spec))


class Follower(threading.Thread):
    """Follows one job, lifts its backoff, and says how it goes.

    Args:
        interval_s: how often to look at the job.
        heartbeat_s: how often to say how it goes while nothing changes.
    """

    def __init__(
        self, folder: RunFolder, job_id: str, say: Say, *, interval_s: float, heartbeat_s: float
    ) -> None:
        super().__init__(name=f"follow-{job_id}", daemon=True)
        self._folder = folder
        self._job_id = job_id
        self._say = say
        self._interval_s = interval_s
        self._heartbeat_s = heartbeat_s
        self._error: BaseException | None = None

    def run(self) -> None:
        """What the thread does."""
        shown, shown_at = "", 0.0
        try:
            for sighting in follow(self._job_id, interval_s=self._interval_s):
                text = self._describe(sighting)
                changed = text.partition(",")[0] != shown.partition(",")[0]
                if changed or time.monotonic() - shown_at > self._heartbeat_s:
                    self._say(text)
                    shown, shown_at = text, time.monotonic()
        except SlurmspotError as error:
            self._error = error

    def _describe(self, sighting: Sighting) -> str:
        state = "gone" if sighting.job is None else sighting.job.state.lower()
        step = last_step(self._folder.events)
        words = state if step is None else f"{state}, step {step}"
        return f"{words} - {sighting.action}" if sighting.action else words

    def join_or_fail(self, deadline_s: float | None = None) -> None:
        """Wait for the end of the job, at most ``deadline_s`` seconds if that is given.

        Raises:
            SlurmspotError: it took too long, or ended without finishing the run.
        """
        self.join(deadline_s)
        if self._error is not None:
            raise self._error
        if not self._folder.finished.exists():
            raise SlurmspotError(
                f"job {self._job_id} did not finish its run",
                fix=f"its output is in {self._folder.logs}",
            )
