"""``campaign.jsonl``: what a campaign has done so far, so that it can be begun again."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slurmspot.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One injection of a campaign.

    Attributes:
        run: the run folder.
        index: its number in this run, from 0.
        t_ns: unix time when its moment was awaited.
        asked: the fault.
        seen: what was seen to happen; None if nothing was.
        problem: why nothing was; empty if all went well.
    """

    run: str
    index: int
    t_ns: int
    asked: Mapping[str, Any]
    seen: Mapping[str, Any] | None = None
    problem: str = ""


class Record:
    """The journal of one campaign. Safe to use from several threads.

    Args:
        digest: tells one campaign from another.

    Attributes:
        resumed: the campaign had begun before.

    Raises:
        UsageError: the file is another campaign's.
    """

    def __init__(self, path: Path, digest: str) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self.resumed = path.exists()
        self._outcomes = recorded(path, digest)
        self._file = path.open("ab")
        if not self.resumed:
            self._append({"campaign": digest})

    def outcomes(self, run: str) -> list[Outcome]:
        """What has been done to a run, in order."""
        with self._lock:
            return [outcome for outcome in self._outcomes if outcome.run == run]

    def add(self, outcome: Outcome) -> None:
        """Write one outcome down, for good."""
        with self._lock:
            self._outcomes.append(outcome)
            self._append(asdict(outcome))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, line: Mapping[str, Any]) -> None:
        # The newline comes first as well: after a torn line the next one still stands alone.
        self._file.write(b"\n" + json.dumps(line).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def recorded(path: Path, digest: str) -> list[Outcome]:
    """What the journal at ``path`` tells, in order; nothing if there is none.

    Raises:
        UsageError: it is another campaign's.
    """
    found = []
    for line in path.read_bytes().split(b"\n") if path.exists() else ():
        with suppress(ValueError, TypeError):  # the last line may be torn
            told = json.loads(line)
            if "campaign" not in told:
                found.append(Outcome(**told))
            elif told["campaign"] != digest:
                raise UsageError(
                    f"{path} is the journal of another campaign", fix="choose another --out"
                )
    return found
