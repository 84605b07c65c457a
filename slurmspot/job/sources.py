"""Notices that come as no signal: the clouds' metadata services, and a file that a site touches.

A source is asked again and again by a thread of :class:`slurmspot.job.notice.NoticeListener` and
answers with the seconds that are left, or None. All speak of the machine, not of the job: Slurm
knows nothing of them and would put the job back on the same node.

==========  ======  ================================================================================
``aws``     120 s   IMDSv2: a token, then ``spot/instance-action``, 404 until the notice
                    (EC2 User Guide, "Spot Instance interruption notices")
``gcp``     30 s    ``instance/preempted``, held open by the server until it changes
                    (Compute Engine, "Detect if a VM was preempted")
``azure``   30 s    scheduled events of type ``Preempt`` that name this machine
                    (Azure, "Scheduled Events for Linux VMs")
``file:…``  window  the file exists; seconds may stand in it
==========  ======  ================================================================================
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from slurmspot.settings import JobEnvironment

_TIMEOUT_S = 5.0
_GCP_HOLD_S = 60
_GCP_WINDOW_S = 30.0
_LINK_LOCAL = "http://169.254.169.254"
_GOOGLE = "http://metadata.google.internal"


class Source(Protocol):
    """Whoever can say that this machine goes away.

    Attributes:
        name: what the event log calls it.
        interval_s: how long to wait before asking again.
    """

    @property
    def name(self) -> str: ...  # noqa: D102 - see above
    @property
    def interval_s(self) -> float: ...  # noqa: D102

    def ask(self) -> float | None:
        """Seconds that are left, never negative; None while there is no notice."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What an HTTP server said; status 0 when it did not."""

    status: int = 0
    text: str = ""
    headers: Mapping[str, str] | None = None


def fetch(
    base: str,
    path: str,
    *,
    method: str = "GET",
    headers: Mapping[str, str],
    timeout_s: float = _TIMEOUT_S,
) -> Answer:
    """Ask a metadata service, never through a proxy. No answer is an answer: it may come later."""
    url = urlsplit(base)
    link = http.client.HTTPConnection(url.hostname or "", url.port or 80, timeout=timeout_s)
    with contextlib.closing(link):
        try:
            link.request(method, url.path.rstrip("/") + path, headers=dict(headers))
            answer = link.getresponse()
            text = answer.read().decode(errors="replace")
        except (OSError, http.client.HTTPException):
            return Answer()
    return Answer(answer.status, text, answer.headers)  # type: ignore[arg-type]  # a Message maps


class Aws:
    """EC2 spot. Amazon advises to ask every five seconds."""

    name = "aws"
    interval_s = 5.0

    def __init__(self, base: str = _LINK_LOCAL, *, now: Callable[[], float] = time.time) -> None:
        self._base = base
        self._now = now
        self._token: str | None = None

    def ask(self) -> float | None:
        """See :class:`Source`."""
        if self._token is None:
            lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
            answer = fetch(self._base, "/latest/api/token", method="PUT", headers=lifetime)
            self._token = answer.text if answer.status == 200 else None
        if self._token is None:
            return None
        token = {"X-aws-ec2-metadata-token": self._token}
        answer = fetch(self._base, "/latest/meta-data/spot/instance-action", headers=token)
        if answer.status == 401:  # the token has expired
            self._token = None
        if answer.status != 200:
            return None
        action = _object(answer.text)
        try:
            when = datetime.fromisoformat(str(action.get("time")))
        except ValueError:
            return 0.0  # a notice all the same
        return max(0.0, _utc(when).timestamp() - self._now())


class Gcp:
    """Compute Engine. The server holds the question until the value changes."""

    name = "gcp"
    interval_s = 1.0

    def __init__(self, base: str = _GOOGLE, *, hold_s: int = _GCP_HOLD_S) -> None:
        self._base = base
        self._hold_s = hold_s
        self._etag: str | None = None

    def ask(self) -> float | None:
        """See :class:`Source`. Returns after a minute at the latest."""
        path = "/computeMetadata/v1/instance/preempted"
        if self._etag is not None:  # what changed since the last answer is not missed
            path += f"?wait_for_change=true&timeout_sec={self._hold_s}&last_etag={self._etag}"
        answer = fetch(
            self._base,
            path,
            headers={"Metadata-Flavor": "Google"},
            timeout_s=self._hold_s + _TIMEOUT_S,
        )
        if answer.status != 200 or (answer.headers or {}).get("Metadata-Flavor") != "Google":
            self._etag = None
            return None
        self._etag = (answer.headers or {}).get("ETag")
        return _GCP_WINDOW_S if answer.text.strip() == "TRUE" else None


class Azure:
    """Azure spot. The events are those of a whole scale set, so the machine's name counts."""

    name = "azure"
    interval_s = 1.0

    def __init__(self, base: str = _LINK_LOCAL, *, now: Callable[[], float] = time.time) -> None:
        self._base = base
        self._now = now
        self._machine: str | None = None

    def ask(self) -> float | None:
        """See :class:`Source`."""
        if self._machine is None:
            path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            answer = fetch(self._base, path, headers={"Metadata": "true"})
            self._machine = answer.text.strip() if answer.status == 200 else None
        if self._machine is None:
            return None
        path = "/metadata/scheduledevents?api-version=2020-07-01"
        answer = fetch(self._base, path, headers={"Metadata": "true"})
        events = _object(answer.text).get("Events") if answer.status == 200 else None
        left = [
            self._left_s(event)
            for event in (events if isinstance(events, list) else [])
            if isinstance(event, dict)
            and event.get("EventType") == "Preempt"
            and self._machine in event.get("Resources", [])
        ]
        return min(left, default=None)

    def _left_s(self, event: Mapping[str, object]) -> float:
        try:
            when = parsedate_to_datetime(str(event.get("NotBefore")))
        except ValueError:  # empty once the event has started
            return 0.0
        return max(0.0, _utc(when).timestamp() - self._now())


class File:
    """A file that a site's own agent makes when the machine goes away.

    It may hold the seconds that are left; without them a notice lasts ``window_s``.
    """

    name = "file"
    interval_s = 1.0

    def __init__(self, path: Path, window_s: float) -> None:
        self._path = path
        self._window_s = window_s

    def ask(self) -> float | None:
        """See :class:`Source`."""
        try:
            text = self._path.read_text(errors="replace")
        except OSError:
            return None
        try:
            seconds = float(text)
        except ValueError:
            seconds = self._window_s
        return seconds if math.isfinite(seconds) and seconds >= 0 else self._window_s


def of(job: JobEnvironment) -> list[Source]:
    """The sources that a job was told to ask. One rank of each node asks for all.

    In ``SLURMSPOT_METADATA_URL`` and in a file's path ``%n`` stands for the node's name.
    """
    base = job.metadata_url.replace("%n", job.host)
    found: list[Source] = []
    for name in job.notice if job.local_rank == 0 else ():
        if name == "aws":
            found.append(Aws(base or _LINK_LOCAL))
        elif name == "gcp":
            found.append(Gcp(base or _GOOGLE))
        elif name == "azure":
            found.append(Azure(base or _LINK_LOCAL))
        else:
            found.append(File(Path(name.partition(":")[2].replace("%n", job.host)), job.window_s))
    return found


def _object(text: str) -> dict[str, object]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _utc(when: datetime) -> datetime:
    return when if when.tzinfo else when.replace(tzinfo=UTC)
