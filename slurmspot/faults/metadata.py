"""The clouds' metadata services, as far as a notice goes: served by a drill, asked by the job.

The protocols are those of :mod:`slurmspot.job.sources`; every node has its own path, named for it.
"""

from __future__ import annotations

import json
import secrets
import sys
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from slurmspot.errors import UsageError
from slurmspot.faults.companion import Companion

_POLL_S = 0.1


class MetadataService(Companion):
    """Serves one node's path after another: ``http://host:port/NODE/latest/api/token`` and so on.

    Use it as a context manager. Before :meth:`warn` it answers as a healthy machine's would.

    Args:
        url: where the job asks (``SLURMSPOT_METADATA_URL``), with or without ``/%n``; port 0 is
            any free one.

    Raises:
        UsageError: it cannot listen there.
    """

    def __init__(self, url: str) -> None:
        super().__init__("metadata")
        place = urlsplit(url.replace("%n", ""))
        try:
            address = (place.hostname or "", place.port or 80)
            self._server = _Server(address, _Handler, self.leaving)
        except OSError as error:
            raise UsageError(
                f"cannot serve notices at {url}",
                why=error.strerror,
                fix="run the drill on the host that metadata_url names, with that port free",
            ) from None

    @property
    def url(self) -> str:
        """Where it listens; ``%n`` stands for the node's name."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}/%n"

    def warn(self, node: str, cloud: str, at: float) -> None:
        """From now on the machine of ``node`` goes away at unix time ``at``."""
        self._server.notices[node] = (cloud, at)

    def _work(self) -> None:
        self._server.serve_forever(_POLL_S)

    def _stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = True

    def __init__(
        self,
        address: tuple[str, int],
        handler: type[BaseHTTPRequestHandler],
        leaving: threading.Event,
    ) -> None:
        super().__init__(address, handler)
        self.notices: dict[str, tuple[str, float]] = {}
        self.token = secrets.token_urlsafe(16)
        self.leaving = leaving

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A job that leaves in the middle of its question is no error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def at(self, node: str, cloud: str) -> float | None:
        """When ``node`` goes away, if ``cloud`` has said so."""
        warned, when = self.notices.get(node, ("", 0.0))
        return when if warned == cloud else None


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_PUT(self) -> None:
        path = self._path()[1]
        lifetime = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds")
        if path == "/latest/api/token" and lifetime:
            self._answer(200, self.server.token)
        else:
            self._answer(400)

    def do_GET(self) -> None:
        node, path, query = self._path()
        if path == "/latest/meta-data/spot/instance-action":
            self._aws(node)
        elif path == "/computeMetadata/v1/instance/preempted":
            self._gcp(node, query)
        elif path.startswith("/metadata/"):
            self._azure(node, path)
        else:
            self._answer(404)

    def _aws(self, node: str) -> None:
        at = self.server.at(node, "cloud-aws")
        if self.headers.get("X-aws-ec2-metadata-token") != self.server.token:
            self._answer(401)
        elif at is None:
            self._answer(404)
        else:
            when = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            self._answer(200, json.dumps({"action": "terminate", "time": when}))

    def _gcp(self, node: str, query: Mapping[str, list[str]]) -> None:
        if self.headers.get("Metadata-Flavor") != "Google":
            self._answer(403)
            return
        left_s = float(query["timeout_sec"][0]) if "wait_for_change" in query else 0.0
        known = query.get("last_etag", [""])[0]
        while (value := self._preempted(node)) == known and left_s > 0:
            if self.server.leaving.wait(_POLL_S):
                break
            left_s -= _POLL_S
        self._answer(200, value, {"Metadata-Flavor": "Google", "ETag": value})

    def _preempted(self, node: str) -> str:
        return "FALSE" if self.server.at(node, "cloud-gcp") is None else "TRUE"

    def _azure(self, node: str, path: str) -> None:
        at = self.server.at(node, "cloud-azure")
        if self.headers.get("Metadata") != "true":
            self._answer(400)
        elif path == "/metadata/instance/compute/name":
            self._answer(200, node)
        else:
            event = {
                "EventId": f"preempt-{node}",
                "EventType": "Preempt",
                "ResourceType": "VirtualMachine",
                "Resources": [node],
                "EventStatus": "Scheduled",
                "EventSource": "Platform",
            }
            events = []
            if at is not None:
                when = format_datetime(datetime.fromtimestamp(at, UTC), usegmt=True)
                events.append({**event, "NotBefore": when})
            self._answer(200, json.dumps({"DocumentIncarnation": 1, "Events": events}))

    def _path(self) -> tuple[str, str, dict[str, list[str]]]:
        url = urlsplit(self.path)
        node, _, path = url.path.lstrip("/").partition("/")
        return node, f"/{path}", parse_qs(url.query)

    def _answer(
        self, status: int, text: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as in the base class
        """Say nothing."""
