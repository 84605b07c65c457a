"""Traces of real spot capacity, as a list of when how many nodes were taken.

Two formats are read. SkyPilot's (JSON): ``metadata.gap_seconds`` is the length of a tick and
``data`` the number of instances at each. Bamboo's (CSV, no header): milliseconds, ``add`` or
``remove``, node name. A fall of the number is a reclaim of that many nodes at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmspot.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Reclaim:
    """So many nodes were taken, ``at_s`` seconds after the trace begins."""

    at_s: float
    nodes: int


def load(path: Path) -> tuple[Reclaim, ...]:
    """The reclaims of a trace, oldest first; none if capacity never fell.

    Raises:
        UsageError: it cannot be read, has a hole, is out of order, or takes what is not there.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the trace {path}", why=str(error)) from None
    if text.lstrip().startswith("{"):
        return tuple(_counts(_document(text, path), path))
    return tuple(_moves(text, path))


def _document(text: str, path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON", why=str(error)) from None


def _counts(document: dict[str, Any], path: Path) -> Iterator[Reclaim]:
    metadata, counts = document.get("metadata"), document.get("data")
    gap_s = metadata.get("gap_seconds") if isinstance(metadata, dict) else None
    if not isinstance(gap_s, int | float) or gap_s <= 0 or not isinstance(counts, list):
        raise UsageError(
            f"{path} is no trace", why="it lacks metadata.gap_seconds (above 0) or a list data"
        )
    before = 0
    for tick, count in enumerate(counts):
        if not isinstance(count, int) or count < 0:
            raise UsageError(f"{path} has a hole: tick {tick} says {count!r}")
        if count < before:
            yield Reclaim(at_s=tick * gap_s, nodes=before - count)
        before = count


def _moves(text: str, path: Path) -> Iterator[Reclaim]:
    here: set[str] = set()
    at_ms, taken = 0, 0
    for number, line in enumerate(filter(str.strip, text.splitlines()), start=1):
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 3 or not fields[0].isdecimal() or fields[1] not in {"add", "remove"}:
            raise UsageError(f"line {number} of {path} is no 'milliseconds,add|remove,node'")
        moment, what, node = int(fields[0]), fields[1], fields[2]
        if moment < at_ms:
            raise UsageError(f"{path} is out of order at line {number}: {moment} after {at_ms}")
        if (what == "add") == (node in here):
            raise UsageError(
                f"{path} has a hole before line {number}",
                why=f"{node} is to be {what}ed and is {'there' if node in here else 'not there'}",
            )
        if moment > at_ms and taken:
            yield Reclaim(at_s=at_ms / 1000, nodes=taken)
            taken = 0
        at_ms = moment
        if what == "add":
            here.add(node)
        else:
            here.remove(node)
            taken += 1
    if taken:
        yield Reclaim(at_s=at_ms / 1000, nodes=taken)
